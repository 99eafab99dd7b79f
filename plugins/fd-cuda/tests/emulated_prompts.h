// What prompt_attention.cu needs beside emulated_quant.h.
#include "emulated_quant.h"

#define LOWEST (-INFINITY)

inline int max(int a, int b) { return a > b ? a : b; }

// How many 16 bytes lie before the values; the other half: before the next 64 columns, which are counted from there.
inline u64 descriptor_of_values(u32 address, u32 step) { return address >> 4 | (u64)(step >> 4) << 16; }
template <int add>
inline void multiply_keys(float* d, u64 queries, u64 keys) {
  if (!add)
    for (int i = 0; i < BN / 2; ++i) d[i] = 0;
  multiply(d, queries, keys);
}
// B has what is summed over as rows of 64 columns, 128 bytes.
template <int columns>
inline void multiply_columns(float* d, const u32* a, u64 b) {
  struct Operands {
    u32 a[4];
  };
  const Lanes<Operands> all(Operands{{a[0], a[1], a[2], a[3]}});
  for (int i = 0; i < columns / 2; ++i) {
    const int row = lane_of() / 4 + i / 2 % 2 * 8, n = i / 4 * 8 + lane_of() % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      const u32 pair = all.value[row % 8 * 4 + k / 2 % 4].a[row / 8 + k / 8 * 2];
      const u32 at = ((u32)(b & 0xffff) + n / 64 * (u32)(b >> 16) << 4) + k * 128 + ((n % 64 / 8 ^ k & 7) << 4) + n % 8 * 2;
      d[i] += (k % 2 ? high(pair) : low(pair)) * half_at(at);
    }
  }
}
inline void multiply_values(float* d, const u32* a, u64 b) { multiply_columns<64>(d, a, b); }
inline void multiply_last(float* d, const u32* a, u64 b) { multiply_columns<72>(d, a, b); }
// GROUP heads of each token; the map's `matrix_rows` is how many bytes lie between heads.
inline void copy_heads(u32 to, const TensorMap& map, int input, int head, int token, u32 barrier) {
  for (int r = 0; r < map.box_rows * GROUP; ++r)
    for (int k = 0; k < 128; ++k) {
      const int own = token + r / GROUP;
      const char* from = map.data + own * map.row_bytes + (head + r % GROUP) * map.matrix_rows + input * map.size;
      *in_cluster(to + r * 128 + ((k / 16 ^ (to >> 7) + r & 7) << 4) + k % 16) = own < map.rows ? from[k] : 0;
    }
  count(barrier, 0, -map.box_rows * GROUP * 128);
}
template <int count>
inline void fence_all(float (&)[count]) {}
inline void await_turn(int) {}
inline void give_turn(int) {}
