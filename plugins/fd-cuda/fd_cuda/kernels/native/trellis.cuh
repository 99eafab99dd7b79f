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
