// Sixteen lanes of float, int32 and so on, written once for every instruction set with the compiler's
// vector types; only what has its own instruction is spelled out. Included inside each level's namespace.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#if FDCPU_LEVEL >= 1
#include <immintrin.h>
#endif

#define FDCPU_INLINE inline __attribute__((always_inline))

namespace fdcpu::FDCPU_NAMESPACE {

constexpr int kLanes = 16;
using F = float __attribute__((vector_size(64)));
using I = int32_t __attribute__((vector_size(64)));
using U = uint32_t __attribute__((vector_size(64)));
using H = uint16_t __attribute__((vector_size(32)));
using B = uint8_t __attribute__((vector_size(64)));

constexpr I kLaneNumbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Minus zero, which changes no number: plus zero would, so that it would be computed.
FDCPU_INLINE F splat(float x) { return x - F{}; }
FDCPU_INLINE I splat_int(int32_t x) { return I{} + x; }

template <class V>
FDCPU_INLINE V load_as(const void *from) {
    V value;
    std::memcpy(&value, from, sizeof value);
    return value;
}
template <class V>
FDCPU_INLINE void store_as(void *to, V value) {
    std::memcpy(to, &value, sizeof value);
}

// The compiler takes five instructions for what is one.
FDCPU_INLINE U widen(H x) {
#if FDCPU_LEVEL >= 2
    return U(_mm512_cvtepu16_epi32(__m256i(x)));
#else
    return __builtin_convertvector(x, U);
#endif
}

FDCPU_INLINE F load(const float *from) { return load_as<F>(from); }
FDCPU_INLINE F load(const uint16_t *from) { return F(widen(load_as<H>(from)) << 16); }  // bfloat16
FDCPU_INLINE void store(float *to, F x) { store_as(to, x); }
FDCPU_INLINE void store(uint16_t *to, F x) {
#if FDCPU_LEVEL >= 2
    store_as(to, _mm512_cvtneps_pbh(__m512(x)));
#else
    const U bits = U(x);
    const U rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const U quiet = bits >> 16 | 0x40;
    const U is_nan = U((bits & 0x7fffffff) > 0x7f800000);
    store_as(to, __builtin_convertvector((rounded & ~is_nan) | (quiet & is_nan), H));
#endif
}
FDCPU_INLINE F round_to_bf16(F x) {
    H bits;
    store(reinterpret_cast<uint16_t *>(&bits), x);
    return F(widen(bits) << 16);
}

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

FDCPU_INLINE F maximum(F a, F b) { return a > b ? a : b; }
FDCPU_INLINE I maximum(I a, I b) { return a > b ? a : b; }
FDCPU_INLINE F absolute(F x) { return F(U(x) & 0x7fffffff); }

FDCPU_INLINE float sum_of(F x) {
#if FDCPU_LEVEL >= 2
    return _mm512_reduce_add_ps(__m512(x));
#else
    float lanes[kLanes], total = 0;
    store_as(lanes, x);
    for (int width = kLanes / 2; width; width /= 2)
        for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    total = lanes[0];
    return total;
#endif
}
FDCPU_INLINE float max_of(F x) {
#if FDCPU_LEVEL >= 2
    return _mm512_reduce_max_ps(__m512(x));
#else
    float lanes[kLanes];
    store_as(lanes, x);
    float most = lanes[0];
    for (int i = 1; i < kLanes; ++i) most = lanes[i] > most ? lanes[i] : most;
    return most;
#endif
}
FDCPU_INLINE int32_t max_of_ints(I x) {
#if FDCPU_LEVEL >= 2
    return _mm512_reduce_max_epi32(__m512i(x));
#else
    int32_t lanes[kLanes];
    store_as(lanes, x);
    return *std::max_element(lanes, lanes + kLanes);
#endif
}
FDCPU_INLINE float float_of(int32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
FDCPU_INLINE int32_t sum_of_ints(I x) {
#if FDCPU_LEVEL >= 2
    return _mm512_reduce_add_epi32(__m512i(x));
#else
    uint32_t lanes[kLanes], total = 0;
    store_as(lanes, x);
    for (uint32_t lane : lanes) total += lane;
    return int32_t(total);
#endif
}

// To the nearest, ties to even; |x| below 2^22.
FDCPU_INLINE I round_to_int(F x) {
#if FDCPU_LEVEL >= 2
    return I(_mm512_cvtps_epi32(__m512(x)));
#else
    // Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
    const F magic = splat(12582912.f);
    return I(x + magic) - splat_int(0x4b400000);
#endif
}
// The low bytes.
FDCPU_INLINE void store_bytes(uint8_t *to, I x) {
#if FDCPU_LEVEL >= 2
    store_as(to, _mm512_cvtepi32_epi8(__m512i(x)));
#else
    using Narrow = uint8_t __attribute__((vector_size(16)));
    store_as(to, __builtin_convertvector(U(x), Narrow));
#endif
}

// e^x to within two units in the last place; far below -87 it is 0.
FDCPU_INLINE F exponential(F x) {
#if FDCPU_LEVEL >= 2
    x = F(_mm512_max_ps(_mm512_set1_ps(-110.f), __m512(x)));  // in this order NaN stays
    const F whole = F(_mm512_roundscale_ps(__m512(x * 1.44269504088896341f), 0));
#else
    const F low = splat(-87.33654f), high = splat(88.37626f);
    const I is_low = x < low;
    x = x > high ? high : (x < low ? low : x);
    const I n = round_to_int(x * 1.44269504088896341f);
    const F whole = __builtin_convertvector(n, F);
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
    x = x < low ? low : x;
    const I n = round_to_int(x - 0.5f);
    const F r = x - __builtin_convertvector(n, F);
#endif
    const F p = ((r * 0.07802201f + 0.22606511f) * r + 0.69583736f) * r + 0.99992454f;
#if FDCPU_LEVEL >= 2
    return F(_mm512_scalef_ps(__m512(p), __m512(x)));
#else
    return F(U(p * F((n + 127) << 23)) & ~U(is_low));
#endif
}

FDCPU_INLINE F silu(F x) { return x / (exponential(-x) + 1.f); }

// acc[lane] + sum over j < 4 of unsigned u[4 lane + j] times signed s[4 lane + j].
FDCPU_INLINE I dot_bytes(I acc, B u, B s) {
#if FDCPU_LEVEL >= 2
    return I(_mm512_dpbusd_epi32(__m512i(acc), __m512i(u), __m512i(s)));
#else
    I result = acc;
#if FDCPU_LEVEL == 1
    // Even and odd bytes apart: products of a full unsigned and a signed byte in pairs do not fit 16 bits.
    for (int half = 0; half < 2; ++half) {
        __m256i uu, ss, aa;
        std::memcpy(&uu, reinterpret_cast<const char *>(&u) + 32 * half, 32);
        std::memcpy(&ss, reinterpret_cast<const char *>(&s) + 32 * half, 32);
        std::memcpy(&aa, reinterpret_cast<const char *>(&result) + 32 * half, 32);
        const __m256i low = _mm256_set1_epi16(0xff);
        const __m256i even = _mm256_madd_epi16(_mm256_and_si256(uu, low), _mm256_srai_epi16(_mm256_slli_epi16(ss, 8), 8));
        const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(uu, 8), _mm256_srai_epi16(ss, 8));
        aa = _mm256_add_epi32(aa, _mm256_add_epi32(even, odd));
        std::memcpy(reinterpret_cast<char *>(&result) + 32 * half, &aa, 32);
    }
#else
    for (int lane = 0; lane < kLanes; ++lane)
        for (int j = 0; j < 4; ++j) result[lane] += int32_t(u[4 * lane + j]) * int32_t(int8_t(s[4 * lane + j]));
#endif
    return result;
#endif
}

FDCPU_INLINE B splat_bytes(const void *four) {
    int32_t word;
    std::memcpy(&word, four, sizeof word);
    return B(splat_int(word));
}

// acc[lane] + a[2 lane] b[2 lane] + a[2 lane + 1] b[2 lane + 1] of bfloat16 pairs.
FDCPU_INLINE F dot_pairs(F acc, I a, I b) {
#if FDCPU_LEVEL >= 2
    return F(_mm512_dpbf16_ps(__m512(acc), (__m512bh)a, (__m512bh)b));
#else
    const F low = F(a << 16) * F(b << 16) + acc;
    return F(U(a) & 0xffff0000u) * F(U(b) & 0xffff0000u) + low;
#endif
}

// Two lines of bfloat16 pairs from signs and mantissas, codes 0 to 15 of exponents, and the exponents, four times
// over: see packed.h. Rotations are computed where products of pairs are; beside many of those shifts cost less.
template <bool kShifts>
FDCPU_INLINE void decode_pairs(B rest, B codes, B exponents, I &first, I &second) {
#if FDCPU_LEVEL >= 2
    const __m512i found = _mm512_shuffle_epi8(__m512i(exponents), __m512i(codes));
    const auto rotated = [](__m512i x) {
        if constexpr (!kShifts) return I(_mm512_ror_epi32(x, 1));
        // The compiler makes a rotation of a plain "or".
        return I(_mm512_ternarylogic_epi32(_mm512_srli_epi32(x, 1), _mm512_slli_epi32(x, 31), x, 0xfc));
    };
    first = rotated(_mm512_unpacklo_epi8(__m512i(rest), found));
    second = rotated(_mm512_unpackhi_epi8(__m512i(rest), found));
#else
    uint8_t mixed[2][64];
    for (int i = 0; i < 64; ++i) {
        uint8_t *to = mixed[i / 8 % 2] + i / 16 * 16 + i % 8 * 2;
        to[0] = rest[i];
        to[1] = exponents[codes[i]];
    }
    const U low = load_as<U>(mixed[0]), high = load_as<U>(mixed[1]);
    first = I(low >> 1 | low << 31);
    second = I(high >> 1 | high << 31);
#endif
}

// Rows that are W apart exchange the lanes that differ in bit W.
template <int W, int... kLane>
FDCPU_INLINE void exchange(U &first, U &second, std::integer_sequence<int, kLane...>) {
    const U low = first, high = second;
    first = __builtin_shufflevector(low, high, (kLane & W ? kLane - W + kLanes : kLane)...);
    second = __builtin_shufflevector(low, high, (kLane & W ? kLane + kLanes : kLane + W)...);
}

// rows[r][lane] becomes rows[lane][r].
template <int W = kLanes / 2>
FDCPU_INLINE void transpose(U (&rows)[kLanes]) {
    for (int r = 0; r < kLanes; ++r)
        if (!(r & W)) exchange<W>(rows[r], rows[r + W], std::make_integer_sequence<int, kLanes>());
    if constexpr (W > 1) transpose<W / 2>(rows);
}

}  // namespace fdcpu::FDCPU_NAMESPACE
