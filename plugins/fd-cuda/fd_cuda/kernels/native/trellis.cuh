// The trellis code of two bits: words of a strand to what integer products take (fd-quant-wint2's code.py).
#include "copies.cuh"

#define MULTIPLIER 0x67edf2ebu

// INSTRUCTIONS: emulated.h of the tests has C++ in the place of what follows.

// Sixteen outputs by eight rows, 32 numbers of each.
__device__ __forceinline__ void multiply(int* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
               "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// By an integer dot product where the unit for logic and shifts has most to do.
__device__ __forceinline__ u32 lower_half(u32 v) {
#if NUMBERS
  return v & 0xffff;
#endif
  u32 half;
  asm("dp2a.lo.u32.u32 %0, %1, %2, 0;" : "=r"(half) : "r"(0x01000001u), "r"(v));
  return half;
}

// Where it is not inside, v stays. A branch around loads would keep the products before it from those after it.
__device__ __forceinline__ void load_inside(uint4& v, const uint4* p, bool inside) {
  asm volatile("{.reg .pred q; setp.ne.b32 q, %5, 0; @q ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3},[%4];}"
               : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w) : "l"(p), "r"((int)inside));
}

// END OF INSTRUCTIONS

// The eight windows that end in a word, times the constant: two outputs by four pairs of inputs. `before`: the word before
// and its upper half, which become this word's.
struct Before {
  u32 word, upper;
};

__device__ __forceinline__ void products(Before& before, u32 word, u32* p) {
  const u32 upper = word >> 16, last = __funnelshift_r(before.word, word, 20), first = word >> 4;
  p[0] = lower_half(last) * MULTIPLIER;
  p[1] = __byte_perm(before.upper, word, 0x2241) * MULTIPLIER;
  p[2] = __byte_perm(last, 0, 0x4421) * MULTIPLIER;
  p[3] = lower_half(word) * MULTIPLIER;
  p[4] = (last >> 16) * MULTIPLIER;
  p[5] = __byte_perm(word, 0, 0x4421) * MULTIPLIER;
  p[6] = __byte_perm(first, 0, 0x4421) * MULTIPLIER;
  p[7] = upper * MULTIPLIER;
  before.word = word;
  before.upper = upper;
}

// The words of a lane: four of a strand and the one before, which the lane with eight outputs less has.
__device__ __forceinline__ Before word_before(const uint4& v, int lane) {
  const u32 word = __shfl_sync(~0u, v.w, (lane + 28) & 31);
  return {word, word >> 16};
}

// A lane's four words times x, the inputs of one row of every eight: to sums of two outputs by two rows for each word and eight.
// Products are made by fewer instructions than one word at a time: windows at odd multiples of four bits are those at even ones of shifted words.
template <int COUNT>
__device__ __forceinline__ void multiply_words(int (&sum)[4][COUNT][4], const uint4& v, const uint4 (&b)[COUNT],
                                               int lane) {
  const u32 words[4] = {v.x, v.y, v.z, v.w}, before = word_before(v, lane).word;
  u32 upper = before >> 16, shifted_upper = __funnelshift_r(before, v.x, 4) >> 16;
#pragma unroll
  for (int n = 0; n < 4; n++) {
    const u32 word = words[n], shifted = n < 3 ? __funnelshift_r(word, words[(n + 1) & 3], 4) : word >> 4;
    u32 p[8];
    p[0] = shifted_upper * MULTIPLIER;
    p[1] = __byte_perm(upper, word, 0x2241) * MULTIPLIER;
    p[2] = __byte_perm(shifted_upper, shifted, 0x2241) * MULTIPLIER;
    p[3] = (word & 0xffff) * MULTIPLIER;
    p[4] = (shifted & 0xffff) * MULTIPLIER;
    p[5] = __byte_perm(word, 0, 0x4421) * MULTIPLIER;
    p[6] = __byte_perm(shifted, 0, 0x4421) * MULTIPLIER;
    upper = word >> 16, shifted_upper = shifted >> 16;
    p[7] = upper * MULTIPLIER;
#pragma unroll
    for (int t = 0; t < COUNT; t++) {
      multiply(sum[n][t], p[0], p[4], p[1], p[5], b[t].x, b[t].y);
      multiply(sum[n][t], p[2], p[6], p[3], p[7], b[t].z, b[t].w);
    }
  }
}
