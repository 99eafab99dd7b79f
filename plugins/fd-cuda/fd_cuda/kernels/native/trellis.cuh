// The trellis code of two bits: words of a strand to what integer products take (fd-quant-wint2's code.py).
#include "copies.cuh"

#define MULTIPLIER 0x67edf2ebu

// The eight windows that end in a word, times the constant: two outputs by four pairs of inputs.
__device__ __forceinline__ void products(u32 before, u32 word, u32* p) {
  const u32 a = __funnelshift_r(before, word, 20), b = __funnelshift_r(before, word, 24), c = word >> 4;
  p[0] = (a & 0xffffu) * MULTIPLIER;
  p[1] = (b & 0xffffu) * MULTIPLIER;
  p[2] = __byte_perm(a, 0, 0x4421) * MULTIPLIER;
  p[3] = (word & 0xffffu) * MULTIPLIER;
  p[4] = (a >> 16) * MULTIPLIER;
  p[5] = (b >> 16) * MULTIPLIER;
  p[6] = __byte_perm(c, 0, 0x4421) * MULTIPLIER;
  p[7] = (word >> 16) * MULTIPLIER;
}
