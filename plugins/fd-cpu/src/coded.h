// Bfloat16 weights in twelve bits, without loss: exponents as codes of four bits. packed.h has the layout.
#pragma once
#include <functional>
#include <memory>

#include "packed.h"

namespace fdcpu {

// Calls work(i) for every i below count, in any order and in parallel.
using Divide = std::function<void(int64_t count, const std::function<void(int64_t)> &work)>;

// Room for such a matrix and its patches.
std::unique_ptr<PackedMatrix> make_coded(int64_t outputs, int64_t inputs, bool gated, int64_t num_patches);
// The matrix of `outputs` rows of bfloat16, `stride` numbers apart; null where its exponents spread so widely
// that more than one weight in kPatchShare would be a patch.
constexpr int64_t kPatchShare = 256;
std::unique_ptr<PackedMatrix> code_bf16(const uint16_t *values, int64_t outputs, int64_t inputs, int64_t stride,
                                        bool gated, const Divide &divide);
// Whether the patches, which may come from a file, are all of this matrix. Other kinds have none.
bool has_sound_patches(const PackedMatrix &matrix);
// Row n, `inputs` numbers.
void get_coded_row(const PackedMatrix &matrix, int64_t n, float *values);

}  // namespace fdcpu
