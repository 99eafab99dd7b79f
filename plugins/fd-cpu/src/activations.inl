// Activations as the products want them: brought into the form of the weights' format, row by row.

namespace fdcpu::FDCPU_NAMESPACE {

// Groups smaller than this cost tiles of integers more than they gain: with more rows than a tile has their
// weights become bfloat16 on the way to the tiles.
constexpr int64_t kLeastTiledGroup = 128;

FDCPU_INLINE constexpr bool is_integer(WeightKind kind) {
    return kind == WeightKind::int8 || kind == WeightKind::int4 || kind == WeightKind::tet2;
}

FDCPU_INLINE constexpr bool is_bf16(WeightKind kind) {
    return kind == WeightKind::bf16 || kind == WeightKind::coded_bf16;
}

// Scales of sixteen outputs of a group, the s-th of a panel's four.
FDCPU_INLINE F load_scales(bool are_halves, const uint8_t *scales, int64_t s) {
    return are_halves ? load_halves(reinterpret_cast<const uint16_t *>(scales) + s * kLanes)
                      : load(reinterpret_cast<const float *>(scales) + s * kLanes);
}

// What bfloat16 meets: itself in pairs, or where no instruction multiplies pairs, float32 with the same values.
using Input = std::conditional_t<(FDCPU_LEVEL < 3), float, uint16_t>;

// Of one input, as weights of this kind meet it.
FDCPU_INLINE constexpr int bytes_of_input(WeightKind kind, bool is_wide) {
    return kind == WeightKind::f32 ? 4 : is_bf16(kind) ? int(sizeof(Input)) : kind == WeightKind::tet2 || is_wide ? 2 : 1;
}

// Activations of one product in the scratch: values in the format's form, then scales and sums.
struct Activations {
    uint8_t *values;
    float *scales;   // [rows][groups]
    int32_t *sums;   // [rows][groups], of what integers with an offset meet
    int64_t row_bytes, groups;
    bool is_int, is_wide;  // wide: bfloat16 for weights of integers
    int offset;            // that int8 has been given, to be unsigned
    // Byte k of row m: rows as they are, or sixteen rows' 64 bytes side by side as tiles read them.
    int64_t row_step, block_step, line_step;

