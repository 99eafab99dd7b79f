#include "coded.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <vector>

namespace fdcpu {

namespace {

constexpr uint8_t kNoCode = 255;

int exponent_of(uint16_t value) { return value >> 7 & 255; }

// Where a panel has an output's codes of inputs 0 and 1, in their low or high nibbles. Eight bytes on are those of
// inputs 2 and 3, and a block on is what comes next.
int64_t codes_of(const PackedMatrix &matrix, int64_t column) {
    const int64_t output = column % 16;
    return kCodedHeader + column / kHalf * matrix.half_bytes() + output / 4 * 16 + output % 4 * 2;
}

// And the rest of these weights: of sixteen outputs one line after the codes, of the others two.
int64_t byte_of(const PackedMatrix &matrix, int64_t column) {
    return codes_of(matrix, column) + (1 + column % kHalf / 16) * 64;
}

// Row n of the matrix that stands in a panel's column; none: -1.
int64_t row_of(const PackedMatrix &shape, int64_t p, int64_t column) {
    if (!shape.gated) return p * kPanel + column < shape.outputs ? p * kPanel + column : -1;
    const int64_t quarter = kHalf / 2, pair = p * kHalf + column / kHalf * quarter + column % quarter;
    return pair < shape.half() ? pair + column % kHalf / quarter * shape.half() : -1;
}

// A panel's codes, and how many of its weights have none.
struct PanelCodes {
    std::array<uint8_t, 16> exponents{};  // code 0 is exponent 0: nothing, and what is nearly nothing
    std::array<uint8_t, 256> codes;
    int64_t num_patches = 0;
};

// The fifteen exponents that most weights have.
PanelCodes choose_codes(const PackedMatrix &shape, int64_t p, const uint16_t *values, int64_t stride) {
    std::array<int64_t, 256> counts{}, odd{};
    for (int64_t column = 0; column < kPanel; ++column) {
        const int64_t n = row_of(shape, p, column);
        if (n < 0) continue;
        const uint16_t *row = values + n * stride;
        int64_t k = 0;
        for (; k + 1 < shape.inputs; k += 2) ++counts[exponent_of(row[k])], ++odd[exponent_of(row[k + 1])];
        if (k < shape.inputs) ++counts[exponent_of(row[k])];
    }
    std::array<uint8_t, 255> order;
    std::iota(order.begin(), order.end(), uint8_t(1));
    for (int e = 0; e < 256; ++e) counts[e] += odd[e];
    std::stable_sort(order.begin(), order.end(), [&](uint8_t a, uint8_t b) { return counts[a] > counts[b]; });
    PanelCodes found;
    found.codes.fill(kNoCode);
    found.codes[0] = 0;
    for (int code = 1; code < 16; ++code) {
        found.exponents[code] = order[code - 1];
        found.codes[order[code - 1]] = uint8_t(code);
    }
    for (int i = 15; i < 255; ++i) found.num_patches += counts[order[i]];
    return found;
}

void write_panel(PackedMatrix &matrix, int64_t p, const PanelCodes &panel_codes, const uint16_t *values, int64_t stride) {
    uint8_t *panel = matrix.weights.data() + p * matrix.panel_bytes();
    for (int i = 0; i < kCodedHeader; i += 16) std::memcpy(panel + i, panel_codes.exponents.data(), 16);
    Patch *patches = const_cast<Patch *>(matrix.patches_of(p)), *next = patches;
    for (int64_t column = 0; column < kPanel; ++column) {
        const int64_t n = row_of(matrix, p, column);
        if (n < 0) continue;
        const uint16_t *row = values + n * stride;
        const int shift = column % kHalf / 16 * 4;
        uint8_t *to = panel + byte_of(matrix, column), *codes = panel + codes_of(matrix, column);
        for (int64_t k = 0; k < matrix.inputs; k += 4, to += kCodedBlock, codes += kCodedBlock) {
            uint16_t four[4] = {};
            std::memcpy(four, row + k, size_t(std::min<int64_t>(4, matrix.inputs - k)) * sizeof(uint16_t));
            for (int j = 0; j < 4; ++j) {
                uint8_t code = panel_codes.codes[exponent_of(four[j])];
                if (code == kNoCode) {
                    *next++ = {int32_t(k + j), uint16_t(column), four[j]};
                    four[j] = code = 0;
                }
                const int at = j / 2 * 8 + j % 2;
                to[at] = uint8_t(to[at] | (four[j] & 127) << 1);
                to[at ^ 1] = uint8_t(to[at ^ 1] | four[j] >> 15);
                codes[at] = uint8_t(codes[at] | code << shift);
            }
        }
    }
    std::sort(patches, next, [](const Patch &a, const Patch &b) {
        return a.input != b.input ? a.input < b.input : a.column < b.column;
    });
}

}  // namespace

std::unique_ptr<PackedMatrix> make_coded(int64_t outputs, int64_t inputs, bool gated, int64_t num_patches) {
    auto matrix = make_packed(WeightKind::coded_bf16, outputs, inputs, 0, gated);
    matrix->num_patches = num_patches;
    const size_t starts = size_t(matrix->num_panels + 1) * sizeof(int64_t);
    matrix->patches = Pages(starts + size_t(num_patches) * sizeof(Patch), true);
    return matrix;
}

std::unique_ptr<PackedMatrix> code_bf16(const uint16_t *values, int64_t outputs, int64_t inputs, int64_t stride,
                                        bool gated, const Divide &divide) {
    PackedMatrix shape{};
    shape.outputs = outputs, shape.inputs = inputs, shape.gated = gated;
    std::vector<PanelCodes> codes(size_t(panels_of(outputs, gated)));
    divide(int64_t(codes.size()), [&](int64_t p) { codes[size_t(p)] = choose_codes(shape, p, values, stride); });
    int64_t num_patches = 0;
    for (const PanelCodes &panel : codes) num_patches += panel.num_patches;
    if (num_patches > outputs * inputs / kPatchShare) return nullptr;
    auto matrix = make_coded(outputs, inputs, gated, num_patches);
    auto *starts = reinterpret_cast<int64_t *>(matrix->patches.data());
    for (size_t p = 0; p < codes.size(); ++p) starts[p + 1] = starts[p] + codes[p].num_patches;
    divide(matrix->num_panels, [&](int64_t p) { write_panel(*matrix, p, codes[size_t(p)], values, stride); });
    return matrix;
}

bool has_sound_patches(const PackedMatrix &matrix) {
    if (matrix.kind != WeightKind::coded_bf16) return true;
    const auto *starts = reinterpret_cast<const int64_t *>(matrix.patches.data());
    if (starts[0] != 0 || starts[matrix.num_panels] != matrix.num_patches) return false;
    if (!std::is_sorted(starts, starts + matrix.num_panels + 1)) return false;
    return std::all_of(matrix.patches_of(0), matrix.patches_of(matrix.num_panels), [&](const Patch &patch) {
        return patch.input >= 0 && patch.input < matrix.inputs && patch.column < kPanel;
    });
}

void get_coded_row(const PackedMatrix &matrix, int64_t n, float *values) {
    const int64_t p = matrix.panel_of(n), column = matrix.column_of(n);
    const uint8_t *panel = matrix.panel(p);
    const uint8_t *from = panel + byte_of(matrix, column), *codes = panel + codes_of(matrix, column);
    const int shift = column % kHalf / 16 * 4;
    for (int64_t k = 0; k < matrix.inputs; k += 4, from += kCodedBlock, codes += kCodedBlock) {
        uint32_t four[4];
        for (int j = 0; j < 4; ++j) {
            const int at = j / 2 * 8 + j % 2, exponent = panel[codes[at] >> shift & 15];
            four[j] = uint32_t(from[at ^ 1] & 1) << 31 | uint32_t(exponent) << 23 | uint32_t(from[at] >> 1) << 16;
        }
        std::memcpy(values + k, four, size_t(std::min<int64_t>(4, matrix.inputs - k)) * sizeof(float));
    }
    for (const Patch *patch = matrix.patches_of(p); patch != matrix.patches_of(p + 1); ++patch) {
        const uint32_t bits = uint32_t(patch->bits) << 16;
        if (patch->column == column) std::memcpy(values + patch->input, &bits, sizeof bits);
    }
}

}  // namespace fdcpu
