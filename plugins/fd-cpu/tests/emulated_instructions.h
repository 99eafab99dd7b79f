// AVX512's instructions, as many as kernels use, lane by lane in plain C++: for tests of the levels that have them on
// processors that do not. Inside the namespace of its level a function hides the compiler's of the same name. What
// each computes is what Intel's Intrinsics Guide and Software Developer's Manual say of it.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

// Inlined they would take a compiler twice as long.
#define FDCPU_CALLED inline __attribute__((noinline))

namespace fdcpu::FDCPU_NAMESPACE {

template <class To, class From>
inline To same_bits(const From &from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

template <class T>
struct EmulatedLanes {
    static constexpr int kCount = 64 / sizeof(T);
    T at[kCount];
    template <class Register>
    explicit EmulatedLanes(const Register &x) { std::memcpy(at, &x, sizeof at); }
    EmulatedLanes() = default;
    template <class Register>
    Register in() const { return same_bits<Register>(at); }
    T &operator[](int lane) { return at[lane]; }
    // Halves with halves.
    template <class Combine>
    T folded(const Combine &combine) {
        for (int count = kCount / 2; count; count /= 2)
            for (int i = 0; i < count; ++i) at[i] = combine(at[i], at[i + count]);
        return at[0];
    }
};
using EmulatedFloats = EmulatedLanes<float>;
using EmulatedInts = EmulatedLanes<int32_t>;
using EmulatedWords = EmulatedLanes<uint32_t>;
using EmulatedBytes = EmulatedLanes<uint8_t>;

// R of each lane, made by function(lane).
template <class R, class Register, class Function>
inline Register lanes_of(const Function &function) {
    R to;
    for (int i = 0; i < R::kCount; ++i) to[i] = function(i);
    return to.template in<Register>();
}

// Instructions of bfloat16 take denormal numbers for zero.
inline float without_denormal(float x) { return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.f, x) : x; }

FDCPU_CALLED uint16_t _mm512_movepi32_mask(__m512i x) {
    EmulatedInts from(x);
    unsigned mask = 0;
    for (int i = 0; i < 16; ++i) mask |= unsigned(from[i] < 0) << i;
    return uint16_t(mask);
}
FDCPU_CALLED __m512i _mm512_cvtepu16_epi32(__m256i x) {
    uint16_t from[16];
    std::memcpy(from, &x, sizeof from);
    return lanes_of<EmulatedWords, __m512i>([&](int i) { return from[i]; });
}
FDCPU_CALLED __m512 _mm512_cvtph_ps(__m256i x) {
    const __m256 halves[2] = {_mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))};
    return same_bits<__m512>(halves);
}
FDCPU_CALLED __m512i _mm512_cvtps_epi32(__m512 x) {
    EmulatedFloats from(x);
    return lanes_of<EmulatedInts, __m512i>([&](int i) { return _mm_cvtss_si32(_mm_set_ss(from[i])); });
}
FDCPU_CALLED __m128i _mm512_cvtepi32_epi8(__m512i x) {
    EmulatedInts from(x);
    uint8_t to[16];
    for (int i = 0; i < 16; ++i) to[i] = uint8_t(from[i]);
    return same_bits<__m128i>(to);
}

FDCPU_CALLED float _mm512_reduce_add_ps(__m512 x) {
    return EmulatedFloats(x).folded([](float a, float b) { return a + b; });
}
FDCPU_CALLED float _mm512_reduce_max_ps(__m512 x) {
    return EmulatedFloats(x).folded([](float a, float b) { return a > b ? a : b; });
}
FDCPU_CALLED int32_t _mm512_reduce_max_epi32(__m512i x) {
    return EmulatedInts(x).folded([](int32_t a, int32_t b) { return a > b ? a : b; });
}
FDCPU_CALLED int32_t _mm512_reduce_add_epi32(__m512i x) {
    return int32_t(EmulatedWords(x).folded([](uint32_t a, uint32_t b) { return a + b; }));
}

