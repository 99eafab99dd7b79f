// Activations as the products want them: brought into the form of the weights' format, row by row.

namespace fdcpu::FDCPU_NAMESPACE {

// Activations of one product in the scratch: values in the format's form, then scales and sums.
struct Activations {
    uint8_t *values;
    float *scales;   // [rows][groups]
    int32_t *sums;   // [rows][groups], int4 only
    int64_t row_bytes, groups;

    Activations(const PackedMatrix &w, int64_t num_rows, uint8_t *scratch) {
        const bool is_int = w.kind == WeightKind::int8 || w.kind == WeightKind::int4;
        row_bytes = (w.padded_inputs * (is_int ? 1 : w.kind == WeightKind::bf16 ? 2 : 4) + 63) / 64 * 64;
        groups = w.num_groups();
        values = scratch;
        scales = reinterpret_cast<float *>(values + num_rows * row_bytes);
        sums = reinterpret_cast<int32_t *>(scales + num_rows * groups);
    }
    // Tiles read whole sixteens of rows.
    size_t num_bytes(int64_t num_rows) const { return size_t((num_rows + 16) * (row_bytes + groups * 8)); }
    const uint8_t *row(int64_t m) const { return values + m * row_bytes; }
};

size_t linear_scratch(const LinearOp &op, int num_threads) {
    const Activations form(*op.weight, op.num_rows, nullptr);
    const size_t rows = size_t(op.weight->padded_inputs + kLanes) * sizeof(float) * size_t(num_threads);
    return form.num_bytes(op.num_rows) + rows + 128;
}

// Per group: int8 by absmax / 127. int8 weights are multiplied with x + 128, which is unsigned.
FDCPU_INLINE void quantize_row(const PackedMatrix &w, const float *row, const Activations &out, int64_t m) {
    uint8_t *bytes = out.values + m * out.row_bytes;
    const int offset = w.kind == WeightKind::int8 ? 128 : 0;
    for (int64_t g = 0; g < out.groups; ++g) {
        const float *x = row + g * w.group;
        F peaks = splat(0);
        for (int64_t k = 0; k < w.group; k += kLanes) peaks = maximum(peaks, absolute(load(x + k)));
        const float peak = max_of(peaks);
        const float scale = peak / 127.f, inverse = peak > 0 ? 127.f / peak : 0.f;
        I total = splat_int(0);
        for (int64_t k = 0; k < w.group; k += kLanes) {
            const I q = round_to_int(load(x + k) * inverse);
            total += q;
            using Narrow = uint8_t __attribute__((vector_size(16)));
            store_as(bytes + g * w.group + k, __builtin_convertvector(U(q + offset), Narrow));
        }
        uint32_t lanes[kLanes], sum = 0;
        store_as(lanes, total);
        for (uint32_t lane : lanes) sum += lane;
        // A value that is no number must reach the result, not vanish in an integer.
        const bool is_finite = std::isfinite(sum_of_squares(x, w.group));
        out.scales[m * out.groups + g] = is_finite ? scale : std::nanf("");
        out.sums[m * out.groups + g] = is_finite ? int32_t(sum) : 0;
    }
}

// Row `from` of x in the format's form becomes row m.
template <class T>
FDCPU_INLINE void prepare_row(const LinearOp &op, const Activations &out, int64_t m, int64_t from, float *row) {
    const PackedMatrix &w = *op.weight;
    widen_row(static_cast<const T *>(op.x) + from * op.x_stride, row, w.inputs);
    for (int64_t k = w.inputs; k < w.padded_inputs; ++k) row[k] = 0;
    if (op.norm_weight) normalize(row, static_cast<const T *>(op.norm_weight), op.eps, w.inputs);
    if (op.norm_weight && sizeof(T) == 2)  // the norm's result has the model's dtype
        for (int64_t k = 0; k < w.inputs; ++k) {
            uint16_t rounded;
            store_one(&rounded, row[k]);
            row[k] = load_one(&rounded);
        }
    uint8_t *values = out.values + m * out.row_bytes;
    switch (w.kind) {
        case WeightKind::f32: std::memcpy(values, row, size_t(w.padded_inputs) * sizeof(float)); break;
        case WeightKind::bf16: narrow_row(row, reinterpret_cast<uint16_t *>(values), w.padded_inputs); break;
        default: quantize_row(w, row, out, m);
    }
}

}  // namespace fdcpu::FDCPU_NAMESPACE
