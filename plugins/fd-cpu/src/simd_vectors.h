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
FDCPU_INLINE bool any(I mask) {
#if FDCPU_LEVEL >= 2
    return _mm512_movepi32_mask(__m512i(mask)) != 0;
#else
    for (int lane = 0; lane < kLanes; ++lane)
        if (mask[lane]) return true;
    return false;
#endif
}
FDCPU_INLINE F maximum(F a, F b) { return a > b ? a : b; }
FDCPU_INLINE I maximum(I a, I b) { return a > b ? a : b; }

FDCPU_INLINE F to_floats(I x) { return __builtin_convertvector(x, F); }
FDCPU_INLINE I to_ints(Bytes x) { return __builtin_convertvector(x, I); }
// The compiler takes five instructions for what is one.
FDCPU_INLINE U widen(H x) {
#if FDCPU_LEVEL >= 2
    return U(_mm512_cvtepu16_epi32(__m256i(x)));
#else
    return __builtin_convertvector(x, U);
#endif
}
// Of numbers below 65536.
FDCPU_INLINE H narrow(U x) { return __builtin_convertvector(x, H); }
// To the nearest, ties to even; |x| below 2^22.
FDCPU_INLINE I round_to_int(F x) {
#if FDCPU_LEVEL >= 2
    return I(_mm512_cvtps_epi32(__m512(x)));
#else
    // Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
    return I(x + 12582912.f) - 0x4b400000;
#endif
}
// The low bytes.
FDCPU_INLINE void store_bytes(uint8_t *to, I x) {
#if FDCPU_LEVEL >= 2
    _mm_storeu_si128(reinterpret_cast<__m128i *>(to), _mm512_cvtepi32_epi8(__m512i(x)));
#else
    const Bytes narrow = __builtin_convertvector(x, Bytes);
    std::memcpy(to, &narrow, sizeof narrow);
#endif
}

FDCPU_INLINE float sum_of(F x) {
#if FDCPU_LEVEL >= 2
    return _mm512_reduce_add_ps(__m512(x));
#else
    float lanes[kLanes], total = 0;
    std::memcpy(lanes, &x, sizeof x);
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
    std::memcpy(lanes, &x, sizeof x);
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
    std::memcpy(lanes, &x, sizeof x);
    return *std::max_element(lanes, lanes + kLanes);
#endif
}
FDCPU_INLINE int32_t sum_of_ints(I x) {
#if FDCPU_LEVEL >= 2
    return _mm512_reduce_add_epi32(__m512i(x));
#else
    uint32_t lanes[kLanes], total = 0;
    std::memcpy(lanes, &x, sizeof x);
    for (uint32_t lane : lanes) total += lane;
    return int32_t(total);
#endif
}

// acc[lane] + sum over j < 4 of unsigned u[4 lane + j] times signed s[4 lane + j].
FDCPU_INLINE I dot_bytes(I acc, B u, B s) {
#if FDCPU_LEVEL >= 2
    return I(_mm512_dpbusd_epi32(__m512i(acc), __m512i(u), __m512i(s)));
#else
    I result = acc;
    for (int lane = 0; lane < kLanes; ++lane)
        for (int j = 0; j < 4; ++j) result[lane] += int32_t(u[4 * lane + j]) * int32_t(int8_t(s[4 * lane + j]));
    return result;
#endif
}

// Of signed bytes x and w, of which x comes with so much added.
constexpr int kByteOffset = 128;
using Weights = B;
FDCPU_INLINE I dot_weights(I acc, B x, Weights w) { return dot_bytes(acc, x, w); }

// acc[lane] + a[2 lane] b[2 lane] + a[2 lane + 1] b[2 lane + 1] of bfloat16 pairs.
FDCPU_INLINE F dot_pairs(F acc, I a, I b) {
#if FDCPU_LEVEL >= 2 && !FDCPU_WITHOUT_BF16
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
    U low, high;
    std::memcpy(&low, mixed[0], sizeof low);
    std::memcpy(&high, mixed[1], sizeof high);
    first = I(low >> 1 | low << 31);
    second = I(high >> 1 | high << 31);
#endif
}

// Pairs in two registers, (x0, y0, x1, ...), become (x0, x1, ...) and (y0, y1, ...), and back.
FDCPU_INLINE void part_pairs(F low, F high, F &first, F &second) {
    first = __builtin_shufflevector(low, high, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    second = __builtin_shufflevector(low, high, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}
FDCPU_INLINE void join_pairs(F first, F second, F &low, F &high) {
    low = __builtin_shufflevector(first, second, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    high = __builtin_shufflevector(first, second, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

// Rows that are W apart exchange the lanes that differ in bit W.
template <int W, int... kLane>
FDCPU_INLINE void exchange_lanes(U &first, U &second, std::integer_sequence<int, kLane...>) {
    const U low = first, high = second;
    first = __builtin_shufflevector(low, high, (kLane & W ? kLane - W + kLanes : kLane)...);
    second = __builtin_shufflevector(low, high, (kLane & W ? kLane + kLanes : kLane + W)...);
}
template <int W>
FDCPU_INLINE void exchange(U &first, U &second) {
    exchange_lanes<W>(first, second, std::make_integer_sequence<int, kLanes>());
}

}  // namespace fdcpu::FDCPU_NAMESPACE
