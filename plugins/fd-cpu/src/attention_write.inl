// New keys and values on their way into the cache.

namespace fdcpu::FDCPU_NAMESPACE {

// `bits` is room for a head.
FDCPU_INLINE void write_paired(const AttentionOp &op, int64_t offset, const float *key, uint16_t *keys, uint16_t *bits) {
    narrow_row(key, bits, op.head_dim);
    for (int64_t d = 0; d < op.head_dim; d += 2) std::memcpy(keys + (d / 2 * op.block_size + offset) * 2, bits + d, 4);
}

// The key and value of a new token and a kv head.
template <class T>
FDCPU_INLINE void write_head(const AttentionOp &op, const AttentionScratch &s, int64_t t, int64_t h) {
    const int64_t slot = op.slot_mapping[t];
    if (slot < 0) return;
    float *row = s.q;
    const int64_t block = slot / op.block_size, offset = slot % op.block_size;
    rotate(op, static_cast<const T *>(op.k) + t * op.k_stride + h * op.head_dim, op.positions[t], op.head_dim, row);
    if (!op.values) return narrow_row(row, static_cast<T *>(op.keys) + slot * op.head_dim, op.head_dim);
    const T *v = static_cast<const T *>(op.v) + t * op.v_stride + h * op.v_head_dim;
    const int64_t place = block * op.num_kv_heads + h;
    if (op.is_int8) {
        auto *numbers = reinterpret_cast<int8_t *>(s.bits());
        write_int8<T>(op, place, offset, h, row, true, numbers);
        widen_row(v, row, op.v_head_dim);
        return write_int8<T>(op, place, offset, h, row, false, numbers);
    }
    T *keys = static_cast<T *>(op.keys) + place * op.head_dim * op.block_size;
    T *values = static_cast<T *>(op.values) + place * op.block_size * op.v_head_dim;
    if (!is_paired<T>(op)) {
        for (int64_t d = 0; d < op.head_dim; ++d) store_one(keys + d * op.block_size + offset, row[d]);
        widen_row(v, row, op.v_head_dim);
        return narrow_row(row, values + offset * op.v_head_dim, op.v_head_dim);
    }
    write_paired(op, offset, row, reinterpret_cast<uint16_t *>(keys), s.bits());
    widen_row(v, row, op.v_head_dim);
    narrow_row(row, s.bits(), op.v_head_dim);
    auto *pairs = reinterpret_cast<uint16_t *>(values) + offset / 2 * op.v_head_dim * 2 + offset % 2;
    for (int64_t d = 0; d < op.v_head_dim; ++d) pairs[2 * d] = s.bits()[d];
}

// ---- kLanes tokens at once, which is a register of keys

// Whether tokens from t on fill a register of keys, and all of them lie before `last`.
FDCPU_INLINE bool are_together(const AttentionOp &op, int64_t t, int64_t last) {
    const int64_t slot = op.slot_mapping[t];
    if (slot < 0 || slot % kLanes || op.block_size % kLanes || t + kLanes > last) return false;
    for (int64_t i = 1; i < kLanes; ++i)
        if (op.slot_mapping[t + i] != slot + i) return false;
    return true;
}

// Heads of pairs: one token at a time would touch a line for every two numbers of a key.
FDCPU_INLINE bool is_written_together(const AttentionOp &op) {
    return is_paired<uint16_t>(op) && !op.is_int8 && op.head_dim % (2 * kLanes) == 0 && op.v_head_dim % kLanes == 0 &&
           op.head_dim * kLanes <= kSpanRows * kSpan;
}

FDCPU_INLINE void write_together(const AttentionOp &op, const AttentionScratch &s, int64_t t, int64_t h) {
    const int64_t slot = op.slot_mapping[t], offset = slot % op.block_size;
    const int64_t place = slot / op.block_size * op.num_kv_heads + h;
    for (int64_t i = 0; i < kLanes; ++i) {
        const auto *key = static_cast<const uint16_t *>(op.k) + (t + i) * op.k_stride + h * op.head_dim;
        rotate(op, key, op.positions[t + i], op.head_dim, s.q);
        narrow_row(s.q, s.bits() + i * op.head_dim, op.head_dim);
    }
    auto *keys = static_cast<uint16_t *>(op.keys) + place * op.head_dim * op.block_size + offset * 2;
    for (int64_t d = 0; d < op.head_dim; d += 2 * kLanes) {
        U rows[kLanes];
        for (int r = 0; r < kLanes; ++r) rows[r] = load_as<U>(s.bits() + r * op.head_dim + d);
        transpose(rows);
        for (int r = 0; r < kLanes; ++r) store_as(keys + (d / 2 + r) * op.block_size * 2, rows[r]);
    }
    auto *values = static_cast<uint16_t *>(op.values) + (place * op.block_size + offset) * op.v_head_dim;
    for (int64_t i = 0; i < kLanes; i += 2, values += 2 * op.v_head_dim) {
        const auto *even = static_cast<const uint16_t *>(op.v) + (t + i) * op.v_stride + h * op.v_head_dim;
        const uint16_t *odd = even + op.v_stride;
        for (int64_t d = 0; d < op.v_head_dim; d += kLanes)
            store_as(values + 2 * d, U(widen(load_as<H>(even + d)) | widen(load_as<H>(odd + d)) << 16));
    }
}

// Keys and values of tokens [first, last), all heads.
template <class T>
FDCPU_INLINE void write_tokens(const AttentionOp &op, const AttentionScratch &s, int64_t first, int64_t last) {
    const bool together = sizeof(T) == 2 && is_written_together(op);
    for (int64_t t = first; t < last;) {
        const bool many = together && are_together(op, t, last);
        for (int64_t h = 0; h < op.num_kv_heads; ++h) many ? write_together(op, s, t, h) : write_head<T>(op, s, t, h);
        t += many ? kLanes : 1;
    }
}

}  // namespace fdcpu::FDCPU_NAMESPACE
