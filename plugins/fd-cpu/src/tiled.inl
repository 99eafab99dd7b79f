// Products with tiles, panel by panel. Up to sixteen rows meet a whole panel, more of them half a panel at a
// time, two tiles of rows by two of outputs. Lines of a packed panel are rows of weight tiles as they are;
// four-bit ones are unpacked a step ahead of their first use, and once for all rows.

namespace fdcpu::FDCPU_NAMESPACE {

constexpr int kTall = 2 * kTileSide;
constexpr int kLine = 4 * kPanel;        // bytes of a panel's line: 64 outputs times four bytes
constexpr int64_t kFarAhead = 4096;      // bytes that short products prefetch ahead

FDCPU_INLINE bool is_tiled(const PackedMatrix &w, int64_t num_rows) {
    return w.kind != WeightKind::f32 && num_rows > (is_bf16(w.kind) ? 1 : 4);
}

// Whether integers become bfloat16 on the way: see kLeastTiledGroup.
FDCPU_INLINE bool is_widened(const PackedMatrix &w, int64_t num_rows) {
    return (w.kind == WeightKind::int8 || w.kind == WeightKind::int4) && w.group < kLeastTiledGroup &&
           w.num_groups() > 1 && num_rows > kTileSide;
}

FDCPU_INLINE size_t unpacked_bytes(const PackedMatrix &w) {
    return size_t(std::max<int64_t>(w.padded_inputs * kHalf * 2, 8 * kTileSide * 64));
}

#define FDCPU_TILE_PRODUCT(c, a, b)                      \
    if constexpr (is_bf16(kind) || is_wide)              \
        FDCPU_TILE_BF16(c, a, b);                        \
    else if constexpr (kind == WeightKind::int8)         \
        FDCPU_TILE_UNSIGNED_SIGNED(c, a, b);             \
    else                                                 \
        FDCPU_TILE_SIGNED_UNSIGNED(c, a, b)

// One panel of weights and the rows that meet it. A step is what one multiplication takes of a row.
template <WeightKind kind, bool is_wide>
struct TiledPanel {
    static constexpr bool kUnpacks =
        is_wide || kind == WeightKind::int4 || kind == WeightKind::tet2 || kind == WeightKind::coded_bf16;
    static constexpr bool kIsInt = !is_wide && !is_bf16(kind);

    // Copies: a store of bytes might change anything else, for all that the compiler knows.
    const Activations a;
    uint8_t *const unpacked;  // [step][output tile][row of a weight tile][64]
    const uint8_t *const panel;
    const uint8_t *const scales;  // of the panel, and
    const int32_t *const weight_sums;
    const bool has_half_scales;
    const int64_t scale_step;  // bytes from a group's to the next one's
    const int64_t group, panel_bytes;
    const int inputs;  // bytes of a step, of activations
    const int64_t packed_step;  // and of weights
    const int64_t num_steps, groups;
    const Patch *const patches, *const last_patch;  // coded_bf16 only, and
    mutable const Patch *patch = patches;           // the first one that is not unpacked yet

    TiledPanel(const PackedMatrix &w, const Activations &a, int64_t p, uint8_t *unpacked)
        : a(a), unpacked(unpacked), panel(w.panel(p)), scales(w.scales_of(p, 0)), weight_sums(w.panel_sums(p)),
          has_half_scales(w.has_half_scales()), scale_step(kPanel * w.scale_bytes()),
          group(w.group), panel_bytes(w.panel_bytes()),
          inputs(kIsInt && kind != WeightKind::tet2 && w.group % 64 ? 32 : 64),
          packed_step(kind == WeightKind::coded_bf16 ? kCodedBlock * 8
                                                     : panel_bytes * inputs / (w.padded_inputs * bytes_of_input(kind, is_wide))),
          num_steps(w.padded_inputs * bytes_of_input(kind, is_wide) / inputs), groups(kIsInt ? w.num_groups() : 1),
          patches(kind == WeightKind::coded_bf16 ? w.patches_of(p) : nullptr),
          last_patch(kind == WeightKind::coded_bf16 ? w.patches_of(p + 1) : nullptr) {}

