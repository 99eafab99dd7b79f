// A weight matrix [N outputs, K inputs] laid out for the kernels: once, when it is loaded.
//
// Panels of 64 outputs. Inside, one 64-byte line holds 16 outputs times as many consecutive inputs as
// fit: 1 (float32), 2 (bfloat16), 4 (int8); int4 lines hold 8 inputs, 0..3 in the low nibbles and 4..7
// in the high ones, with 8 added. Such a line is one vector register, and it is what the dot product
// instructions of AVX512-VNNI, AVX512-BF16 and the tiles of AMX take as it is.
//
// tet2 is the trellis code of two bits that fd-quant-wint2 defines: 16 bits for an output's eight inputs,
// whose four states reach back into the 16 bits before them. So a tile of eight inputs holds, for each
// sixteen outputs, the word before the first one and their sixteen. A state times kTetMultiplier is a line
// of bytes, which meets (x0, x0 + x1, x1, x1 - x0) of two inputs.
//
// coded_bf16 is bfloat16 in twelve bits, without loss. Few exponents are all that weights have (2.6 bits of
// entropy: DFloat11, arXiv 2504.11651; ZipNN, 2411.05239). So a panel begins with sixteen of them, four times over,
// which codes of four bits stand for: 0, and the fifteen that most of its weights have. The others are nothing
// there and patches beside it, in the order of inputs; they may be anything, infinities included. Then come its
// halves, one after the other, in blocks of four inputs and three lines: codes (low nibbles: sixteen outputs, high
// ones: the others), and for each sixteen the rest of their weights as bytes [output / 4][input / 2][output % 4]
// [input % 2]: mantissa and, in the lowest bit, the sign of the *other* input of the pair. Bytes interleaved with the
// exponents, low and high halves of 16 bytes by themselves, and every 32 bits rotated by one: that is a line of
// bfloat16.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>

#include "memory.h"

namespace fdcpu {

enum class DType { f32 = 0, bf16 = 1 };
enum class WeightKind { f32 = 0, bf16 = 1, int8 = 2, int4 = 3, tet2 = 4, coded_bf16 = 5 };

constexpr int kPanel = 64;      // outputs of a panel
constexpr int kHalf = 32;       // a panel's half; of a gated matrix 16 gate outputs, then their 16 up outputs
constexpr int kGroupStep = 32;  // groups that share a scale are multiples of so many inputs
constexpr int kTetWords = 17, kTetTile = kPanel / 16 * kTetWords * 2;  // of sixteen outputs; bytes of a panel's tile
constexpr uint32_t kTetMultiplier = 0x67edf2eb;
constexpr int kCodedHeader = 64, kCodedBlock = 3 * 64;  // bytes of a panel's exponents; of four inputs of half of it

// Float16, to nearest; what is too large becomes the largest one.
inline uint16_t half_of(float x) {
    const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    x = std::fabs(x);
    if (!(x <= 65504.f)) return sign | (x > 65504.f ? 0x7bff : 0x7e00);
    if (x < 0x1p-14f) return sign | uint16_t(std::nearbyint(x * 0x1p24f));
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return sign | uint16_t(((bits + 0xfff + (bits >> 13 & 1)) >> 13) - (112 << 10));
}
inline float float_of_half(uint16_t half) {
    const int exponent = half >> 10 & 31, fraction = half & 1023;
    const float value = exponent == 31 ? (fraction ? NAN : INFINITY)
                                       : exponent ? std::ldexp(float(1024 + fraction), exponent - 25) : std::ldexp(float(fraction), -24);
    return half >> 15 ? -value : value;
}

// A weight of coded_bf16 whose exponent has no code.
struct Patch {
    int32_t input;
    uint16_t column, bits;  // of its panel; bfloat16
};

struct PackedMatrix {
    WeightKind kind;
    int64_t outputs, inputs;  // as the layer sees them; of a gated matrix gate and up together
    int64_t padded_inputs;    // a multiple of the format's step; the surplus weights are zero
    int64_t group;            // inputs that share a scale; padded_inputs: all of them
    bool gated;
    int64_t num_panels;
    Pages weights;
    Pages scales;  // [panel][group][64]: float16 of int4 in groups, as files of such weights have them, else float
    Pages sums;    // int8 only: int32 [panel][group][64], the sum of a group's weights
    Pages signs;   // tet2 only: float [inputs], what inputs are multiplied with before
    int64_t rotation = 1;  // Hadamard transforms of so many of them
    Pages patches;  // coded_bf16 only: int64 [panel + 1], where a panel's patches begin; then all of them
    int64_t num_patches = 0;

