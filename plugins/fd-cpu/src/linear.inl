// Products with packed matrices: every thread computes its panels, a few rows by 64 outputs at a time, in
// registers or, where there are some, in tiles.

namespace fdcpu::FDCPU_NAMESPACE {

constexpr int kVectors = kPanel / kLanes;   // registers across a panel
constexpr int kMostRows = FDCPU_LEVEL >= 2 ? 6 : 2;  // rows of a register tile, and
constexpr int kMostHalved = 2 * kMostRows;           // of one that takes half a panel at a time
constexpr int64_t kTileRowsApart = 32;               // threads that divide rows for tiles keep two tiles together
constexpr size_t kOwnBytes = 512 << 10;              // of weights that every thread may read for itself

#if !FDCPU_TILES
struct TileUse {};
FDCPU_INLINE bool is_tiled(const PackedMatrix &, int64_t) { return false; }
FDCPU_INLINE bool is_widened(const PackedMatrix &, int64_t) { return false; }
// Room for a panel of bfloat16 without codes.
FDCPU_INLINE size_t unpacked_bytes(const PackedMatrix &w) {
    return is_bf16(w.kind) ? size_t(w.padded_inputs * kPanel) * sizeof(uint16_t) : 0;
}
#endif

// ---- register tiles: R rows by one panel into out[R][64]. Few rows have two chains of sums, or the
// processor would wait for one.

template <int R>
constexpr int kChains = R <= 2 ? 2 : 1;

template <int R>
struct Rows {
    const uint8_t *at[R];
    Rows(const Activations &a, int64_t m) {
        for (int r = 0; r < R; ++r) at[r] = a.row(m + r);
    }
};

// What is fetched while a panel's lines are multiplied: lines a little ahead, or, when several register tiles
// meet the panel one after another, each tile's share of the panel that comes next.
struct Ahead {
    int64_t first, second;  // parts of a line, and where: always two, because more branches cost more
    bool is_first, is_only;
    Ahead(const PackedMatrix &w, int64_t tile, int64_t num_tiles)
        : first(4096), second(first + 64), is_first(tile == 0), is_only(num_tiles == 1) {
        if (is_only) return;
        const int64_t parts = w.kind == WeightKind::coded_bf16 ? kCodedBlock / 64 : kVectors;
        first = w.panel_bytes() + (num_tiles < parts ? tile * 2 : tile) % parts * 64;
        second = num_tiles < parts ? first + 64 : first;
    }
    FDCPU_INLINE void fetch(const uint8_t *line) const {
        __builtin_prefetch(line + first, 0, 2);
        __builtin_prefetch(line + second, 0, 2);
        if (!is_only) return;
        __builtin_prefetch(line + first + 128, 0, 2);
        __builtin_prefetch(line + first + 192, 0, 2);
    }
};

// The first V registers of a panel; the others are zero.
template <int R, int V>
void tile_f32_of(const PackedMatrix &w, int64_t p, const Activations &a, int64_t m, const Ahead &ahead, float *out) {
    const float *line = reinterpret_cast<const float *>(w.panel(p));
    const Rows<R> x(a, m);
    F acc[R][kVectors] = {};
    for (int64_t k = 0; k < w.padded_inputs; ++k, line += kPanel) {
        if (V == kVectors) ahead.fetch(reinterpret_cast<const uint8_t *>(line));
        F weights[V];
        for (int s = 0; s < V; ++s) weights[s] = load(line + s * kLanes);
        for (int r = 0; r < R; ++r)
            for (int s = 0; s < V; ++s)
                acc[r][s] = weights[s] * splat(reinterpret_cast<const float *>(x.at[r])[k]) + acc[r][s];
    }
    for (int r = 0; r < R; ++r)
        for (int s = 0; s < kVectors; ++s) store(out + r * kPanel + s * kLanes, acc[r][s]);
}

// Routers have few outputs.
template <int R>
void tile_f32(const PackedMatrix &w, int64_t p, const Activations &a, int64_t m, const Ahead &ahead, float *out) {
    if (!w.gated && w.outputs - p * kPanel <= kLanes) return tile_f32_of<R, 1>(w, p, a, m, ahead, out);
    tile_f32_of<R, kVectors>(w, p, a, m, ahead, out);
}

template <int R>
FDCPU_INLINE void store_sums(const F (&sums)[kChains<R>][R][kVectors], float *out) {
    for (int r = 0; r < R; ++r)
        for (int s = 0; s < kVectors; ++s)
            store(out + r * kPanel + s * kLanes, kChains<R> > 1 ? sums[0][r][s] + sums[kChains<R> - 1][r][s] : sums[0][r][s]);
}

// Of lines as they are, at `line`; `stored` is the panel itself, `step` bytes of it for each two inputs.
template <int R>
FDCPU_INLINE void tile_lines(const uint8_t *line, const uint8_t *stored, int64_t step, int64_t inputs, const Activations &a,
                             int64_t m, const Ahead &ahead, float *out) {
    const Rows<R> x(a, m);
    F acc[kChains<R>][R][kVectors] = {};
    for (int64_t k = 0; k < 2 * inputs;)
        for (int c = 0; c < kChains<R>; ++c, k += 4, line += 4 * kPanel, stored += step) {
            ahead.fetch(stored);
            for (int s = 0; s < kVectors; ++s) {
                const I weights = load_as<I>(line + s * 64);
                for (int r = 0; r < R; ++r) acc[c][r][s] = dot_pairs(acc[c][r][s], weights, I(splat_bytes(x.at[r] + k)));
            }
        }
    store_sums<R>(acc, out);
}

template <int R>
void tile_bf16(const PackedMatrix &w, int64_t p, const Activations &a, int64_t m, const Ahead &ahead, float *out) {
    tile_lines<R>(w.panel(p), w.panel(p), 4 * kPanel, w.padded_inputs, a, m, ahead, out);
}

// Half a panel at a time becomes lines on the way, which stay in `copy` if other tiles of rows follow.
template <int R, bool kKeeps>
void tile_codes(const PackedMatrix &w, int64_t p, const Activations &a, int64_t m, const Ahead &ahead, uint8_t *copy,
                float *out) {
    constexpr int kParts = R <= 4 ? 2 : 1;  // chains of sums
    const uint8_t *block = w.panel(p) + kCodedHeader;
    const B exponents = load_as<B>(w.panel(p));
    const Rows<R> x(a, m);
    for (int half = 0; half < 2; ++half) {
        F acc[kParts][R][2] = {};
        uint8_t *to = copy + half * kHalf * 4;
        for (int64_t k = 0; k < 2 * w.padded_inputs; k += 8, block += kCodedBlock, to += 8 * kPanel) {
            ahead.fetch(block);
            I lines[2][2];
            decode_block(block, exponents, lines);
            for (int j = 0; j < 2; ++j) {
                for (int s = 0; s < 2 && kKeeps; ++s) store_as(to + j * 4 * kPanel + s * 64, lines[s][j]);
                for (int r = 0; r < R; ++r) {
                    const I input = I(splat_bytes(x.at[r] + k + 4 * j));
                    for (int s = 0; s < 2; ++s)
                        acc[j % kParts][r][s] = dot_pairs(acc[j % kParts][r][s], lines[s][j], input);
                }
            }
        }
        for (int r = 0; r < R; ++r)
            for (int s = 0; s < 2; ++s)
                store(out + r * kPanel + half * kHalf + s * kLanes,
                      kParts > 1 ? acc[0][r][s] + acc[kParts - 1][r][s] : acc[0][r][s]);
    }
    for (const Patch *patch = w.patches_of(p); patch != w.patches_of(p + 1); ++patch) {
        const float weight = load_one(&patch->bits);
        for (int r = 0; r < R; ++r)
            out[r * kPanel + patch->column] += load_one(reinterpret_cast<const uint16_t *>(x.at[r]) + patch->input) * weight;
        if (kKeeps) put_patch(*patch, copy + patch->input / 2 * 4 * kPanel, patch->column);
    }
}

// The tile that meets a panel first.
template <int R = kMostHalved>
void tile_codes_of(int rows, const PackedMatrix &w, int64_t p, const Activations &a, int64_t m, const Ahead &ahead,
                   uint8_t *copy, float *out) {
    if constexpr (R > 1) {
        if (rows < R) return tile_codes_of<R - 1>(rows, w, p, a, m, ahead, copy, out);
    }
    if constexpr (R > kMostRows) {
        if (!ahead.is_only) return tile_codes<R, true>(w, p, a, m, ahead, copy, out);
    }
    tile_codes<R, false>(w, p, a, m, ahead, copy, out);
}

// Shared by int8 and int4: what a group's integer sums add to the result.
template <int R>
FDCPU_INLINE void add_group(const PackedMatrix &w, int64_t p, const Activations &a, int64_t m, int64_t g,
                            const I (&sums)[kChains<R>][R][kVectors], float *out) {
    const float *scales = w.panel_scales(p) + g * kPanel;
    for (int r = 0; r < R; ++r) {
        const float x_scale = a.scales[(m + r) * a.groups + g];
        for (int s = 0; s < kVectors; ++s) {
            float *to = out + r * kPanel + s * kLanes;
            const I both = kChains<R> > 1 ? sums[0][r][s] + sums[kChains<R> - 1][r][s] : sums[0][r][s];
            const F value = __builtin_convertvector(both, F) * (load(scales + s * kLanes) * x_scale);
            store(to, g ? load(to) + value : value);
        }
    }
}

template <int R>
void tile_int8(const PackedMatrix &w, int64_t p, const Activations &a, int64_t m, const Ahead &ahead, float *out) {
    const uint8_t *line = w.panel(p);
    const Rows<R> x(a, m);
    for (int64_t g = 0; g < a.groups; ++g) {
        I acc[kChains<R>][R][kVectors] = {};
        const int32_t *sums = w.panel_sums(p) + g * kPanel;
        for (int s = 0; s < kVectors; ++s)
            for (int r = 0; r < R; ++r) acc[0][r][s] = load_as<I>(sums + s * kLanes) * -128;
        for (int64_t k = g * w.group; k < (g + 1) * w.group;)
            for (int c = 0; c < kChains<R>; ++c, k += 4, line += 4 * kPanel) {
                ahead.fetch(line);
                for (int s = 0; s < kVectors; ++s) {
                    const B weights = load_as<B>(line + s * 64);
                    for (int r = 0; r < R; ++r) acc[c][r][s] = dot_bytes(acc[c][r][s], splat_bytes(x.at[r] + k), weights);
                }
            }
        add_group<R>(w, p, a, m, g, acc, out);
    }
}

template <int R>
void tile_int4(const PackedMatrix &w, int64_t p, const Activations &a, int64_t m, const Ahead &ahead, float *out) {
    const uint8_t *line = w.panel(p);
    const Rows<R> x(a, m);
    for (int64_t g = 0; g < a.groups; ++g) {
        I acc[kChains<R>][R][kVectors] = {};
        for (int r = 0; r < R; ++r)
            for (int s = 0; s < kVectors; ++s) acc[0][r][s] = splat_int(-8 * a.sums[(m + r) * a.groups + g]);
        for (int64_t k = g * w.group; k < (g + 1) * w.group; k += 8, line += 4 * kPanel) {
            ahead.fetch(line);
            for (int s = 0; s < kVectors; ++s) {
                const B packed = load_as<B>(line + s * 64), low = packed & 15, high = B(U(packed) >> 4) & 15;
                for (int r = 0; r < R; ++r) {
                    I &even = acc[0][r][s], &odd = acc[kChains<R> - 1][r][s];
                    even = dot_bytes(even, low, splat_bytes(x.at[r] + k));
                    odd = dot_bytes(odd, high, splat_bytes(x.at[r] + k + 4));
                }
            }
        }
        add_group<R>(w, p, a, m, g, acc, out);
    }
}

template <int R>
void tile_tet2(const PackedMatrix &w, int64_t p, const Activations &a, int64_t m, const Ahead &ahead, float *out) {
    const uint8_t *tile = w.panel(p);
    const Rows<R> x(a, m);
    I acc[kChains<R>][R][kVectors] = {};
    for (int64_t k = 0; k < 2 * w.padded_inputs; k += 16, tile += kTetTile) {
        ahead.fetch(tile);
        for (int s = 0; s < kVectors; ++s) {
            const U words = tet_words(tile + s * kTetWords * sizeof(uint16_t));
            for (int j = 0; j < 4; ++j) {
                const B bytes = tet_bytes(words, j);
                for (int r = 0; r < R; ++r) {
                    I &sum = acc[j % kChains<R>][r][s];
                    sum = dot_bytes(sum, bytes, splat_bytes(x.at[r] + k + 4 * j));
                }
            }
        }
    }
    for (int r = 0; r < R; ++r)
        for (int s = 0; s < kVectors; ++s) {
            for (int c = 0; c < kChains<R>; ++c) acc[c][r][s] += acc[c][r][s];
            acc[0][r][s] -= 255 * a.sums[m + r];  // bytes stand for themselves minus 127.5
        }
    add_group<R>(w, p, a, m, 0, acc, out);
}

template <int R>
void tile(const PackedMatrix &w, int64_t p, const Activations &a, int64_t m, const Ahead &ahead, uint8_t *copy, float *out) {
    switch (w.kind) {
        case WeightKind::f32: return tile_f32<R>(w, p, a, m, ahead, out);
        case WeightKind::bf16: return tile_bf16<R>(w, p, a, m, ahead, out);
        case WeightKind::int8: return tile_int8<R>(w, p, a, m, ahead, out);
        case WeightKind::int4: return tile_int4<R>(w, p, a, m, ahead, out);
        case WeightKind::tet2: return tile_tet2<R>(w, p, a, m, ahead, out);
        case WeightKind::coded_bf16:
            return tile_lines<R>(copy, w.panel(p), kCodedBlock, w.padded_inputs, a, m, ahead, out);
    }
}

template <int R = kMostRows>
void tile_of(int rows, const PackedMatrix &w, int64_t p, const Activations &a, int64_t m, const Ahead &ahead,
             uint8_t *copy, float *out) {
    if constexpr (R > 1) {
        if (rows < R) return tile_of<R - 1>(rows, w, p, a, m, ahead, copy, out);
    }
    tile<R>(w, p, a, m, ahead, copy, out);
}

// finish(row, half, sums, sums) for rows [begin, end) of a panel, in tiles or in registers.
template <class Finish>
FDCPU_INLINE void panel_rows(TileUse &use, bool in_tiles, const PackedMatrix &w, int64_t p, const Activations &a,
                             int64_t begin, int64_t end, uint8_t *unpacked, const Finish &finish) {
#if FDCPU_TILES
    if (in_tiles) return panel_in_tiles(use, w, p, a, begin, end, unpacked, finish);
#endif
    alignas(64) float sums[kMostHalved * kPanel];
    const bool is_coded = w.kind == WeightKind::coded_bf16;
    const int64_t count = end - begin;
    // Of codes the first tile is large enough to decode meanwhile, and whole tiles are left.
    constexpr int64_t kFirst = kMostHalved - kMostRows + 1;
    const int64_t head = !is_coded || count == 0 ? 0 : count <= kMostHalved ? count : kFirst + (count - kFirst) % kMostRows;
    const int64_t num_tiles = (head > 0) + (count - head + kMostRows - 1) / kMostRows;
    int64_t m = begin;
    for (int64_t i = 0; i < num_tiles; ++i) {
        const Ahead ahead(w, i, num_tiles);
        const int rows = i == 0 && head ? int(head) : int((end - m + num_tiles - i - 1) / (num_tiles - i));  // much the same
        if (i == 0 && head)
            tile_codes_of(rows, w, p, a, m, ahead, unpacked, sums);
        else
            tile_of(rows, w, p, a, m, ahead, unpacked, sums);
        for (int r = 0; r < rows; ++r)
            for (int half = 0; half < 2; ++half) {
                const float *from = sums + r * kPanel + half * kHalf;
                finish(m + r, half, load(from), load(from + kLanes));
            }
        m += rows;
    }
}

// ---- epilogue: 32 sums of one row

// Where results go, copied from the operation: a store might change it, for all that the compiler knows.
template <class T>
struct Outputs {
    const T *bias, *residual;
    T *y;
    int64_t stride, rows, width;  // rows of the matrix; outputs of the operation
    bool gated;

