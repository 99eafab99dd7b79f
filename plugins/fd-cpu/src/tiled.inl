// Products with tiles: up to 32 rows by one panel, two tiles of rows by two of outputs at a time. Lines of
// a packed panel are rows of weight tiles as they are; four-bit ones are unpacked a step ahead of use.

namespace fdcpu::FDCPU_NAMESPACE {

constexpr int kTiledRows = 2 * kTileSide;
constexpr int kLine = 4 * kPanel;  // bytes of a panel's line: 64 outputs times four bytes

// Bytes of a row of activations that one multiplication takes.
FDCPU_INLINE int tile_inputs(const PackedMatrix &w) {
    return w.kind == WeightKind::bf16 || w.group % 64 == 0 ? 64 : 32;
}

FDCPU_INLINE bool is_tiled(const PackedMatrix &w, int64_t num_rows) {
    return w.kind != WeightKind::f32 && num_rows > 4;
}

// Lines of four inputs from lines of eight, low nibbles first.
FDCPU_INLINE void unpack_lines(const uint8_t *from, int lines, uint8_t *to) {
    for (int i = 0; i < lines / 2; ++i)
        for (int s = 0; s < kLine; s += 64) {
            const B packed = load_as<B>(from + i * kLine + s);
            store_as(to + 2 * i * kLine + s, B(packed & 15));
            store_as(to + (2 * i + 1) * kLine + s, B(B(U(packed) >> 4) & 15));
        }
}

// One group of inputs, one half of the panel (32 outputs): sums[rows][32] in `out`, row by row.
template <WeightKind kind>
FDCPU_INLINE void tile_group(const PackedMatrix &w, const uint8_t *panel, const Activations &a, int64_t m, bool is_tall,
                             int64_t g, int half, uint8_t *out) {
    const int inputs = tile_inputs(w), lines = inputs / 4;
    const int64_t bytes = kind == WeightKind::bf16 ? w.group * 2 : w.group;  // of a row of activations
    alignas(64) uint8_t unpacked[kind == WeightKind::int4 ? 16 * kLine : 64];
    FDCPU_TILE_ZERO(0);
    FDCPU_TILE_ZERO(1);
    FDCPU_TILE_ZERO(2);
    FDCPU_TILE_ZERO(3);
    for (int64_t k = 0; k < bytes; k += inputs) {
        const int64_t at = g * bytes + k;
        const uint8_t *weights;
        if constexpr (kind == WeightKind::int4) {
            unpack_lines(panel + at / 8 * kLine, lines, unpacked);
            weights = unpacked;
        } else {
            weights = panel + at / 4 * kLine;
        }
        FDCPU_TILE_LOAD(4, a.row(m) + at, a.row_bytes);
        FDCPU_TILE_LOAD(6, weights + half * 128, kLine);
        FDCPU_TILE_LOAD(7, weights + half * 128 + 64, kLine);
        if constexpr (kind == WeightKind::bf16) {
            FDCPU_TILE_BF16(0, 4, 6);
            FDCPU_TILE_BF16(1, 4, 7);
        } else if constexpr (kind == WeightKind::int8) {
            FDCPU_TILE_UNSIGNED_SIGNED(0, 4, 6);
            FDCPU_TILE_UNSIGNED_SIGNED(1, 4, 7);
        } else {
            FDCPU_TILE_SIGNED_UNSIGNED(0, 4, 6);
            FDCPU_TILE_SIGNED_UNSIGNED(1, 4, 7);
        }
        if (!is_tall) continue;
        FDCPU_TILE_LOAD(5, a.row(m + kTileSide) + at, a.row_bytes);
        if constexpr (kind == WeightKind::bf16) {
            FDCPU_TILE_BF16(2, 5, 6);
            FDCPU_TILE_BF16(3, 5, 7);
        } else if constexpr (kind == WeightKind::int8) {
            FDCPU_TILE_UNSIGNED_SIGNED(2, 5, 6);
            FDCPU_TILE_UNSIGNED_SIGNED(3, 5, 7);
        } else {
            FDCPU_TILE_SIGNED_UNSIGNED(2, 5, 6);
            FDCPU_TILE_SIGNED_UNSIGNED(3, 5, 7);
        }
    }
    FDCPU_TILE_STORE(0, out, 128);
    FDCPU_TILE_STORE(1, out + 64, 128);
    if (!is_tall) return;
    FDCPU_TILE_STORE(2, out + kTileSide * 128, 128);
    FDCPU_TILE_STORE(3, out + kTileSide * 128 + 64, 128);
}

// out[rows][64] of up to 32 rows. Rows of activations up to a multiple of 16 are read, not used.
template <WeightKind kind>
void tiled_of(int rows, const PackedMatrix &w, int64_t p, const Activations &a, int64_t m, float *out) {
    alignas(64) uint8_t raw[kTiledRows * 128];
    for (int64_t g = 0; g < a.groups; ++g)
        for (int half = 0; half < 2; ++half) {
            tile_group<kind>(w, w.panel(p), a, m, rows > kTileSide, g, half, raw);
            for (int r = 0; r < rows; ++r)
                for (int s = 0; s < 2; ++s) {
                    float *to = out + r * kPanel + half * 32 + s * kLanes;
                    const uint8_t *from = raw + r * 128 + s * 64;
                    if constexpr (kind == WeightKind::bf16) {
                        store(to, load_as<F>(from));
                        continue;
                    }
                    I sums = load_as<I>(from);
                    const int64_t column = half * 32 + s * kLanes;
                    if constexpr (kind == WeightKind::int8)
                        sums -= load_as<I>(w.panel_sums(p) + g * kPanel + column) * 128;
                    else
                        sums -= 8 * a.sums[(m + r) * a.groups + g];
                    const F scale = load(w.panel_scales(p) + g * kPanel + column) * a.scales[(m + r) * a.groups + g];
                    const F value = __builtin_convertvector(sums, F) * scale;
                    store(to, g ? load(to) + value : value);
                }
        }
}

FDCPU_INLINE void tiled(int rows, const PackedMatrix &w, int64_t p, const Activations &a, int64_t m, float *out) {
    switch (w.kind) {
        case WeightKind::bf16: return tiled_of<WeightKind::bf16>(rows, w, p, a, m, out);
        case WeightKind::int8: return tiled_of<WeightKind::int8>(rows, w, p, a, m, out);
        default: return tiled_of<WeightKind::int4>(rows, w, p, a, m, out);
    }
}

}  // namespace fdcpu::FDCPU_NAMESPACE