    int64_t num_groups() const { return padded_inputs / group; }
    int64_t panel_bytes() const;
    const uint8_t *panel(int64_t p) const { return weights.data() + p * panel_bytes(); }
    bool has_half_scales() const { return kind == WeightKind::int4 && num_groups() > 1; }
    int64_t scale_bytes() const { return has_half_scales() ? sizeof(uint16_t) : sizeof(float); }
    // Of a panel's group: 64 of them.
    const uint8_t *scales_of(int64_t p, int64_t g) const {
        return scales.data() + (p * num_groups() + g) * kPanel * scale_bytes();
    }
    const int32_t *panel_sums(int64_t p) const {
        return reinterpret_cast<const int32_t *>(sums.data()) + p * num_groups() * kPanel;
    }
    // Of half a panel of coded_bf16.
    int64_t half_bytes() const { return padded_inputs / 4 * kCodedBlock; }
    const uint8_t *coded_half(int64_t p, int half) const { return panel(p) + kCodedHeader + half * half_bytes(); }
    // Up to patches_of(p + 1).
    const Patch *patches_of(int64_t p) const {
        const auto *starts = reinterpret_cast<const int64_t *>(patches.data());
        return reinterpret_cast<const Patch *>(starts + num_panels + 1) + starts[p];
    }
    // Where the n-th output stands.
    int64_t panel_of(int64_t n) const { return gated ? (n % half()) / kHalf : n / kPanel; }
    int64_t column_of(int64_t n) const {
        if (!gated) return n % kPanel;
        const int64_t pair = (n % half()) % kHalf, quarter = kHalf / 2;
        return pair / quarter * kHalf + n / half() * quarter + pair % quarter;
    }
    int64_t half() const { return outputs / 2; }
    size_t num_bytes() const { return weights.size() + scales.size() + sums.size() + signs.size() + patches.size(); }
};

int64_t panels_of(int64_t outputs, bool gated);
// Makes room for the whole matrix; rows are written by set_*, all of coded_bf16 by code_bf16 (coded.h).
std::unique_ptr<PackedMatrix> make_packed(WeightKind kind, int64_t outputs, int64_t inputs, int64_t group, bool gated);

// Row n from `inputs` values; for int kinds they are rounded to nearest with absmax / 127 or / 7 per group.
void set_row(PackedMatrix &matrix, int64_t n, const void *values, DType dtype);
// Row n of an int kind from integers, one a byte (int4: -8..7), and its scales, one a group.
void set_quantized_row(PackedMatrix &matrix, int64_t n, const int8_t *values, const float *scales);
// Row n of int4 from pairs, low nibble first, with 8 added: as checkpoints hold them.
void set_nibble_row(PackedMatrix &matrix, int64_t n, const uint8_t *pairs, const float *scales);
// tet2: all of it, as checkpoints hold it: strands [ceil(outputs / 64)][inputs / 8][64 words of 16 bits].
void set_tet(PackedMatrix &matrix, const uint16_t *strands, const float *scales, const int8_t *signs, int64_t rotation);
// Row n as the kernels see it, `inputs` floats.
void get_row(const PackedMatrix &matrix, int64_t n, float *values);

}  // namespace fdcpu
