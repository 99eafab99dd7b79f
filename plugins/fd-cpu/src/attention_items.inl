// Paged attention item by item: one kv head and a few tokens of one sequence.

namespace fdcpu::FDCPU_NAMESPACE {

FDCPU_INLINE void attend_pairs(const AttentionOp &op, const AttentionScratch &s, const uint16_t *keys,
                               const uint16_t *values, int64_t rows, int64_t first, int64_t tokens, const NextBlock &next) {
    // Tokens of the block that any of these rows sees: the last one sees most.
    const auto seen = [&](int64_t last_row) { return std::min(tokens, s.limit[last_row] - first); };
    in_tiles_of_rows(rows, 0, [&](auto count, int64_t r) {
        paired_scores<count>(op, keys, seen(r + count - 1), s.q_pairs + r * op.head_dim,
                             r ? Fetching() : keys_of(op, next), s.scores + r * op.block_size);
    });
    soften(op, s, 0, rows, first, op.block_size, op.block_size, s.scores, s.weights);
    in_tiles_of_rows(rows, 0, [&](auto count, int64_t r) {
        const int64_t most = seen(r + count - 1);
        paired_values<count>(op, values, most, s.weights + r * op.block_size,
                             r ? Fetching() : values_of<kPairVectors<count>>(op, next, most), s.out + r * op.v_head_dim);
    });
}

// Of bfloat16 in pairs: the sequence's tokens from `first` on, up to `top`.
FDCPU_INLINE NextBlock block_at(const AttentionOp &op, int64_t seq, int64_t head, int64_t first, int64_t top) {
    const int64_t block = op.block_tables[seq * op.max_blocks + first / op.block_size];
    const int64_t place = (block * op.num_kv_heads + head) * op.block_size;
    return {static_cast<const uint16_t *>(op.keys) + place * op.head_dim,
            static_cast<const uint16_t *>(op.values) + place * op.v_head_dim, std::min(op.block_size, top - first)};
}

template <class C>
void attend(const AttentionOp &op, const AttentionScratch &s, TileUse &use, int64_t seq, int64_t head, int64_t rows,
            int64_t top, const NextBlock &after) {
    if (is_paired<C>(op) && fits_tiles(op, rows)) return attend_tiles(op, s, use, seq, head, rows);
    const int64_t start = *std::min_element(s.start, s.start + rows);
    for (int64_t first = block_begin(op, start); first < top; first += op.block_size) {
        const int64_t block = op.block_tables[seq * op.max_blocks + first / op.block_size];
        const int64_t place = block * op.num_kv_heads + head;
        const C *keys = static_cast<const C *>(op.keys) + place * op.head_dim * op.block_size;
        const C *values = op.values ? static_cast<const C *>(op.values) + place * op.block_size * op.v_head_dim : keys;
        if (op.is_int8) {
            auto *wide_keys = reinterpret_cast<C *>(s.wide_keys), *wide_values = reinterpret_cast<C *>(s.wide_values);
            widen_block(op, place, 0, wide_keys, wide_values, s.key_scale, s.value_scale);
            keys = wide_keys;
            values = wide_values;
        }
        const int64_t tokens = std::min(op.block_size, top - first);
        if (is_paired<C>(op)) {
            const int64_t end = first + op.block_size;
            attend_pairs(op, s, reinterpret_cast<const uint16_t *>(keys), reinterpret_cast<const uint16_t *>(values), rows,
                         first, tokens,
                         op.is_int8 ? NextBlock() : end < top ? block_at(op, seq, head, end, top) : after);
            continue;
        }
        int64_t r = 0;
        for (; r + kTileRows <= rows; r += kTileRows)
            score_block<kTileRows>(op, keys, tokens, s.q + r * op.head_dim, s.scores + r * op.block_size);
        for (; r < rows; ++r)
            score_block<1>(op, keys, tokens, s.q + r * op.head_dim, s.scores + r * op.block_size);
        soften(op, s, 0, rows, first, op.block_size, op.block_size, s.scores, nullptr);
        for (r = 0; r + kTileRows <= rows; r += kTileRows)
            value_tile<kTileRows>(op, values, tokens, s.scores + r * op.block_size, s.out + r * op.v_head_dim);
        for (; r < rows; ++r)
            value_tile<1>(op, values, tokens, s.scores + r * op.block_size, s.out + r * op.v_head_dim);
    }
}

constexpr int64_t kTokensAhead = 4;  // whose queries and results are fetched

// New tokens [begin, end) of a sequence, and a kv head.
struct Item {
    int64_t seq, head, begin, end;
};

template <class T>
void attend_item(const AttentionOp &op, const AttentionScratch &s, TileUse &use, const Item &item, bool writes,
                 const NextBlock &after) {
    const int64_t seq = item.seq, head = item.head, begin = item.begin, end = item.end;
    const int64_t first_token = op.cu_seqlens_q[seq], num_new = op.cu_seqlens_q[seq + 1] - first_token;
    const int64_t seq_len = op.seq_lens[seq], shared = op.num_heads / op.num_kv_heads;
    int64_t top = 0;  // keys that any token of the item may see, all of them written
    for (int64_t t = begin; t < end; ++t)
        if (op.slot_mapping[first_token + t] >= 0) top = std::max(top, seq_len - num_new + t + 1);
    const int64_t rows = (end - begin) * shared;
    if (writes)
        for (int64_t t = begin; t < end; ++t) write_head<T>(op, s, first_token + t, head);
    const auto query = [&](int64_t r) {
        const int64_t token = first_token + begin + r / shared;
        return static_cast<const T *>(op.q) + token * op.q_stride + (head * shared + r % shared) * op.head_dim;
    };
    const int64_t ahead = kTokensAhead * shared;
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t d = 0; d < op.head_dim && r + ahead < rows; d += 64 / int64_t(sizeof(T)))
            __builtin_prefetch(query(r + ahead) + d);
        const int64_t t = begin + r / shared;
        s.start[r] = first_key(op, seq_len - num_new + t);
        s.limit[r] = std::min(top, seq_len - num_new + t + 1);
        // A sink is a logit that counts in the sum and nowhere else.
        s.peak[r] = op.sinks ? op.sinks[head * shared + r % shared] / op.scale : -INFINITY;
        store(s.sum + r * kLanes, splat(0));
        s.sum[r * kLanes] = s.peak[r] > -INFINITY;
        float *q = is_paired<T>(op) ? s.q : s.q + r * op.head_dim;
        rotate(op, query(r), op.positions[first_token + t], op.head_dim, q);
        for (int64_t d = 0; d < op.head_dim && op.key_factors; ++d) q[d] *= op.key_factors[head * op.head_dim + d];
        if (is_paired<T>(op)) round_row(q, s.q_pairs + r * op.head_dim, op.head_dim);
    }
    std::memset(s.out, 0, size_t(rows * op.v_head_dim) * sizeof(float));
    attend<T>(op, s, use, seq, head, rows, top, after);
    const auto result = [&](int64_t r) {
        const int64_t token = first_token + begin + r / shared;
        return static_cast<T *>(op.y) + (token * op.num_heads + head * shared + r % shared) * op.v_head_dim;
    };
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t d = 0; d < op.v_head_dim && r + ahead < rows; d += 64 / int64_t(sizeof(T)))
            __builtin_prefetch(result(r + ahead) + d, 1);
        float *out = s.out + r * op.v_head_dim;
        const float sum = sum_of(load(s.sum + r * kLanes)), factor = sum == 0 ? 0.f : 1.f / sum;
        for (int64_t d = 0; d < op.v_head_dim && op.value_factors; ++d) out[d] *= op.value_factors[head * op.v_head_dim + d];
        scale_to(out, factor, result(r), op.v_head_dim);
    }
}

