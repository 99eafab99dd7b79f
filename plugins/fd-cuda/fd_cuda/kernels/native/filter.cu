// min_p, top_k and top_p without sorting: one cluster per row, which holds the row in shared memory: two rows
// share its multiprocessors, and one counts while the other waits for sums.
//
// What is kept are the largest logits down to some value. Passes narrow the range it lies in: three values
// divide it, and what lies at or above each is counted. Once few logits are left in the range they move to
// one block, which goes on alone. Amounts are integers (masses in units of 2^-40 of the largest), so sums
// do not depend on their order.

#include "common.cuh"
#include "copies.cuh"
#define SPLIT CLUSTER
#include "cluster.cuh"

#define WARPS (THREADS / 32)
#define MINE(x, i) (x)[(i) * THREADS]  // of ITEMS, what a thread has of the row
#define FEW (4 * THREADS)
#define PIVOTS 3

__device__ __forceinline__ void send(u32 address, u64 value) {
  asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(address), "l"(value) : "memory");
}

__device__ __forceinline__ long long key_of(float x) {
  const int bits = __float_as_int(x == 0.f ? 0.f : x);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

__device__ __forceinline__ float value_of(long long key) {
  const int k = (int)key;
  return __int_as_float(k ^ ((k >> 31) & 0x7fffffff));
}

__device__ __forceinline__ u64 mass_of(float x, float peak) {
  return (u64)(__expf(x - peak) * 1099511627776.f);
}

struct Range {
  long long low, high;   // keys: the value lies in [low, high)
  u64 beyond;            // the amount at or above high
  u32 num_low, num_high; // logits at or above low, and high
};

struct Pivots {
  float at[PIVOTS];
  __device__ __forceinline__ void divide(const Range& range) {
    const float lowest = value_of(range.low), highest = value_of(range.high - 1);
    const float step = (highest * 0.5f - lowest * 0.5f) * (2.f / (PIVOTS + 1));
    long long before = range.low;
#pragma unroll
    for (int i = 0; i < PIVOTS; i++) {
      // Strictly ascending while there is room; after the end they repeat the last key.
      long long key = key_of(lowest + step * (i + 1));
      key = key > before ? key : before + 1;
      key = key < range.high ? key : range.high - 1;
      at[i] = value_of(key);
      before = key;
    }
  }
};

struct Amounts {
  u64 mass[PIVOTS];
  u32 count[PIVOTS];
};

__device__ __forceinline__ bool is_found(const Range& range) {
  return range.high - range.low <= 1 || range.num_low - range.num_high <= 1;
}

// The part of the range that the value lies in, after what lies at or above each pivot became known.
template <bool BY_MASS>
__device__ __forceinline__ void narrow_range(Range& range, const Pivots& pivots,
                                             const Amounts& amounts, u64 wanted) {
#pragma unroll
  for (int i = PIVOTS - 1; i >= 0; i--) {
    const long long key = key_of(pivots.at[i]);
    if (key <= range.low || key >= range.high) continue;
    const u64 amount = BY_MASS ? amounts.mass[i] : amounts.count[i];
    if (amount >= wanted) {
      range.low = key;
      range.num_low = amounts.count[i];
      return;
    }
    range.high = key;
    range.beyond = amount;
    range.num_high = amounts.count[i];
  }
}

// Of some values of the row: the largest, the smallest finite one and how many are finite.
struct alignas(8) Extent {
  float highest, lowest;
  u32 count;
};

struct Total {
  u64 mass;
  u32 count;
};

__device__ __forceinline__ void add(Extent& to, const Extent& one) {
  to.highest = fmaxf(to.highest, one.highest), to.lowest = fminf(to.lowest, one.lowest);
  to.count += one.count;
}

__device__ __forceinline__ void add(Total& to, const Total& one) { to.mass += one.mass, to.count += one.count; }

__device__ __forceinline__ void add(Amounts& to, const Amounts& one) {
#pragma unroll
  for (int i = 0; i < PIVOTS; i++) to.mass[i] += one.mass[i], to.count[i] += one.count[i];
}

// The sum of a warp's threads.
__device__ __forceinline__ u64 of_warp(u64 mine) {
  for (int d = 16; d > 0; d >>= 1) mine += __shfl_xor_sync(~0u, mine, d);
  return mine;
}

__device__ __forceinline__ Total of_warp(const Total& mine) {
  return {of_warp(mine.mass), __reduce_add_sync(~0u, mine.count)};
}

__device__ __forceinline__ Extent of_warp(Extent mine) {
  for (int d = 16; d > 0; d >>= 1)
    add(mine, {__shfl_xor_sync(~0u, mine.highest, d), __shfl_xor_sync(~0u, mine.lowest, d), 0});
  mine.count = __reduce_add_sync(~0u, mine.count);
  return mine;
}

template <bool BY_MASS>
__device__ __forceinline__ Amounts of_warp(Amounts mine) {
#pragma unroll
  for (int i = 0; i < PIVOTS; i++) {
    mine.count[i] = __reduce_add_sync(~0u, mine.count[i]);
    if (BY_MASS) mine.mass[i] = of_warp(mine.mass[i]);
  }
  return mine;
}

// Where warps of a block, and then blocks of the cluster, leave their sums; the latter in turn.
template <class Sum>
struct Sums {
  Sum of_warps[WARPS], of_blocks[2][CLUSTER];
};

// The sum of the block's warps, then, if ALL, of the cluster's blocks.
template <bool ALL, class Sum>
__device__ __forceinline__ Sum summed(const Sum& of_warp, Sums<Sum>& at, int& turn, int rank) {
  if (threadIdx.x % 32 == 0) at.of_warps[threadIdx.x / 32] = of_warp;
  __syncthreads();
  Sum sum = at.of_warps[0];
  for (int w = 1; w < WARPS; w++) add(sum, at.of_warps[w]);
  if (!ALL) {
    __syncthreads();
    return sum;
  }
  if (threadIdx.x < CLUSTER) {
    u64 words[sizeof(Sum) / 8];  // all kinds are whole ones
    memcpy(words, &sum, sizeof(Sum));
    const u32 to = at_rank(shared_address(&at.of_blocks[turn][rank]), threadIdx.x);
#pragma unroll
    for (int i = 0; i < sizeof(Sum) / 8; i++) send(to + i * 8, words[i]);
  }
  meet();
  Sum all = at.of_blocks[turn][0];
  for (int b = 1; b < CLUSTER; b++) add(all, at.of_blocks[turn][b]);
  turn ^= 1;
  return all;
}

struct Shared {
  Sums<Amounts> amounts;
  Sums<Extent> extents;
  Sums<Total> totals;
  float list[FEW];
  u32 listed;
  long long result;
};

template <bool BY_MASS>
__device__ __forceinline__ void look(Amounts& amounts, const Pivots& pivots, float x, float peak) {
  const u64 mass = BY_MASS ? mass_of(x, peak) : 0;
#pragma unroll
  for (int i = 0; i < PIVOTS; i++) {
    const bool above = x >= pivots.at[i];
    amounts.count[i] += above;
    if (BY_MASS) amounts.mass[i] += above ? mass : 0;
  }
}

// The largest value v >= low such that the amount at or above v is at least `wanted`; low if none is.
template <bool BY_MASS>
__device__ __forceinline__ float smallest_kept(const float* x, float low, float peak, u32 num_low,
                                               u64 wanted, Shared& s, int& turn, int rank) {
  Range range = {key_of(low), key_of(peak) + 1, 0, num_low, 0};
  Pivots pivots;
  while (!is_found(range) && range.num_low - range.num_high > FEW) {
    pivots.divide(range);
    Amounts amounts = {};
#pragma unroll 2
    for (int i = 0; i < ITEMS; i++) look<BY_MASS>(amounts, pivots, MINE(x, i), peak);
    amounts = summed<true>(of_warp<BY_MASS>(amounts), s.amounts, turn, rank);
    narrow_range<BY_MASS>(range, pivots, amounts, wanted);
  }
  if (is_found(range)) return value_of(range.low);  // every block of the cluster knows
  // What is left moves to the first block.
  if (rank == 0 && threadIdx.x == 0) s.listed = 0;
  meet();
  const float lowest = value_of(range.low), end = value_of(range.high);
  for (int i = 0; i < ITEMS; i++) {
    const float value = MINE(x, i);
    if (value >= lowest && value < end) {
      u32 place;
      asm volatile("atom.shared::cluster.add.u32 %0, [%1], 1;"
                   : "=r"(place) : "r"(at_rank(shared_address(&s.listed), 0)) : "memory");
      send(at_rank(shared_address(s.list + place), 0), value);
    }
  }
  meet();
  if (rank == 0) {
    const u32 count = s.listed, num_beyond = range.num_high;  // what lies beyond did not move
    const u64 beyond = range.beyond;
    float mine[FEW / THREADS];
#pragma unroll
    for (int i = 0; i < FEW / THREADS; i++) {
      const u32 place = i * THREADS + threadIdx.x;
      mine[i] = place < count ? s.list[place] : LOWEST;
    }
    while (!is_found(range)) {
      pivots.divide(range);
      Amounts amounts = {};
#pragma unroll
      for (int i = 0; i < FEW / THREADS; i++) look<BY_MASS>(amounts, pivots, mine[i], peak);
      amounts = summed<false>(of_warp<BY_MASS>(amounts), s.amounts, turn, rank);
#pragma unroll
      for (int i = 0; i < PIVOTS; i++) {
        amounts.count[i] += num_beyond;
        if (BY_MASS) amounts.mass[i] += beyond;
      }
      narrow_range<BY_MASS>(range, pivots, amounts, wanted);
    }
    if (threadIdx.x < CLUSTER)
      send(at_rank(shared_address(&s.result), threadIdx.x), (u64)range.low);
  }
  meet();
  return value_of(s.result);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
filter(float* logits, const long long* __restrict__ top_k, const float* __restrict__ top_p,
       const float* __restrict__ min_p, int width) {
  __shared__ Shared s;
  extern __shared__ float held[];  // [ITEMS][THREADS]
  float* x = held + threadIdx.x;
  const int rank = blockIdx.z;
  float* row = logits + (u64)blockIdx.x * width;
  let_next_start();
  wait_for_previous();
  const long long k = top_k[blockIdx.x];
  const float p = top_p[blockIdx.x], least = min_p[blockIdx.x];
  const bool uses_k = k > 0 && k < width, uses_p = p < 1.f;
  if (!uses_k && !uses_p && least <= 0.f) return;  // all blocks of the cluster alike

#pragma unroll 8
  for (int i = 0; i < ITEMS; i++) {
    const int column = (i * CLUSTER + rank) * THREADS + threadIdx.x;
    MINE(x, i) = column < width ? row[column] : LOWEST;
  }
  int turn = 0;
  meet();  // all have started: their memory may be written to
  Extent extent = {LOWEST, -LOWEST, 0};
#pragma unroll 4
  for (int i = 0; i < ITEMS; i++) {
    const float value = MINE(x, i);
    add(extent, {value, value > LOWEST ? value : -LOWEST, value > LOWEST});
  }
  extent = summed<true>(of_warp(extent), s.extents, turn, rank);
  const float peak = extent.highest;
  if (peak > LOWEST && peak < -LOWEST) {
    float kept = extent.lowest;
    if (least > 0.f) kept = fmaxf(kept, peak + logf(least));
    if (uses_k)
      kept = fmaxf(kept, smallest_kept<false>(x, extent.lowest, peak, extent.count, k, s, turn, rank));
    if (uses_p) {
      Total total = {};
#pragma unroll 4
      for (int i = 0; i < ITEMS; i++) {
        const float value = MINE(x, i);
        if (value >= kept) add(total, {mass_of(value, peak), 1});
      }
      total = summed<true>(of_warp(total), s.totals, turn, rank);
      const u64 wanted = (u64)ceil((double)p * (double)total.mass);
      kept = fmaxf(kept, smallest_kept<true>(x, kept, peak, total.count, wanted, s, turn, rank));
    }
    for (int i = 0; i < ITEMS; i++) {
      const int column = (i * CLUSTER + rank) * THREADS + threadIdx.x;
      if (column < width && MINE(x, i) < kept) row[column] = LOWEST;
    }
  }
  meet();  // nobody leaves while others may still write to its memory
}
