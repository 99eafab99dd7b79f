// Sixteen lanes in two registers of AVX2. The compiler's own vectors of that size would live in memory, because
// no register holds them; a pair of vectors lives in two. Included by simd.h.
#pragma once
#include <immintrin.h>

namespace fdcpu::FDCPU_NAMESPACE {

template <class V>
struct Pair {
    using Lane = std::decay_t<decltype(V()[0])>;
    V a, b;  // the first lanes and the others

    Pair() = default;
    FDCPU_INLINE constexpr Pair(V first, V others) : a(first), b(others) {}
    // The same bits.
    template <class W>
    FDCPU_INLINE explicit Pair(Pair<W> x) : a(V(x.a)), b(V(x.b)) {}

    Lane operator[](int64_t lane) const { return (&reinterpret_cast<const Lane &>(a))[lane]; }
};

// Register by register: copied as a whole they would pass through memory.
template <class P>
FDCPU_INLINE P load_pair(const void *from) {
    P value;
    std::memcpy(&value.a, from, sizeof value.a);
    std::memcpy(&value.b, static_cast<const char *>(from) + sizeof value.a, sizeof value.b);
    return value;
}
template <class P>
FDCPU_INLINE void store_pair(void *to, P value) {
    std::memcpy(to, &value.a, sizeof value.a);
    std::memcpy(static_cast<char *>(to) + sizeof value.a, &value.b, sizeof value.b);
}

#define FDCPU_OPERATOR(op)                                                                               \
    template <class V>                                                                                   \
    FDCPU_INLINE auto operator op(Pair<V> x, Pair<V> y) {                                                \
        return Pair<decltype(x.a op y.a)>(x.a op y.a, x.b op y.b);                                       \
    }                                                                                                    \
    template <class V>                                                                                   \
    FDCPU_INLINE auto operator op(Pair<V> x, typename Pair<V>::Lane y) {                                 \
        return Pair<decltype(x.a op y)>(x.a op y, x.b op y);                                             \
    }                                                                                                    \
    template <class V>                                                                                   \
    FDCPU_INLINE auto operator op(typename Pair<V>::Lane x, Pair<V> y) {                                 \
        return Pair<decltype(x op y.a)>(x op y.a, x op y.b);                                             \
    }
FDCPU_OPERATOR(+)
FDCPU_OPERATOR(-)
FDCPU_OPERATOR(*)
FDCPU_OPERATOR(/)
FDCPU_OPERATOR(&)
FDCPU_OPERATOR(|)
FDCPU_OPERATOR(>>)
FDCPU_OPERATOR(<<)
FDCPU_OPERATOR(<)
FDCPU_OPERATOR(>)
FDCPU_OPERATOR(==)
FDCPU_OPERATOR(!=)
#undef FDCPU_OPERATOR

template <class V>
FDCPU_INLINE Pair<V> operator-(Pair<V> x) { return {-x.a, -x.b}; }
template <class V>
FDCPU_INLINE Pair<V> operator~(Pair<V> x) { return {~x.a, ~x.b}; }
template <class V, class Y>
FDCPU_INLINE Pair<V> &operator+=(Pair<V> &x, Y y) { return x = x + y; }
template <class V, class Y>
FDCPU_INLINE Pair<V> &operator-=(Pair<V> &x, Y y) { return x = x - y; }
template <class V, class Y>
FDCPU_INLINE Pair<V> &operator&=(Pair<V> &x, Y y) { return x = x & y; }
template <class V, class Y>
FDCPU_INLINE Pair<V> &operator|=(Pair<V> &x, Y y) { return x = x | y; }

using Floats = float __attribute__((vector_size(32)));
using Ints = int32_t __attribute__((vector_size(32)));
using F = Pair<Floats>;
using I = Pair<Ints>;
using U = Pair<uint32_t __attribute__((vector_size(32)))>;
using B = Pair<uint8_t __attribute__((vector_size(32)))>;
using H = uint16_t __attribute__((vector_size(32)));
using Bytes = int8_t __attribute__((vector_size(16)));

constexpr I kLaneNumbers = {Ints{0, 1, 2, 3, 4, 5, 6, 7}, Ints{8, 9, 10, 11, 12, 13, 14, 15}};

FDCPU_INLINE F select(I mask, F a, F b) {
    return {Floats(_mm256_blendv_ps(b.a, a.a, __m256(mask.a))), Floats(_mm256_blendv_ps(b.b, a.b, __m256(mask.b)))};
}
FDCPU_INLINE bool any(I mask) { return _mm256_movemask_ps(__m256(mask.a | mask.b)) != 0; }
// In this order NaN of b stays.
FDCPU_INLINE F maximum(F a, F b) { return {Floats(_mm256_max_ps(a.a, b.a)), Floats(_mm256_max_ps(a.b, b.b))}; }
FDCPU_INLINE I maximum(I a, I b) {
    return {Ints(_mm256_max_epi32(__m256i(a.a), __m256i(b.a))), Ints(_mm256_max_epi32(__m256i(a.b), __m256i(b.b)))};
}

FDCPU_INLINE F to_floats(I x) {
    return {Floats(_mm256_cvtepi32_ps(__m256i(x.a))), Floats(_mm256_cvtepi32_ps(__m256i(x.b)))};
}
FDCPU_INLINE I to_ints(Bytes x) {
    const __m128i all = __m128i(x);
    return {Ints(_mm256_cvtepi8_epi32(all)), Ints(_mm256_cvtepi8_epi32(_mm_srli_si128(all, 8)))};
}
FDCPU_INLINE U widen(H x) {
    using Words = decltype(U::a);
    return {Words(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(__m256i(x)))),
            Words(_mm256_cvtepu16_epi32(_mm256_extracti128_si256(__m256i(x), 1)))};
}
// Of float16.
FDCPU_INLINE F load_halves(const uint16_t *from) {
    const auto *eights = reinterpret_cast<const __m128i *>(from);
    return {Floats(_mm256_cvtph_ps(_mm_loadu_si128(eights))), Floats(_mm256_cvtph_ps(_mm_loadu_si128(eights + 1)))};
}
// Of numbers below 65536.
FDCPU_INLINE H narrow(U x) {
    return H(_mm256_permute4x64_epi64(_mm256_packus_epi32(__m256i(x.a), __m256i(x.b)), 0xd8));
}
FDCPU_INLINE void store_bytes(uint8_t *to, I x) {
    const __m256i words = __m256i(narrow(U(x & 255)));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(to),
                     _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
FDCPU_INLINE I round_to_int(F x) { return {Ints(_mm256_cvtps_epi32(x.a)), Ints(_mm256_cvtps_epi32(x.b))}; }

// All lanes to one, halves with halves.
template <class V, class Combine>
FDCPU_INLINE auto fold(Pair<V> x, const Combine &combine) {
    V y = combine(x.a, x.b);
    y = combine(y, V(shuffled<4, 5, 6, 7, 0, 1, 2, 3>(y, y)));
    y = combine(y, V(shuffled<2, 3, 0, 1, 6, 7, 4, 5>(y, y)));
    return combine(y, V(shuffled<1, 0, 3, 2, 5, 4, 7, 6>(y, y)))[0];
}
FDCPU_INLINE float sum_of(F x) { return fold(x, [](Floats a, Floats b) { return a + b; }); }
FDCPU_INLINE float max_of(F x) { return fold(x, [](Floats a, Floats b) { return a > b ? a : b; }); }
FDCPU_INLINE int32_t max_of_ints(I x) { return fold(x, [](Ints a, Ints b) { return a > b ? a : b; }); }
FDCPU_INLINE int32_t sum_of_ints(I x) { return int32_t(fold(U(x), [](auto a, auto b) { return a + b; })); }

// acc[lane] + sum over j < 4 of unsigned u[4 lane + j] times signed s[4 lane + j]. Even and odd bytes apart: products
// of a full unsigned and a signed byte in pairs do not fit 16 bits.
FDCPU_INLINE Ints dot_bytes(Ints acc, __m256i u, __m256i s) {
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(u, _mm256_set1_epi16(0xff)),
                                           _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(s, 8));
    return acc + Ints(even) + Ints(odd);
}
FDCPU_INLINE I dot_bytes(I acc, B u, B s) {
    return {dot_bytes(acc.a, __m256i(u.a), __m256i(s.a)), dot_bytes(acc.b, __m256i(u.b), __m256i(s.b))};
}

