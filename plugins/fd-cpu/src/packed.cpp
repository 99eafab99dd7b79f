#include "packed.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "coded.h"

namespace fdcpu {

namespace {

// Kernels prefetch and load a little beyond the last panel.
constexpr size_t kSlack = 8192;
constexpr int64_t kMostTetInputs = 32768;
constexpr float kTetScale = 1.03f / 128 / 2;  // of a code's doubled numbers, which are whole

int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

float widen(uint16_t bits) {
    const uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
}

uint16_t narrow(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if (std::isnan(value)) return uint16_t(bits >> 16 | 0x40);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// One row's place in its panel: lines of four bytes per output, one line after another.
struct RowWriter {
    uint8_t *at;
    explicit RowWriter(PackedMatrix &matrix, int64_t n)
        : at(matrix.weights.data() + matrix.panel_of(n) * matrix.panel_bytes() + matrix.column_of(n) * 4) {}
    void put(const void *four) {
        std::memcpy(at, four, 4);
        at += 4 * kPanel;
    }
};

// Eight values, low nibbles first: what a line of four bytes holds.
void pack_nibbles(const int8_t *eight, uint8_t *four) {
    for (int j = 0; j < 4; ++j) four[j] = uint8_t((eight[j] + 8) | (eight[4 + j] + 8) << 4);
}

void set_scales(PackedMatrix &matrix, int64_t n, const float *scales) {
    auto *out = const_cast<uint8_t *>(matrix.scales_of(matrix.panel_of(n), 0)) + matrix.column_of(n) * matrix.scale_bytes();
    for (int64_t g = 0; g < matrix.num_groups(); ++g, out += kPanel * matrix.scale_bytes()) {
        const uint16_t half = half_of(scales[g]);
        std::memcpy(out, matrix.has_half_scales() ? static_cast<const void *>(&half) : scales + g, size_t(matrix.scale_bytes()));
    }
}

}  // namespace

int64_t PackedMatrix::panel_bytes() const {
    switch (kind) {
        case WeightKind::f32: return padded_inputs * kPanel * 4;
        case WeightKind::bf16: return padded_inputs * kPanel * 2;
        case WeightKind::int8: return padded_inputs * kPanel;
        case WeightKind::tet2: return padded_inputs / 8 * kTetTile;
        case WeightKind::coded_bf16: return kCodedHeader + 2 * half_bytes();
        default: return padded_inputs * kPanel / 2;
    }
}

int64_t panels_of(int64_t outputs, bool gated) {
    return gated ? (outputs / 2 + kHalf - 1) / kHalf : (outputs + kPanel - 1) / kPanel;
}

std::unique_ptr<PackedMatrix> make_packed(WeightKind kind, int64_t outputs, int64_t inputs, int64_t group, bool gated) {
    if (outputs < 1 || inputs < 1) throw std::invalid_argument("a packed matrix needs at least one row and column");
    if (gated && outputs % 2) throw std::invalid_argument("a gated matrix needs as many gate as up rows");
    auto matrix = std::make_unique<PackedMatrix>();
    const bool is_int = kind == WeightKind::int8 || kind == WeightKind::int4;
    const bool is_tet = kind == WeightKind::tet2;
    // Sums of products of bytes, doubled, have to fit 32 bits.
    if (is_tet && (inputs % kGroupStep || inputs > kMostTetInputs))
        throw std::invalid_argument("tet2 with " + std::to_string(inputs) + " inputs is not possible; multiples of " +
                                    std::to_string(kGroupStep) + " up to " + std::to_string(kMostTetInputs) + " are");
    if (is_tet && gated && outputs % 32) throw std::invalid_argument("tet2 of gate and up outputs takes sixteens of each");
    const bool grouped = is_int && group > 0 && group < inputs;
    if (grouped && group % kGroupStep)
        throw std::invalid_argument("groups of " + std::to_string(group) + " inputs are not possible; multiples of " +
                                    std::to_string(kGroupStep) + " are");
    matrix->kind = kind;
    matrix->outputs = outputs;
    matrix->inputs = inputs;
    matrix->padded_inputs = round_up(inputs, grouped ? group : kind == WeightKind::f32 ? 1 : is_int ? 64 : 32);
    matrix->group = grouped ? group : matrix->padded_inputs;
    matrix->gated = gated;
    matrix->num_panels = panels_of(outputs, gated);
    matrix->weights = Pages(size_t(matrix->num_panels * matrix->panel_bytes()) + kSlack, true);
    if (kind == WeightKind::int4)  // a nibble of 8 is a weight of zero
        std::memset(matrix->weights.data(), 0x88, size_t(matrix->num_panels * matrix->panel_bytes()));
    const size_t num_scales = size_t(matrix->num_panels * matrix->num_groups() * kPanel);
    if (is_int || is_tet) matrix->scales = Pages(num_scales * size_t(matrix->scale_bytes()), true);
    if (kind == WeightKind::int8) matrix->sums = Pages(num_scales * sizeof(int32_t), true);
    if (is_tet) matrix->signs = Pages(size_t(inputs) * sizeof(float), true);
    return matrix;
}

void set_row(PackedMatrix &matrix, int64_t n, const void *values, DType dtype) {
    const int64_t size = matrix.inputs;
    if (matrix.kind == WeightKind::bf16 && dtype == DType::bf16) {
        RowWriter writer(matrix, n);
        const auto *from = static_cast<const uint16_t *>(values);
        for (int64_t k = 0; k + 1 < size; k += 2) writer.put(from + k);
        const uint16_t last[2] = {from[size - 1], 0};
        if (size % 2) writer.put(last);
        return;
    }
    std::vector<float> row(size);
    if (dtype == DType::f32)
        std::memcpy(row.data(), values, size * sizeof(float));
    else
        for (int64_t k = 0; k < size; ++k) row[k] = widen(static_cast<const uint16_t *>(values)[k]);
    const int64_t column = matrix.column_of(n);
    uint8_t *panel = matrix.weights.data() + matrix.panel_of(n) * matrix.panel_bytes();
    if (matrix.kind == WeightKind::f32) {
        for (int64_t k = 0; k < size; ++k) reinterpret_cast<float *>(panel)[k * kPanel + column] = row[k];
        return;
    }
    if (matrix.kind == WeightKind::bf16) {
        auto *out = reinterpret_cast<uint16_t *>(panel);
        for (int64_t k = 0; k < size; ++k) out[((k / 2) * kPanel + column) * 2 + k % 2] = narrow(row[k]);
        return;
    }
    const float most = matrix.kind == WeightKind::int8 ? 127.f : 7.f;
    const float least = matrix.kind == WeightKind::int8 ? -127.f : -8.f;
    std::vector<int8_t> rounded(size);
    std::vector<float> scales(matrix.num_groups());
    for (int64_t g = 0; g < matrix.num_groups(); ++g) {
        const int64_t first = g * matrix.group, last = std::min(size, first + matrix.group);
        float peak = 0;
        for (int64_t k = first; k < last; ++k) peak = std::max(peak, std::fabs(row[k]));
        scales[g] = peak / most;
        if (matrix.has_half_scales()) scales[g] = float_of_half(half_of(scales[g]));
        for (int64_t k = first; k < last; ++k) {
            const float q = scales[g] > 0 ? std::nearbyint(row[k] / scales[g]) : 0.f;
            rounded[k] = int8_t(std::min(most, std::max(least, q)));
        }
    }
    set_quantized_row(matrix, n, rounded.data(), scales.data());
}

void set_quantized_row(PackedMatrix &matrix, int64_t n, const int8_t *values, const float *scales) {
    set_scales(matrix, n, scales);
    RowWriter writer(matrix, n);
    const int64_t size = matrix.inputs, step = matrix.kind == WeightKind::int8 ? 4 : 8;
    for (int64_t k = 0; k < size; k += step) {
        int8_t padded[8] = {};
        const int8_t *from = values + k;
        if (k + step > size) {
            std::memcpy(padded, from, size_t(size - k));
            from = padded;
        }
        uint8_t nibbles[4];
        if (step == 8) pack_nibbles(from, nibbles);
        writer.put(step == 8 ? static_cast<const void *>(nibbles) : from);
    }
    if (matrix.kind != WeightKind::int8) return;
    auto *sums = const_cast<int32_t *>(matrix.panel_sums(matrix.panel_of(n))) + matrix.column_of(n);
    for (int64_t g = 0; g < matrix.num_groups(); ++g) {
        int32_t sum = 0;
        for (int64_t k = g * matrix.group; k < std::min(size, (g + 1) * matrix.group); ++k) sum += values[k];
        sums[g * kPanel] = sum;
    }
}

void set_nibble_row(PackedMatrix &matrix, int64_t n, const uint8_t *pairs, const float *scales) {
    set_scales(matrix, n, scales);
    RowWriter writer(matrix, n);
    const int64_t bytes = (matrix.inputs + 1) / 2;
    for (int64_t i = 0; i < bytes; i += 4) {
        uint8_t from[4] = {0x88, 0x88, 0x88, 0x88}, to[4];
        std::memcpy(from, pairs + i, size_t(std::min<int64_t>(4, bytes - i)));
        if (matrix.inputs % 2 && i + 4 >= bytes) from[bytes - i - 1] = uint8_t((from[bytes - i - 1] & 15) | 0x80);
        for (int j = 0; j < 4; ++j) {
            const int low = from[j / 2] >> (j % 2 * 4) & 15, high = from[2 + j / 2] >> (j % 2 * 4) & 15;
            to[j] = uint8_t(low | high << 4);
        }
        writer.put(to);
    }
}

void set_tet(PackedMatrix &matrix, const uint16_t *strands, const float *scales, const int8_t *signs, int64_t rotation) {
    const int64_t tiles = matrix.inputs / 8;
    for (int64_t n = 0; n < matrix.outputs; ++n) {
        const float scale = scales[n] * kTetScale;
        set_scales(matrix, n, &scale);
    }
    // Sixteen outputs lie side by side wherever they are; the last ones may be padding.
    for (int64_t n = 0; n < matrix.outputs; n += 16) {
        uint8_t *to = matrix.weights.data() + matrix.panel_of(n) * matrix.panel_bytes() +
                      matrix.column_of(n) / 16 * kTetWords * sizeof(uint16_t);
        for (int64_t k = 0; k < tiles; ++k, to += kTetTile) {
            const uint16_t *strand = strands + (n / kPanel * tiles + k) * kPanel;
            std::memcpy(to, strand + (n + kPanel - 1) % kPanel, sizeof(uint16_t));
            std::memcpy(to + sizeof(uint16_t), strand + n % kPanel, (kTetWords - 1) * sizeof(uint16_t));
        }
    }
    auto *factors = reinterpret_cast<float *>(matrix.signs.data());
    for (int64_t k = 0; k < matrix.inputs; ++k) factors[k] = float(signs[k]);
    matrix.rotation = rotation;
}

namespace {

// Doubled numbers of two inputs.
void decode_tet(const uint8_t *panel, int64_t column, int64_t k, float *two) {
    uint32_t words;
    std::memcpy(&words, panel + k / 8 * kTetTile + (column / 16 * kTetWords + column % 16) * sizeof(uint16_t), sizeof words);
    const uint32_t product = (words >> (k % 8 / 2 * 4 + 4) & 0xffff) * kTetMultiplier;
    float b[4];
    for (int j = 0; j < 4; ++j) b[j] = 2.f * float(product >> 8 * j & 255) - 255.f;
    two[0] = b[0] + b[1] - b[3];
    two[1] = b[1] + b[2] + b[3];
}

}  // namespace

void get_row(const PackedMatrix &matrix, int64_t n, float *values) {
    const int64_t p = matrix.panel_of(n), column = matrix.column_of(n);
    const uint8_t *panel = matrix.panel(p);
    const int64_t inputs = matrix.inputs;
    switch (matrix.kind) {
        case WeightKind::f32:
            for (int64_t k = 0; k < inputs; ++k) values[k] = reinterpret_cast<const float *>(panel)[k * kPanel + column];
            return;
        case WeightKind::bf16:
            for (int64_t k = 0; k < inputs; ++k)
                values[k] = widen(reinterpret_cast<const uint16_t *>(panel)[((k / 2) * kPanel + column) * 2 + k % 2]);
            return;
        case WeightKind::coded_bf16: return get_coded_row(matrix, n, values);
        case WeightKind::int8:
            for (int64_t k = 0; k < inputs; k += 4) {
                const uint8_t *four = panel + (k * kPanel / 4 + column) * 4;
                for (int64_t j = 0; j < std::min<int64_t>(4, inputs - k); ++j) values[k + j] = int8_t(four[j]);
            }
            break;
        case WeightKind::tet2:
            for (int64_t k = 0; k < inputs; k += 2) decode_tet(panel, column, k, values + k);
            break;
        case WeightKind::int4:
            for (int64_t k = 0; k < inputs; k += 4) {  // four in the low halves of bytes, then four in the high ones
                const uint8_t *four = panel + (k / 8 * kPanel + column) * 4;
                const int shift = k % 8;
                for (int64_t j = 0; j < std::min<int64_t>(4, inputs - k); ++j)
                    values[k + j] = float(four[j] >> shift & 15) - 8;
            }
    }
    for (int64_t begin = 0, g = 0; begin < inputs; begin += matrix.group, ++g) {
        float scale;
        const uint8_t *from = matrix.scales_of(p, g) + column * matrix.scale_bytes();
        if (matrix.has_half_scales()) {
            uint16_t half;
            std::memcpy(&half, from, sizeof half);
            scale = float_of_half(half);
        } else {
            std::memcpy(&scale, from, sizeof scale);
        }
        for (int64_t k = begin; k < std::min(inputs, begin + matrix.group); ++k) values[k] *= scale;
    }
}

}  // namespace fdcpu
