// Sixteen lanes as the compiler's own vectors: a register of AVX512, and memory where there is none. Included by simd.h.
#pragma once
#if FDCPU_LEVEL >= 2
#include <immintrin.h>
#endif

namespace fdcpu::FDCPU_NAMESPACE {

using F = float __attribute__((vector_size(64)));
using I = int32_t __attribute__((vector_size(64)));
using U = uint32_t __attribute__((vector_size(64)));
using H = uint16_t __attribute__((vector_size(32)));
using B = uint8_t __attribute__((vector_size(64)));
using Bytes = int8_t __attribute__((vector_size(16)));

constexpr I kLaneNumbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

FDCPU_INLINE F select(I mask, F a, F b) { return mask ? a : b; }
FDCPU_INLINE F maximum(F a, F b) { return a > b ? a : b; }
FDCPU_INLINE I maximum(I a, I b) { return a > b ? a : b; }

FDCPU_INLINE F to_floats(I x) { return __builtin_convertvector(x, F); }
FDCPU_INLINE I to_ints(Bytes x) { return __builtin_convertvector(x, I); }
// Of numbers below 65536.
FDCPU_INLINE H narrow(U x) { return __builtin_convertvector(x, H); }

// Where the compiler takes several instructions for what is one.
#if FDCPU_LEVEL >= 2
FDCPU_INLINE bool any(I mask) { return _mm512_movepi32_mask(__m512i(mask)) != 0; }
FDCPU_INLINE U widen(H x) { return U(_mm512_cvtepu16_epi32(__m256i(x))); }
// Of float16.
FDCPU_INLINE F load_halves(const uint16_t *from) {
    return F(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from))));
}
// To the nearest, ties to even; |x| below 2^22.
FDCPU_INLINE I round_to_int(F x) { return I(_mm512_cvtps_epi32(__m512(x))); }
// The low bytes.
FDCPU_INLINE void store_bytes(uint8_t *to, I x) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(to), _mm512_cvtepi32_epi8(__m512i(x)));
}
FDCPU_INLINE float sum_of(F x) { return _mm512_reduce_add_ps(__m512(x)); }
FDCPU_INLINE float max_of(F x) { return _mm512_reduce_max_ps(__m512(x)); }
FDCPU_INLINE int32_t max_of_ints(I x) { return _mm512_reduce_max_epi32(__m512i(x)); }
FDCPU_INLINE int32_t sum_of_ints(I x) { return _mm512_reduce_add_epi32(__m512i(x)); }
// acc[lane] + sum over j < 4 of unsigned u[4 lane + j] times signed s[4 lane + j].
FDCPU_INLINE I dot_bytes(I acc, B u, B s) { return I(_mm512_dpbusd_epi32(__m512i(acc), __m512i(u), __m512i(s))); }
#else
FDCPU_INLINE bool any(I mask) {
    for (int lane = 0; lane < kLanes; ++lane)
        if (mask[lane]) return true;
    return false;
}
FDCPU_INLINE U widen(H x) { return __builtin_convertvector(x, U); }
FDCPU_INLINE F load_halves(const uint16_t *from) {
    F lanes = {};
    for (int i = 0; i < kLanes; ++i) lanes[i] = float_of_half(from[i]);
    return lanes;
}
// Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
FDCPU_INLINE I round_to_int(F x) { return I(x + 12582912.f) - 0x4b400000; }
FDCPU_INLINE void store_bytes(uint8_t *to, I x) {
    const Bytes narrow = __builtin_convertvector(x, Bytes);
    std::memcpy(to, &narrow, sizeof narrow);
}
// All lanes to one, halves with halves.
template <class V, class Combine>
FDCPU_INLINE auto fold(V x, const Combine &combine) {
    for (int width = kLanes / 2; width; width /= 2)
        for (int i = 0; i < width; ++i) x[i] = combine(x[i], x[i + width]);
    return x[0];
}
FDCPU_INLINE float sum_of(F x) { return fold(x, [](float a, float b) { return a + b; }); }
FDCPU_INLINE float max_of(F x) { return fold(x, [](float a, float b) { return a > b ? a : b; }); }
FDCPU_INLINE int32_t max_of_ints(I x) { return fold(x, [](int32_t a, int32_t b) { return a > b ? a : b; }); }
FDCPU_INLINE int32_t sum_of_ints(I x) { return int32_t(fold(U(x), [](uint32_t a, uint32_t b) { return a + b; })); }
FDCPU_INLINE I dot_bytes(I acc, B u, B s) {
    for (int lane = 0; lane < kLanes; ++lane)
        for (int j = 0; j < 4; ++j) acc[lane] += int32_t(u[4 * lane + j]) * int32_t(int8_t(s[4 * lane + j]));
    return acc;
}
#endif

// Of signed bytes x and w, of which x comes with so much added.
constexpr int kByteOffset = 128;
using Weights = B;
FDCPU_INLINE I dot_weights(I acc, B x, Weights w) { return dot_bytes(acc, x, w); }

#if FDCPU_LEVEL >= 3
// acc[lane] + a[2 lane] b[2 lane] + a[2 lane + 1] b[2 lane + 1] of bfloat16 pairs.
FDCPU_INLINE F dot_pairs(F acc, I a, I b) { return F(_mm512_dpbf16_ps(__m512(acc), (__m512bh)a, (__m512bh)b)); }
#endif

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
    U low, high;
    std::memcpy(&low, mixed[0], sizeof low);
    std::memcpy(&high, mixed[1], sizeof high);
    first = I(low >> 1 | low << 31);
    second = I(high >> 1 | high << 31);
#endif
}

// Pairs in two registers, (x0, y0, x1, ...), become (x0, x1, ...) and (y0, y1, ...), and back.
FDCPU_INLINE void part_pairs(F low, F high, F &first, F &second) {
    first = shuffled<0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30>(low, high);
    second = shuffled<1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31>(low, high);
}
FDCPU_INLINE void join_pairs(F first, F second, F &low, F &high) {
    low = shuffled<0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23>(first, second);
    high = shuffled<8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31>(first, second);
}

// Rows that are W apart exchange the lanes that differ in bit W.
template <int W, int... kLane>
FDCPU_INLINE void exchange_lanes(U &first, U &second, std::integer_sequence<int, kLane...>) {
    const U low = first, high = second;
    first = shuffled<(kLane & W ? kLane - W + kLanes : kLane)...>(low, high);
    second = shuffled<(kLane & W ? kLane + kLanes : kLane + W)...>(low, high);
}
template <int W>
FDCPU_INLINE void exchange(U &first, U &second) {
    exchange_lanes<W>(first, second, std::make_integer_sequence<int, kLanes>());
}

}  // namespace fdcpu::FDCPU_NAMESPACE
