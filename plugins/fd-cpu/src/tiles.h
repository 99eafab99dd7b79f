// The tile registers of AMX as the products use them: sixteen rows of activations times sixteen outputs.
// With FDCPU_TILES 2 they are emulated in plain C++, as emulated_instructions.h does for the rest, so that
// everything around the instructions can be tested on any processor. Included inside a level's namespace, like simd.h.
#pragma once
#include <cstdint>
#include <cstring>
#if FDCPU_TILES == 1
#include <immintrin.h>
#endif

namespace fdcpu::FDCPU_NAMESPACE {

constexpr int kTileSide = 16;

// Rows and bytes of a row of each tile.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t colsb[16] = {};
    uint8_t rows[16] = {};
};

// Tiles 0 to 3 are sums and 4 holds activations, `inputs` bytes of each row. A tall shape has a second tile
// of activations, 5, and 6 and 7 for weights; a short one has up to sixteen rows and three tiles for weights.
inline TileConfig tile_config(int inputs, int rows, bool is_tall) {
    TileConfig config;
    for (int t = 0; t < 8; ++t) {
        const bool is_input = t == 4 || (is_tall && t == 5);
        config.colsb[t] = uint16_t(is_input ? inputs : 64);
        config.rows[t] = uint8_t(t < 4 || is_input ? rows : inputs / 4);
    }
    return config;
}

#if FDCPU_TILES == 1

// GCC 12's _tile_loadconfig says that it reads eight bytes, so that stores to the others may be left out.
inline void tiles_configure(const TileConfig &config) { asm volatile("ldtilecfg %0" : : "m"(config)); }
inline void tiles_release() { _tile_release(); }

#define FDCPU_TILE_ZERO(t) _tile_zero(t)
// Unlike GCC's _tile_loadd this says that it reads memory, or stores before it might be moved after it.
#define FDCPU_TILE_LOAD(t, from, stride)                                                                 \
    asm volatile("tileloadd (%0,%1,1), %%tmm" #t : : "r"(from), "r"(int64_t(stride)),                     \
                 "m"(*reinterpret_cast<const uint8_t(*)[1 << 20]>(reinterpret_cast<const uint8_t *>(from))))
#define FDCPU_TILE_STORE(t, to, stride) _tile_stored(t, to, stride)
#define FDCPU_TILE_UNSIGNED_SIGNED(c, a, b) _tile_dpbusd(c, a, b)
#define FDCPU_TILE_SIGNED_UNSIGNED(c, a, b) _tile_dpbsud(c, a, b)
#define FDCPU_TILE_BF16(c, a, b) _tile_dpbf16ps(c, a, b)

#else

struct EmulatedTiles {
    TileConfig config;
    uint8_t bytes[8][kTileSide][64];
};
inline thread_local EmulatedTiles tiles;

inline void tiles_configure(const TileConfig &config) { tiles.config = config; }
inline void tiles_release() {}

inline void emulated_load(int t, const void *from, int64_t stride) {
    for (int r = 0; r < tiles.config.rows[t]; ++r)
        std::memcpy(tiles.bytes[t][r], static_cast<const uint8_t *>(from) + r * stride, tiles.config.colsb[t]);
}
inline void emulated_store(int t, void *to, int64_t stride) {
    for (int r = 0; r < tiles.config.rows[t]; ++r)
        std::memcpy(static_cast<uint8_t *>(to) + r * stride, tiles.bytes[t][r], tiles.config.colsb[t]);
}
template <class A, class B>
inline void emulated_bytes(int c, int a, int b) {
    for (int m = 0; m < tiles.config.rows[c]; ++m)
        for (int n = 0; n < kTileSide; ++n) {
            int32_t sum;
            std::memcpy(&sum, tiles.bytes[c][m] + 4 * n, 4);
            for (int k = 0; k < tiles.config.colsb[a]; ++k)
                sum += int32_t(A(tiles.bytes[a][m][k])) * int32_t(B(tiles.bytes[b][k / 4][4 * n + k % 4]));
            std::memcpy(tiles.bytes[c][m] + 4 * n, &sum, 4);
        }
}
inline void emulated_bf16(int c, int a, int b) {
    for (int m = 0; m < tiles.config.rows[c]; ++m)
        for (int n = 0; n < kTileSide; ++n) {
            float sum;
            std::memcpy(&sum, tiles.bytes[c][m] + 4 * n, 4);
            for (int k = 0; k < tiles.config.colsb[a] / 2; ++k) {
                uint16_t x, w;
                std::memcpy(&x, tiles.bytes[a][m] + 2 * k, 2);
                std::memcpy(&w, tiles.bytes[b][k / 2] + 4 * n + 2 * (k % 2), 2);
                sum += load_one(&x) * load_one(&w);
            }
            std::memcpy(tiles.bytes[c][m] + 4 * n, &sum, 4);
        }
}

#define FDCPU_TILE_ZERO(t) std::memset(tiles.bytes[t], 0, sizeof tiles.bytes[t])
#define FDCPU_TILE_LOAD(t, from, stride) emulated_load(t, from, stride)
#define FDCPU_TILE_STORE(t, to, stride) emulated_store(t, to, stride)
#define FDCPU_TILE_UNSIGNED_SIGNED(c, a, b) emulated_bytes<uint8_t, int8_t>(c, a, b)
#define FDCPU_TILE_SIGNED_UNSIGNED(c, a, b) emulated_bytes<int8_t, uint8_t>(c, a, b)
#define FDCPU_TILE_BF16(c, a, b) emulated_bf16(c, a, b)

#endif

// A thread's use of the tiles during one operation.
class TileUse {
public:
    ~TileUse() {
        if (key_) tiles_release();
    }
    void shape(int inputs, int rows, bool is_tall) {
        const int key = 1 + inputs * 64 + rows * 2 + is_tall;
        if (key == key_) return;
        key_ = key;
        tiles_configure(tile_config(inputs, rows, is_tall));
    }

private:
    int key_ = 0;
};

}  // namespace fdcpu::FDCPU_NAMESPACE