// The same of signed bytes x and w, which is the quicker product here: inputs need no offset.
constexpr int kByteOffset = 0;
struct Weights {
    B bytes, magnitudes;
    FDCPU_INLINE explicit Weights(B w)
        : bytes(w), magnitudes(Lanes(_mm256_abs_epi8(__m256i(w.a))), Lanes(_mm256_abs_epi8(__m256i(w.b)))) {}
    using Lanes = decltype(B::a);
};
FDCPU_INLINE Ints pairs_to_ints(__m256i words) { return Ints(_mm256_madd_epi16(words, _mm256_set1_epi16(1))); }
FDCPU_INLINE I dot_weights(I acc, B x, const Weights &w) {
    const auto dot = [](auto x, auto w, auto magnitudes) {
        return pairs_to_ints(_mm256_maddubs_epi16(__m256i(magnitudes), _mm256_sign_epi8(__m256i(x), __m256i(w))));
    };
    return {acc.a + dot(x.a, w.bytes.a, w.magnitudes.a), acc.b + dot(x.b, w.bytes.b, w.magnitudes.b)};
}

// Products of nibbles, 0 to 15, with bytes: their sums in pairs fit words eight times.
FDCPU_INLINE I add_words(I words, B nibbles, B x) {
    const auto add = [](auto words, auto nibbles, auto x) {
        return Ints(_mm256_add_epi16(__m256i(words), _mm256_maddubs_epi16(__m256i(nibbles), __m256i(x))));
    };
    words = {add(words.a, nibbles.a, x.a), add(words.b, nibbles.b, x.b)};
    // One after the other: the compiler would make all products first, and they do not fit the registers.
    asm volatile("" : "+x"(words.a), "+x"(words.b));
    return words;
}
FDCPU_INLINE I sum_words(I words) { return {pairs_to_ints(__m256i(words.a)), pairs_to_ints(__m256i(words.b))}; }

