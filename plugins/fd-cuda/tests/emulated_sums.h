// Clusters of row_sums.cu: an address in another block's shared memory carries the block's rank, plus one, from bit 28
// on.
#include "emulated_rows.h"

#define __grid_constant__
inline u32 __cvta_generic_to_shared(const void* at) { return (u32)((const char*)at - &anchor) & 0xfffffff; }
inline char* in_cluster(u32 address) {
  const int offset = (int)(address << 4) >> 4;  // may be below the anchor
  return (address >> 28 ? (*block->anchors)[(address >> 28) - 1] : &anchor) + offset;
}
inline u32 at_rank(u32 address, int rank) { return address | (u32)(rank + 1) << 28; }
inline void send(u32 address, float value) { std::memcpy(in_cluster(address), &value, 4); }
inline void announce_start() {}
inline void await_start() { await(); }
inline void meet() { arrive(), await(); }
