// Attention in tiles: 32 rows and 256 tokens of the cache at a time, two tiles of rows by two of tokens
// (scores), then by two of dimensions (values). Keys and values in pairs are rows of weight tiles as they lie
// in the cache.

namespace fdcpu::FDCPU_NAMESPACE {

#if FDCPU_TILES

constexpr int64_t kLeastRows = 4;  // fewer are faster in registers

FDCPU_INLINE bool fits_tiles(const AttentionOp &op, int64_t rows) {
    return rows >= kLeastRows && op.head_dim % 32 == 0 && op.v_head_dim % 32 == 0 && op.block_size % 32 == 0;
}

// The cache of one sequence and kv head; without `blocks` what was widened of it, from token `begin` on.
struct CachedHead {
    const AttentionOp &op;
    const void *all_keys, *all_values;
    const int32_t *blocks;
    int64_t head, begin;

    FDCPU_INLINE const uint16_t *keys(int64_t token) const {
        return static_cast<const uint16_t *>(all_keys) + place(token) * op.head_dim * op.block_size + token % op.block_size * 2;
    }
    FDCPU_INLINE const uint16_t *values(int64_t token) const {
        return static_cast<const uint16_t *>(all_values) +
               (place(token) * op.block_size + token % op.block_size) * op.v_head_dim;
    }
    FDCPU_INLINE int64_t place(int64_t token) const {
        return blocks ? blocks[token / op.block_size] * op.num_kv_heads + head : (token - begin) / op.block_size;
    }
};

// The blocks of tokens [first, last).
FDCPU_INLINE CachedHead widened(const CachedHead &cache, const AttentionScratch &s, int64_t first, int64_t last) {
    const AttentionOp &op = cache.op;
    for (int64_t t = first, n = 0; t < last; t += op.block_size, ++n)
        widen_block(op, cache.place(t), n, reinterpret_cast<uint16_t *>(s.wide_keys),
                    reinterpret_cast<uint16_t *>(s.wide_values), s.key_scale, s.value_scale);
    return {op, s.wide_keys, s.wide_values, nullptr, cache.head, first};
}

// Scores of `rows` rows for tokens [first, last): [row][kSpan].
FDCPU_INLINE void score_tiles(const AttentionOp &op, const CachedHead &cache, int64_t first, int64_t last, int64_t rows,
                              const uint16_t *q, float *scores) {
    const int64_t q_stride = op.head_dim * 2, stride = op.block_size * 4;
    const bool has_second = rows > kTileSide;
    for (int64_t t = first; t < last; t += 2 * kTileSide) {
        const uint16_t *line = cache.keys(t);
        FDCPU_TILE_ZERO(0);
        FDCPU_TILE_ZERO(1);
        FDCPU_TILE_ZERO(2);
        FDCPU_TILE_ZERO(3);
        for (int64_t d = 0; d < op.head_dim; d += 32, line += 32 * op.block_size) {
            FDCPU_TILE_LOAD(4, q + d, q_stride);
            FDCPU_TILE_LOAD(6, line, stride);
            FDCPU_TILE_BF16(0, 4, 6);
            FDCPU_TILE_LOAD(7, line + 2 * kTileSide, stride);
            FDCPU_TILE_BF16(1, 4, 7);
            if (!has_second) continue;
            FDCPU_TILE_LOAD(5, q + d + kTileSide * op.head_dim, q_stride);
            FDCPU_TILE_BF16(2, 5, 6);
            FDCPU_TILE_BF16(3, 5, 7);
        }
        float *to = scores + t - first;
        FDCPU_TILE_STORE(0, to, kSpan * 4);
        FDCPU_TILE_STORE(1, to + kTileSide, kSpan * 4);
        if (!has_second) continue;
        FDCPU_TILE_STORE(2, to + kTileSide * kSpan, kSpan * 4);
        FDCPU_TILE_STORE(3, to + kTileSide * kSpan + kTileSide, kSpan * 4);
    }
}

// The last tokens, fewer than 32, with zeros after them: slots there may hold anything, and nothing times
// that may be NaN.
FDCPU_INLINE void copy_tail(const AttentionOp &op, const uint16_t *values, int64_t tokens, uint16_t *tail) {
    const int64_t pair = 2 * op.v_head_dim;
    std::memset(tail, 0, size_t(32 * op.v_head_dim) * sizeof(uint16_t));
    std::memcpy(tail, values, size_t((tokens + 1) / 2 * pair) * sizeof(uint16_t));
    if (tokens % 2)
        for (int64_t d = 0; d < op.v_head_dim; ++d) tail[tokens / 2 * pair + 2 * d + 1] = 0;
}

// out[rows][v_head_dim] += weights[rows][kSpan] times values of tokens [first, last).
FDCPU_INLINE void value_tiles(const AttentionOp &op, const CachedHead &cache, int64_t first, int64_t last, int64_t rows,
                              const uint16_t *weights, const uint16_t *tail, float *out) {
    const int64_t out_stride = op.v_head_dim * 4, weight_stride = kSpan * 2, stride = op.v_head_dim * 4;
    const bool has_second = rows > kTileSide;
    for (int64_t d = 0; d < op.v_head_dim; d += 2 * kTileSide) {
        float *to = out + d, *second = to + kTileSide * op.v_head_dim;
        FDCPU_TILE_LOAD(0, to, out_stride);
        FDCPU_TILE_LOAD(1, to + kTileSide, out_stride);
        if (has_second) {
            FDCPU_TILE_LOAD(2, second, out_stride);
            FDCPU_TILE_LOAD(3, second + kTileSide, out_stride);
        }
        for (int64_t t = first; t < last; t += 32) {
            const uint16_t *line = (last - t < 32 ? tail : cache.values(t)) + 2 * d, *from = weights + t - first;
            FDCPU_TILE_LOAD(4, from, weight_stride);
            FDCPU_TILE_LOAD(6, line, stride);
            FDCPU_TILE_BF16(0, 4, 6);
            FDCPU_TILE_LOAD(7, line + 2 * kTileSide, stride);
            FDCPU_TILE_BF16(1, 4, 7);
            if (!has_second) continue;
            FDCPU_TILE_LOAD(5, from + kTileSide * kSpan, weight_stride);
            FDCPU_TILE_BF16(2, 5, 6);
            FDCPU_TILE_BF16(3, 5, 7);
        }
        FDCPU_TILE_STORE(0, to, out_stride);
        FDCPU_TILE_STORE(1, to + kTileSide, out_stride);
        if (!has_second) continue;
        FDCPU_TILE_STORE(2, second, out_stride);
        FDCPU_TILE_STORE(3, second + kTileSide, out_stride);
    }
}

FDCPU_INLINE void attend_tiles(const AttentionOp &op, const AttentionScratch &s, TileUse &use, int64_t seq, int64_t head,
                               int64_t num_rows) {
    const CachedHead stored{op, op.keys, op.values, op.block_tables + seq * op.max_blocks, head, 0};
    const int64_t end = *std::max_element(s.limit, s.limit + num_rows);
    const int64_t start = *std::min_element(s.start, s.start + num_rows);
    use.shape(64, int(std::min<int64_t>(num_rows, kTileSide)), true);
    for (int64_t first = block_begin(op, start); first < end; first += kSpan) {
        const CachedHead cache = op.is_int8 ? widened(stored, s, first, std::min(end, first + kSpan)) : stored;
        for (int64_t begin = 0; begin < num_rows; begin += kSpanRows) {
            const int64_t rows = std::min(kSpanRows, num_rows - begin);
            const int64_t top = *std::max_element(s.limit + begin, s.limit + begin + rows);
            if (top <= first || *std::min_element(s.start + begin, s.start + begin + rows) >= first + kSpan) continue;
            const int64_t last = std::min(top, first + kSpan), rest = last % 32;
            if (rest) copy_tail(op, cache.values(last - rest), rest, s.tail);
            score_tiles(op, cache, first, last, rows, s.q_pairs + begin * op.head_dim, s.scores);
            const int64_t width = (last - first + 31) / 32 * 32;
            soften(op, s, begin, rows, first, width, kSpan, s.scores, s.weights);
            value_tiles(op, cache, first, last, rows, s.weights, s.tail, s.out + begin * op.v_head_dim);
        }
    }
}

#else

FDCPU_INLINE bool fits_tiles(const AttentionOp &, int64_t) { return false; }
FDCPU_INLINE void attend_tiles(const AttentionOp &, const AttentionScratch &, TileUse &, int64_t, int64_t, int64_t) {}

#endif

}  // namespace fdcpu::FDCPU_NAMESPACE
