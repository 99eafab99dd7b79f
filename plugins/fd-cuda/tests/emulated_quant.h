// What the kernels of packed weights need besides emulated.h, and the run of a whole grid. Copies to shared
// memory happen at once; addresses there are counted from its beginning.
#include "emulated.h"

#undef __align__
#define __align__(n) __attribute__((aligned(n)))

#define memory ((unsigned char*)shared)

struct float2 {
  float x, y;
};
inline u32 fma2(u32 a, u32 b, u32 c) {
  return pack((float)((double)low(a) * low(b) + low(c)), (float)((double)high(a) * high(b) + high(c)));
}
inline uint4 load_once(const uint4* p) { return *p; }
inline uint4 load_early(const uint4* p) { return *p; }
inline float load_early(const float* p) { return *p; }
inline void load_inside(uint4& v, const uint4* p, bool inside) { if (inside) v = *p; }
inline uint2 load_once(const uint2* p) { return *p; }
inline u32 load_once(const unsigned char* p) { return *p; }
inline u32 load_once(const u32* p) { return *p; }
inline float load_once(const float* p) { return *p; }
template <class T>
inline void keep(T&) {}
inline u32 shared_address(const void* p) { return (u32)((const char*)p - (const char*)shared); }
inline void copy_async(u32 to, const void* from, bool inside) {
  if (inside) std::memcpy((char*)shared + to, from, 16);
  else std::memset((char*)shared + to, 0, 16);
}
inline void copy_once(u32 to, const void* from, bool inside) { copy_async(to, from, inside); }
inline void commit() {}
inline void __syncwarp() { gather(block->warp_turn, warp_first(), 32); }
inline void meet_group(int) { gather(block->group_turn, block->current / 128 * 128, 128); }
inline void await_turn() {}
inline void load_chunk(u32* b, u32 address) { std::memcpy(b, (char*)shared + address, 16); }
inline uint2 load_pair(u32 address) { return *(uint2*)((char*)shared + address); }
inline u32 load_word(u32 address) { return *(u32*)((char*)shared + address); }
inline u32 load_byte(u32 address) { return *((unsigned char*)shared + address); }
inline float byte_of(u32 bytes, int which) { return 8388608.f + (bytes >> 8 * which & 255); }
// ldmatrix: lane 8 i + j has the address of row j of matrix i, and gets elements (lane / 4, 2 (lane % 4)) of each.
inline void load_matrices(u32* b, u32 address) {
  const Lanes<u32> all(address);
  for (int i = 0; i < 4; ++i)
    std::memcpy(b + i, (char*)shared + all.value[i * 8 + lane_of() / 4] + lane_of() % 4 * 4, 4);
}
inline void store_matrices(u32 address, const u32* a) {
  const Lanes<u32> all(address);
  for (int i = 0; i < 4; ++i)
    std::memcpy((char*)shared + all.value[i * 8 + lane_of() / 4] + lane_of() % 4 * 4, a + i, 4);
}
inline void store_transposed(u32 address, u32 first, u32 second) {
  const Lanes<u32> all(address);
  const u32 pairs[2] = {first, second};
  for (int i = 0; i < 2; ++i)
    for (int odd = 0; odd < 2; ++odd) {
      const u16 half = (u16)(pairs[i] >> odd * 16);
      std::memcpy((char*)shared + all.value[i * 8 + lane_of() % 4 * 2 + odd] + lane_of() / 4 * 2, &half, 2);
    }
}
// The same with rows as columns: registers are elements (2 (lane % 4), lane / 4) and the next below.
inline void load_transposed(u32* b, u32 address) {
  const Lanes<u32> all(address);
  for (int i = 0; i < 4; ++i) {
    b[i] = 0;
    for (int odd = 0; odd < 2; ++odd) {
      const u32 at = all.value[i * 8 + lane_of() % 4 * 2 + odd] + lane_of() / 4 * 2;
      b[i] |= (u32)*(u16*)((char*)shared + at) << odd * 16;
    }
  }
}
inline void multiply(float* c, const u32* a, const u32* b) {
  multiply(*(float(*)[4])c, a[0], a[1], a[2], a[3], b[0], b[1]);
}
inline void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, const float* c) {
  if (d != c) std::memcpy(d, c, sizeof(d));
  multiply(d, a0, a1, a2, a3, b0, b1);
}
inline u32 max(u32 a, u32 b) { return a > b ? a : b; }
inline u32 __reduce_max_sync(unsigned, u32 own) {
  const Lanes<u32> all(own);
  for (u32 lane : all.value) own = max(own, lane);
  return own;
}
inline int __reduce_add_sync(unsigned, int own) {
  const Lanes<int> all(own);
  own = 0;
  for (int lane : all.value) own += lane;
  return own;
}
inline bool __any_sync(unsigned, bool own) {
  const Lanes<bool> all(own);
  bool any = false;
  for (bool lane : all.value) any |= lane;
  return any;
}
// mma.m16n8k32 of bytes: as m16n8k16 with four bytes in the place of two halves.
inline void multiply(int* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  struct Operands {
    u32 a[4], b[2];
  };
  const Lanes<Operands> all(Operands{{a0, a1, a2, a3}, {b0, b1}});
  for (int i = 0; i < 4; ++i) {
    const int row = lane_of() / 4 + i / 2 * 8, column = lane_of() % 4 * 2 + i % 2;
    for (int k = 0; k < 32; ++k) {
      const u32 a = all.value[row % 8 * 4 + k / 4 % 4].a[row / 8 + k / 16 * 2] >> k % 4 * 8;
      const u32 b = all.value[column * 4 + k / 4 % 4].b[k / 16] >> k % 4 * 8;
      c[i] += (int)(a & 255) * (signed char)b;
    }
  }
}
inline u32 __funnelshift_r(u32 first, u32 second, int by) { return (u32)(((u64)second << 32 | first) >> by); }
inline float silu(float x) { return x / (1.f + std::exp(-x)); }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fdiv_rn(float x, float y) { volatile float r = x / y; return r; }
inline float __frcp_rn(float x) { return __fdiv_rn(1.f, x); }
inline int __float2int_rn(float x) { return (int)std::nearbyint(x); }
inline u32 masked_or(u32 v, u32 mask, u32 bits) { return (v & mask) | bits; }
inline u32 lower_half(u32 v) { return v & 0xffff; }
inline u32 dot(u32 bytes, u32 factors, int sum) {
  for (int i = 0; i < 4; ++i) sum += (int)(bytes >> 8 * i & 255) * (signed char)(factors >> 8 * i);
  return sum;
}
inline u32 masked_xor(u32 v, u32 mask, u32 bits) { return (v & mask) ^ bits; }
inline u32 widen_fp8(u32 v) {
  u32 result = 0;
  for (int i = 0; i < 2; ++i) {
    const int byte = v >> 8 * i & 255, exponent = byte >> 3 & 15, fraction = byte & 7;
    const float size = exponent ? std::ldexp(8.f + fraction, exponent - 10) : std::ldexp((float)fraction, -9);
    const _Float16 half = (_Float16)(byte & 128 ? -size : size);
    u16 bits;
    std::memcpy(&bits, &half, 2);
    result |= (u32)bits << 16 * i;
  }
  return result;
}
// Three bits after the leading one, down to 2^-9 and up to 448.
inline u16 narrow_fp8(float first, float second) {
  u32 pair = 0;
  for (int i = 0; i < 2; ++i) {
    const float x = i ? second : first, size = std::fmin(std::fabs(x), 448.f);
    const int exponent = size < 0.015625f ? -6 : std::ilogb(size);
    const int steps = (int)std::nearbyint(std::ldexp(size, 3 - exponent));  // of 2^(exponent - 3), carried over into the next
    pair |= ((std::signbit(x) ? 128u : 0u) | (u32)((exponent + 6) * 8 + steps)) << 8 * i;
  }
  return (u16)pair;
}
inline float low_half(u32 pair) { const u16 bits = (u16)pair; _Float16 x; std::memcpy(&x, &bits, 2); return (float)x; }
#if defined(Y_HALF) && Y_HALF
inline float widen_y(u16 bits) { _Float16 x; std::memcpy(&x, &bits, 2); return (float)x; }
inline u16 narrow_y(float x) { _Float16 h = (_Float16)x; u16 bits; std::memcpy(&bits, &h, 2); return bits; }
#else
inline float widen_y(u16 bits) { u32 wide = (u32)bits << 16; float x; std::memcpy(&x, &wide, 4); return x; }
inline u16 narrow_y(float x) {
  u32 bits;
  std::memcpy(&bits, &x, 4);
  return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
#endif
inline u32 narrow_y(float first, float second) { return narrow_y(first) | (u32)narrow_y(second) << 16; }
inline uint2 load_pair(const unsigned char* at) { uint2 v; std::memcpy(&v, at, 8); return v; }
inline u16 load_scale(const u16* at) { return *at; }
// volatile: nothing may be contracted
inline float __fmaf_rn(float a, float b, float c) { return (float)((double)a * b + c); }
inline float __fadd_rn(float a, float b) { volatile float r = a + b; return r; }
inline float __fadd_rd(float a, float b) {
  const double sum = (double)a + b;
  const float near = (float)sum;
  return near > sum ? std::nextafter(near, -INFINITY) : near;
}
inline float __uint_as_float(u32 bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline float __int_as_float(int bits) { return __uint_as_float((u32)bits); }
inline u32 __float_as_uint(float x) { u32 bits; std::memcpy(&bits, &x, 4); return bits; }
inline int __float_as_int(float x) { int bits; std::memcpy(&bits, &x, 4); return bits; }

// wgmma of bytes: a warp's 16 rows of A are its lanes' registers, B is in shared memory, 128-byte swizzle: row n 128 n
// bytes after the first, its 16-byte chunks exchanged by n % 8.
template <int left>
inline void await_products() {}
inline void begin_products() {}
inline void end_products() {}
inline void fence_registers(int*) {}
inline void fence_registers(float*) {}
#include "emulated_feed.h"
inline u64 descriptor(u32 address) { return address >> 4; }
inline void copy_word(u32 to, const void* from, bool) { std::memcpy((char*)shared + to, from, 4); }
#ifdef BN
inline void multiply(int* d, u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
  struct Operands {
    u32 a[4];
  };
  const Lanes<Operands> all(Operands{{a0, a1, a2, a3}});
  const u32 address = (u32)b << 4, first = address & ~127u, chunk = address % 128 / 16;
  for (int i = 0; i < BN / 2; ++i) {
    const int row = lane_of() / 4 + i / 2 % 2 * 8, n = i / 4 * 8 + lane_of() % 4 * 2 + i % 2;
    for (int k = 0; k < 32; ++k) {
      const u32 x = all.value[row % 8 * 4 + k / 4 % 4].a[row / 8 + k / 16 * 2] >> k % 4 * 8;
      const u32 at = first + n * 128 + (((chunk + k / 16) ^ (n & 7)) << 4) + k % 16;
      d[i] += (int)(x & 255) * ((signed char*)shared)[at];
    }
  }
}
#if FORMAT == 6 /* TRELLIS */
inline void multiply(int* d, u64 a, u64 b) {
  Lanes<int> together(0);
  const u32 first_a = (u32)a << 4 & ~127u, chunk_a = ((u32)a << 4) % 128 / 16;
  const u32 first_b = (u32)b << 4 & ~127u, chunk_b = ((u32)b << 4) % 128 / 16;
  for (int i = 0; i < BN / 2; ++i) {
    const int row = threadIdx.x / 32 % 4 * 16 + lane_of() / 4 + i / 2 % 2 * 8, n = i / 4 * 8 + lane_of() % 4 * 2 + i % 2;
    for (int k = 0; k < 32; ++k)
      d[i] += ((unsigned char*)shared)[first_a + row * 128 + (((chunk_a + k / 16) ^ (row & 7)) << 4) + k % 16] *
              ((signed char*)shared)[first_b + n * 128 + (((chunk_b + k / 16) ^ (n & 7)) << 4) + k % 16];
  }
}
#endif
#if FORMAT == 3 || FORMAT == 4 /* INT8_ROWS, FP8_ROWS */
// The same with A in shared memory as B is, of int8 or fp8; a group of four warps has 64 rows of A.
inline float number_at(u64 address) {
  const u32 byte = ((unsigned char*)shared)[address];
  return FORMAT == 3 /* INT8_ROWS */ ? (float)(signed char)byte : low_half(widen_fp8(byte));
}
template <int add, class Sum>
inline void multiply(Sum* d, u64 a, u64 b) {
  Lanes<int> together(0);
  const u32 first_a = (u32)a << 4 & ~127u, chunk_a = ((u32)a << 4) % 128 / 16;
  const u32 first_b = (u32)b << 4 & ~127u, chunk_b = ((u32)b << 4) % 128 / 16;
  for (int i = 0; i < BN / 2; ++i) {
    const int row = threadIdx.x / 32 % 4 * 16 + lane_of() / 4 + i / 2 % 2 * 8, n = i / 4 * 8 + lane_of() % 4 * 2 + i % 2;
    Sum sum = 0;
    for (int k = 0; k < 32; ++k)
      sum += (Sum)(number_at(first_a + row * 128 + (((chunk_a + k / 16) ^ (row & 7)) << 4) + k % 16) *
                   number_at(first_b + n * 128 + (((chunk_b + k / 16) ^ (n & 7)) << 4) + k % 16));
    d[i] = add ? d[i] + sum : sum;
  }
}
#endif
// The same of 16 half floats; with A in registers, or in shared memory, of which a group of four warps has 64 rows.
inline float half_at(u32 address) {
  u16 x;
  std::memcpy(&x, (char*)shared + address, 2);
  return widen(x);
}
inline void multiply(float* d, u64 a, u64 b) {
  Lanes<int> together(0);
  const u32 first_a = (u32)a << 4 & ~127u, chunk_a = ((u32)a << 4) % 128 / 16;
  const u32 first_b = (u32)b << 4 & ~127u, chunk_b = ((u32)b << 4) % 128 / 16;
  for (int i = 0; i < BN / 2; ++i) {
    const int row = threadIdx.x / 32 % 4 * 16 + lane_of() / 4 + i / 2 % 2 * 8, n = i / 4 * 8 + lane_of() % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k)
      d[i] += half_at(first_a + row * 128 + (((chunk_a + k / 8) ^ (row & 7)) << 4) + k % 8 * 2) *
              half_at(first_b + n * 128 + (((chunk_b + k / 8) ^ (n & 7)) << 4) + k % 8 * 2);
  }
}
template <int rows>
inline void multiply_rows(float* d, const u32* a, u64 b) {
  struct Operands {
    u32 a[4];
  };
  const Lanes<Operands> all(Operands{{a[0], a[1], a[2], a[3]}});
  const u32 address = (u32)b << 4, first = address & ~127u, chunk = address % 128 / 16;
  for (int i = 0; i < rows / 2; ++i) {
    const int row = lane_of() / 4 + i / 2 % 2 * 8, n = i / 4 * 8 + lane_of() % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      const u32 pair = all.value[row % 8 * 4 + k / 2 % 4].a[row / 8 + k / 8 * 2];
      const u32 at = first + n * 128 + (((chunk + k / 8) ^ (n & 7)) << 4) + k % 8 * 2;
      u16 x;
      std::memcpy(&x, (char*)shared + at, 2);
      d[i] += (k % 2 ? high(pair) : low(pair)) * widen(x);
    }
  }
}
inline void multiply(float* d, const u32* a, u64 b) { multiply_rows<BN>(d, a, b); }
// Of int8 numbers; the trellis code's are uint8 where it is not decoded.
template <int rows>
inline void multiply_rows(int* d, const u32* a, u64 b) {
  struct Operands {
    u32 a[4];
  };
  const Lanes<Operands> all(Operands{{a[0], a[1], a[2], a[3]}});
  const u32 address = (u32)b << 4, first = address & ~127u, chunk = address % 128 / 16;
  for (int i = 0; i < rows / 2; ++i) {
    const int row = lane_of() / 4 + i / 2 % 2 * 8, n = i / 4 * 8 + lane_of() % 4 * 2 + i % 2;
    for (int k = 0; k < 32; ++k) {
      const u32 own = all.value[row % 8 * 4 + k / 4 % 4].a[row / 8 + k / 16 * 2] >> k % 4 * 8;
      const u32 at = first + n * 128 + (((chunk + k / 16) ^ (n & 7)) << 4) + k % 16;
#if FORMAT == 6 && !NUMBERS /* TRELLIS */
      d[i] += (int)(own & 255) * ((signed char*)shared)[at];
#else
      d[i] += (int)(signed char)own * ((signed char*)shared)[at];
#endif
    }
  }
}
#endif
