// The likeliest token of each row: of logits, or of the product that makes them, which are then never written.

namespace fdcpu::FDCPU_NAMESPACE {

// What every thread has found so far: [row][thread]. No id: it has looked at nothing.
struct Found {
    float *peaks;
    int64_t *ids;
    int size;

    Found(int64_t num_rows, int size, uint8_t *at)
        : peaks(reinterpret_cast<float *>(at)), ids(reinterpret_cast<int64_t *>(peaks + (num_rows * size + 1) / 2 * 2)),
          size(size) {}
    static size_t num_bytes(int64_t num_rows, int size) { return size_t(num_rows * size + 2) * 12; }

    // Whether thread t has found something better in row m than thread `best`.
    bool is_better(int64_t m, int64_t t, int64_t best) const {
        const float peak = peaks[m * size + t], most = peaks[m * size + best];
        const bool is_nan = peak != peak, was_nan = most != most;
        if (is_nan != was_nan) return is_nan;
        return is_nan || peak == most ? ids[m * size + t] < ids[m * size + best] : peak > most;
    }
    // The best of all threads' rows.
    void choose(int64_t num_rows, int64_t *best_ids, float *best_peaks) const {
        for (int64_t m = 0; m < num_rows; ++m) {
            int64_t best = -1;
            for (int t = 0; t < size; ++t)
                if (ids[m * size + t] >= 0 && (best < 0 || is_better(m, t, best))) best = t;
            best_ids[m] = ids[m * size + best];
            best_peaks[m] = peaks[m * size + best];
        }
    }
};

size_t greedy_scratch(const GreedyOp &op, int num_threads) { return Found::num_bytes(op.num_rows, num_threads); }

// Every thread searches its part of all rows; the first then compares the parts.
void greedy(const GreedyOp &op, const Worker &worker) {
    const Found found(op.num_rows, worker.crew, worker.scratch);
    int64_t first, last;
    worker.share(op.width, first, last);
    for (int64_t m = 0; m < op.num_rows; ++m) {
        const float *row = op.logits + m * op.width;
        float peak = -INFINITY;
        int64_t best = first;
        for (int64_t begin = first; begin < last; begin += 1024) {
            const int64_t end = std::min(last, begin + 1024);
            F most = splat(-INFINITY);
            bool has_nan = false;
            int64_t i = begin;
            for (; i + kLanes <= end; i += kLanes) most = maximum(load(row + i), most);
            float local = max_of(most);
            for (int64_t j = begin; j < end; ++j) has_nan |= row[j] != row[j];
            for (; i < end; ++i) local = std::max(local, row[i]);
            if (!has_nan && !(local > peak)) continue;
            for (i = begin; i < end; ++i)
                if (row[i] != row[i] || (!has_nan && row[i] == local)) break;
            peak = row[i];
            best = i;
            if (has_nan) break;
        }
        found.peaks[m * worker.crew + worker.thread] = first < last ? peak : -INFINITY;
        found.ids[m * worker.crew + worker.thread] = first < last ? best : -1;
    }
    worker.barrier();
    if (worker.thread == 0) found.choose(op.num_rows, op.ids, op.peaks);
}

// 32 logits from `column` on; the first of the largest stays, and the first that is no number for good.
FDCPU_INLINE void look_at(F low, F high, int64_t column, int64_t outputs, float &peak, int64_t &id) {
    const F both = low + high;
    if (!any((maximum(low, high) > peak) | (both != both)) && id >= 0) return;
    float lanes[2 * kLanes];
    store(lanes, low);
    store(lanes + kLanes, high);
    for (int64_t i = 0; i < std::min<int64_t>(2 * kLanes, outputs - column) && peak == peak; ++i)
        if (id < 0 || lanes[i] != lanes[i] || lanes[i] > peak) {
            peak = lanes[i];
            id = column + i;
        }
}

// What a product with a head does with its sums.
struct Search {
    Outputs<float> out;
    Found found;
    int thread;
    FDCPU_INLINE void operator()(int64_t p, int64_t m, int half, F low, F high) const {
        const int64_t column = p * kPanel + half * kHalf, at = m * found.size + thread;
        if (column >= out.width) return;
        low = out.biased(column, low);
        high = out.biased(column + kLanes, high);
        look_at(low, high, column, out.width, found.peaks[at], found.ids[at]);
    }
    FDCPU_INLINE void fetch(int64_t, int64_t, int) const {}
};

size_t greedy_linear_scratch(const GreedyLinearOp &op, int num_threads) {
    return linear_scratch(op.product, num_threads) + 64 + Found::num_bytes(op.product.num_rows, num_threads);
}

void greedy_linear(const GreedyLinearOp &op, const Worker &worker) {
    const LinearOp &linear = op.product;
    const size_t before = (linear_scratch(linear, worker.crew) + 63) / 64 * 64;
    const Found found(linear.num_rows, worker.crew, worker.scratch + before);
    for (int64_t m = 0; m < linear.num_rows; ++m) {
        found.peaks[m * found.size + worker.thread] = -INFINITY;
        found.ids[m * found.size + worker.thread] = -1;
    }
    product_of_any(linear, worker, Search{Outputs<float>(linear), found, worker.thread});
    worker.barrier();
    if (worker.thread == 0) found.choose(linear.num_rows, op.ids, op.peaks);
}

}  // namespace fdcpu::FDCPU_NAMESPACE
