// A product of few rows: 16 rows of weights a warp, read straight into the operands of mma.m16n8k16.
//
// The sum over k may be taken in any order, so W and x agree on a permutation of k under which eight
// consecutive values are what one thread has to hold: thread (r, q) of a warp, r = lane / 4 and
// q = lane % 4, loads values q * 8 to + 8 of every 32 of weight rows r and r + 8, and of row r of x.
#include "common.cuh"

// INSTRUCTIONS: emulated.h of the tests has C++ in the place of what follows.

__device__ __forceinline__ uint4 load_weight(const u16* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

__device__ __forceinline__ uint4 load_input(const u16* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}

// END OF INSTRUCTIONS

// 32 of k: upper and lower are of weight rows r and r + 8, x of row r.
__device__ __forceinline__ void multiply(float (&c)[4], const uint4& upper, const uint4& lower,
                                         const uint4& x) {
  multiply(c, upper.x, lower.x, upper.y, lower.y, x.x, x.y);
  multiply(c, upper.z, lower.z, upper.w, lower.w, x.z, x.w);
}

__device__ __forceinline__ void scale(uint4& x, const uint4& gain, float& squares) {
  x.x = scaled(x.x, gain.x, squares);
  x.y = scaled(x.y, gain.y, squares);
  x.z = scaled(x.z, gain.z, squares);
  x.w = scaled(x.w, gain.w, squares);
}
