// Bfloat16 in twelve bits back to lines of pairs: see packed.h.

namespace fdcpu::FDCPU_NAMESPACE {

// A block of 32 outputs and four inputs: [pair of inputs][sixteen outputs].
template <bool kShifts = false>
FDCPU_INLINE void decode_block(const uint8_t *block, B exponents, I (&lines)[2][2]) {
    const B codes = load_as<B>(block);
    decode_pairs<kShifts>(load_as<B>(block + 64), codes & 15, exponents, lines[0][0], lines[1][0]);
    decode_pairs<kShifts>(load_as<B>(block + 128), B(U(codes) >> 4) & 15, exponents, lines[0][1], lines[1][1]);
}

// The weight of a patch, in a panel or part of one whose lines lie one after another.
FDCPU_INLINE void put_patch(const Patch &patch, uint8_t *line, int64_t column) {
    std::memcpy(line + column * 4 + patch.input % 2 * 2, &patch.bits, sizeof patch.bits);
}

}  // namespace fdcpu::FDCPU_NAMESPACE
