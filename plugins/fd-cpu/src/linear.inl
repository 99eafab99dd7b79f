// Products with packed matrices: activations are brought into the form that the format wants, row by row;
// then every thread computes its panels, a few rows by 64 outputs at a time, in registers.

namespace fdcpu::FDCPU_NAMESPACE {

constexpr int kVectors = kPanel / kLanes;   // registers across a panel
constexpr int64_t kRowBlock = 128;          // rows whose activations stay in the second-level cache
constexpr int kMostRows = FDCPU_LEVEL >= 2 ? 6 : 2;  // rows of a register tile

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
    size_t num_bytes(int64_t num_rows) const { return size_t(num_rows * (row_bytes + groups * 8)); }
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
        int32_t lanes[kLanes], sum = 0;
        store_as(lanes, total);
        for (int32_t lane : lanes) sum += lane;
        // A value that is no number must reach the result, not vanish in an integer.
        const bool is_finite = std::isfinite(sum_of_squares(x, w.group));
        out.scales[m * out.groups + g] = is_finite ? scale : std::nanf("");
        out.sums[m * out.groups + g] = sum;
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

// ---- register tiles: R rows by one panel into out[R][64]

template <int R>
void tile_f32(const PackedMatrix &w, int64_t p, const Activations &a, int64_t m, float *out) {
    const float *line = reinterpret_cast<const float *>(w.panel(p));
    F acc[R][kVectors] = {};
    for (int64_t k = 0; k < w.padded_inputs; ++k, line += kPanel) {
        F weights[kVectors];
        for (int s = 0; s < kVectors; ++s) weights[s] = load(line + s * kLanes);
        for (int r = 0; r < R; ++r) {
            const F x = splat(reinterpret_cast<const float *>(a.row(m + r))[k]);
            for (int s = 0; s < kVectors; ++s) acc[r][s] = weights[s] * x + acc[r][s];
        }
    }
    for (int r = 0; r < R; ++r)
        for (int s = 0; s < kVectors; ++s) store(out + r * kPanel + s * kLanes, acc[r][s]);
}

template <int R>
void tile_bf16(const PackedMatrix &w, int64_t p, const Activations &a, int64_t m, float *out) {
    const uint8_t *line = w.panel(p);
    F acc[R][kVectors] = {};
    for (int64_t k = 0; k < w.padded_inputs / 2; ++k, line += 4 * kPanel) {
        I weights[kVectors];
        for (int s = 0; s < kVectors; ++s) weights[s] = load_as<I>(line + s * 64);
        __builtin_prefetch(line + 4096, 0, 2);
        __builtin_prefetch(line + 4096 + 64, 0, 2);
        __builtin_prefetch(line + 4096 + 128, 0, 2);
        __builtin_prefetch(line + 4096 + 192, 0, 2);
        for (int r = 0; r < R; ++r) {
            const I x = I(splat_bytes(a.row(m + r) + 4 * k));
            for (int s = 0; s < kVectors; ++s) acc[r][s] = dot_pairs(acc[r][s], weights[s], x);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int s = 0; s < kVectors; ++s) store(out + r * kPanel + s * kLanes, acc[r][s]);
}

// Shared by int8 and int4: what a group's integer sums add to the result.
template <int R>
FDCPU_INLINE void add_group(const PackedMatrix &w, int64_t p, const Activations &a, int64_t m, int64_t g,
                            const I (&sums)[R][kVectors], float *out) {
    const float *scales = w.panel_scales(p) + g * kPanel;
    for (int r = 0; r < R; ++r) {
        const float x_scale = a.scales[(m + r) * a.groups + g];
        for (int s = 0; s < kVectors; ++s) {
            float *to = out + r * kPanel + s * kLanes;
            const F value = __builtin_convertvector(sums[r][s], F) * (load(scales + s * kLanes) * x_scale);
            store(to, g ? load(to) + value : value);
        }
    }
}

template <int R>
void tile_int8(const PackedMatrix &w, int64_t p, const Activations &a, int64_t m, float *out) {
    const uint8_t *line = w.panel(p);
    for (int64_t g = 0; g < a.groups; ++g) {
        I acc[R][kVectors];
        const int32_t *sums = w.panel_sums(p) + g * kPanel;
        for (int s = 0; s < kVectors; ++s)
            for (int r = 0; r < R; ++r) acc[r][s] = load_as<I>(sums + s * kLanes) * -128;
        const int64_t first = g * w.group;
        for (int64_t k = 0; k < w.group; k += 4, line += 4 * kPanel) {
            B weights[kVectors];
            for (int s = 0; s < kVectors; ++s) {
                weights[s] = load_as<B>(line + s * 64);
                __builtin_prefetch(line + 4096 + s * 64, 0, 2);
            }
            for (int r = 0; r < R; ++r) {
                const B x = splat_bytes(a.row(m + r) + first + k);
                for (int s = 0; s < kVectors; ++s) acc[r][s] = dot_bytes(acc[r][s], x, weights[s]);
            }
        }
        add_group<R>(w, p, a, m, g, acc, out);
    }
}

template <int R>
void tile_int4(const PackedMatrix &w, int64_t p, const Activations &a, int64_t m, float *out) {
    const uint8_t *line = w.panel(p);
    for (int64_t g = 0; g < a.groups; ++g) {
        I acc[R][kVectors];
        for (int r = 0; r < R; ++r)
            for (int s = 0; s < kVectors; ++s) acc[r][s] = splat_int(-8 * a.sums[(m + r) * a.groups + g]);
        const int64_t first = g * w.group;
        for (int64_t k = 0; k < w.group; k += 8, line += 4 * kPanel) {
            B low[kVectors], high[kVectors];
            for (int s = 0; s < kVectors; ++s) {
                const B packed = load_as<B>(line + s * 64);
                __builtin_prefetch(line + 4096 + s * 64, 0, 2);
                low[s] = packed & 15;
                high[s] = B(U(packed) >> 4) & 15;
            }
            for (int r = 0; r < R; ++r) {
                const B x0 = splat_bytes(a.row(m + r) + first + k);
                for (int s = 0; s < kVectors; ++s) acc[r][s] = dot_bytes(acc[r][s], low[s], x0);
                const B x1 = splat_bytes(a.row(m + r) + first + k + 4);
                for (int s = 0; s < kVectors; ++s) acc[r][s] = dot_bytes(acc[r][s], high[s], x1);
            }
        }
        add_group<R>(w, p, a, m, g, acc, out);
    }
}

template <int R>
void tile(const PackedMatrix &w, int64_t p, const Activations &a, int64_t m, float *out) {
    switch (w.kind) {
        case WeightKind::f32: return tile_f32<R>(w, p, a, m, out);
        case WeightKind::bf16: return tile_bf16<R>(w, p, a, m, out);
        case WeightKind::int8: return tile_int8<R>(w, p, a, m, out);
        case WeightKind::int4: return tile_int4<R>(w, p, a, m, out);
    }
}

template <int R = kMostRows>
void tile_of(int rows, const PackedMatrix &w, int64_t p, const Activations &a, int64_t m, float *out) {
    if constexpr (R > 1) {
        if (rows < R) return tile_of<R - 1>(rows, w, p, a, m, out);
    }
    tile<R>(w, p, a, m, out);
}

// ---- epilogue: one row of a panel from its 64 sums

template <class T>
FDCPU_INLINE void finish_row(const LinearOp &op, int64_t p, int64_t m, const float *sums) {
    const PackedMatrix &w = *op.weight;
    const int64_t width = w.gated ? kHalf : kPanel, outputs = w.gated ? w.half() : w.outputs;
    const int64_t first = p * width, count = std::min(width, outputs - first);
    alignas(64) float row[kPanel];
    const T *bias = static_cast<const T *>(op.bias);
    if (w.gated) {
        alignas(64) float both[kPanel];
        std::memcpy(both, sums, sizeof both);
        if (bias)
            for (int64_t i = 0; i < count; ++i) {
                both[i] += load_one(bias + first + i);
                both[kHalf + i] += load_one(bias + w.half() + first + i);
            }
        for (int64_t i = 0; i < kHalf; i += kLanes) store(row + i, silu(load(both + i)) * load(both + kHalf + i));
    } else {
        std::memcpy(row, sums, sizeof row);
        if (bias)
            for (int64_t i = 0; i < count; ++i) row[i] += load_one(bias + first + i);
    }
    const int64_t offset = m * op.y_stride + first;
    if (op.residual) {
        const T *residual = static_cast<const T *>(op.residual) + offset;
        for (int64_t i = 0; i < count; ++i) row[i] += load_one(residual + i);
    }
    narrow_row(row, static_cast<T *>(op.y) + offset, count);
}

template <class X, class Y>
void product(const LinearOp &op, const Worker &worker) {
    const PackedMatrix &w = *op.weight;
    auto *aligned = reinterpret_cast<uint8_t *>((reinterpret_cast<uintptr_t>(worker.scratch) + 63) & ~uintptr_t(63));
    const Activations a(w, op.num_rows, aligned);
    float *row = reinterpret_cast<float *>(aligned + (a.num_bytes(op.num_rows) + 63) / 64 * 64) +
                 worker.thread * w.padded_inputs;
    int64_t first, last;
    worker.share(op.num_rows, first, last);
    for (int64_t m = first; m < last; ++m) prepare_row<X>(op, a, m, m, row);
    worker.barrier();
    worker.share(w.num_panels, first, last);
    alignas(64) float sums[kMostRows * kPanel];
    for (int64_t block = 0; block < op.num_rows; block += kRowBlock) {
        const int64_t end = std::min(op.num_rows, block + kRowBlock);
        for (int64_t p = first; p < last; ++p)
            for (int64_t m = block; m < end; m += kMostRows) {
                const int rows = int(std::min<int64_t>(kMostRows, end - m));
                tile_of(rows, w, p, a, m, sums);
                for (int r = 0; r < rows; ++r) finish_row<Y>(op, p, m + r, sums + r * kPanel);
            }
    }
}

void linear(const LinearOp &op, const Worker &worker) {
    const bool x32 = op.x_type == DType::f32, y32 = op.y_type == DType::f32;
    if (x32)
        y32 ? product<float, float>(op, worker) : product<float, uint16_t>(op, worker);
    else
        y32 ? product<uint16_t, float>(op, worker) : product<uint16_t, uint16_t>(op, worker);
}

}  // namespace fdcpu::FDCPU_NAMESPACE
