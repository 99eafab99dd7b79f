// Products with register tiles: R rows by one panel into out[R][64]. Few rows have two chains of sums, or the
// processor would wait for one.

namespace fdcpu::FDCPU_NAMESPACE {

constexpr int kVectors = kPanel / kLanes;            // registers across a panel
constexpr int kMostRows = FDCPU_LEVEL >= 2 ? 6 : 2;  // rows of a register tile, and
constexpr int kMostHalved = 2 * kMostRows;           // of one that takes half a panel at a time

template <int R>
constexpr int kChains = R <= 2 ? 2 : 1;

template <int R>
struct Rows {
    const uint8_t *at[R];
    Rows(const Activations &a, int64_t m) {
        for (int r = 0; r < R; ++r) at[r] = a.row(m + r);
    }
};

// What is fetched while a panel's lines are multiplied: lines a little ahead, or, when several register tiles
// meet the panel one after another, each tile's share of the panel that comes next.
struct Ahead {
    const uint8_t *at;
    int64_t step;  // for each line
    bool is_only;
    Ahead(const PackedMatrix &w, int64_t p, int64_t next, int64_t tile, int64_t num_tiles) : is_only(num_tiles == 1) {
        const int64_t line = w.kind == WeightKind::coded_bf16 ? kCodedBlock : 4 * kPanel;
        at = is_only ? w.panel(p) + 4096 : w.panel(next) + w.panel_bytes() * tile / num_tiles;
        step = (line + num_tiles - 1) / num_tiles;
    }
    FDCPU_INLINE void fetch() {
        __builtin_prefetch(at, 0, 2);
        __builtin_prefetch(at + 64, 0, 2);
        if (is_only) {
            __builtin_prefetch(at + 128, 0, 2);
            __builtin_prefetch(at + 192, 0, 2);
        }
        at += step;
    }
};

// The first V registers of a panel; the others are zero.
template <int R, int V>
void tile_f32_of(const PackedMatrix &w, int64_t p, const Activations &a, int64_t m, Ahead ahead, float *out) {
    const float *line = reinterpret_cast<const float *>(w.panel(p));
    const Rows<R> x(a, m);
    F acc[R][kVectors] = {};
    for (int64_t k = 0; k < w.padded_inputs; ++k, line += kPanel) {
        if (V == kVectors) ahead.fetch();
        F weights[V];
        for (int s = 0; s < V; ++s) weights[s] = load(line + s * kLanes);
        for (int r = 0; r < R; ++r)
            for (int s = 0; s < V; ++s)
                acc[r][s] = weights[s] * splat(reinterpret_cast<const float *>(x.at[r])[k]) + acc[r][s];
    }
    for (int r = 0; r < R; ++r)
        for (int s = 0; s < kVectors; ++s) store(out + r * kPanel + s * kLanes, acc[r][s]);
}

// Routers have few outputs.
template <int R>
void tile_f32(const PackedMatrix &w, int64_t p, const Activations &a, int64_t m, Ahead ahead, float *out) {
    if (!w.gated && w.outputs - p * kPanel <= kLanes) return tile_f32_of<R, 1>(w, p, a, m, ahead, out);
    tile_f32_of<R, kVectors>(w, p, a, m, ahead, out);
}

template <int R>
FDCPU_INLINE void store_sums(const F (&sums)[kChains<R>][R][kVectors], float *out) {
    for (int r = 0; r < R; ++r)
        for (int s = 0; s < kVectors; ++s)
            store(out + r * kPanel + s * kLanes, kChains<R> > 1 ? sums[0][r][s] + sums[kChains<R> - 1][r][s] : sums[0][r][s]);
}

// Of lines as they are, at `line`.
template <int R>
FDCPU_INLINE void tile_lines(const uint8_t *line, int64_t inputs, const Activations &a, int64_t m, Ahead ahead, float *out) {
    const Rows<R> x(a, m);
    F acc[kChains<R>][R][kVectors] = {};
    for (int64_t k = 0; k < 2 * inputs;)
        for (int c = 0; c < kChains<R>; ++c, k += 4, line += 4 * kPanel) {
            ahead.fetch();
            for (int s = 0; s < kVectors; ++s) {
                const I weights = load_as<I>(line + s * 64);
                for (int r = 0; r < R; ++r) acc[c][r][s] = dot_pairs(acc[c][r][s], weights, I(splat_bytes(x.at[r] + k)));
            }
        }
    store_sums<R>(acc, out);
}

template <int R>
void tile_bf16(const PackedMatrix &w, int64_t p, const Activations &a, int64_t m, Ahead ahead, float *out) {
    tile_lines<R>(w.panel(p), w.padded_inputs, a, m, ahead, out);
}

// Half a panel at a time becomes lines on the way, which stay in `copy` if other tiles of rows follow.
template <int R, bool kKeeps>
void tile_codes(const PackedMatrix &w, int64_t p, const Activations &a, int64_t m, Ahead ahead, uint8_t *copy,
                float *out) {
    constexpr int kParts = R <= 4 ? 2 : 1;  // chains of sums
    const uint8_t *block = w.panel(p) + kCodedHeader;
    const B exponents = load_as<B>(w.panel(p));
    const Rows<R> x(a, m);
    for (int half = 0; half < 2; ++half) {
        F acc[kParts][R][2] = {};
        uint8_t *to = copy + half * kHalf * 4;
        for (int64_t k = 0; k < 2 * w.padded_inputs; k += 8, block += kCodedBlock, to += 8 * kPanel) {
            ahead.fetch();
            I lines[2][2];
            decode_block(block, exponents, lines);
            for (int j = 0; j < 2; ++j) {
                for (int s = 0; s < 2 && kKeeps; ++s) store_as(to + j * 4 * kPanel + s * 64, lines[s][j]);
                for (int r = 0; r < R; ++r) {
                    const I input = I(splat_bytes(x.at[r] + k + 4 * j));
                    for (int s = 0; s < 2; ++s)
                        acc[j % kParts][r][s] = dot_pairs(acc[j % kParts][r][s], lines[s][j], input);
                }
            }
        }
        for (int r = 0; r < R; ++r)
            for (int s = 0; s < 2; ++s)
                store(out + r * kPanel + half * kHalf + s * kLanes,
                      kParts > 1 ? acc[0][r][s] + acc[kParts - 1][r][s] : acc[0][r][s]);
    }
    for (const Patch *patch = w.patches_of(p); patch != w.patches_of(p + 1); ++patch) {
        const float weight = load_one(&patch->bits);
        for (int r = 0; r < R; ++r)
            out[r * kPanel + patch->column] += load_one(reinterpret_cast<const uint16_t *>(x.at[r]) + patch->input) * weight;
        if (kKeeps) put_patch(*patch, copy + patch->input / 2 * 4 * kPanel, patch->column);
    }
}

// The tile that meets a panel first.
template <int R = kMostHalved>
void tile_codes_of(int rows, const PackedMatrix &w, int64_t p, const Activations &a, int64_t m, Ahead ahead,
                   uint8_t *copy, float *out) {
    if constexpr (R > 1) {
        if (rows < R) return tile_codes_of<R - 1>(rows, w, p, a, m, ahead, copy, out);
    }
    if constexpr (R > kMostRows) {
        if (!ahead.is_only) return tile_codes<R, true>(w, p, a, m, ahead, copy, out);
    }
    tile_codes<R, false>(w, p, a, m, ahead, copy, out);
}

// Shared by int8 and int4: what a group's integer sums add to the result.
template <int R>
FDCPU_INLINE void add_group(const PackedMatrix &w, int64_t p, const Activations &a, int64_t m, int64_t g,
                            const I (&sums)[kChains<R>][R][kVectors], float *out) {
    const float *scales = w.panel_scales(p) + g * kPanel;
    for (int r = 0; r < R; ++r) {
        const float x_scale = a.scales[(m + r) * a.groups + g];
        for (int s = 0; s < kVectors; ++s) {
            float *to = out + r * kPanel + s * kLanes;
            const I both = kChains<R> > 1 ? sums[0][r][s] + sums[kChains<R> - 1][r][s] : sums[0][r][s];
            const F value = __builtin_convertvector(both, F) * (load(scales + s * kLanes) * x_scale);
            store(to, g ? load(to) + value : value);
        }
    }
}

template <int R>
void tile_int8(const PackedMatrix &w, int64_t p, const Activations &a, int64_t m, Ahead ahead, float *out) {
    const uint8_t *line = w.panel(p);
    const Rows<R> x(a, m);
    for (int64_t g = 0; g < a.groups; ++g) {
        I acc[kChains<R>][R][kVectors] = {};
        const int32_t *sums = w.panel_sums(p) + g * kPanel;
        for (int s = 0; s < kVectors; ++s)
            for (int r = 0; r < R; ++r) acc[0][r][s] = load_as<I>(sums + s * kLanes) * -128;
        for (int64_t k = g * w.group; k < (g + 1) * w.group;)
            for (int c = 0; c < kChains<R>; ++c, k += 4, line += 4 * kPanel) {
                ahead.fetch();
                for (int s = 0; s < kVectors; ++s) {
                    const B weights = load_as<B>(line + s * 64);
                    for (int r = 0; r < R; ++r) acc[c][r][s] = dot_bytes(acc[c][r][s], splat_bytes(x.at[r] + k), weights);
                }
            }
        add_group<R>(w, p, a, m, g, acc, out);
    }
}

template <int R>
void tile_int4(const PackedMatrix &w, int64_t p, const Activations &a, int64_t m, Ahead ahead, float *out) {
    const uint8_t *line = w.panel(p);
    const Rows<R> x(a, m);
    for (int64_t g = 0; g < a.groups; ++g) {
        I acc[kChains<R>][R][kVectors] = {};
        for (int r = 0; r < R; ++r)
            for (int s = 0; s < kVectors; ++s) acc[0][r][s] = splat_int(-8 * a.sums[(m + r) * a.groups + g]);
        for (int64_t k = g * w.group; k < (g + 1) * w.group; k += 8, line += 4 * kPanel) {
            ahead.fetch();
            for (int s = 0; s < kVectors; ++s) {
                const B packed = load_as<B>(line + s * 64), low = packed & 15, high = B(U(packed) >> 4) & 15;
                for (int r = 0; r < R; ++r) {
                    I &even = acc[0][r][s], &odd = acc[kChains<R> - 1][r][s];
                    even = dot_bytes(even, low, splat_bytes(x.at[r] + k));
                    odd = dot_bytes(odd, high, splat_bytes(x.at[r] + k + 4));
                }
            }
        }
        add_group<R>(w, p, a, m, g, acc, out);
    }
}

template <int R>
void tile_tet2(const PackedMatrix &w, int64_t p, const Activations &a, int64_t m, Ahead ahead, float *out) {
    const uint8_t *tile = w.panel(p);
    const Rows<R> x(a, m);
    I acc[kChains<R>][R][kVectors] = {};
    for (int64_t k = 0; k < 2 * w.padded_inputs; k += 16, tile += kTetTile) {
        ahead.fetch();
        for (int s = 0; s < kVectors; ++s) {
            const U words = tet_words(tile + s * kTetWords * sizeof(uint16_t));
            for (int j = 0; j < 4; ++j) {
                const B bytes = tet_bytes(words, j);
                for (int r = 0; r < R; ++r) {
                    I &sum = acc[j % kChains<R>][r][s];
                    sum = dot_bytes(sum, bytes, splat_bytes(x.at[r] + k + 4 * j));
                }
            }
        }
    }
    for (int r = 0; r < R; ++r)
        for (int s = 0; s < kVectors; ++s) {
            for (int c = 0; c < kChains<R>; ++c) acc[c][r][s] += acc[c][r][s];
            acc[0][r][s] -= 255 * a.sums[m + r];  // bytes stand for themselves minus 127.5
        }
    add_group<R>(w, p, a, m, 0, acc, out);
}

template <int R>
void tile(const PackedMatrix &w, int64_t p, const Activations &a, int64_t m, Ahead ahead, uint8_t *copy, float *out) {
    switch (w.kind) {
        case WeightKind::f32: return tile_f32<R>(w, p, a, m, ahead, out);
        case WeightKind::bf16: return tile_bf16<R>(w, p, a, m, ahead, out);
        case WeightKind::int8: return tile_int8<R>(w, p, a, m, ahead, out);
        case WeightKind::int4: return tile_int4<R>(w, p, a, m, ahead, out);
        case WeightKind::tet2: return tile_tet2<R>(w, p, a, m, ahead, out);
        case WeightKind::coded_bf16: return tile_lines<R>(copy, w.padded_inputs, a, m, ahead, out);
    }
}

template <int R = kMostRows>
void tile_of(int rows, const PackedMatrix &w, int64_t p, const Activations &a, int64_t m, Ahead ahead,
             uint8_t *copy, float *out) {
    if constexpr (R > 1) {
        if (rows < R) return tile_of<R - 1>(rows, w, p, a, m, ahead, copy, out);
    }
    tile<R>(w, p, a, m, ahead, copy, out);
}

}  // namespace fdcpu::FDCPU_NAMESPACE
