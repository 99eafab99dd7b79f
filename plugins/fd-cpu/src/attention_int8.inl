// The cache in int8: written head by head, and widened a few blocks at a time into what attention reads.
// Scales stay outside the products: those of tokens meet scores and weights, those of channels queries and
// results, so that widening is exact.

namespace fdcpu::FDCPU_NAMESPACE {

// Numbers of one head's vector: its scale is written to `scale`, or comes for each channel.
FDCPU_INLINE void round_head(const float *row, int64_t size, const float *factors, uint16_t *scale, int8_t *numbers) {
    float inverse = 1;
    if (!factors) {
        float peak = 0, total = 0;
        for (int64_t d = 0; d < size; ++d) {
            peak = std::max(peak, std::fabs(row[d]));
            total += row[d];
        }
        *scale = std::isfinite(total) ? half_of(std::max(peak / 127.f, 1e-7f)) : half_of(std::nanf(""));
        inverse = 1.f / float_of_half(*scale);
    }
    for (int64_t d = 0; d < size; ++d) {
        const float q = std::nearbyint(row[d] * (factors ? 1.f / factors[d] : inverse));
        numbers[d] = int8_t(q > 127.f ? 127.f : q >= -127.f ? q : -127.f);
    }
}

// Key and value of one token and head; `numbers` is room for one of them.
template <class C>
FDCPU_INLINE void write_int8(const AttentionOp &op, int64_t place, int64_t offset, int64_t head, const float *row,
                             bool is_key, int8_t *numbers) {
    const int64_t size = is_key ? op.head_dim : op.v_head_dim, block_size = op.block_size;
    const float *factors = is_key ? op.key_factors : op.value_factors;
    uint16_t *scales = is_key ? op.key_scales : op.value_scales;
    round_head(row, size, factors ? factors + head * size : nullptr, scales ? scales + place * block_size + offset : nullptr,
               numbers);
    int8_t *to = static_cast<int8_t *>(is_key ? op.keys : op.values) + place * size * block_size;
    constexpr int64_t pair = sizeof(C) == 2 ? 2 : 1;
    for (int64_t d = 0; d < size; ++d) {
        if (is_key)
            to[(d / pair * block_size + offset) * pair + d % pair] = numbers[d];
        else
            to[(offset / pair * size + d) * pair + offset % pair] = numbers[d];
    }
}

template <class C>
FDCPU_INLINE void widen_numbers(const int8_t *from, C *to, int64_t count) {
    for (int64_t i = 0; i < count; i += kLanes)
        store(to + i, to_floats(to_ints(load_as<Bytes>(from + i))));
}

// A block of one kv head becomes the n-th of `wide`, with its tokens' scales.
template <class C>
FDCPU_INLINE void widen_block(const AttentionOp &op, int64_t place, int64_t n, C *keys, C *values, float *key_scale,
                              float *value_scale) {
    const int64_t of_keys = op.head_dim * op.block_size, of_values = op.v_head_dim * op.block_size;
    widen_numbers(static_cast<const int8_t *>(op.keys) + place * of_keys, keys + n * of_keys, of_keys);
    widen_numbers(static_cast<const int8_t *>(op.values) + place * of_values, values + n * of_values, of_values);
    if (!op.key_scales) return;
    for (int64_t t = 0; t < op.block_size; t += kLanes) {
        store(key_scale + n * op.block_size + t, load_halves(op.key_scales + place * op.block_size + t));
        store(value_scale + n * op.block_size + t, load_halves(op.value_scales + place * op.block_size + t));
    }
}

}  // namespace fdcpu::FDCPU_NAMESPACE