// The first block that an item reads, which is fetched while the item before it is computed, bit by bit. It comes at
// once where there is none before, and where tiles compute that.
template <class T>
FDCPU_INLINE NextBlock first_block(const AttentionOp &op, const Item &item, bool is_behind) {
    if (!is_paired<T>(op) || op.is_int8) return {};
    const int64_t seq_len = op.seq_lens[item.seq], num_new = op.cu_seqlens_q[item.seq + 1] - op.cu_seqlens_q[item.seq];
    const int64_t first = block_begin(op, first_key(op, seq_len - num_new + item.begin));
    const NextBlock block = block_at(op, item.seq, item.head, first, seq_len);
    if (is_behind && !fits_tiles(op, (item.end - item.begin) * (op.num_heads / op.num_kv_heads))) return block;
    for (int64_t d = 0; d < op.head_dim; d += 2)
        for (int64_t t = 0; t < block.tokens; t += 16) __builtin_prefetch(block.keys + d * op.block_size + 2 * t, 0, 2);
    for (int64_t i = 0; i < block.tokens * op.v_head_dim; i += 32) __builtin_prefetch(block.values + i, 0, 2);
    return {};
}

template <class T>
void attention_of(const AttentionOp &op, const Worker &worker) {
    const size_t part = (AttentionScratch::num_bytes(op) + 63) / 64 * 64;
    const AttentionScratch scratch(op, worker.scratch + part * size_t(worker.thread));
    const int64_t step = tokens_per_item(op);
    // Items with all new tokens of their sequences write them themselves: nobody else reads them.
    bool writes = true;
    for (int64_t seq = 0; seq < op.num_seqs; ++seq) writes &= op.cu_seqlens_q[seq + 1] - op.cu_seqlens_q[seq] <= step;
    int64_t first, last;
    worker.share(writes ? 0 : op.num_tokens, first, last);
    write_tokens<T>(op, scratch, first, last);
    if (!writes) worker.barrier();
    TileUse use;
    Item waiting{-1, 0, 0, 0};
    int64_t item = 0, mine = worker.turn();
    for (int64_t seq = op.num_seqs; seq-- > 0;) {
        const int64_t num_new = op.cu_seqlens_q[seq + 1] - op.cu_seqlens_q[seq];
        // Head by head: its keys and values stay in the second-level cache. The last tokens see most of them, so
        // they come first, and no thread is left alone with them.
        for (int64_t head = 0; head < op.num_kv_heads; ++head)
            for (int64_t end = num_new; end > 0; end -= step, ++item) {
                if (item != mine) continue;
                const Item found{seq, head, std::max<int64_t>(0, end - step), end};
                const NextBlock after = writes ? first_block<T>(op, found, waiting.seq >= 0) : NextBlock();
                if (waiting.seq >= 0) attend_item<T>(op, scratch, use, waiting, writes, after);
                waiting = found;
                mine = worker.turn();
            }
    }
    if (waiting.seq >= 0) attend_item<T>(op, scratch, use, waiting, writes, {});
}

void attention(const AttentionOp &op, const Worker &worker) {
    op.type == DType::f32 ? attention_of<float>(op, worker) : attention_of<uint16_t>(op, worker);
}

}  // namespace fdcpu::FDCPU_NAMESPACE
