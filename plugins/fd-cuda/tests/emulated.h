// A GPU for the attention kernels of kernels/native: threads are fibers, the blocks of a cluster are threads of
// the host, and each warp instruction is what its documentation says, computed from all lanes' operands.
// Slow, and exact about who holds which element.
#include "emulated_library.h"

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __shared__ static thread_local
#define __align__(n) alignas(n)

struct Index {
  int x, y, z;
};
struct float4 {
  float x, y, z, w;
};
struct uint2 {
  u32 x, y;
};
struct uint4 {
  u32 x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline int min(int a, int b) { return a < b ? a : b; }

static thread_local Index threadIdx, blockIdx;
static Index gridDim;
alignas(16) static thread_local float shared[65536];
static thread_local char anchor;

// -- fibers: each runs until it waits for others ---------------------------------------------------

#ifndef FIBERS
#define FIBERS 128
#endif
static const int STACK = 64 * 1024;

struct Block {
  ucontext_t main, fibers[FIBERS];
  std::vector<char> stacks = std::vector<char>(FIBERS * STACK);
  bool done[FIBERS] = {};
  int current = 0;
  // How often each has come to its warp's meetings, to those of its group of four warps, to the block's.
  long warp_turn[FIBERS] = {}, group_turn[FIBERS] = {}, block_turn[FIBERS] = {};
  char lanes[FIBERS][64];  // operands
  std::vector<char*>* anchors;
  std::barrier<>* cluster;
  int rank, arrived = 0, awaited = 0;
};
static thread_local Block* block;

inline void yield() { swapcontext(&block->fibers[block->current], &block->main); }

// Wait for fibers [first, first + count) to come as often as this one.
inline void gather(long* turns, int first, int count) {
  const long mine = ++turns[block->current];
  for (;;) {
    bool all = true;
    for (int i = first; i < first + count; ++i) all = all && (turns[i] >= mine || block->done[i]);
    if (all) return;
    yield();
  }
}
inline void __syncthreads() { gather(block->block_turn, 0, FIBERS); }
inline int warp_first() { return block->current / 32 * 32; }

// Every lane's value of one instruction.
template <class T>
struct Lanes {
  T value[32];
  explicit Lanes(const T& mine) {
    static_assert(sizeof(T) <= sizeof(block->lanes[0]));
    std::memcpy(block->lanes[block->current], &mine, sizeof(T));
    gather(block->warp_turn, warp_first(), 32);
    for (int i = 0; i < 32; ++i) std::memcpy(&value[i], block->lanes[warp_first() + i], sizeof(T));
    gather(block->warp_turn, warp_first(), 32);
  }
};
inline int lane_of() { return block->current % 32; }

// -- instructions ----------------------------------------------------------------------------------

template <class T>
inline T __shfl_sync(unsigned, T value, int source) { return Lanes<T>(value).value[source % 32]; }
template <class T>
inline T __shfl_xor_sync(unsigned, T value, int step) { return Lanes<T>(value).value[lane_of() ^ step]; }
inline void __threadfence() {}
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
inline int atomicAdd(int* at, int more) { return __atomic_fetch_add(at, more, __ATOMIC_SEQ_CST); }
template <class T>
inline T __ldcg(const T* at) { return *at; }
inline u32 __byte_perm(u32 a, u32 b, u32 selector) {
  const u64 both = (u64)b << 32 | a;
  u32 result = 0;
  for (int i = 0; i < 4; ++i) result |= (u32)(both >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
  return result;
}

#if HALF
inline float widen(u16 bits) { _Float16 x; std::memcpy(&x, &bits, 2); return (float)x; }
inline u16 narrow(float x) { _Float16 h = (_Float16)x; u16 bits; std::memcpy(&bits, &h, 2); return bits; }
#else
inline float widen(u16 bits) { u32 wide = (u32)bits << 16; float x; std::memcpy(&x, &wide, 4); return x; }
inline u16 narrow(float x) {
  u32 bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return 0x7fff;
  return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
#endif
inline float low(u32 pair) { return widen((u16)pair); }
inline float high(u32 pair) { return widen((u16)(pair >> 16)); }
inline u32 pack(float first, float second) { return narrow(first) | (u32)narrow(second) << 16; }
inline void let_next_start() {}
inline void wait_for_previous() {}
inline void leave_chain() {}

struct Word4 {
  u32 x[4];
};
inline Word4 load_past_l1(const u16* at) { Word4 w; std::memcpy(&w, at, 16); return w; }
inline int load_past_l1(const int* at) { return *at; }
inline long long load_past_l1(const long long* at) { return *at; }
inline float power(float x) { return std::exp2(x); }

// mma.m16n8k16: element (row, k) of A is in lane 4 (row % 8) + k / 2 % 4, register row / 8 + 2 (k / 8),
// half k % 2; (k, column) of B in lane 4 column + k / 2 % 4, register k / 8; of the result, (row, column) in lane
// 4 (row % 8) + column / 2, register 2 (row / 8) + column % 2.
inline void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  struct Operands {
    u32 a[4], b[2];
  };
  const Lanes<Operands> all(Operands{{a0, a1, a2, a3}, {b0, b1}});
  for (int i = 0; i < 4; ++i) {
    const int row = lane_of() / 4 + i / 2 * 8, column = lane_of() % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      const u32 a = all.value[row % 8 * 4 + k / 2 % 4].a[row / 8 + k / 8 * 2];
      const u32 b = all.value[column * 4 + k / 2 % 4].b[k / 8];
      c[i] += (k % 2 ? high(a) : low(a)) * (k % 2 ? high(b) : low(b));
    }
  }
}

// movmatrix: lane holds elements (lane / 4, 2 (lane % 4)) and the next of an 8 by 8 matrix.
inline u32 transposed(u32 x) {
  const Lanes<u32> all(x);
  u32 result = 0;
  for (int i = 0; i < 2; ++i) {
    const int row = lane_of() % 4 * 2 + i, column = lane_of() / 4;  // of the matrix as it was
    const u32 pair = all.value[row * 4 + column / 2];
    result |= (column % 2 ? pair >> 16 : pair & 0xffff) << 16 * i;
  }
  return result;
}

inline u32 cluster_rank() { return block->rank; }
// All fibers of the block come, then the block does.
inline void arrive() { __syncthreads(); }
inline void await() {
  if (++block->awaited == FIBERS) {
    block->awaited = 0;
    block->cluster->arrive_and_wait();
  }
  __syncthreads();
}
template <class T>
inline T of_block(const T* here, u32 rank) {
  return *(const T*)((const char*)here - &anchor + (*block->anchors)[rank]);
}