    explicit Outputs(const LinearOp &op)
        : bias(static_cast<const T *>(op.bias)), residual(static_cast<const T *>(op.residual)), y(static_cast<T *>(op.y)),
          stride(op.y_stride), rows(op.weight->outputs), width(op.weight->gated ? op.weight->half() : rows),
          gated(op.weight->gated) {}

    // Sixteen outputs from `column` on, as many as there are.
    FDCPU_INLINE void put(int64_t m, int64_t column, F value) const {
        const int64_t at = m * stride + column, count = width - column;
        if (count >= kLanes) return store(y + at, residual ? value + load(residual + at) : value);
        float lanes[kLanes];
        store(lanes, value);
        for (int64_t i = 0; i < count; ++i)
            store_one(y + at + i, residual ? lanes[i] + load_one(residual + at + i) : lanes[i]);
    }

    FDCPU_INLINE F biased(int64_t row, F value) const {
        if (!bias) return value;
        if (row + kLanes <= rows) return value + load(bias + row);
        float lanes[kLanes] = {};
        for (int64_t i = 0; i < rows - row; ++i) lanes[i] = load_one(bias + row + i);
        return value + load(lanes);
    }

    FDCPU_INLINE void operator()(int64_t p, int64_t m, int half, F low, F high) const {
        if (gated) {
            const int64_t column = p * kHalf + half * kLanes;
            low = biased(column, low);
            high = biased(width + column, high);
            return put(m, column, silu(low) * high);
        }
        const int64_t column = p * kPanel + half * kHalf;
        put(m, column, biased(column, low));
        put(m, column + kLanes, biased(column + kLanes, high));
    }
    // What will be written: rows lie far apart, and writing waits for each of them.
    FDCPU_INLINE void fetch(int64_t p, int64_t m, int half) const {
        __builtin_prefetch(y + m * stride + (gated ? p * kHalf + half * kLanes : p * kPanel + half * kHalf), 1, 3);
    }
};

// The same for one panel.
template <class Finish>
struct PanelFinish {
    Finish finish;
    int64_t p;
    FDCPU_INLINE void operator()(int64_t m, int half, F low, F high) const { finish(p, m, half, low, high); }
    FDCPU_INLINE void fetch(int64_t m, int half) const { finish.fetch(p, m, half); }
};

// ---- the whole operation

FDCPU_INLINE Activations form_of(const LinearOp &op, uint8_t *scratch) {
    const PackedMatrix &w = *op.weight;
    return Activations(w, op.num_rows, scratch, is_tiled(w, op.num_rows), is_widened(w, op.num_rows));
}

// Rows whose activations stay in the second-level cache while a panel meets them.
FDCPU_INLINE int64_t rows_of_block(const Activations &a, int64_t num_rows, bool in_tiles) {
    constexpr int64_t kBlockBytes = 1 << 20, kStep = 32;
    const int64_t most = in_tiles ? std::min<int64_t>(512, std::max<int64_t>(kStep, kBlockBytes / a.row_bytes)) : 128;
    const int64_t blocks = (num_rows + most - 1) / most;
    return ((num_rows + blocks - 1) / blocks + kStep - 1) / kStep * kStep;
}

// Every thread's part of the scratch: a row of floats, room for unpacked weights, and when there is but one
// row of activations its own copy of that.
struct ThreadScratch {
    size_t row, unpacked, own;
    ThreadScratch(const PackedMatrix &w, const Activations &a)
        : row((size_t(w.padded_inputs + kLanes) * sizeof(float) + 63) / 64 * 64), unpacked(unpacked_bytes(w)),
          own((a.num_bytes(1) + 63) / 64 * 64) {}
    size_t num_bytes() const { return row + unpacked + own; }
};

size_t linear_scratch(const LinearOp &op, int num_threads) {
    size_t most = 0;
    LinearOp fewer = op;  // a plan for many rows also runs with few, in other forms
    for (int64_t rows : {op.num_rows, std::min<int64_t>(op.num_rows, 16)}) {
        fewer.num_rows = rows;
        const Activations a = form_of(fewer, nullptr);
        most = std::max(most, a.num_bytes(rows) + 128 + ThreadScratch(*op.weight, a).num_bytes() * size_t(num_threads));
    }
    return most;
}

// Whether threads divide rows instead of panels: with few panels they have to. Many rows they better divide
// where the weights fit every thread's cache: nobody waits until all are prepared, and rows stay in the cache of
// their thread from one operation to the next.
FDCPU_INLINE bool divides_rows(const PackedMatrix &w, int64_t num_rows, int num_threads, bool in_tiles) {
    if (num_rows >= 64 * num_threads && w.num_bytes() <= kOwnBytes) return true;
    return w.num_panels < num_threads && !in_tiles;
}

// finish(panel, row, half, sums, sums) for all rows of this thread's panels, or its rows of all panels.
template <class X, class Finish>
void product(const LinearOp &op, const Worker &worker, const Finish &finish) {
    if (op.num_rows == 0) return;  // of a plan, when nobody is there
    const PackedMatrix &w = *op.weight;
    auto *aligned = reinterpret_cast<uint8_t *>((reinterpret_cast<uintptr_t>(worker.scratch) + 63) & ~uintptr_t(63));
    Activations a = form_of(op, aligned);
    const ThreadScratch parts(w, a);
    uint8_t *mine = aligned + (a.num_bytes(op.num_rows) + 63) / 64 * 64 + parts.num_bytes() * size_t(worker.thread);
    float *row = reinterpret_cast<float *>(mine);
    const bool in_tiles = is_tiled(w, op.num_rows);
    const bool by_rows = divides_rows(w, op.num_rows, worker.size(), in_tiles);
    int64_t first, last, top = 0, bottom = op.num_rows;
    worker.share_steps(op.num_rows, in_tiles ? kTileRowsApart : 1, first, last);
    if (op.num_rows == 1) {  // cheaper than to wait for another thread
        a = form_of(op, mine + parts.row + parts.unpacked);
        prepare_row<X>(op, a, 0, 0, row);
    } else {
        for (int64_t m = first; m < last; ++m) prepare_row<X>(op, a, m, m, row);
        if (!by_rows) worker.barrier();
    }
    if (by_rows) {
        top = first, bottom = last;
        first = 0, last = w.num_panels;
    } else {
        worker.share(w.num_panels, first, last);
    }
    TileUse use;
    const int64_t block = rows_of_block(a, op.num_rows, in_tiles);
    for (int64_t begin = top; begin < bottom; begin += block)
        for (int64_t p = first; p < last; ++p)
            panel_rows(use, in_tiles, w, p, a, begin, std::min(bottom, begin + block), mine + parts.row,
                       PanelFinish<Finish>{finish, p});
}

template <class Finish>
FDCPU_INLINE void product_of_any(const LinearOp &op, const Worker &worker, const Finish &finish) {
    op.x_type == DType::f32 ? product<float>(op, worker, finish) : product<uint16_t>(op, worker, finish);
}

void linear(const LinearOp &op, const Worker &worker) {
    op.y_type == DType::f32 ? product_of_any(op, worker, Outputs<float>(op))
                            : product_of_any(op, worker, Outputs<uint16_t>(op));
}

}  // namespace fdcpu::FDCPU_NAMESPACE