    // A part of a step, outputs [16 first, 16 (first + count)), as rows of weight tiles. Lines are read in the
    // order of memory: the processor then fetches what comes next by itself, far more than it lets us ask for.
    template <bool kFetches>
    FDCPU_INLINE void unpack(int64_t step, int part, int parts, int first, int count, uint8_t *to) const {
        constexpr int kInputs = kind == WeightKind::int4 ? 8 : kind == WeightKind::int8 ? 4 : 2;  // of a line
        constexpr int kRows = is_wide ? kInputs / 2 : kind == WeightKind::int4 ? 2 : 1;           // that it becomes
        if constexpr (kind == WeightKind::tet2) return part ? void() : unpack_tet(step, first, count, to);
        if constexpr (kind == WeightKind::coded_bf16) return unpack_codes<kFetches>(step, part, parts, first, count, to);
        const int64_t lines = packed_step / kLine, end = lines * (part + 1) / parts, tile = inputs * kTileSide;
        F scale[4] = {};
        for (int s = 0; s < count && is_wide; ++s)
            scale[s] = load_scales(has_half_scales, scales + step * 32 / group * scale_step, first + s);
        for (int64_t i = lines * part / parts; i < end; ++i)
            for (int s = 0; s < count; ++s) {
                const uint8_t *line = panel + step * packed_step + i * kLine + (first + s) * 64;
                uint8_t *row = to + s * tile + i * kRows * 64;
                if (kFetches) __builtin_prefetch(line + kFarAhead, 0, 2);
                const B packed = load_as<B>(line);
                if constexpr (is_wide) {
                    for (int j = 0; j < kRows; ++j)
                        store_as(row + j * 64,
                                 pairs_of_bf16(integer(packed, 2 * j) * scale[s], integer(packed, 2 * j + 1) * scale[s]));
                } else if constexpr (kind == WeightKind::int4) {
                    store_as(row, B(packed & 15));
                    store_as(row + 64, B(B(U(packed) >> 4) & 15));
                } else {
                    store_as(row, packed);
                }
            }
    }
    FDCPU_INLINE void unpack_tet(int64_t step, int first, int count, uint8_t *to) const {
        const uint8_t *sixteen = panel + step * packed_step + first * kTetWords * sizeof(uint16_t);
        for (int s = 0; s < count; ++s, sixteen += kTetWords * sizeof(uint16_t))
            for (int t = 0; t < kTileSide / 4; ++t) {
                const U words = tet_words(sixteen + t * kTetTile);
                for (int j = 0; j < 4; ++j, to += 64) store_as(to, tet_bytes(words, j));
            }
    }
    template <bool kFetches>
    FDCPU_INLINE void unpack_codes(int64_t step, int part, int parts, int first, int count, uint8_t *to) const {
        constexpr int kBlocks = 8;  // of four inputs, in a step
        const B exponents = load_as<B>(panel);
        const int64_t half_bytes = packed_step * num_steps;
        const uint8_t *from = panel + kCodedHeader + step * packed_step + first / 2 * half_bytes;
        for (int i = kBlocks * part / parts; i < kBlocks * (part + 1) / parts; ++i)
            for (int s = 0; s < count; s += 2) {
                const uint8_t *block = from + i * kCodedBlock + s / 2 * half_bytes;
                for (int line = 0; line < 3 && kFetches; ++line) __builtin_prefetch(block + line * 64 + kFarAhead, 0, 2);
                I lines[2][2];
                decode_block(block, exponents, lines);
                for (int n = 0; n < 4; ++n) store_as(to + (s + n / 2) * 1024 + (2 * i + n % 2) * 64, lines[n % 2][n / 2]);
            }
        if (part < parts - 1) return;
        if (step == 0) patch = patches;
        for (; patch != last_patch && patch->input < 32 * (step + 1); ++patch) {
            const int tile = patch->column / kLanes - first;
            if (tile >= 0 && tile < count)
                put_patch(*patch, to + tile * 1024 + patch->input % 32 / 2 * 64, patch->column % kLanes);
        }
    }
    // The j-th input of each output in a line.
    static FDCPU_INLINE F integer(B line, int j) {
        if constexpr (kind == WeightKind::int4)
            return to_floats(I(U(line) >> (j % 4 * 8 + j / 4 * 4) & 15) - 8);
        else
            return to_floats(I(U(line) << (24 - 8 * j)) >> 24);
    }