FDCPU_CALLED __m512i _mm512_dpbusd_epi32(__m512i sums, __m512i u, __m512i s) {
    EmulatedWords from(sums);
    EmulatedBytes x(u);
    EmulatedLanes<int8_t> y(s);
    return lanes_of<EmulatedWords, __m512i>([&](int i) {
        for (int j = 4 * i; j < 4 * i + 4; ++j) from[i] += uint32_t(int32_t(x[j]) * int32_t(y[j]));
        return from[i];
    });
}
// The second of each pair first, then the first, each rounded by itself.
template <class Pairs>
FDCPU_CALLED __m512 _mm512_dpbf16_ps(__m512 sums, Pairs a, Pairs b) {
    EmulatedFloats from(sums);
    EmulatedLanes<uint16_t> x(a), y(b);
    const auto widened = [](uint16_t bits) { return without_denormal(same_bits<float>(uint32_t(bits) << 16)); };
    return lanes_of<EmulatedFloats, __m512>([&](int i) {
        float sum = without_denormal(from[i]);
        for (int j : {2 * i + 1, 2 * i}) sum = without_denormal(std::fma(widened(x[j]), widened(y[j]), sum));
        return sum;
    });
}
struct EmulatedHalves {
    uint16_t at[16];
};
FDCPU_CALLED EmulatedHalves _mm512_cvtneps_pbh(__m512 x) {
    EmulatedFloats from(x);
    EmulatedHalves to;
    for (int i = 0; i < 16; ++i) {
        const uint32_t bits = same_bits<uint32_t>(without_denormal(from[i]));
        to.at[i] = uint16_t(std::isnan(from[i]) ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
    return to;
}

FDCPU_CALLED __m512i _mm512_shuffle_epi8(__m512i table, __m512i indices) {
    EmulatedBytes from(table), index(indices);
    return lanes_of<EmulatedBytes, __m512i>(
        [&](int i) { return index[i] & 0x80 ? uint8_t(0) : from[i / 16 * 16 + (index[i] & 15)]; });
}
// Of each sixteen bytes the eight from kFirst on, in turn with those of the other.
template <int kFirst>
inline __m512i interleaved(__m512i a, __m512i b) {
    EmulatedBytes x(a), y(b);
    return lanes_of<EmulatedBytes, __m512i>([&](int i) {
        const int at = i / 16 * 16 + kFirst + i % 16 / 2;
        return i % 2 ? y[at] : x[at];
    });
}
FDCPU_CALLED __m512i _mm512_unpacklo_epi8(__m512i a, __m512i b) { return interleaved<0>(a, b); }
FDCPU_CALLED __m512i _mm512_unpackhi_epi8(__m512i a, __m512i b) { return interleaved<8>(a, b); }
FDCPU_CALLED __m512i _mm512_slli_epi32(__m512i x, int count) {
    EmulatedWords from(x);
    return lanes_of<EmulatedWords, __m512i>([&](int i) { return from[i] << count; });
}
FDCPU_CALLED __m512i _mm512_srli_epi32(__m512i x, int count) {
    EmulatedWords from(x);
    return lanes_of<EmulatedWords, __m512i>([&](int i) { return from[i] >> count; });
}
FDCPU_CALLED __m512i _mm512_ror_epi32(__m512i x, int count) {
    EmulatedWords from(x);
    return lanes_of<EmulatedWords, __m512i>([&](int i) { return from[i] >> count | from[i] << (32 - count); });
}
// `table` says which bit comes of the three.
FDCPU_CALLED __m512i _mm512_ternarylogic_epi32(__m512i a, __m512i b, __m512i c, int table) {
    EmulatedWords x(a), y(b), z(c);
    return lanes_of<EmulatedWords, __m512i>([&](int i) {
        uint32_t to = 0;
        for (int bit = 0; bit < 32; ++bit) {
            const uint32_t at = (x[i] >> bit & 1) << 2 | (y[i] >> bit & 1) << 1 | (z[i] >> bit & 1);
            to |= (uint32_t(table) >> at & 1) << bit;
        }
        return to;
    });
}

FDCPU_CALLED __m512 _mm512_set1_ps(float x) {
    return lanes_of<EmulatedFloats, __m512>([&](int) { return x; });
}
// Where one is not a number: the second.
FDCPU_CALLED __m512 _mm512_max_ps(__m512 a, __m512 b) {
    EmulatedFloats x(a), y(b);
    return lanes_of<EmulatedFloats, __m512>([&](int i) { return x[i] > y[i] ? x[i] : y[i]; });
}
// As kernels call them: to the nearest integer; what is left above the next lower one.
FDCPU_CALLED __m512 _mm512_roundscale_ps(__m512 x, int) {
    EmulatedFloats from(x);
    return lanes_of<EmulatedFloats, __m512>([&](int i) { return std::nearbyint(from[i]); });
}
FDCPU_CALLED __m512 _mm512_reduce_ps(__m512 x, int) {
    EmulatedFloats from(x);
    return lanes_of<EmulatedFloats, __m512>([&](int i) { return std::isinf(from[i]) ? 0.f : from[i] - std::floor(from[i]); });
}
// x times two to the power of y rounded down.
FDCPU_CALLED __m512 _mm512_scalef_ps(__m512 x, __m512 y) {
    EmulatedFloats from(x), power(y);
    return lanes_of<EmulatedFloats, __m512>([&](int i) {
        if (std::isnan(from[i]) || std::isnan(power[i])) return std::numeric_limits<float>::quiet_NaN();
        const float least = -1000, most = 1000;  // further it is zero or infinite anyway
        return float(std::ldexp(double(from[i]), int(std::floor(std::fmin(most, std::fmax(least, power[i]))))));
    });
}

}  // namespace fdcpu::FDCPU_NAMESPACE
