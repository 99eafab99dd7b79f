// The trellis code of two bits: words of a strand to what integer products take (fd-quant-wint2's code.py).
#include "copies.cuh"

#define MULTIPLIER 0x67edf2ebu

// The eight windows that end in a word, times the constant: two outputs by four pairs of inputs. `before`: the word before
// and its upper half, which become this word's.
struct Before {
  u32 word, upper;
};

__device__ __forceinline__ void products(Before& before, u32 word, u32* p) {
  const u32 upper = word >> 16, last = __funnelshift_r(before.word, word, 20), first = word >> 4;
  p[0] = (last & 0xffffu) * MULTIPLIER;
  p[1] = __byte_perm(before.upper, word, 0x2241) * MULTIPLIER;
  p[2] = __byte_perm(last, 0, 0x4421) * MULTIPLIER;
  p[3] = (word & 0xffffu) * MULTIPLIER;
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
