// Products with register tiles: R rows by one panel into out[R][64], across as much of it at a time as there are
// registers for sums. Few rows have two chains of sums, or the processor would wait for one.

namespace fdcpu::FDCPU_NAMESPACE {

constexpr int kVectors = kPanel / kLanes;            // registers across a panel
constexpr int kMostRows = FDCPU_LEVEL >= 1 ? 6 : 2;  // rows of a register tile, and
constexpr int kMostHalved = FDCPU_LEVEL == 1 ? 2 : 2 * kMostRows;  // of one that takes half a panel at a time

constexpr bool kDecodesApart = FDCPU_LEVEL == 1;  // decoding takes the registers of sums

template <int R>
constexpr int kAcross = FDCPU_LEVEL != 1 || R == 1 ? kVectors : R <= 3 ? 2 : 1;
template <int R>
constexpr int kChains = FDCPU_LEVEL != 1 && R <= 2 ? 2 : 1;

template <int R>
struct Rows {
    const uint8_t *at[R];
    Rows(const Activations &a, int64_t m) {
        FDCPU_UNROLL
        for (int r = 0; r < R; ++r) at[r] = a.row(m + r);
    }
    FDCPU_INLINE Rows(const Input *first, int64_t stride) {
        FDCPU_UNROLL
        for (int r = 0; r < R; ++r) at[r] = reinterpret_cast<const uint8_t *>(first + r * stride);
    }
    FDCPU_INLINE const float *floats(int r) const { return reinterpret_cast<const float *>(at[r]); }
};

// What is fetched while a panel's lines are multiplied: of its own those a little ahead, or, when several register
// tiles meet the panel one after another, each tile's share of what comes next.
struct Ahead {
    const uint8_t *here, *next;
    int64_t bytes, line;  // a tile's share, of all and for each line
    bool is_only;
    // Tiles meet `bytes` from `here` on, a line of `line` of them at a time, and then as many from `next` on.
    Ahead(const uint8_t *here, const uint8_t *next, int64_t bytes, int64_t line, int64_t tile, int64_t num_tiles)
        : here(here), next(next + bytes * tile / num_tiles), bytes(bytes / num_tiles), line((line + num_tiles - 1) / num_tiles),
          is_only(num_tiles == 1) {}

