// Paged attention over this device's own cache layout, with rotation and the cache write before it.
//
// An item of work is one kv head and a few tokens of one sequence; with g query heads for a kv head its
// rows are these tokens times g. Blocks of the cache are taken one after another (attention_softmax.inl), so
// that the scores of one block are all that is kept.

namespace fdcpu::FDCPU_NAMESPACE {

constexpr int64_t kMostItemRows = 96;  // rows of an item, unless one token already has more
constexpr int kTileRows = 8;           // rows of a register tile
constexpr int64_t kSpanRows = 32, kSpan = 256;  // rows and tokens that tiles take at once

FDCPU_INLINE int64_t tokens_per_item(const AttentionOp &op) {
    return std::max<int64_t>(1, kMostItemRows / (op.num_heads / op.num_kv_heads));
}

// Bfloat16 in pairs, as the dot product wants them: keys [head_dim / 2, block_size, 2] of a block and head,
// values [block_size / 2, v_head_dim, 2]. Rows of tokens (latent attention) and float32 stay as they are.
template <class C>
FDCPU_INLINE bool is_paired(const AttentionOp &op) {
    return sizeof(C) == 2 && op.values;
}

// The first key that the query of a sequence's token sees (a row of nobody has tokens below 0), and the token that its
// block begins with: what lies in front of that may be of others.
FDCPU_INLINE int64_t first_key(const AttentionOp &op, int64_t token) {
    token = std::max<int64_t>(0, token);
    if (op.chunk) return token / op.chunk * op.chunk;
    return op.window ? std::max<int64_t>(0, token + 1 - op.window) : 0;
}
FDCPU_INLINE int64_t block_begin(const AttentionOp &op, int64_t token) { return token / op.block_size * op.block_size; }

struct AttentionScratch {
    float *q, *scores, *out, *peak;
    float *sum;  // [rows][kLanes]: see attention_softmax.inl
    int64_t *start, *limit;  // a row sees the keys of tokens [start, limit)
    Input *q_pairs, *weights;            // what bfloat16 in pairs meets
    uint16_t *tail;                      // of values
    float *key_scale, *value_scale;      // of int8: the tokens' at hand, and
    uint8_t *wide_keys, *wide_values;    // their blocks

