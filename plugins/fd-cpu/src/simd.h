// Sixteen lanes of float (F), int32 (I), uint32 (U), bfloat16 (H) or 64 bytes (B), with operators, written once for
// every instruction set. What they are, and what has its own instruction, comes from simd_pairs.h or simd_vectors.h.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#define FDCPU_INLINE inline __attribute__((always_inline))
// Loops over registers: unless they are unrolled at once, the compiler has the registers in memory.
#ifdef __clang__
#define FDCPU_UNROLL _Pragma("clang loop unroll(full)")
#else
#define FDCPU_UNROLL _Pragma("GCC unroll 16")
#endif

namespace fdcpu::FDCPU_NAMESPACE {

constexpr int kLanes = 16;

// Of two vectors of 32-bit lanes those with these numbers, which go on from the first to the second.
template <int... kLane, class V>
FDCPU_INLINE V shuffled(V first, V second) {
#ifdef __clang__
    return __builtin_shufflevector(first, second, kLane...);
#else  // GCC 11 knows but its own
    return __builtin_shuffle(first, second, decltype(first == second){kLane...});
#endif
}

}  // namespace fdcpu::FDCPU_NAMESPACE

#if FDCPU_LEVEL == 1
#include "simd_pairs.h"
#else
#include "simd_vectors.h"
#endif

namespace fdcpu::FDCPU_NAMESPACE {

// Minus zero, which changes no number: plus zero would, so that it would be computed.
FDCPU_INLINE F splat(float x) { return x - F{}; }
FDCPU_INLINE I splat_int(int32_t x) { return I{} + x; }

template <class V>
FDCPU_INLINE V load_as(const void *from) {
    V value;
#if FDCPU_LEVEL == 1
    if constexpr (sizeof(V) == 64) return load_pair<V>(from);
#endif
    std::memcpy(&value, from, sizeof value);
    return value;
}
template <class V>
FDCPU_INLINE void store_as(void *to, V value) {
#if FDCPU_LEVEL == 1
    if constexpr (sizeof(V) == 64) return store_pair(to, value);
#endif
    std::memcpy(to, &value, sizeof value);
}

FDCPU_INLINE F load(const float *from) { return load_as<F>(from); }
FDCPU_INLINE F load(const uint16_t *from) { return F(widen(load_as<H>(from)) << 16); }  // bfloat16
FDCPU_INLINE void store(float *to, F x) { store_as(to, x); }
FDCPU_INLINE void store(uint16_t *to, F x) {
#if FDCPU_LEVEL >= 3
    store_as(to, _mm512_cvtneps_pbh(__m512(x)));
#else
    const U bits = U(x);
    const U rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const U quiet = bits >> 16 | 0x40;
    const U is_nan = U((bits & 0x7fffffff) > 0x7f800000);
    store_as(to, narrow((rounded & ~is_nan) | (quiet & is_nan)));
#endif
}
FDCPU_INLINE F round_to_bf16(F x) {
    H bits;
    store(reinterpret_cast<uint16_t *>(&bits), x);
    return F(widen(bits) << 16);
}

// The first or second of each pair of bfloat16.
template <bool kIsSecond>
FDCPU_INLINE F half_of_pairs(I x) { return kIsSecond ? F(U(x) & 0xffff0000u) : F(x << 16); }

// a in the low halves, b in the high ones.
FDCPU_INLINE U pairs_of_bf16(F a, F b) { return U(round_to_bf16(a)) >> 16 | U(round_to_bf16(b)); }

FDCPU_INLINE float load_one(const float *from) { return *from; }
FDCPU_INLINE float load_one(const uint16_t *from) {
    const uint32_t bits = uint32_t(*from) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
FDCPU_INLINE void store_one(float *to, float x) { *to = x; }
FDCPU_INLINE void store_one(uint16_t *to, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    *to = (bits & 0x7fffffff) > 0x7f800000 ? uint16_t(bits >> 16 | 0x40)
                                           : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

FDCPU_INLINE F absolute(F x) { return F(U(x) & 0x7fffffff); }

FDCPU_INLINE float float_of(int32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// e^x to within two units in the last place; far below -87 it is 0.
FDCPU_INLINE F exponential(F x) {
#if FDCPU_LEVEL >= 2
    x = F(_mm512_max_ps(_mm512_set1_ps(-110.f), __m512(x)));  // in this order NaN stays
    const F whole = F(_mm512_roundscale_ps(__m512(x * 1.44269504088896341f), 0));
#else
    const F low = splat(-87.33654f), high = splat(88.37626f);
    const I is_low = x < low;
    x = select(x > high, high, select(is_low, low, x));
    const I n = round_to_int(x * 1.44269504088896341f);
    const F whole = to_floats(n);
#endif
    const F r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    F p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.f;
#if FDCPU_LEVEL >= 2
    return F(_mm512_scalef_ps(__m512(p), __m512(whole)));
#else
    const F scaled = p * F((n + 127) << 23);
    return F(U(scaled) & ~U(is_low));
#endif
}

// 2^x to within 1e-4, for results that become bfloat16; x is not far above 0, and far below -126 this is 0.
FDCPU_INLINE F rough_power_of_two(F x) {
    // r: what x has above the next lower integer; of minus infinity that is 0.
#if FDCPU_LEVEL >= 2
    const F r = F(_mm512_reduce_ps(__m512(x), 1));
#else
    const F low = splat(-126.f);
    const I is_low = x < low;
    x = select(is_low, low, x);
    const I n = round_to_int(x - 0.5f);
    const F r = x - to_floats(n);
#endif
    const F p = ((r * 0.07802201f + 0.22606511f) * r + 0.69583736f) * r + 0.99992454f;
#if FDCPU_LEVEL >= 2
    return F(_mm512_scalef_ps(__m512(p), __m512(x)));
#else
    return F(U(p * F((n + 127) << 23)) & ~U(is_low));
#endif
}

FDCPU_INLINE F silu(F x) { return x / (exponential(-x) + 1.f); }

FDCPU_INLINE B splat_bytes(const void *four) {
    int32_t word;
    std::memcpy(&word, four, sizeof word);
    return B(splat_int(word));
}

// rows[r][lane] becomes rows[lane][r].
template <int W = kLanes / 2>
FDCPU_INLINE void transpose(U (&rows)[kLanes]) {
    for (int r = 0; r < kLanes; ++r)
        if (!(r & W)) exchange<W>(rows[r], rows[r + W]);
    if constexpr (W > 1) transpose<W / 2>(rows);
}

}  // namespace fdcpu::FDCPU_NAMESPACE
