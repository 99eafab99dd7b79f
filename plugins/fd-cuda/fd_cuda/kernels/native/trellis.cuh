// The trellis code of two bits: words of a strand to what integer products take (fd-quant-wint2's code.py).
#define MULTIPLIER 0x67edf2ebu

// INSTRUCTIONS: emulated.h of the tests has C++ in the place of what follows.

__device__ __forceinline__ uint4 load_once(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

// END OF INSTRUCTIONS

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
