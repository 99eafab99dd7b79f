// What kernels that include few_rows.cuh need beside emulated.h.
#include "emulated.h"

#undef __align__
#define __align__(n) __attribute__((aligned(n)))
#define LOWEST (-INFINITY)
#define PLAIN 0
#define ADD 1
#define GATED 2

inline int __float_as_int(float x) { int bits; std::memcpy(&bits, &x, 4); return bits; }
inline u32 __float_as_uint(float x) { u32 bits; std::memcpy(&bits, &x, 4); return bits; }
inline float __expf(float x) { return std::exp(x); }
inline float silu(float x) { return x / (1.f + std::exp(-x)); }
inline u32 scaled(u32 x, u32 g, float& squares) {
  const float a = low(x), b = high(x);
  squares += a * a + b * b;
  return pack(a * low(g), b * high(g));
}
inline uint4 load_weight(const u16* p) { uint4 v; std::memcpy(&v, p, 16); return v; }
inline uint4 load_input(const u16* p) { return load_weight(p); }
inline int count_up(int* at) { return __atomic_fetch_add(at, 1, __ATOMIC_SEQ_CST); }
