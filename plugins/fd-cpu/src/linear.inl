// Products with packed matrices: every thread computes its panels, a few rows by 64 outputs at a time, in
// registers or, where there are some, in tiles.

namespace fdcpu::FDCPU_NAMESPACE {

constexpr int64_t kTileRowsApart = 32;               // threads that divide rows for tiles keep two tiles together
constexpr int64_t kFewRows = 16;                      // as many as a tile has
constexpr size_t kOwnBytes = 512 << 10;              // of weights that every thread may read for itself

#if !FDCPU_TILES
struct TileUse {};
FDCPU_INLINE bool is_tiled(const PackedMatrix &, int64_t) { return false; }
FDCPU_INLINE bool is_widened(const PackedMatrix &, int64_t) { return false; }
// Room for half a panel of bfloat16 without codes, or for all of it.
FDCPU_INLINE size_t unpacked_bytes(const PackedMatrix &w) {
    constexpr int64_t kWidth = kDecodesApart ? kPanel : kHalf;
    return w.kind == WeightKind::coded_bf16 ? size_t(w.padded_inputs * kWidth) * sizeof(uint16_t) : 0;
}
#endif

// Bfloat16 in twelve bits, half a panel at a time. Tiles of rows are much the same, and the first one decodes:
// that goes on beside its products.
template <class Finish>
FDCPU_INLINE void coded_panel_rows(const PackedMatrix &w, int64_t p, int64_t next, const Activations &a, int64_t begin,
                                   int64_t end, uint8_t *copy, const Finish &finish) {
    constexpr int kLeast = kMostHalved / 2;  // rows of a tile that is one of several
    alignas(64) float sums[kMostHalved * kHalf];
    const int64_t num_tiles = (end - begin + kMostHalved - 1) / kMostHalved;
    for (int half = 0; half < 2; ++half) {
        int64_t m = begin;
        for (int64_t i = 0; i < num_tiles; ++i) {
            const Ahead ahead(w.coded_half(p, half), half ? w.panel(next) : w.coded_half(p, 1), w.half_bytes(), kCodedBlock,
                              i, num_tiles);
            const int rows = int((end - m + num_tiles - i - 1) / (num_tiles - i));
            for (int r = 0; r < rows; ++r) finish.fetch(m + r, half);  // comes meanwhile
            if (kDecodesApart || num_tiles == 1)
                tile_codes_of<Lines::decoded, 1>(rows, w, p, half, a, m, ahead, copy, sums);
            else if (i == 0)
                tile_codes_of<Lines::kept, kLeast>(rows, w, p, half, a, m, ahead, copy, sums);
            else
                tile_codes_of<Lines::copied, kLeast>(rows, w, p, half, a, m, ahead, copy, sums);
            for (int r = 0; r < rows; ++r) finish(m + r, half, load(sums + r * kHalf), load(sums + r * kHalf + kLanes));
            m += rows;
        }
    }
}

// finish(row, half, sums, sums) for rows [begin, end) of a panel, in tiles or in registers. Panel `next` is this
// thread's next one. A call a panel costs nothing, and all of this at every place that calls takes long to compile.
template <class Finish>
__attribute__((noinline)) void panel_rows(TileUse &use, bool in_tiles, const PackedMatrix &w, int64_t p, int64_t next,
                                          const Activations &a, int64_t begin, int64_t end, uint8_t *unpacked,
                                          const Finish finish) {
#if FDCPU_TILES
    if (in_tiles) return panel_in_tiles(use, w, p, next, a, begin, end, unpacked, finish);
#endif
    const bool is_coded = w.kind == WeightKind::coded_bf16;
    if (is_coded) {
        if (!kDecodesApart || end - begin <= kMostHalved)
            return coded_panel_rows(w, p, next, a, begin, end, unpacked, finish);
        decode_panel(w, p, unpacked);
    }
    alignas(64) float sums[kMostRows * kPanel];
    const int64_t num_tiles = (end - begin + kMostRows - 1) / kMostRows;
    int64_t m = begin;
    for (int64_t i = 0; i < num_tiles; ++i) {
        Ahead ahead(w.panel(p), w.panel(next), w.panel_bytes(), is_coded ? kCodedBlock : 4 * kPanel, i, num_tiles);
        ahead.is_only &= !is_coded;  // its lines are here
        const int rows = int((end - m + num_tiles - i - 1) / (num_tiles - i));  // much the same
        for (int r = 0; r < rows; ++r)
            for (int half = 0; half < 2; ++half) finish.fetch(m + r, half);  // comes meanwhile
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
    // What will be written and is added to: rows lie far apart, and writing waits for each of them.
    FDCPU_INLINE void fetch(int64_t p, int64_t m, int half) const {
        const int64_t at = m * stride + (gated ? p * kHalf + half * kLanes : p * kPanel + half * kHalf);
        __builtin_prefetch(y + at, 1, 3);
        if (residual) __builtin_prefetch(residual + at, 0, 3);
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
    const int64_t most = in_tiles ? std::min<int64_t>(512, std::max<int64_t>(kStep, kBlockBytes / a.row_bytes)) : 256;
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
        const size_t parts = ThreadScratch(*op.weight, a).num_bytes() * size_t(num_threads);
        most = std::max(most, a.num_bytes(rows) + 128 + parts);
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

// How many panels threads divide before they take one after another as they come, so that none waits for one that is
// slower or has to share its processor. Few rows are reading, which likes to go straight on.
FDCPU_INLINE int64_t divided_panels(int64_t num_panels, int64_t num_rows) {
    return num_rows > kFewRows ? 0 : num_panels - num_panels / 8;
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
    const int num_threads = worker.team.size();  // what is done goes by it, whoever is there: see Team
    TileUse use;
    const int64_t block = rows_of_block(a, op.num_rows, in_tiles), num_panels = w.num_panels;
    // Rows [begin, end) of one panel; the next one is read ahead.
    const auto meet = [&](int64_t begin, int64_t end, int64_t p, int64_t next) {
        panel_rows(use, in_tiles, w, p, next, a, begin, std::min(end, begin + block), mine + parts.row,
                   PanelFinish<Finish>{finish, p});
    };
    const bool by_rows = divides_rows(w, op.num_rows, num_threads, in_tiles);
    const int64_t step = in_tiles ? kTileRowsApart : 1;
    int64_t first, last;
    if (by_rows && op.num_rows > 1) {
        for (int part = worker.thread; part < num_threads; part += worker.crew) {
            share_steps(op.num_rows, step, part, num_threads, first, last);
            for (int64_t m = first; m < last; ++m) prepare_row<X>(op, a, m, m, row);
            for (int64_t begin = first; begin < last; begin += block)
                for (int64_t p = 0; p < num_panels; ++p) meet(begin, last, p, p + 1);
        }
        return;
    }
    if (op.num_rows == 1) {  // cheaper than to wait for another thread
        a = form_of(op, mine + parts.row + parts.unpacked);
        prepare_row<X>(op, a, 0, 0, row);
    } else {
        share_steps(op.num_rows, step, worker.thread, worker.crew, first, last);
        for (int64_t m = first; m < last; ++m) prepare_row<X>(op, a, m, m, row);
        worker.barrier();
    }
    const int64_t divided = divided_panels(num_panels, op.num_rows);
    worker.share(divided, first, last);
    for (int64_t p = first; p < last; ++p) meet(0, op.num_rows, p, p + 1 < last ? p + 1 : divided + worker.thread);
    if (divided) {  // nobody keeps a panel back, of which there are few
        for (int64_t p = divided + worker.turn(); p < num_panels; p = divided + worker.turn())
            meet(0, op.num_rows, p, p + worker.crew);
        return;
    }
    const int64_t end = (op.num_rows + block - 1) / block * num_panels;
    for (int64_t next, turn = worker.turn(); turn < end; turn = next) {
        next = worker.turn();
        meet(turn / num_panels * block, op.num_rows, turn % num_panels, next % num_panels);
    }
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
