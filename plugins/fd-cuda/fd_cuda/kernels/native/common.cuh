// What the native kernels share. HALF selects float16, else bfloat16; products accumulate in float32.
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

#define LOWEST __int_as_float(0xff800000)

// What happens to a product before it is stored.
#define PLAIN 0
#define ADD 1     // plus a residual
#define GATED 2   // silu(gate half) times up half

#if HALF
#define TYPE "f16"
#else
#define TYPE "bf16"
#endif

__device__ __forceinline__ float low(u32 pair) {
#if HALF
  float value;
  asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a;}" : "=f"(value) : "r"(pair));
  return value;
#else
  return __uint_as_float(pair << 16);
#endif
}

__device__ __forceinline__ float high(u32 pair) {
#if HALF
  float value;
  asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, b;}" : "=f"(value) : "r"(pair));
  return value;
#else
  return __uint_as_float(pair & 0xffff0000u);
#endif
}

__device__ __forceinline__ u32 pack(float first, float second) {
  u32 pair;
  asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}

__device__ __forceinline__ u16 narrow(float value) { return (u16)(pack(value, 0.f) & 0xffffu); }
__device__ __forceinline__ float widen(u16 value) { return low((u32)value); }
__device__ __forceinline__ float silu(float x) { return x / (1.f + __expf(-x)); }

// x times g, rounded once; sums the squares of x.
__device__ __forceinline__ u32 scaled(u32 x, u32 g, float& squares) {
  float a = low(x), b = high(x);
  squares = fmaf(a, a, fmaf(b, b, squares));
  return pack(a * low(g), b * high(g));
}

// c + a b: sixteen rows by eight columns by sixteen.
__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "
               "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The chain of kernels: see common.py.
__device__ __forceinline__ void let_next_start() {
#if PDL
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_previous() {
#if PDL
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// For blocks that end without work: leave_chain in common.py.
__device__ __forceinline__ void leave_chain() {
  if (blockIdx.x == 0) wait_for_previous();
}