    Activations(const PackedMatrix &w, int64_t num_rows, uint8_t *scratch, bool in_tiles = false, bool wide = false)
        : is_int(!wide && is_integer(w.kind)), is_wide(wide),
          offset(w.kind == WeightKind::int8 ? kByteOffset : 0) {
        row_bytes = (w.padded_inputs * bytes_of_input(w.kind, wide) + 63) / 64 * 64;
        // What register tiles have of their rows at a time must not come to lie in the same places of a cache.
        if (!in_tiles) row_bytes |= 64;
        groups = w.num_groups();
        values = scratch;
        scales = reinterpret_cast<float *>(values + (num_rows + 15) / 16 * 16 * row_bytes);
        sums = reinterpret_cast<int32_t *>(scales + num_rows * groups);
        row_step = in_tiles ? 64 : row_bytes;
        block_step = 16 * row_bytes;
        line_step = in_tiles ? 1024 : 64;
    }
    // Tiles read whole sixteens of rows, from any row.
    size_t num_bytes(int64_t num_rows) const { return size_t((num_rows + 16) * (row_bytes + groups * 8)); }
    uint8_t *row(int64_t m) const { return values + m / 16 * block_step + m % 16 * row_step; }
    int64_t at(int64_t byte) const { return byte / 64 * line_step + byte % 64; }
};

// Per group: int8 by absmax / 127. The instructions that multiply bytes want one side unsigned, here or there.
// What loops read is copied first: a store of bytes might change anything, for all that the compiler knows.
template <class T>
FDCPU_INLINE void quantize_row(const PackedMatrix &w, const T *row, const Activations &form, int64_t m) {
    const Activations out = form;
    const int64_t group = w.group, groups = out.groups;
    uint8_t *bytes = out.row(m);
    for (int64_t g = 0; g < groups; ++g) {
        const T *x = row + g * group;
        // Magnitudes are in the order of their bits, and what is no number above all of them.
        I peaks = splat_int(0);
        for (int64_t k = 0; k < group; k += kLanes) peaks = maximum(I(absolute(load(x + k))), peaks);
        const float peak = float_of(max_of_ints(peaks));
        const bool is_finite = std::isfinite(peak);
        const float inverse = is_finite && peak > 0 ? 127.f / peak : 0.f;
        I total = splat_int(0);
        for (int64_t k = 0; k < group; k += kLanes) {
            const I q = round_to_int(load(x + k) * inverse);
            total += q;
            store_bytes(bytes + out.at(g * group + k), q + out.offset);
        }
        // A value that is no number must reach the result, not vanish in an integer.
        out.scales[m * groups + g] = is_finite ? peak / 127.f : std::nanf("");
        out.sums[m * groups + g] = is_finite ? sum_of_ints(total) : 0;
    }
}

// Two inputs become (x0, x0 + x1, x1, x1 - x0), each rounded by itself: what the bytes of tet2 meet.
FDCPU_INLINE void quantize_pairs(const PackedMatrix &w, const float *row, const Activations &form, int64_t m) {
    const Activations out = form;
    uint8_t *bytes = out.row(m);
    F peaks = splat(0), squares = splat(0);
    const auto pairs = [row](int64_t k, F &first, F &second) {
        part_pairs(load(row + k), load(row + k + kLanes), first, second);
    };
    F x, y;
    for (int64_t k = 0; k < w.inputs; k += 2 * kLanes) {
        pairs(k, x, y);
        peaks = maximum(peaks, absolute(x) + absolute(y));
        squares = x * x + y * y + squares;
    }
    const float peak = max_of(peaks), inverse = peak > 0 ? 127.f / peak : 0.f;
    U total = {};  // of what is no number it runs over
    for (int64_t k = 0; k < w.inputs; k += 2 * kLanes) {
        pairs(k, x, y);
        const I q[4] = {round_to_int(x * inverse), round_to_int((x + y) * inverse), round_to_int(y * inverse),
                        round_to_int((y - x) * inverse)};
        U packed = {};
        for (int j = 0; j < 4; ++j) {
            total += U(q[j]);
            packed |= (U(q[j]) & 255) << (8 * j);
        }
        store_as(bytes + out.at(2 * k), packed);
    }
    const bool is_finite = std::isfinite(sum_of(squares));
    out.scales[m] = is_finite ? peak / 127.f : std::nanf("");
    out.sums[m] = is_finite ? sum_of_ints(I(total)) : 0;
}

// Bfloat16 is what the format wants; `size` is a multiple of 32.
template <class T>
FDCPU_INLINE void copy_row(const T *x, const Activations &form, int64_t m, int64_t size) {
    const Activations out = form;
    uint8_t *bytes = out.row(m);
    if constexpr (sizeof(Input) == 4) return widen_row(x, reinterpret_cast<float *>(bytes), size);
    for (int64_t k = 0; k < size; k += 32) std::memcpy(bytes + out.at(2 * k), x + k, 64);
}

// Row `from` of x in the format's form becomes row m.
template <class T>
FDCPU_INLINE void prepare_row(const LinearOp &op, const Activations &form, int64_t m, int64_t from, float *row) {
    const PackedMatrix &w = *op.weight;
    const int64_t inputs = w.inputs, padded = w.padded_inputs;
    const T *x = static_cast<const T *>(op.x) + from * op.x_stride;
    const bool is_as_it_is = !op.norm_weight && inputs == padded && w.kind != WeightKind::tet2;
    if (is_as_it_is && form.is_int) return quantize_row(w, x, form, m);
    if (is_as_it_is && sizeof(T) == 2 && (form.is_wide || is_bf16(w.kind))) return copy_row(x, form, m, padded);
    widen_row(x, row, inputs);
    const int64_t whole = (padded + kLanes - 1) / kLanes * kLanes;
    for (int64_t k = inputs; k < whole; ++k) row[k] = 0;
    if (op.norm_weight) normalize(row, static_cast<const T *>(op.norm_weight), op.eps, inputs, row);
    if (op.norm_weight && sizeof(T) == 2)  // the norm's result has the model's dtype
        for (int64_t k = 0; k < inputs; k += kLanes) store(row + k, round_to_bf16(load(row + k)));
    if (w.kind == WeightKind::tet2) {
        rotate_row(w, row);
        return quantize_pairs(w, row, form, m);
    }
    if (form.is_int) return quantize_row(w, row, form, m);
    const Activations out = form;
    uint8_t *bytes = out.row(m);
    if (w.kind == WeightKind::f32) {
        std::memcpy(bytes, row, size_t(padded) * sizeof(float));
        return;
    }
    for (int64_t k = 0; k < padded; k += kLanes)
        if constexpr (sizeof(Input) == 4)
            store(reinterpret_cast<float *>(bytes) + k, round_to_bf16(load(row + k)));
        else
            store(reinterpret_cast<uint16_t *>(bytes + out.at(2 * k)), load(row + k));
}

}  // namespace fdcpu::FDCPU_NAMESPACE
