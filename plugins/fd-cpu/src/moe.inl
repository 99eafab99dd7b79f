// Experts: tokens are ordered by expert. Then all panels are one pool of work for the team; or, where experts
// are small and rows many, some rows of an expert are, which one thread takes through both products.

namespace fdcpu::FDCPU_NAMESPACE {

constexpr int64_t kMoeTokens = 256;  // tokens taken at once; bounds the scratch
constexpr int64_t kItemRows = 64;    // of an expert that one thread takes

struct ExpertScratch {
    int64_t *starts;  // [experts + 1]: which ordered rows are whose
    int64_t *token, *place;  // [rows]: the token of an ordered row; the row of (token, choice)
    float *hidden, *out;
    uint8_t *activations;
    uint8_t *unpacked;  // weights, and
    float *rows;        // inputs: one for each thread
    size_t unpacked_step;
    size_t item_bytes;  // activations of an item; 0: there is no room for as many as threads
    size_t num_bytes;

    ExpertScratch(const ExpertsOp &op, uint8_t *at, int num_threads) {
        const int64_t most = std::min(op.num_tokens, kMoeTokens) * op.top_k;
        const PackedMatrix &up = *op.gate_up[0], &down = *op.down[0];
        uint8_t *begin = at;
        auto take = [&](auto *&to, size_t bytes) {
            to = reinterpret_cast<std::remove_reference_t<decltype(to)>>(at);
            at += (bytes + 63) / 64 * 64;
        };
        take(starts, size_t(op.num_experts + 1) * 8);
        take(token, size_t(most) * 8);
        take(place, size_t(most) * 8);
        take(hidden, size_t(most * up.half()) * 4);
        take(out, size_t(most * op.width) * 4);
        const size_t widest = std::max(Activations(up, most, nullptr).num_bytes(most),
                                       Activations(down, most, nullptr).num_bytes(most));
        take(activations, widest);
        item_bytes = std::max(Activations(up, kItemRows, nullptr).num_bytes(kItemRows),
                              Activations(down, kItemRows, nullptr).num_bytes(kItemRows));
        item_bytes = (item_bytes + 63) / 64 * 64;
        if (item_bytes * size_t(num_threads) > widest || kItemRows * num_threads > most) item_bytes = 0;
        unpacked_step = std::max(unpacked_bytes(up), unpacked_bytes(down));
        take(unpacked, unpacked_step * size_t(num_threads));
        take(rows, size_t(std::max(up.padded_inputs, down.padded_inputs) + kLanes) * 4 * size_t(num_threads));
        num_bytes = size_t(at - begin) + 64;
    }
};

size_t experts_scratch(const ExpertsOp &op, int num_threads) {
    return ExpertScratch(op, nullptr, num_threads).num_bytes;
}

// Stable counting sort of (token, choice) by expert; ids outside the experts are left out.
FDCPU_INLINE void order_by_expert(const ExpertsOp &op, const ExpertScratch &s, int64_t first, int64_t count) {
    std::fill(s.starts, s.starts + op.num_experts + 1, 0);
    const int64_t *ids = op.topk_ids + first * op.top_k;
    for (int64_t i = 0; i < count * op.top_k; ++i)
        if (ids[i] >= 0 && ids[i] < op.num_experts) ++s.starts[ids[i] + 1];
    for (int64_t e = 0; e < op.num_experts; ++e) s.starts[e + 1] += s.starts[e];
    for (int64_t i = 0; i < count * op.top_k; ++i) {
        s.place[i] = -1;
        if (ids[i] < 0 || ids[i] >= op.num_experts) continue;
        const int64_t row = s.starts[ids[i]]++;
        s.place[i] = row;
        s.token[row] = first + i / op.top_k;
    }
    for (int64_t e = op.num_experts; e > 0; --e) s.starts[e] = s.starts[e - 1];
    s.starts[0] = 0;
}

// One pass over (expert, panel) pairs of experts that have rows.
FDCPU_INLINE void expert_products(const ExpertsOp &op, const ExpertScratch &s, const Worker &worker,
                                  const PackedMatrix *const *matrices, const Activations &a, float *y, int64_t y_stride) {
    LinearOp linear{};
    linear.y = y;
    linear.y_stride = y_stride;
    TileUse use;
    uint8_t *unpacked = s.unpacked + s.unpacked_step * size_t(worker.thread);
    int64_t item = 0, mine = worker.turn();
    for (int64_t e = 0; e < op.num_experts; ++e) {
        const int64_t begin = s.starts[e], end = s.starts[e + 1];
        if (begin == end) continue;
        const PackedMatrix &w = *matrices[e];
        linear.weight = &w;
        if (mine >= item + w.num_panels) {
            item += w.num_panels;
            continue;
        }
        for (int64_t p = 0; p < w.num_panels; ++p, ++item) {
            if (item != mine) continue;
            const Outputs<float> out(linear);
            panel_rows(use, is_tiled(w, end - begin), w, p, p + 1, a, begin, end, unpacked,
                       PanelFinish<Outputs<float>>{out, p});
            mine = worker.turn();
        }
    }
}

// All panels of a matrix for rows [0, rows).
FDCPU_INLINE void whole_product(const LinearOp &op, TileUse &use, const Activations &a, int64_t rows, uint8_t *unpacked) {
    const PackedMatrix &w = *op.weight;
    const Outputs<float> out(op);
    for (int64_t p = 0; p < w.num_panels; ++p)
        panel_rows(use, is_tiled(w, rows), w, p, p + 1, a, 0, rows, unpacked, PanelFinish<Outputs<float>>{out, p});
}

// Ordered rows [begin, begin + rows) of expert e, from the tokens to `out`.
template <class T>
FDCPU_INLINE void expert_rows(const ExpertsOp &op, const ExpertScratch &s, int thread, TileUse &use, int64_t e,
                              int64_t begin, int64_t rows, float *row) {
    LinearOp up{}, down{};
    up.weight = op.gate_up[e];
    down.weight = op.down[e];
    up.x = op.x;
    up.x_stride = op.width;
    up.y_stride = down.x_stride = up.weight->half();
    up.y = s.hidden + thread * kItemRows * up.y_stride;
    down.x = up.y;
    down.y = s.out + begin * op.width;
    down.y_stride = op.width;
    uint8_t *form = s.activations + s.item_bytes * size_t(thread), *unpacked = s.unpacked + s.unpacked_step * size_t(thread);
    const Activations a(*up.weight, rows, form), b(*down.weight, rows, form);
    for (int64_t m = 0; m < rows; ++m) prepare_row<T>(up, a, m, s.token[begin + m], row);
    whole_product(up, use, a, rows, unpacked);
    for (int64_t m = 0; m < rows; ++m) prepare_row<float>(down, b, m, m, row);
    whole_product(down, use, b, rows, unpacked);
}

template <class T>
FDCPU_INLINE void experts_by_rows(const ExpertsOp &op, const ExpertScratch &s, const Worker &worker, float *row) {
    TileUse use;
    int64_t item = 0, mine = worker.turn();
    for (int64_t e = 0; e < op.num_experts; ++e)
        for (int64_t begin = s.starts[e]; begin < s.starts[e + 1]; begin += kItemRows, ++item) {
            if (item != mine) continue;
            const int64_t rows = std::min(kItemRows, s.starts[e + 1] - begin);
            expert_rows<T>(op, s, worker.thread, use, e, begin, rows, row);
            mine = worker.turn();
        }
}

template <class T>
FDCPU_INLINE void experts_by_panels(const ExpertsOp &op, const ExpertScratch &s, const Worker &worker, float *row) {
    const PackedMatrix &up = *op.gate_up[0], &down = *op.down[0];
    const int64_t num_rows = s.starts[op.num_experts];
    int64_t begin, end;
    worker.share(num_rows, begin, end);
    Activations a(up, num_rows, s.activations);
    LinearOp input{};
    input.x = op.x;
    input.x_stride = op.width;
    for (int64_t m = begin, e = 0; m < end; ++m) {
        while (s.starts[e + 1] <= m) ++e;
        input.weight = op.gate_up[e];  // experts may rotate their inputs differently
        prepare_row<T>(input, a, m, s.token[m], row);
    }
    worker.barrier();
    expert_products(op, s, worker, op.gate_up, a, s.hidden, up.half());
    worker.barrier();
    Activations b(down, num_rows, s.activations);
    LinearOp between{};
    between.x = s.hidden;
    between.x_stride = up.half();
    for (int64_t m = begin, e = 0; m < end; ++m) {
        while (s.starts[e + 1] <= m) ++e;
        between.weight = op.down[e];
        prepare_row<float>(between, b, m, m, row);
    }
    worker.barrier();
    expert_products(op, s, worker, op.down, b, s.out, op.width);
}

template <class T>
void experts_of(const ExpertsOp &op, const Worker &worker) {
    auto *aligned = reinterpret_cast<uint8_t *>((reinterpret_cast<uintptr_t>(worker.scratch) + 63) & ~uintptr_t(63));
    const ExpertScratch s(op, aligned, worker.team.size());
    const PackedMatrix &up = *op.gate_up[0], &down = *op.down[0];
    float *row = s.rows + worker.thread * (std::max(up.padded_inputs, down.padded_inputs) + kLanes);
    for (int64_t first = 0; first < op.num_tokens; first += kMoeTokens) {
        const int64_t count = std::min(kMoeTokens, op.num_tokens - first);
        if (first) worker.barrier();
        if (worker.thread == 0) order_by_expert(op, s, first, count);
        worker.barrier();
        if (s.item_bytes && s.starts[op.num_experts] >= 2 * kItemRows * worker.team.size() &&
            up.num_bytes() + down.num_bytes() <= kOwnBytes)
            experts_by_rows<T>(op, s, worker, row);
        else
            experts_by_panels<T>(op, s, worker, row);
        worker.barrier();
        int64_t begin, end;
        worker.share(count, begin, end);
        for (int64_t t = begin; t < end; ++t) {
            std::memset(row, 0, size_t(op.width) * sizeof(float));
            for (int64_t j = 0; j < op.top_k; ++j) {
                const int64_t place = s.place[t * op.top_k + j];
                if (place < 0) continue;
                add_row(s.out + place * op.width, row, op.width, op.topk_weights[(first + t) * op.top_k + j]);
            }
            narrow_row(row, static_cast<T *>(op.y) + (first + t) * op.width, op.width);
        }
    }
}

void experts(const ExpertsOp &op, const Worker &worker) {
    op.type == DType::f32 ? experts_of<float>(op, worker) : experts_of<uint16_t>(op, worker);
}

}  // namespace fdcpu::FDCPU_NAMESPACE