    // While V registers of each line are met.
    template <int V>
    struct Part {
        const uint8_t *at;
        int64_t step;
        bool is_only;
        template <bool kIsOnly>
        FDCPU_INLINE void fetch_for() {
            for (int i = 0; i < (kIsOnly ? V : std::min(V, 2)); ++i) __builtin_prefetch(at + i * 64, 0, 2);
            at += step;
        }
        FDCPU_INLINE void fetch() { is_only ? fetch_for<true>() : fetch_for<false>(); }
    };
    // Registers [s0, s0 + V): those after them are fetched meanwhile, so that no part waits and others do not read.
    template <int V>
    FDCPU_INLINE Part<V> part(int s0) const {
        if (!is_only) return {next + bytes * s0 / kVectors, (line * V + kVectors - 1) / kVectors, false};
        if (V == kVectors) return {here + 4096, line, true};
        return {s0 + V < kVectors ? here + (s0 + V) * 64 : next, line, true};
    }
};

// Registers [s0, s0 + V) of a panel.
template <int R, int V>
FDCPU_INLINE void part_f32(const PackedMatrix &w, int64_t p, const Rows<R> &x, const Ahead &ahead, int s0, float *out) {
    const float *line = reinterpret_cast<const float *>(w.panel(p)) + s0 * kLanes;
    auto part = ahead.part<V>(s0);
    F acc[R][V] = {};
    for (int64_t k = 0; k < w.padded_inputs; ++k, line += kPanel) {
        part.fetch();
        F weights[V];
        FDCPU_UNROLL
        for (int s = 0; s < V; ++s) weights[s] = load(line + s * kLanes);
        FDCPU_UNROLL
        for (int r = 0; r < R; ++r)
            FDCPU_UNROLL
            for (int s = 0; s < V; ++s)
                acc[r][s] = weights[s] * splat(x.floats(r)[k]) + acc[r][s];
    }
    FDCPU_UNROLL
    for (int r = 0; r < R; ++r)
        FDCPU_UNROLL
        for (int s = 0; s < V; ++s) store(out + r * kPanel + (s0 + s) * kLanes, acc[r][s]);
}

// Routers have few outputs.
template <int R>
void tile_f32(const PackedMatrix &w, int64_t p, const Activations &a, int64_t m, const Ahead &ahead, float *out) {
    const Rows<R> x(a, m);
    if (!w.gated && w.outputs - p * kPanel <= kLanes) {
        part_f32<R, 1>(w, p, x, ahead, 0, out);
        FDCPU_UNROLL
        for (int r = 0; r < R; ++r)
            FDCPU_UNROLL
            for (int s = 1; s < kVectors; ++s) store(out + r * kPanel + s * kLanes, splat(0));
        return;
    }
    for (int s0 = 0; s0 < kVectors; s0 += kAcross<R>) part_f32<R, kAcross<R>>(w, p, x, ahead, s0, out);
}

// Registers of bfloat16 in pairs meet two inputs of each row, the k-th and the next.
template <int R, int V>
FDCPU_INLINE void add_pairs(const I (&line)[V], const Rows<R> &x, int64_t k, F (&acc)[R][V]) {
#if FDCPU_LEVEL < 3
    FDCPU_UNROLL
    for (int s = 0; s < V; ++s) {
        // The first of each pair, then the others: for both at once there are not enough registers.
        const F first = half_of_pairs<0>(line[s]);
        FDCPU_UNROLL
        for (int r = 0; r < R; ++r) acc[r][s] = first * splat(x.floats(r)[k]) + acc[r][s];
        const F second = half_of_pairs<1>(line[s]);
        FDCPU_UNROLL
        for (int r = 0; r < R; ++r) acc[r][s] = second * splat(x.floats(r)[k + 1]) + acc[r][s];
    }
#else
    FDCPU_UNROLL
    for (int r = 0; r < R; ++r) {
        const I inputs = I(splat_bytes(x.at[r] + 2 * k));
        FDCPU_UNROLL
        for (int s = 0; s < V; ++s) acc[r][s] = dot_pairs(acc[r][s], line[s], inputs);
    }
#endif
}

// Where registers of bfloat16 in pairs lie: `line` bytes from one to that of the next two inputs, `across` to the next
// sixteen outputs.
struct Pairs {
    const uint8_t *at;
    int64_t line, across;
};
// Those of a matrix, and those that codes have become: each register's by themselves, since what lies 256 bytes apart
// shares places of the first-level cache with activations.
FDCPU_INLINE Pairs pairs_of(const PackedMatrix &w, int64_t p) { return {w.panel(p), 4 * kPanel, 64}; }
FDCPU_INLINE Pairs decoded_pairs(const PackedMatrix &w, const uint8_t *copy) { return {copy, 64, w.padded_inputs / 2 * 64}; }

template <int R>
void tile_pairs(const Pairs &pairs, int64_t num_inputs, const Activations &a, int64_t m, const Ahead &ahead, float *out) {
    constexpr int V = kAcross<R>, C = kChains<R>;
    const Rows<R> x(a, m);
    for (int s0 = 0; s0 < kVectors; s0 += V) {
        const uint8_t *line = pairs.at + s0 * pairs.across;
        auto part = ahead.part<V>(s0);
        F acc[C][R][V] = {};
        for (int64_t k = 0; k < num_inputs;)
            for (int c = 0; c < C; ++c, k += 2, line += pairs.line) {
                part.fetch();
                I registers[V];
                FDCPU_UNROLL
                for (int s = 0; s < V; ++s) registers[s] = load_as<I>(line + s * pairs.across);
                add_pairs(registers, x, k, acc[c]);
            }
        FDCPU_UNROLL
        for (int r = 0; r < R; ++r)
            FDCPU_UNROLL
            for (int s = 0; s < V; ++s)
                store(out + r * kPanel + (s0 + s) * kLanes, C > 1 ? acc[0][r][s] + acc[C - 1][r][s] : acc[0][r][s]);
    }
}

// Where a tile has half a panel of bfloat16 from: codes, which become lines on the way and may stay in a copy
// for the tiles that follow, or that copy, [input / 2][32 outputs][2].
enum class Lines { decoded, kept, copied };

// R rows by half a panel into out[R][32]. Unless loops over rows are unrolled at once, the compiler has the sums in
// memory before and after them.
template <int R, Lines from>
void tile_codes(const PackedMatrix &w, int64_t p, int half, const Activations &a, int64_t m, const Ahead &ahead, uint8_t *copy,
                float *out) {
    constexpr int kParts = R <= (FDCPU_LEVEL == 1 ? 1 : 4) ? 2 : 1;  // chains of sums
    const uint8_t *block = w.coded_half(p, half), *const last = block + w.half_bytes();
    const B exponents = load_as<B>(w.panel(p));
    const Rows<R> x(a, m);
    F acc[kParts][R][2];
    FDCPU_UNROLL
    for (int r = 0; r < R; ++r)
        FDCPU_UNROLL
        for (int c = 0; c < kParts; ++c) acc[c][r][0] = acc[c][r][1] = splat(0);
    auto part = ahead.part<kVectors>(0);
    uint8_t *line = copy;
    for (int64_t k = 0; block != last; k += 4, block += kCodedBlock, line += 8 * kHalf) {
        part.template fetch_for<from == Lines::decoded>();
        for (int i = 0; i < 3 && from == Lines::kept; ++i) __builtin_prefetch(block + 8 * kCodedBlock + i * 64, 0, 3);
        I lines[2][2];  // [input / 2][output / 16]
        if (from != Lines::copied) decode_block<from == Lines::kept>(block, exponents, lines);
        FDCPU_UNROLL
        for (int j = 0; j < 2; ++j) {
            FDCPU_UNROLL
            for (int s = 0; s < 2 && from == Lines::copied; ++s) lines[j][s] = load_as<I>(line + j * 4 * kHalf + s * 64);
            FDCPU_UNROLL
            for (int s = 0; s < 2 && from == Lines::kept; ++s) store_as(line + j * 4 * kHalf + s * 64, lines[j][s]);
            add_pairs(lines[j], x, k + 2 * j, acc[j % kParts]);
        }
    }
    FDCPU_UNROLL
    for (int r = 0; r < R; ++r)
        FDCPU_UNROLL
        for (int s = 0; s < 2; ++s)
            store(out + r * kHalf + s * kLanes, kParts > 1 ? acc[0][r][s] + acc[kParts - 1][r][s] : acc[0][r][s]);
    if (from == Lines::copied) return;
    for (const Patch *patch = w.patches_of(p); patch != w.patches_of(p + 1); ++patch) {
        if (patch->column / kHalf != half) continue;
        const int64_t column = patch->column % kHalf;
        const float weight = load_one(&patch->bits);
        FDCPU_UNROLL
        for (int r = 0; r < R; ++r)
            out[r * kHalf + column] += load_one(reinterpret_cast<const Input *>(x.at[r]) + patch->input) * weight;
        if (from == Lines::kept) put_patch(*patch, copy + patch->input / 2 * 4 * kHalf, column);
    }
}

// A whole panel into the copy.
FDCPU_INLINE void decode_panel(const PackedMatrix &w, int64_t p, uint8_t *copy) {
    const B exponents = load_as<B>(w.panel(p));
    const int64_t across = decoded_pairs(w, copy).across;
    for (int half = 0; half < 2; ++half) {
        const uint8_t *block = w.coded_half(p, half), *const last = block + w.half_bytes();
        for (uint8_t *to = copy + 2 * half * across; block != last; block += kCodedBlock, to += 2 * 64) {
            I lines[2][2];
            decode_block(block, exponents, lines);
            FDCPU_UNROLL
            for (int s = 0; s < 2; ++s)
                FDCPU_UNROLL
                for (int j = 0; j < 2; ++j) store_as(to + s * across + j * 64, lines[j][s]);
        }
    }
    for (const Patch *patch = w.patches_of(p); patch != w.patches_of(p + 1); ++patch)
        put_patch(*patch, copy + patch->column / kLanes * across + patch->input / 2 * 64, patch->column % kLanes);
}

template <Lines from, int kLeast, int R = kMostHalved>
void tile_codes_of(int rows, const PackedMatrix &w, int64_t p, int half, const Activations &a, int64_t m, const Ahead &ahead,
                   uint8_t *copy, float *out) {
    if constexpr (R > kLeast) {
        if (rows < R) return tile_codes_of<from, kLeast, R - 1>(rows, w, p, half, a, m, ahead, copy, out);
    }
    tile_codes<R, from>(w, p, half, a, m, ahead, copy, out);
}

// Shared by formats of integers: what a group's sums add to the result, registers [s0, s0 + V) of a panel.
template <int R, int C, int V>
FDCPU_INLINE void add_group(const PackedMatrix &w, int64_t p, const Activations &a, int64_t m, int64_t g, int s0,
                            const I (&sums)[C][R][V], float *out) {
    const uint8_t *scales = w.scales_of(p, g);
    F scale[V];
    FDCPU_UNROLL
    for (int s = 0; s < V; ++s) scale[s] = load_scales(w.has_half_scales(), scales, s0 + s);
    FDCPU_UNROLL
    for (int r = 0; r < R; ++r) {
        const float x_scale = a.scales[(m + r) * a.groups + g];
        FDCPU_UNROLL
        for (int s = 0; s < V; ++s) {
            float *to = out + r * kPanel + (s0 + s) * kLanes;
            const I both = C > 1 ? sums[0][r][s] + sums[C - 1][r][s] : sums[0][r][s];
            const F value = to_floats(both) * (scale[s] * x_scale);
            store(to, g ? load(to) + value : value);
        }
    }
}

template <int R>
void tile_int8(const PackedMatrix &w, int64_t p, const Activations &a, int64_t m, const Ahead &ahead, float *out) {
    constexpr int V = kAcross<R>, C = kChains<R>;
    const Rows<R> x(a, m);
    for (int s0 = 0; s0 < kVectors; s0 += V) {
        const uint8_t *line = w.panel(p) + s0 * 64;
        auto part = ahead.part<V>(s0);
        for (int64_t g = 0; g < a.groups; ++g) {
            I acc[C][R][V] = {};
            const int32_t *sums = w.panel_sums(p) + g * kPanel + s0 * kLanes;
            FDCPU_UNROLL
            for (int s = 0; s < V; ++s)
                FDCPU_UNROLL
                for (int r = 0; r < R; ++r) acc[0][r][s] = load_as<I>(sums + s * kLanes) * -kByteOffset;
            for (int64_t k = g * w.group; k < (g + 1) * w.group;)
                for (int c = 0; c < C; ++c, k += 4, line += 4 * kPanel) {
                    part.fetch();
                    FDCPU_UNROLL
                    for (int s = 0; s < V; ++s) {
                        const Weights weights(load_as<B>(line + s * 64));
                        FDCPU_UNROLL
                        for (int r = 0; r < R; ++r)
                            acc[c][r][s] = dot_weights(acc[c][r][s], splat_bytes(x.at[r] + k), weights);
                    }
                }
            add_group(w, p, a, m, g, s0, acc, out);
        }
    }
}

// 32 inputs, from `k` on, of weights of four bits.
template <int R, int C, int V>
FDCPU_INLINE void add_nibbles(const uint8_t *line, const Rows<R> &x, int64_t k, I (&acc)[C][R][V]) {
#if FDCPU_LEVEL == 1
    I words[R][V] = {};
#endif
    FDCPU_UNROLL
    for (int i = 0; i < kGroupStep; i += 8, line += 4 * kPanel)
        FDCPU_UNROLL
        for (int s = 0; s < V; ++s) {
            const B packed = load_as<B>(line + s * 64);
            FDCPU_UNROLL
            for (int j = 0; j < 2; ++j) {
                const B nibbles = (j ? B(U(packed) >> 4) : packed) & 15;
                FDCPU_UNROLL
                for (int r = 0; r < R; ++r) {
                    const B inputs = splat_bytes(x.at[r] + k + i + 4 * j);
#if FDCPU_LEVEL == 1
                    words[r][s] = add_words(words[r][s], nibbles, inputs);
#else
                    I &sum = acc[j % C][r][s];
                    sum = dot_bytes(sum, nibbles, inputs);
#endif
                }
            }
        }
#if FDCPU_LEVEL == 1
    FDCPU_UNROLL
    for (int r = 0; r < R; ++r)
        FDCPU_UNROLL
        for (int s = 0; s < V; ++s) acc[0][r][s] += sum_words(words[r][s]);
#endif
}

template <int R>
void tile_int4(const PackedMatrix &w, int64_t p, const Activations &a, int64_t m, const Ahead &ahead, float *out) {
    constexpr int V = kAcross<R>, C = kChains<R>;
    constexpr int64_t kBytes = kGroupStep / 8 * 4 * kPanel;
    const Rows<R> x(a, m);
    for (int s0 = 0; s0 < kVectors; s0 += V) {
        const uint8_t *line = w.panel(p) + s0 * 64;
        auto part = ahead.part<V>(s0);
        for (int64_t g = 0; g < a.groups; ++g) {
            I acc[C][R][V] = {};
            FDCPU_UNROLL
            for (int r = 0; r < R; ++r)
                FDCPU_UNROLL
                for (int s = 0; s < V; ++s) acc[0][r][s] = splat_int(-8 * a.sums[(m + r) * a.groups + g]);
            for (int64_t k = g * w.group; k < (g + 1) * w.group; k += kGroupStep, line += kBytes) {
                for (int i = 0; i < kGroupStep; i += 8) part.fetch();
                add_nibbles(line, x, k, acc);
            }
            add_group(w, p, a, m, g, s0, acc, out);
        }
    }
}

template <int R>
void tile_tet2(const PackedMatrix &w, int64_t p, const Activations &a, int64_t m, const Ahead &ahead, float *out) {
    constexpr int V = kAcross<R>, C = kChains<R>;
    const Rows<R> x(a, m);
    for (int s0 = 0; s0 < kVectors; s0 += V) {
        const uint8_t *tile = w.panel(p) + s0 * kTetWords * sizeof(uint16_t);
        auto part = ahead.part<V>(s0);
        I acc[C][R][V] = {};
        for (int64_t k = 0; k < 2 * w.padded_inputs; k += 16, tile += kTetTile) {
            part.fetch();
            FDCPU_UNROLL
            for (int s = 0; s < V; ++s) {
                const U words = tet_words(tile + s * kTetWords * sizeof(uint16_t));
                FDCPU_UNROLL
                for (int j = 0; j < 4; ++j) {
                    const B bytes = tet_bytes(words, j);
                    FDCPU_UNROLL
                    for (int r = 0; r < R; ++r) {
                        I &sum = acc[j % C][r][s];
                        sum = dot_bytes(sum, bytes, splat_bytes(x.at[r] + k + 4 * j));
                    }
                }
            }
        }
        FDCPU_UNROLL
        for (int r = 0; r < R; ++r)
            FDCPU_UNROLL
            for (int s = 0; s < V; ++s) {
                for (int c = 0; c < C; ++c) acc[c][r][s] += acc[c][r][s];
                acc[0][r][s] -= 255 * a.sums[m + r];  // bytes stand for themselves minus 127.5
            }
        add_group(w, p, a, m, 0, s0, acc, out);
    }
}

// `copy`: of bfloat16 in twelve bits the decoded panel.
template <int R>
void tile(const PackedMatrix &w, int64_t p, const Activations &a, int64_t m, const Ahead &ahead,
          const uint8_t *copy, float *out) {
    switch (w.kind) {
        case WeightKind::f32: return tile_f32<R>(w, p, a, m, ahead, out);
        case WeightKind::bf16: return tile_pairs<R>(pairs_of(w, p), w.padded_inputs, a, m, ahead, out);
        case WeightKind::int8: return tile_int8<R>(w, p, a, m, ahead, out);
        case WeightKind::int4: return tile_int4<R>(w, p, a, m, ahead, out);
        case WeightKind::tet2: return tile_tet2<R>(w, p, a, m, ahead, out);
        case WeightKind::coded_bf16: return tile_pairs<R>(decoded_pairs(w, copy), w.padded_inputs, a, m, ahead, out);
    }
}

template <int R = kMostRows>
void tile_of(int rows, const PackedMatrix &w, int64_t p, const Activations &a, int64_t m, const Ahead &ahead,
             const uint8_t *copy, float *out) {
    if constexpr (R > 1) {
        if (rows < R) return tile_of<R - 1>(rows, w, p, a, m, ahead, copy, out);
    }
    tile<R>(w, p, a, m, ahead, copy, out);
}

}  // namespace fdcpu::FDCPU_NAMESPACE