    // Sums of a group: [output tile][16][16] of up to sixteen rows. Tiles are read from a copy of the step, made a
    // step ahead: they take lines that lie apart, and from memory that is half as fast.
    FDCPU_INLINE void sum_short(int64_t m, int64_t first, int64_t last, uint8_t *sums) const {
        const int64_t tile = inputs * kTileSide;
        const auto stage = [this, tile](int64_t step, int part) {
            if (step < num_steps) unpack<true>(step, part, 4, 0, 4, unpacked + step % 2 * 4 * tile);
        };
        for (int part = 0; part < 4 && first == 0; ++part) stage(0, part);
        FDCPU_TILE_ZERO(0);
        FDCPU_TILE_ZERO(1);
        FDCPU_TILE_ZERO(2);
        FDCPU_TILE_ZERO(3);
        for (int64_t step = first; step < last; ++step) {
            const uint8_t *weights = unpacked + step % 2 * 4 * tile;
            stage(step + 1, 0);
            FDCPU_TILE_LOAD(4, a.row(m) + a.at(step * inputs), a.row_step);
            FDCPU_TILE_LOAD(5, weights, 64);
            FDCPU_TILE_PRODUCT(0, 4, 5);
            stage(step + 1, 1);
            FDCPU_TILE_LOAD(6, weights + tile, 64);
            FDCPU_TILE_PRODUCT(1, 4, 6);
            stage(step + 1, 2);
            FDCPU_TILE_LOAD(7, weights + 2 * tile, 64);
            FDCPU_TILE_PRODUCT(2, 4, 7);
            stage(step + 1, 3);
            FDCPU_TILE_LOAD(5, weights + 3 * tile, 64);
            FDCPU_TILE_PRODUCT(3, 4, 5);
        }
        FDCPU_TILE_STORE(0, sums, 64);
        FDCPU_TILE_STORE(1, sums + 1024, 64);
        FDCPU_TILE_STORE(2, sums + 2048, 64);
        FDCPU_TILE_STORE(3, sums + 3072, 64);
    }

    // Sums of a group and half a panel: [tile of rows][output tile][16][16]. Meanwhile `lines` of what
    // comes next are fetched for every step, and so is where `written` rows will be written.
    template <class Finish>
    FDCPU_INLINE void sum_tall(int half, int64_t m, bool has_second, bool is_first, int64_t first, int64_t last,
                               const uint8_t *next, int64_t lines, int64_t written, const Finish &finish,
                               uint8_t *sums) const {
        const int64_t tile = kUnpacks ? inputs * kTileSide : 64, stride = kUnpacks ? 64 : kLine;
        const bool unpacks = kUnpacks && is_first;
        if (unpacks && first == 0) unpack<false>(0, 0, 1, 2 * half, 2, unpacked);
        FDCPU_TILE_ZERO(0);
        FDCPU_TILE_ZERO(1);
        FDCPU_TILE_ZERO(2);
        FDCPU_TILE_ZERO(3);
        const uint8_t *low = a.row(m), *high = a.row(m + kTileSide);
        const int64_t each = (written + last - first - 1) / (last - first);
        int64_t row = 0;
        for (int64_t step = first; step < last; ++step) {
            const uint8_t *weights = kUnpacks ? unpacked + step * 2 * tile : panel + step * packed_step + half * 128;
            const int64_t at = a.at(step * inputs);
            FDCPU_TILE_LOAD(4, low + at, a.row_step);
            FDCPU_TILE_LOAD(6, weights, stride);
            FDCPU_TILE_PRODUCT(0, 4, 6);
            FDCPU_TILE_LOAD(7, weights + tile, stride);
            FDCPU_TILE_PRODUCT(1, 4, 7);
            for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(next + (step * lines + i) * 64, 0, 2);
            for (int64_t i = 0; i < each && row < written; ++i) finish.fetch(m + row++, half);
            if (unpacks && step + 1 < num_steps)
                unpack<false>(step + 1, 0, 1, 2 * half, 2, unpacked + (step + 1) * 2 * tile);
            if (!has_second) continue;
            FDCPU_TILE_LOAD(5, high + at, a.row_step);
            FDCPU_TILE_PRODUCT(2, 5, 6);
            FDCPU_TILE_PRODUCT(3, 5, 7);
        }
        FDCPU_TILE_STORE(0, sums, 64);
        FDCPU_TILE_STORE(1, sums + 1024, 64);
        if (!has_second) return;
        FDCPU_TILE_STORE(2, sums + 2048, 64);
        FDCPU_TILE_STORE(3, sums + 3072, 64);
    }