    // Register tiles and tiles read a few rows more.
    static int64_t num_rows(const AttentionOp &op) {
        return (tokens_per_item(op) * (op.num_heads / op.num_kv_heads) + kTileRows + 15) / 16 * 16;
    }
    static int64_t num_scores(const AttentionOp &op) {
        return std::max(num_rows(op) * op.block_size, kSpanRows * kSpan);
    }
    AttentionScratch(const AttentionOp &op, uint8_t *at) {
        const int64_t rows = num_rows(op);
        q = reinterpret_cast<float *>(at);
        scores = q + rows * op.head_dim;
        out = scores + num_scores(op);
        peak = out + rows * op.v_head_dim;
        sum = peak + rows;
        start = reinterpret_cast<int64_t *>(sum + rows * kLanes);
        limit = start + rows;
        q_pairs = reinterpret_cast<Input *>(limit + rows);
        weights = q_pairs + rows * op.head_dim;
        tail = reinterpret_cast<uint16_t *>(weights + num_scores(op));
        key_scale = reinterpret_cast<float *>(tail + 32 * op.v_head_dim);
        value_scale = key_scale + num_wide(op);
        wide_keys = reinterpret_cast<uint8_t *>(value_scale + num_wide(op));
        wide_values = wide_keys + num_wide(op) * op.head_dim * wide_bytes(op);
    }
    // Room for a few heads on their way into the cache.
    uint16_t *bits() const { return reinterpret_cast<uint16_t *>(weights); }
    // Tokens that are widened at once, and bytes of a number then.
    static int64_t num_wide(const AttentionOp &op) { return op.is_int8 ? std::max(kSpan, op.block_size) : 0; }
    static int64_t wide_bytes(const AttentionOp &op) { return op.type == DType::f32 ? 4 : 2; }
    static size_t num_bytes(const AttentionOp &op) {
        const size_t per_row = size_t(op.head_dim) * (4 + sizeof(Input)) + size_t(op.v_head_dim + 1 + kLanes) * 4 + 16;
        const size_t wide = size_t(num_wide(op) * (8 + (op.head_dim + op.v_head_dim) * wide_bytes(op)));
        return size_t(num_rows(op)) * per_row + size_t(num_scores(op)) * (4 + sizeof(Input)) + size_t(op.v_head_dim) * 64 + wide;
    }
};

size_t attention_scratch(const AttentionOp &op, int num_threads) {
    return (AttentionScratch::num_bytes(op) + 63) / 64 * 64 * size_t(num_threads);
}

// Sixteen pairs (x, y), rotated: each half a register, or alternating in two.
FDCPU_INLINE void rotate_pairs(float *x, float *y, bool interleaved, const float *cosine, const float *sine) {
    F a = load(x), b = load(y);
    const F c = load(cosine), s = load(sine);
    if (interleaved) part_pairs(a, b, a, b);
    F first = a * c - b * s, second = b * c + a * s;
    if (interleaved) join_pairs(first, second, first, second);
    store(x, first);
    store(y, second);
}

// One head's vector, rotated by its position and rounded to T as the reference does, unless the next thing
// is that it becomes pairs.
template <class T>
FDCPU_INLINE void rotate(const AttentionOp &op, const T *from, int64_t position, int64_t size, float *to) {
    widen_row(from, to, size);
    if (!op.cos_sin) return;
    const int64_t half = op.rotary / 2;
    const float *cosine = op.cos_sin + position * op.rotary, *sine = cosine + half;
    float *head = to + op.rotary_begin;
    int64_t i = 0;
    for (; i + kLanes <= half; i += kLanes) {
        float *x = head + (op.interleaved ? 2 * i : i), *y = op.interleaved ? x + kLanes : x + half;
        rotate_pairs(x, y, op.interleaved, cosine + i, sine + i);
    }
    for (; i < half; ++i) {
        const int64_t a = op.interleaved ? 2 * i : i, b = op.interleaved ? 2 * i + 1 : i + half;
        const float x = head[a], y = head[b];
        head[a] = x * cosine[i] - y * sine[i];
        head[b] = y * cosine[i] + x * sine[i];
    }
    if (sizeof(T) == 4 || (is_paired<T>(op) && !op.is_int8)) return;
    for (i = 0; i + kLanes <= op.rotary; i += kLanes) store(head + i, round_to_bf16(load(head + i)));
    for (; i < op.rotary; ++i) {
        uint16_t rounded;
        store_one(&rounded, head[i]);
        head[i] = load_one(&rounded);
    }
}

// scores[R][tokens of the block] of R rows.
template <int R, class C>
FDCPU_INLINE void score_tile(const AttentionOp &op, const C *keys, const float *q, float *scores) {
    for (int64_t t = 0; t < op.block_size; t += kLanes) {
        F acc[R] = {};
        for (int64_t d = 0; d < op.head_dim; ++d) {
            const F key = load(keys + d * op.block_size + t);
            FDCPU_UNROLL
            for (int r = 0; r < R; ++r) acc[r] = key * splat(q[r * op.head_dim + d]) + acc[r];
        }
        FDCPU_UNROLL
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
            FDCPU_UNROLL
            for (int r = 0; r < R; ++r) acc[r] = part * load(q + r * op.head_dim + d) + acc[r];
        }
        FDCPU_UNROLL
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
        FDCPU_UNROLL
        for (int r = 0; r < R; ++r) {
            low[r] = load(out + r * op.v_head_dim + d);
            high[r] = load(out + r * op.v_head_dim + d + kLanes);
        }
        for (int64_t t = 0; t < tokens; ++t) {
            const F v0 = load(values + t * stride + d), v1 = load(values + t * stride + d + kLanes);
            FDCPU_UNROLL
            for (int r = 0; r < R; ++r) {
                const F p = splat(weights[r * op.block_size + t]);
                low[r] = v0 * p + low[r];
                high[r] = v1 * p + high[r];
            }
        }
        FDCPU_UNROLL
        for (int r = 0; r < R; ++r) {
            store(out + r * op.v_head_dim + d, low[r]);
            store(out + r * op.v_head_dim + d + kLanes, high[r]);
        }
    }
    for (; d < op.v_head_dim; ++d)
        FDCPU_UNROLL
        for (int r = 0; r < R; ++r)
            for (int64_t t = 0; t < tokens; ++t)
                out[r * op.v_head_dim + d] += weights[r * op.block_size + t] * load_one(values + t * stride + d);
}

// ---- pairs: R rows by V vectors

template <int R>
constexpr int kPairVectors = FDCPU_LEVEL != 1 ? 4 : R == 1 ? 2 : 1;

// The block of the cache that is met next. It comes while the one at hand is met, a few lines at a time: as many
// as a block has, asked for at once, would be waited for.
struct NextBlock {
    const uint16_t *keys = nullptr, *values = nullptr;
    int64_t tokens = 0;
};
struct Fetching {
    const uint8_t *at = nullptr;
    int64_t lines = 0, step = 0;
    FDCPU_INLINE void fetch() {
        for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(at + i * 64, 0, 2);
        at += step;
    }
};
// Keys with every two numbers of those at hand, values with every two of `tokens` and V registers.
FDCPU_INLINE Fetching keys_of(const AttentionOp &op, const NextBlock &next) {
    return {reinterpret_cast<const uint8_t *>(next.keys), (next.tokens + kLanes - 1) / kLanes, op.block_size * 4};
}
template <int V>
FDCPU_INLINE Fetching values_of(const AttentionOp &op, const NextBlock &next, int64_t tokens) {
    constexpr int64_t kWidth = V * kLanes;
    const int64_t times = (tokens + 1) / 2 * (op.v_head_dim / kWidth + op.v_head_dim % kWidth / kLanes);
    const int64_t lines = times ? ((next.tokens + 1) / 2 * op.v_head_dim / kLanes + times - 1) / times : 0;
    return {reinterpret_cast<const uint8_t *>(next.values), lines, lines * 64};
}

