// Clusters and the copy engine of feed.cuh. An address in another block's shared memory carries the block's rank from bit
// 20 on; a barrier counts what is missing.

struct TensorMap {  // quant_emulation.py makes it
  const char* data;
  long long row_bytes;
  int inputs, rows, box_rows, size, box_bytes, swizzles, matrix_rows;
  char rest[84];
};
struct Barrier {
  unsigned char phase, arrivals;
  short missing;
  int bytes;
};
static std::mutex counting;

inline char* in_cluster(u32 address) {
  char* own = (char*)shared;
  if (address >> 20) own = (*block->anchors)[(address >> 20) - 1] + (own - &anchor);
  return own + (address & 0xfffff);
}
inline u32 at_rank(u32 address, int rank) { return address | (u32)(rank + 1) << 20; }
inline void send(u32 address, float value) { std::memcpy(in_cluster(address), &value, 4); }
inline void send(u32 address, float4 v) { std::memcpy(in_cluster(address), &v, 16); }
inline void announce_start() { arrive(); }
inline void await_start() { await(); }
inline void meet() { arrive(), await(); }

inline void count(u32 address, int arrivals, int bytes) {
  const std::lock_guard<std::mutex> guard(counting);
  Barrier& own = *(Barrier*)in_cluster(address);
  own.missing -= arrivals, own.bytes += bytes;
  if (!own.missing && !own.bytes) own.phase ^= 1, own.missing = own.arrivals;
}
inline void make_barrier(u32 address, int arrivals) {
  *(Barrier*)in_cluster(address) = {0, (unsigned char)arrivals, (short)arrivals, 0};
}
inline void publish_barriers() {}
template <int kept>
inline void give_registers() {}
template <int taken>
inline void take_registers() {}
inline void expect(u32 address, int bytes) { count(address, 1, bytes); }
inline void arrive_at(u32 address) { count(address, 1, 0); }
inline void arrive_when_copied(u32 address) { arrive_at(address); }
inline void await_phase(u32 address, u32 parity) {
  for (;;) {
    {
      const std::lock_guard<std::mutex> guard(counting);
      if (((Barrier*)in_cluster(address))->phase != parity) return;
    }
    std::this_thread::yield();
    yield();
  }
}
template <int left>
inline void await_own_copies() {}
inline void prefetch(const TensorMap&) {}
template <class RowOf>
inline void copy_rows(u32 to, const TensorMap& map, int input, u32 barrier, const RowOf& row_of) {
  for (int r = 0; r < map.box_rows; ++r)
    for (int k = 0; k < map.box_bytes; ++k) {
      const int row = row_of(r), byte = input * map.size + k;
      const u32 at = to + r * map.box_bytes + (map.swizzles ? ((k / 16 ^ ((to >> 7) + r & 7)) << 4) + k % 16 : k);
      const bool inside = row >= 0 && row < map.rows && byte < map.inputs * map.size;
      *in_cluster(at) = inside ? map.data[row * map.row_bytes + byte] : 0;
    }
  count(barrier, 0, -map.box_rows * map.box_bytes);
}
inline void copy_box(u32 to, const TensorMap& map, int input, int row, u32 barrier) {
  copy_rows(to, map, input, barrier, [&](int r) { return row + r; });
}
inline void store_box(const TensorMap& map, int input, int row, u32 from) {
  for (int r = 0; r < map.box_rows && row + r < map.rows; ++r)
    for (int k = 0; k < map.box_bytes && input * map.size + k < map.inputs * map.size; ++k) {
      const u32 at = from + r * map.box_bytes + ((k / 16 ^ ((from >> 7) + r & 7)) << 4) + k % 16;
      ((char*)map.data)[(row + r) * map.row_bytes + input * map.size + k] = *in_cluster(at);
    }
}
template <int left>
inline void await_reads() {}
inline void show_to_copies() {}
inline void copy_gates(u32 to, const TensorMap& map, int input, int eight, int matrix, u32 barrier) {
  copy_rows(to, map, input, barrier, [&](int r) {
    const int half = map.matrix_rows / 2, own = eight * 8 + r / 16 * 8 + r % 8;
    return own < half ? matrix * map.matrix_rows + r / 8 % 2 * half + own : -1;
  });
}
inline void copy_line(u32 to, const void* from, int bytes, u32 barrier) {
  std::memcpy(in_cluster(to), from, bytes);
  count(barrier, 0, -bytes);
}
#define __grid_constant__
