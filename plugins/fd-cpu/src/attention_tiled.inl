// One block of the cache in tiles: two tiles of rows by two of tokens (scores), then by two of dimensions
// (values). Keys and values in pairs are rows of weight tiles as they lie in the cache.

namespace fdcpu::FDCPU_NAMESPACE {

#if FDCPU_TILES

constexpr int64_t kLeastRows = 4;  // fewer are faster in registers

FDCPU_INLINE bool fits_tiles(const AttentionOp &op, int64_t rows) {
    return rows >= kLeastRows && op.head_dim % 32 == 0 && op.v_head_dim % 32 == 0 && op.block_size % 32 == 0;
}

FDCPU_INLINE void score_tiles(const AttentionOp &op, const uint16_t *keys, int64_t tokens, int64_t rows,
                              const uint16_t *q, float *scores) {
    const int64_t q_stride = op.head_dim * 2, stride = op.block_size * 4;
    for (int64_t r = 0; r < rows; r += kTall)
        for (int64_t t = 0; t < tokens; t += 2 * kTileSide) {
            const bool has_second = rows - r > kTileSide;
            FDCPU_TILE_ZERO(0);
            FDCPU_TILE_ZERO(1);
            FDCPU_TILE_ZERO(2);
            FDCPU_TILE_ZERO(3);
            for (int64_t d = 0; d < op.head_dim; d += 32) {
                const uint16_t *from = q + r * op.head_dim + d, *line = keys + d * op.block_size + 2 * t;
                FDCPU_TILE_LOAD(4, from, q_stride);
                FDCPU_TILE_LOAD(6, line, stride);
                FDCPU_TILE_BF16(0, 4, 6);
                FDCPU_TILE_LOAD(7, line + 2 * kTileSide, stride);
                FDCPU_TILE_BF16(1, 4, 7);
                if (!has_second) continue;
                FDCPU_TILE_LOAD(5, from + kTileSide * op.head_dim, q_stride);
                FDCPU_TILE_BF16(2, 5, 6);
                FDCPU_TILE_BF16(3, 5, 7);
            }
            float *to = scores + r * op.block_size + t;
            FDCPU_TILE_STORE(0, to, stride);
            FDCPU_TILE_STORE(1, to + kTileSide, stride);
            if (!has_second) continue;
            FDCPU_TILE_STORE(2, to + kTileSide * op.block_size, stride);
            FDCPU_TILE_STORE(3, to + kTileSide * op.block_size + kTileSide, stride);
        }
}

// `tail` is room for 32 tokens: slots behind the last token may hold anything, and nothing times that may
// be NaN.
FDCPU_INLINE void value_tiles(const AttentionOp &op, const uint16_t *values, int64_t tokens, int64_t rows,
                              const uint16_t *weights, uint16_t *tail, float *out) {
    const int64_t pair = 2 * op.v_head_dim, whole = tokens / 32 * 32, rest = tokens - whole;
    if (rest) {
        std::memset(tail, 0, size_t(32 * op.v_head_dim) * sizeof(uint16_t));
        std::memcpy(tail, values + whole / 2 * pair, size_t((rest + 1) / 2 * pair) * sizeof(uint16_t));
        if (rest % 2)
            for (int64_t d = 0; d < op.v_head_dim; ++d) tail[rest / 2 * pair + 2 * d + 1] = 0;
    }
    const int64_t out_stride = op.v_head_dim * 4, weight_stride = op.block_size * 2, stride = pair * 2;
    for (int64_t r = 0; r < rows; r += kTall)
        for (int64_t d = 0; d < op.v_head_dim; d += 2 * kTileSide) {
            const bool has_second = rows - r > kTileSide;
            float *to = out + r * op.v_head_dim + d, *second = to + kTileSide * op.v_head_dim;
            FDCPU_TILE_LOAD(0, to, out_stride);
            FDCPU_TILE_LOAD(1, to + kTileSide, out_stride);
            if (has_second) {
                FDCPU_TILE_LOAD(2, second, out_stride);
                FDCPU_TILE_LOAD(3, second + kTileSide, out_stride);
            }
            for (int64_t t = 0; t < tokens; t += 32) {
                const uint16_t *line = (t < whole ? values + t / 2 * pair : tail) + 2 * d;
                const uint16_t *from = weights + r * op.block_size + t;
                FDCPU_TILE_LOAD(4, from, weight_stride);
                FDCPU_TILE_LOAD(6, line, stride);
                FDCPU_TILE_BF16(0, 4, 6);
                FDCPU_TILE_LOAD(7, line + 2 * kTileSide, stride);
                FDCPU_TILE_BF16(1, 4, 7);
                if (!has_second) continue;
                FDCPU_TILE_LOAD(5, from + kTileSide * op.block_size, weight_stride);
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

FDCPU_INLINE void attend_tiles(const AttentionOp &op, const AttentionScratch &s, TileUse &use, const uint16_t *keys,
                               const uint16_t *values, int64_t rows, int64_t first, int64_t tokens) {
    use.shape(64, int(std::min<int64_t>(rows, kTileSide)), true);
    score_tiles(op, keys, tokens, rows, s.q_pairs, s.scores);
    for (int64_t r = 0; r < rows; ++r) soften(op, s, r, first);
    value_tiles(op, values, tokens, rows, s.weights, s.tail, s.out);
}

#else

FDCPU_INLINE bool fits_tiles(const AttentionOp &, int64_t) { return false; }
FDCPU_INLINE void attend_tiles(const AttentionOp &, const AttentionScratch &, TileUse &, const uint16_t *,
                               const uint16_t *, int64_t, int64_t, int64_t) {}

#endif

}  // namespace fdcpu::FDCPU_NAMESPACE