template <int R, int V>
FDCPU_INLINE void score_pairs(const AttentionOp &op, const uint16_t *keys, const Input *q, Fetching next, float *scores) {
    F acc[R][V] = {};
    for (int64_t d = 0; d < op.head_dim; d += 2, keys += 2 * op.block_size) {
        next.fetch();
        I line[V];
        FDCPU_UNROLL
        for (int v = 0; v < V; ++v) line[v] = load_as<I>(keys + v * 2 * kLanes);
        add_pairs(line, Rows<R>(q + d, op.head_dim), 0, acc);
    }
    FDCPU_UNROLL
    for (int r = 0; r < R; ++r)
        FDCPU_UNROLL
        for (int v = 0; v < V; ++v) store(scores + r * op.block_size + v * kLanes, acc[r][v]);
}

template <int R, int V>
FDCPU_INLINE void value_pairs(const AttentionOp &op, const uint16_t *values, int64_t tokens, const Input *weights,
                              Fetching &next, float *out) {
    F acc[R][V];
    FDCPU_UNROLL
    for (int r = 0; r < R; ++r)
        FDCPU_UNROLL
        for (int v = 0; v < V; ++v) acc[r][v] = load(out + r * op.v_head_dim + v * kLanes);
    for (int64_t t = 0; t < tokens; t += 2, values += 2 * op.v_head_dim) {
        next.fetch();
        I line[V];
        FDCPU_UNROLL
        for (int v = 0; v < V; ++v) {
            line[v] = load_as<I>(values + v * 2 * kLanes);
            // The slot after the last token may hold anything, and nothing times that may be NaN.
            if (t + 1 == tokens) line[v] &= 0xffff;
        }
        add_pairs(line, Rows<R>(weights + t, op.block_size), 0, acc);
    }
    FDCPU_UNROLL
    for (int r = 0; r < R; ++r)
        FDCPU_UNROLL
        for (int v = 0; v < V; ++v) store(out + r * op.v_head_dim + v * kLanes, acc[r][v]);
}

// Of the block's first tokens, and some more.
template <int R>
void paired_scores(const AttentionOp &op, const uint16_t *keys, int64_t tokens, const Input *q, Fetching next,
                   float *scores) {
    constexpr int V = kPairVectors<R>;
    int64_t t = 0;
    for (; V > 2 && t + (V - 1) * kLanes < tokens && t + V * kLanes <= op.block_size; t += V * kLanes, next = {})
        score_pairs<R, V>(op, keys + 2 * t, q, next, scores + t);
    for (; V > 1 && t + kLanes < tokens; t += 2 * kLanes, next = {})
        score_pairs<R, 2>(op, keys + 2 * t, q, next, scores + t);
    for (; t < tokens; t += kLanes, next = {}) score_pairs<R, 1>(op, keys + 2 * t, q, next, scores + t);
}

template <int R>
void paired_values(const AttentionOp &op, const uint16_t *values, int64_t tokens, const Input *weights, Fetching next,
                   float *out) {
    constexpr int V = kPairVectors<R>;
    int64_t d = 0;
    for (; d + V * kLanes <= op.v_head_dim; d += V * kLanes)
        value_pairs<R, V>(op, values + 2 * d, tokens, weights, next, out + d);
    for (; d + kLanes <= op.v_head_dim; d += kLanes) value_pairs<R, 1>(op, values + 2 * d, tokens, weights, next, out + d);
    for (; d < op.v_head_dim; ++d)
        FDCPU_UNROLL
        for (int r = 0; r < R; ++r)
            for (int64_t t = 0; t < tokens; ++t)
                out[r * op.v_head_dim + d] += load_one(weights + r * op.block_size + t) *
                                              load_one(values + (t / 2 * op.v_head_dim + d) * 2 + t % 2);
}

constexpr int kPairRows = FDCPU_LEVEL >= 1 ? 6 : 2;

// work(R, first row) for all rows, R of them at a time.
template <int R = kPairRows, class Work>
FDCPU_INLINE void in_tiles_of_rows(int64_t rows, int64_t first, const Work &work) {
    int64_t r = first;
    // Four and four are faster than six and two.
    if (R == 6 && (rows - r) % 6) {
        for (; rows - r > 8; r += R) work(std::integral_constant<int, R>(), r);
        return in_tiles_of_rows<std::min(R, 4)>(rows, r, work);
    }
    for (; r + R <= rows; r += R) work(std::integral_constant<int, R>(), r);
    if constexpr (R > 1) in_tiles_of_rows<R == 6 ? 4 : R - 1>(rows, r, work);
}

template <int R, class C>
FDCPU_INLINE void score_block(const AttentionOp &op, const C *keys, int64_t tokens, const float *q, float *scores) {
    if (op.values)
        score_tile<R>(op, keys, q, scores);
    else
        score_rows<R>(op, keys, tokens, q, scores);
}

}  // namespace fdcpu::FDCPU_NAMESPACE
