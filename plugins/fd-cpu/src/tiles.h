// The tile registers of AMX as the products use them: sixteen rows of activations times sixteen outputs.
// With FDCPU_TILES 2 emulated_tiles.h of the tests has plain C++ in the place of the instructions. Included inside a
// level's namespace, like simd.h.
#pragma once
#include <cstdint>
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

#endif

}  // namespace fdcpu::FDCPU_NAMESPACE

#if FDCPU_TILES == 2
#include "emulated_tiles.h"
#endif

namespace fdcpu::FDCPU_NAMESPACE {

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