template <bool kShifts>
FDCPU_INLINE void decode_pairs(B rest, B codes, B exponents, I &first, I &second) {
    const auto decode = [&](auto rest, auto codes, auto exponents, Ints &low, Ints &high) {
        const __m256i found = _mm256_shuffle_epi8(__m256i(exponents), __m256i(codes));
        const auto rotated = [](__m256i x) { return Ints(_mm256_or_si256(_mm256_srli_epi32(x, 1), _mm256_slli_epi32(x, 31))); };
        low = rotated(_mm256_unpacklo_epi8(__m256i(rest), found));
        high = rotated(_mm256_unpackhi_epi8(__m256i(rest), found));
    };
    decode(rest.a, codes.a, exponents.a, first.a, second.a);
    decode(rest.b, codes.b, exponents.b, first.b, second.b);
}

// Pairs in two registers, (x0, y0, x1, ...), become (x0, x1, ...) and (y0, y1, ...), and back.
FDCPU_INLINE void part_pairs(F low, F high, F &first, F &second) {
    const auto evens = [](F x) { return Floats(shuffled<0, 2, 4, 6, 8, 10, 12, 14>(x.a, x.b)); };
    const auto odds = [](F x) { return Floats(shuffled<1, 3, 5, 7, 9, 11, 13, 15>(x.a, x.b)); };
    first = {evens(low), evens(high)};
    second = {odds(low), odds(high)};
}
FDCPU_INLINE void join_pairs(F first, F second, F &low, F &high) {
    const auto joined = [](Floats x, Floats y) {
        return F(Floats(shuffled<0, 8, 1, 9, 2, 10, 3, 11>(x, y)),
                 Floats(shuffled<4, 12, 5, 13, 6, 14, 7, 15>(x, y)));
    };
    low = joined(first.a, second.a);
    high = joined(first.b, second.b);
}

// Rows that are W apart exchange the lanes that differ in bit W.
template <int W, class V, int... kLane>
FDCPU_INLINE void exchange_eight(V &first, V &second, std::integer_sequence<int, kLane...>) {
    const V low = first, high = second;
    first = shuffled<(kLane & W ? kLane - W + 8 : kLane)...>(low, high);
    second = shuffled<(kLane & W ? kLane + 8 : kLane + W)...>(low, high);
}
template <int W>
FDCPU_INLINE void exchange(U &first, U &second) {
    if constexpr (W == 8) {
        std::swap(first.b, second.a);
    } else {
        exchange_eight<W>(first.a, second.a, std::make_integer_sequence<int, 8>());
        exchange_eight<W>(first.b, second.b, std::make_integer_sequence<int, 8>());
    }
}

}  // namespace fdcpu::FDCPU_NAMESPACE
