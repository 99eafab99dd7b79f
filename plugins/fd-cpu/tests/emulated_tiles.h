// The tile registers of AMX in plain C++, as emulated_instructions.h does for the rest, so that everything around the
// instructions can be tested on any processor. Included by tiles.h.
#pragma once
#include <cstdint>
#include <cstring>

namespace fdcpu::FDCPU_NAMESPACE {

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

}  // namespace fdcpu::FDCPU_NAMESPACE
