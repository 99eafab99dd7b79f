// Products of int8 or fp8 numbers as they are stored, by wgmma: both operands in shared memory in the 128-byte swizzle, 64
// rows of the left one and BN of the right one, 32 inputs at a time.

#if FORMAT == INT8_ROWS
typedef int Sum;
#else
typedef float Sum;
#endif

// INSTRUCTIONS: emulated.h of the tests has C++ in the place of what follows.

#if BY_ROWS
// Plus what is in d, or in its place.
template <int add>
__device__ __forceinline__ void multiply(Sum* d, u64 a, u64 b) {
#if FORMAT == INT8_ROWS
  asm volatile("wgmma.mma_async.sync.aligned." SIZE "k32.s32.s8.s8 " D_LIST ", " BOTH_SHARED ", " FLAG ";"
               : D_REGS("+r", d) : "l"(a), "l"(b), "n"(add));
#else
  asm volatile("wgmma.mma_async.sync.aligned." SIZE "k32.f32.e4m3.e4m3 " D_LIST ", " BOTH_SHARED ", " FLAG ", 1, 1;"
               : D_REGS("+f", d) : "l"(a), "l"(b), "n"(add));
#endif
}
#endif

// END OF INSTRUCTIONS