    // A group's sums of two output tiles, side by side: the last group finishes the rows.
    template <class Finish>
    FDCPU_INLINE void add(const uint8_t *sums, int64_t rows, int64_t m, int64_t g, int half, float *totals,
                          const Finish &finish) const {
        const int64_t at = g * kPanel + half * kHalf;
        F scale[2] = {};
        I offset[2] = {};
        for (int s = 0; s < 2 && kIsInt; ++s) {
            scale[s] = load_scales(has_half_scales, scales + g * scale_step, half * 2 + s);
            if (kind == WeightKind::int8) offset[s] = load_as<I>(weight_sums + at + s * kLanes) * 128;
        }
        for (int64_t r = 0; r < rows; ++r) {
            F found[2];
            const float x_scale = kIsInt ? a.scales[(m + r) * groups + g] : 0.f;
            constexpr int kOffset = !kIsInt ? 0 : kind == WeightKind::int4 ? 8 : kind == WeightKind::tet2 ? 255 : 0;
            const int32_t x_offset = kOffset ? kOffset * a.sums[(m + r) * groups + g] : 0;
            for (int s = 0; s < 2; ++s) {
                const uint8_t *from = sums + s * 1024 + r * 64;
                float *total = totals + r * kHalf + s * kLanes;
                if constexpr (kIsInt) {
                    I sum = load_as<I>(from);
                    if (kind == WeightKind::tet2) sum += sum;
                    found[s] = to_floats(sum - offset[s] - x_offset) * (scale[s] * x_scale);
                } else {
                    found[s] = load_as<F>(from);
                }
                if (g) found[s] += load(total);
                if (g < groups - 1) store(total, found[s]);
            }
            if (g == groups - 1) finish(m + r, half, found[0], found[1]);
        }
    }

    template <class Finish>
    void run(TileUse &use, const uint8_t *next, int64_t begin, int64_t end, const Finish &finish) const {
        alignas(64) uint8_t sums[4 * kTileSide * 64];
        alignas(64) float totals[kTall * kHalf];
        const int64_t per_group = num_steps / groups;
        if (end - begin <= kTileSide) {
            use.shape(inputs, int(end - begin), false);
            for (int64_t g = 0; g < groups; ++g) {
                sum_short(begin, g * per_group, (g + 1) * per_group, sums);
                for (int half = 0; half < 2; ++half)
                    add(sums + half * 2048, end - begin, begin, g, half, totals + half * kTileSide * kHalf, finish);
            }
            return;
        }
        use.shape(inputs, kTileSide, true);
        const int64_t passes = 2 * ((end - begin + kTall - 1) / kTall);
        const int64_t lines = (panel_bytes / 64 + num_steps * passes - 1) / (num_steps * passes);
        for (int half = 0; half < 2; ++half)
            for (int64_t m = begin; m < end; m += kTall, next += num_steps * lines * 64) {
                const int64_t low = std::min<int64_t>(kTileSide, end - m), high = std::min<int64_t>(kTall, end - m) - low;
                for (int64_t g = 0; g < groups; ++g) {
                    sum_tall(half, m, high > 0, m == begin, g * per_group, (g + 1) * per_group, next, lines,
                             g == groups - 1 ? low + high : 0, finish, sums);
                    add(sums, low, m, g, half, totals, finish);
                    add(sums + 2048, high, m + kTileSide, g, half, totals + kTileSide * kHalf, finish);
                }
            }
    }
};

// finish(row, half, sums, sums) for rows [begin, end) of a panel.
template <class Finish>
FDCPU_INLINE void panel_in_tiles(TileUse &use, const PackedMatrix &w, int64_t p, int64_t next, const Activations &a,
                                 int64_t begin, int64_t end, uint8_t *unpacked, const Finish &finish) {
    const bool is_int4 = w.kind == WeightKind::int4;
    if (w.kind == WeightKind::tet2)
        TiledPanel<WeightKind::tet2, false>(w, a, p, unpacked).run(use, w.panel(next), begin, end, finish);
    else if (w.kind == WeightKind::coded_bf16)
        TiledPanel<WeightKind::coded_bf16, false>(w, a, p, unpacked).run(use, w.panel(next), begin, end, finish);
    else if (w.kind == WeightKind::bf16)
        TiledPanel<WeightKind::bf16, false>(w, a, p, unpacked).run(use, w.panel(next), begin, end, finish);
    else if (a.is_wide)
        is_int4 ? TiledPanel<WeightKind::int4, true>(w, a, p, unpacked).run(use, w.panel(next), begin, end, finish)
                : TiledPanel<WeightKind::int8, true>(w, a, p, unpacked).run(use, w.panel(next), begin, end, finish);
    else
        is_int4 ? TiledPanel<WeightKind::int4, false>(w, a, p, unpacked).run(use, w.panel(next), begin, end, finish)
                : TiledPanel<WeightKind::int8, false>(w, a, p, unpacked).run(use, w.panel(next), begin, end, finish);
}

}  // namespace fdcpu::FDCPU_NAMESPACE
