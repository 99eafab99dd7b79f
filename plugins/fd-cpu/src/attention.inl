// Paged attention over this device's own cache layout, with rotation and the cache write before it.
//
// An item of work is one kv head and a few tokens of one sequence; with g query heads for a kv head its
// rows are these tokens times g. Blocks of the cache are taken one after another with a running maximum
// and sum (online softmax, arXiv 1805.02867), so that the scores of one block are all that is kept.

namespace fdcpu::FDCPU_NAMESPACE {

constexpr int64_t kMostItemRows = 32;  // rows of an item, unless one token already has more
constexpr int kTileRows = 8;           // rows of a register tile

FDCPU_INLINE int64_t tokens_per_item(const AttentionOp &op) {
    return std::max<int64_t>(1, kMostItemRows / (op.num_heads / op.num_kv_heads));
}

struct AttentionScratch {
    float *q, *scores, *out, *peak, *sum;
    int64_t *limit;

    AttentionScratch(const AttentionOp &op, uint8_t *at) {
        const int64_t rows = tokens_per_item(op) * (op.num_heads / op.num_kv_heads) + kTileRows;
        q = reinterpret_cast<float *>(at);
        scores = q + rows * op.head_dim;
        out = scores + rows * op.block_size;
        peak = out + rows * op.v_head_dim;
        sum = peak + rows;
        limit = reinterpret_cast<int64_t *>(sum + rows + rows % 2);
    }
    static size_t num_bytes(const AttentionOp &op) {
        const int64_t rows = tokens_per_item(op) * (op.num_heads / op.num_kv_heads) + kTileRows;
        return size_t(rows * (op.head_dim + op.block_size + op.v_head_dim + 2) + 1) * 4 + size_t(rows) * 8 + 64;
    }
};

constexpr size_t kCounterBytes = 64;  // the shared counter of items stands before the threads' parts

size_t attention_scratch(const AttentionOp &op, int num_threads) {
    return kCounterBytes + (AttentionScratch::num_bytes(op) + 63) / 64 * 64 * size_t(num_threads);
}

// One head's vector, rotated by its position and rounded to T as the reference does.
template <class T>
FDCPU_INLINE void rotate(const AttentionOp &op, const T *from, int64_t position, int64_t size, float *to) {
    widen_row(from, to, size);
    if (!op.cos_sin) return;
    const int64_t half = op.rotary / 2;
    const float *cosine = op.cos_sin + position * op.rotary, *sine = cosine + half;
    for (int64_t i = 0; i < half; ++i) {
        const int64_t a = op.rotary_begin + (op.interleaved ? 2 * i : i);
        const int64_t b = op.rotary_begin + (op.interleaved ? 2 * i + 1 : i + half);
        const float x = to[a], y = to[b];
        to[a] = x * cosine[i] - y * sine[i];
        to[b] = y * cosine[i] + x * sine[i];
    }
    if (sizeof(T) == 2)
        for (int64_t i = op.rotary_begin; i < op.rotary_begin + op.rotary; ++i) {
            uint16_t rounded;
            store_one(&rounded, to[i]);
            to[i] = load_one(&rounded);
        }
}

template <class T, class C>
void write_cache(const AttentionOp &op, const Worker &worker, float *row) {
    int64_t first, last;
    worker.share(op.num_tokens, first, last);
    for (int64_t t = first; t < last; ++t) {
        const int64_t slot = op.slot_mapping[t];
        if (slot < 0) continue;
        const int64_t block = slot / op.block_size, offset = slot % op.block_size;
        for (int64_t h = 0; h < op.num_kv_heads; ++h) {
            rotate(op, static_cast<const T *>(op.k) + t * op.k_stride + h * op.head_dim, op.positions[t], op.head_dim, row);
            if (!op.values) {
                narrow_row(row, static_cast<C *>(op.keys) + slot * op.head_dim, op.head_dim);
                continue;
            }
            C *keys = static_cast<C *>(op.keys) + (block * op.num_kv_heads + h) * op.head_dim * op.block_size + offset;
            for (int64_t d = 0; d < op.head_dim; ++d) store_one(keys + d * op.block_size, row[d]);
            widen_row(static_cast<const T *>(op.v) + t * op.v_stride + h * op.v_head_dim, row, op.v_head_dim);
            C *values = static_cast<C *>(op.values) +
                        ((block * op.num_kv_heads + h) * op.block_size + offset) * op.v_head_dim;
            narrow_row(row, values, op.v_head_dim);
        }
    }
}

// scores[R][tokens of the block] of R rows.
template <int R, class C>
FDCPU_INLINE void score_tile(const AttentionOp &op, const C *keys, const float *q, float *scores) {
    for (int64_t t = 0; t < op.block_size; t += kLanes) {
        F acc[R] = {};
        for (int64_t d = 0; d < op.head_dim; ++d) {
            const F key = load(keys + d * op.block_size + t);
            for (int r = 0; r < R; ++r) acc[r] = key * splat(q[r * op.head_dim + d]) + acc[r];
        }
        for (int r = 0; r < R; ++r) store(scores + r * op.block_size + t, acc[r]);
    }
}

// The same over rows of keys, as latent attention keeps them.
template <int R, class C>
FDCPU_INLINE void score_rows(const AttentionOp &op, const C *keys, int64_t tokens, const float *q, float *scores) {
    const int64_t whole = op.head_dim / kLanes * kLanes;
    for (int64_t t = 0; t < tokens; ++t) {
        const C *key = keys + t * op.head_dim;
        F acc[R] = {};
        for (int64_t d = 0; d < whole; d += kLanes) {
            const F part = load(key + d);
            for (int r = 0; r < R; ++r) acc[r] = part * load(q + r * op.head_dim + d) + acc[r];
        }
        for (int r = 0; r < R; ++r) {
            float score = sum_of(acc[r]);
            for (int64_t d = whole; d < op.head_dim; ++d) score += q[r * op.head_dim + d] * load_one(key + d);
            scores[r * op.block_size + t] = score;
        }
    }
}

// out[R][v_head_dim] += weights[R][tokens] values[tokens][v_head_dim].
template <int R, class C>
FDCPU_INLINE void value_tile(const AttentionOp &op, const C *values, int64_t tokens, const float *weights, float *out) {
    const int64_t stride = op.values ? op.v_head_dim : op.head_dim;
    int64_t d = 0;
    for (; d + 2 * kLanes <= op.v_head_dim; d += 2 * kLanes) {
        F low[R], high[R];
        for (int r = 0; r < R; ++r) {
            low[r] = load(out + r * op.v_head_dim + d);
            high[r] = load(out + r * op.v_head_dim + d + kLanes);
        }
        for (int64_t t = 0; t < tokens; ++t) {
            const F v0 = load(values + t * stride + d), v1 = load(values + t * stride + d + kLanes);
            for (int r = 0; r < R; ++r) {
                const F p = splat(weights[r * op.block_size + t]);
                low[r] = v0 * p + low[r];
                high[r] = v1 * p + high[r];
            }
        }
        for (int r = 0; r < R; ++r) {
            store(out + r * op.v_head_dim + d, low[r]);
            store(out + r * op.v_head_dim + d + kLanes, high[r]);
        }
    }
    for (; d < op.v_head_dim; ++d)
        for (int r = 0; r < R; ++r)
            for (int64_t t = 0; t < tokens; ++t)
                out[r * op.v_head_dim + d] += weights[r * op.block_size + t] * load_one(values + t * stride + d);
}

template <int R, class C>
FDCPU_INLINE void score_block(const AttentionOp &op, const C *keys, int64_t tokens, const float *q, float *scores) {
    if (op.values)
        score_tile<R>(op, keys, q, scores);
    else
        score_rows<R>(op, keys, tokens, q, scores);
}

// One row's scores of a block become weights; what was summed before is scaled to the new maximum.
FDCPU_INLINE void soften(const AttentionOp &op, const AttentionScratch &s, int64_t r, int64_t first_token) {
    float *scores = s.scores + r * op.block_size;
    const int64_t valid = std::min(op.block_size, s.limit[r] - first_token);
    if (valid <= 0) {
        std::memset(scores, 0, size_t(op.block_size) * sizeof(float));
        return;
    }
    for (int64_t t = valid; t < op.block_size; ++t) scores[t] = -INFINITY;
    F peaks = load(scores);
    bool has_nan = false;
    for (int64_t t = kLanes; t < op.block_size; t += kLanes) peaks = maximum(load(scores + t), peaks);
    for (int64_t t = 0; t < valid; ++t) has_nan |= scores[t] != scores[t];
    const float peak = std::max(s.peak[r], max_of(peaks));
    const float factor = std::exp(s.peak[r] - peak);
    F total = splat(0);
    for (int64_t t = 0; t < op.block_size; t += kLanes) {
        const F weight = exponential(load(scores + t) - peak);
        store(scores + t, weight);
        total += weight;
    }
    s.sum[r] = has_nan ? std::nanf("") : s.sum[r] * factor + sum_of(total);
    s.peak[r] = peak;
    if (factor != 1.f)
        for (int64_t d = 0; d < op.v_head_dim; ++d) s.out[r * op.v_head_dim + d] *= factor;
}

template <class C>
void attend(const AttentionOp &op, const AttentionScratch &s, int64_t seq, int64_t head, int64_t rows, int64_t top) {
    for (int64_t first = 0; first < top; first += op.block_size) {
        const int64_t block = op.block_tables[seq * op.max_blocks + first / op.block_size];
        const C *keys = static_cast<const C *>(op.keys) + (block * op.num_kv_heads + head) * op.head_dim * op.block_size;
        const int64_t in_values = (block * op.num_kv_heads + head) * op.block_size * op.v_head_dim;
        const C *values = op.values ? static_cast<const C *>(op.values) + in_values : keys;
        const int64_t tokens = std::min(op.block_size, top - first);
        int64_t r = 0;
        for (; r + kTileRows <= rows; r += kTileRows)
            score_block<kTileRows>(op, keys, tokens, s.q + r * op.head_dim, s.scores + r * op.block_size);
        for (; r < rows; ++r)
            score_block<1>(op, keys, tokens, s.q + r * op.head_dim, s.scores + r * op.block_size);
        for (r = 0; r < rows; ++r) soften(op, s, r, first);
        for (r = 0; r + kTileRows <= rows; r += kTileRows)
            value_tile<kTileRows>(op, values, tokens, s.scores + r * op.block_size, s.out + r * op.v_head_dim);
        for (; r < rows; ++r)
            value_tile<1>(op, values, tokens, s.scores + r * op.block_size, s.out + r * op.v_head_dim);
    }
}

template <class T, class C>
void attend_item(const AttentionOp &op, const AttentionScratch &s, int64_t seq, int64_t head, int64_t begin, int64_t end) {
    const int64_t first_token = op.cu_seqlens_q[seq], num_new = op.cu_seqlens_q[seq + 1] - first_token;
    const int64_t seq_len = op.seq_lens[seq], shared = op.num_heads / op.num_kv_heads;
    int64_t top = 0;  // keys that any token of the item may see, all of them written
    for (int64_t t = begin; t < end; ++t)
        if (op.slot_mapping[first_token + t] >= 0) top = std::max(top, seq_len - num_new + t + 1);
    const int64_t rows = (end - begin) * shared;
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t t = begin + r / shared, token = first_token + t, query = head * shared + r % shared;
        s.limit[r] = std::min(top, seq_len - num_new + t + 1);
        s.peak[r] = -INFINITY;
        s.sum[r] = 0;
        float *q = s.q + r * op.head_dim;
        rotate(op, static_cast<const T *>(op.q) + token * op.q_stride + query * op.head_dim, op.positions[token],
               op.head_dim, q);
        for (int64_t d = 0; d < op.head_dim; ++d) q[d] *= op.scale;
    }
    std::memset(s.out, 0, size_t(rows * op.v_head_dim) * sizeof(float));
    attend<C>(op, s, seq, head, rows, top);
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t token = first_token + begin + r / shared, query = head * shared + r % shared;
        float *out = s.out + r * op.v_head_dim;
        const float factor = s.sum[r] == 0 ? 0.f : 1.f / s.sum[r];
        for (int64_t d = 0; d < op.v_head_dim; ++d) out[d] *= factor;
        narrow_row(out, static_cast<T *>(op.y) + (token * op.num_heads + query) * op.v_head_dim, op.v_head_dim);
    }
}

