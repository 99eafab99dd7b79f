// The trellis code of two bits (packed.h): its states' bytes, and the rotation of what meets them.

namespace fdcpu::FDCPU_NAMESPACE {

// Sixteen outputs' 16 bits of a tile's eight inputs, and below them the 16 before.
FDCPU_INLINE U tet_words(const uint8_t *sixteen) {
    return widen(load_as<H>(sixteen + sizeof(uint16_t))) << 16 | widen(load_as<H>(sixteen));
}
// What the j-th two of the eight inputs meet.
FDCPU_INLINE B tet_bytes(U words, int j) { return B((words >> (4 * j + 4) & 0xffff) * kTetMultiplier); }

// Signs, then orthonormal Hadamard transforms of `rotation` inputs.
FDCPU_INLINE void rotate_row(const PackedMatrix &w, float *row) {
    const int64_t size = w.inputs, block = w.rotation;
    const float *signs = reinterpret_cast<const float *>(w.signs.data());
    const float factor = 1.f / std::sqrt(float(block));
    for (int64_t k = 0; k < size; k += kLanes) store(row + k, load(row + k) * load(signs + k) * factor);
    for (int64_t half = 1; half < std::min<int64_t>(block, kLanes); half *= 2)
        for (int64_t k = 0; k < size; k += kLanes) {
            float lanes[kLanes];
            store(lanes, load(row + k));
            for (int64_t i = 0; i < kLanes; ++i) row[k + i] = i & half ? lanes[i ^ half] - lanes[i] : lanes[i] + lanes[i ^ half];
        }
    for (int64_t half = kLanes; half < block; half *= 2)
        for (int64_t k = 0; k < size; k += 2 * half)
            for (int64_t i = k; i < k + half; i += kLanes) {
                const F low = load(row + i), high = load(row + i + half);
                store(row + i, low + high);
                store(row + i + half, low - high);
            }
}

}  // namespace fdcpu::FDCPU_NAMESPACE
