// Products with packed matrices: every thread computes its panels, a few rows by 64 outputs at a time, in
// registers or, where there are some, in tiles.

namespace fdcpu::FDCPU_NAMESPACE {

constexpr int kVectors = kPanel / kLanes;   // registers across a panel
constexpr int64_t kRowBlock = 128;          // rows whose activations stay in the second-level cache
constexpr int kMostRows = FDCPU_LEVEL >= 2 ? 6 : 2;  // rows of a register tile

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

// Rows of one call of rows_of_panel().
FDCPU_INLINE int64_t rows_at_once(const PackedMatrix &w, int64_t num_rows) {
#if FDCPU_TILES
    if (is_tiled(w, num_rows)) return kTiledRows;
#endif
    return kMostRows;
}

template <int R = kMostRows>
void tile_of(int rows, const PackedMatrix &w, int64_t p, const Activations &a, int64_t m, float *out) {
    if constexpr (R > 1) {
        if (rows < R) return tile_of<R - 1>(rows, w, p, a, m, out);
    }
    tile<R>(w, p, a, m, out);
}

constexpr int64_t kMostAtOnce = 32;

// out[rows][64], rows being at most rows_at_once().
FDCPU_INLINE void rows_of_panel(bool in_tiles, int rows, const PackedMatrix &w, int64_t p, const Activations &a, int64_t m,
                                float *out) {
#if FDCPU_TILES
    if (in_tiles) return tiled(rows, w, p, a, m, out);
#endif
    tile_of(rows, w, p, a, m, out);
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
    alignas(64) float sums[kMostAtOnce * kPanel];
    const int64_t step = rows_at_once(w, op.num_rows);
    const bool in_tiles = step > kMostRows;
#if FDCPU_TILES
    if (in_tiles) tiles_begin(tile_inputs(w));
#endif
    for (int64_t block = 0; block < op.num_rows; block += kRowBlock) {
        const int64_t end = std::min(op.num_rows, block + kRowBlock);
        for (int64_t p = first; p < last; ++p)
            for (int64_t m = block; m < end; m += step) {
                const int rows = int(std::min(step, end - m));
                rows_of_panel(in_tiles, rows, w, p, a, m, sums);
                for (int r = 0; r < rows; ++r) finish_row<Y>(op, p, m + r, sums + r * kPanel);
            }
    }
#if FDCPU_TILES
    if (in_tiles) tiles_end();
#endif
}

void linear(const LinearOp &op, const Worker &worker) {
    const bool x32 = op.x_type == DType::f32, y32 = op.y_type == DType::f32;
    if (x32)
        y32 ? product<float, float>(op, worker) : product<float, uint16_t>(op, worker);
    else
        y32 ? product<uint16_t, float>(op, worker) : product<uint16_t, uint16_t>(op, worker);
}

}  // namespace fdcpu::FDCPU_NAMESPACE