template <class T, class C>
void attention_of(const AttentionOp &op, const Worker &worker) {
    auto &next = *reinterpret_cast<std::atomic<int64_t> *>(worker.scratch);
    const size_t part = (AttentionScratch::num_bytes(op) + 63) / 64 * 64;
    const AttentionScratch scratch(op, worker.scratch + kCounterBytes + part * size_t(worker.thread));
    if (worker.thread == 0) next.store(0);
    write_cache<T, C>(op, worker, scratch.q);
    worker.barrier();
    const int64_t step = tokens_per_item(op);
    int64_t item = 0, mine = next.fetch_add(1);
    for (int64_t seq = op.num_seqs; seq-- > 0;) {
        const int64_t num_new = op.cu_seqlens_q[seq + 1] - op.cu_seqlens_q[seq];
        // The last tokens see most keys: first, so that no thread is left alone with them.
        for (int64_t end = num_new; end > 0; end -= step)
            for (int64_t head = 0; head < op.num_kv_heads; ++head, ++item) {
                if (item != mine) continue;
                attend_item<T, C>(op, scratch, seq, head, std::max<int64_t>(0, end - step), end);
                mine = next.fetch_add(1);
            }
    }
}

void attention(const AttentionOp &op, const Worker &worker) {
    const bool c32 = op.cache_type == DType::f32;
    if (op.type == DType::f32)
        c32 ? attention_of<float, float>(op, worker) : attention_of<float, uint16_t>(op, worker);
    else
        c32 ? attention_of<uint16_t, float>(op, worker) : attention_of<uint16_t, uint16_t>(op, worker);
}

}  // namespace fdcpu::FDCPU_NAMESPACE
