// A x of the adapter that a row has, for products of few rows: before the product's launch, with NORM after the norm.
//
// A block takes a row, a part of the product, and SHARE of the inputs, with NORM all of them. A is read before the
// kernel before has ended, by a slot that may be an old one; then it is read again. A warp multiplies with eight
// ranks.
// DEFERRED: x first gets what the product before left out of it, B A of that product's inputs. That product let this
// kernel start when its inputs were there, so all this is computed while it runs. The PARTS blocks of a row are a
// cluster (SPLIT): each takes a share of the inputs, and they send each other their sums. SUMS 0: no product follows
// the norm.

#include "common.cuh"
#if DEFERRED
#include "cluster.cuh"
#endif

#define GROUPS_OF_RANKS (RANK / 8)
#define EACH (WARPS / GROUPS_OF_RANKS)  // warps that divide the inputs
#define PIECES (SHARE / 8)              // of 16 bytes, of a line
#define TURNS ((PIECES + EACH * 32 - 1) / (EACH * 32))

struct Line {
  u32 of[4];
};

__device__ __forceinline__ Line line_at(const u16* from, bool inside) {
  const uint4 v = inside ? *(const uint4*)from : make_uint4(0, 0, 0, 0);
  return {{v.x, v.y, v.z, v.w}};
}

struct Ranks {
  Line of[TURNS][8];

  __device__ __forceinline__ void fetch(const u16* a, int slot, int part, int group, const int (&column)[TURNS],
                                        const bool (&inside)[TURNS]) {
    const u16* first = a + ((u64)slot * PARTS * RANK + part * RANK + group * 8) * WIDTH;
#pragma unroll
    for (int t = 0; t < TURNS; t++)
#pragma unroll
      for (int r = 0; r < 8; r++) of[t][r] = line_at(first + (u64)r * WIDTH + column[t], inside[t]);
  }
};

// sum += what eight ranks have of a line of x.
__device__ __forceinline__ void add_products(float (&sum)[8], const Line& x, const Line (&ranks)[8]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float first = low(x.of[i]), second = high(x.of[i]);
#pragma unroll
    for (int r = 0; r < 8; r++)
      sum[r] = fmaf(first, low(ranks[r].of[i]), fmaf(second, high(ranks[r].of[i]), sum[r]));
  }
}

// Over all lanes, of rank lane / 4.
__device__ __forceinline__ float over_lanes(float (&sum)[8], int lane) {
  // Lanes with bit 4 go on with the second half of the ranks, with bits 3 and 2 with the halves of these.
#pragma unroll
  for (int half = 4; half; half /= 2)
#pragma unroll
    for (int i = 0; i < half; i++) {
      const bool second = lane & (half * 4);
      const float other = __shfl_xor_sync(~0u, second ? sum[i] : sum[i + half], half * 4);
      sum[i] = (second ? sum[i + half] : sum[i]) + other;
    }
  sum[0] += __shfl_xor_sync(~0u, sum[0], 2);
  return sum[0] + __shfl_xor_sync(~0u, sum[0], 1);
}

#if DEFERRED
#define SHARE_BEFORE ((DEPTH / 8 + PARTS - 1) / PARTS * 8)
#define TURNS_BEFORE ((SHARE_BEFORE / 8 + EACH * 32 - 1) / (EACH * 32))
#define PIECES_B (WIDTH * GROUPS_OF_RANKS)  // eight ranks of an output
#define TURNS_B ((PIECES_B + WARPS * 32 - 1) / (WARPS * 32))

struct Before {
  const u16 *x, *a, *b;  // [M, DEPTH], [SLOTS, RANK, DEPTH], [SLOTS, WIDTH, RANK]
  u16* total;            // [M, WIDTH]: x with what it lacked
  long long x_stride;

  // A x of a warp's share of this block's share of the inputs, of rank lane / 4 of its group.
  __device__ __forceinline__ float sum(int row, int slot, int part, int group, int nth) const {
    float sum[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
    const u16* first = a + ((u64)slot * RANK + group * 8) * DEPTH;
#pragma unroll 1
    for (int t = 0; t < TURNS_BEFORE; t++) {
      const int piece = (t * EACH + nth) * 32 + (threadIdx.x & 31), at = part * SHARE_BEFORE + piece * 8;
      const bool inside = piece < SHARE_BEFORE / 8 && at < DEPTH;
      Line ranks[8];
#pragma unroll
      for (int r = 0; r < 8; r++) ranks[r] = line_at(first + (u64)r * DEPTH + at, inside);
      const uint4 v = inside ? __ldcg((const uint4*)(x + row * x_stride + at)) : make_uint4(0, 0, 0, 0);
      add_products(sum, {{v.x, v.y, v.z, v.w}}, ranks);
    }
    return over_lanes(sum, threadIdx.x & 31);
  }

  __device__ __forceinline__ void fetch_b(Line (&of_b)[TURNS_B], int slot) const {
#pragma unroll
    for (int i = 0; i < TURNS_B; i++) {
      const int e = i * WARPS * 32 + threadIdx.x;
      of_b[i] = line_at(b + ((u64)slot * PIECES_B + e) * 8, e < PIECES_B);
    }
  }

  // added = B times the blocks' sums. Neighbouring threads have the ranks of an output.
  __device__ __forceinline__ void multiply_b(float* added, const Line (&of_b)[TURNS_B],
                                             const float (&sums)[PARTS][RANK]) const {
    const int first_rank = threadIdx.x % GROUPS_OF_RANKS * 8;
    float inner[8];
#pragma unroll
    for (int r = 0; r < 8; r++) {
      inner[r] = 0.f;
#pragma unroll
      for (int p = 0; p < PARTS; p++) inner[r] += sums[p][first_rank + r];
    }
#pragma unroll
    for (int i = 0; i < TURNS_B; i++) {
      float value = 0.f;
#pragma unroll
      for (int r = 0; r < 4; r++)
        value = fmaf(inner[2 * r], low(of_b[i].of[r]), fmaf(inner[2 * r + 1], high(of_b[i].of[r]), value));
#pragma unroll
      for (int step = GROUPS_OF_RANKS / 2; step; step /= 2) value += __shfl_xor_sync(~0u, value, step);
      const int e = i * WARPS * 32 + threadIdx.x;
      if (first_rank == 0 && e < PIECES_B) added[e / GROUPS_OF_RANKS] = value;
    }
  }
};
#endif

extern "C" __global__ void __launch_bounds__(WARPS * 32)
row_sums(const u16* __restrict__ x, long long x_stride, const u16* __restrict__ norm, const u16* __restrict__ a,
         const int* slots, u16* y, float* inner, int M, float eps
#if DEFERRED
         , const __grid_constant__ Before before
#endif
         ) {
  __shared__ float sums[EACH][RANK];
  let_next_start();
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  const int row = blockIdx.x, part = DEFERRED ? blockIdx.z : blockIdx.y % PARTS, split = blockIdx.y / PARTS;
  const int group = warp % GROUPS_OF_RANKS, nth = warp / GROUPS_OF_RANKS;
  int column[TURNS];
  bool inside[TURNS];
#pragma unroll
  for (int t = 0; t < TURNS; t++) {
    const int piece = (t * EACH + nth) * 32 + lane;
    column[t] = split * SHARE + piece * 8;
    inside[t] = piece < PIECES && column[t] < WIDTH;
  }
#if NORM
  __shared__ float squares[GROUPS_OF_RANKS][EACH];
  Line gain[TURNS];
#pragma unroll
  for (int t = 0; t < TURNS; t++) gain[t] = line_at(norm + column[t], inside[t]);
#endif
  const int early = __ldcg(slots + row);
  Ranks ranks;
#if DEFERRED
  __shared__ float sums_before[PARTS][RANK];
  __shared__ __align__(16) float added[WIDTH];
  announce_start();
  const int slot = early;  // it was there before the product's inputs
  if (slot >= 0) {
    const float own = before.sum(row, slot, part, group, nth);
    if ((lane & 3) == 0) sums[nth][group * 8 + (lane >> 2)] = own;
    Line of_b[TURNS_B];
    before.fetch_b(of_b, slot);
    __syncthreads();
    await_start();
    if (thread < RANK) {
      float whole = 0.f;
#pragma unroll
      for (int i = 0; i < EACH; i++) whole += sums[i][thread];
#pragma unroll
      for (int p = 0; p < PARTS; p++)
        send(at_rank((u32)__cvta_generic_to_shared(&sums_before[part][thread]), p), whole);
    }
    if (SUMS) ranks.fetch(a, slot, part, group, column, inside);
    meet();
    before.multiply_b(added, of_b, sums_before);
    __syncthreads();
  } else {
    await_start();
  }
  wait_for_previous();
#else
  if (early >= 0 && early < SLOTS) ranks.fetch(a, early, part, group, column, inside);

  wait_for_previous();
  const int slot = __ldcg(slots + row);
#endif
  Line values[TURNS];
#pragma unroll
  for (int t = 0; t < TURNS; t++) values[t] = line_at(x + row * x_stride + column[t], inside[t]);
#if DEFERRED
#pragma unroll
  for (int t = 0; t < TURNS; t++) {
    if (!inside[t]) continue;
    if (slot >= 0) {
      float more[8];
      *(float4*)more = *(const float4*)(added + column[t]);
      *(float4*)(more + 4) = *(const float4*)(added + column[t] + 4);
#pragma unroll
      for (int i = 0; i < 4; i++)
        values[t].of[i] = pack(low(values[t].of[i]) + more[2 * i], high(values[t].of[i]) + more[2 * i + 1]);
    }
    if (part == 0 && group == 0)
      *(uint4*)(before.total + (u64)row * WIDTH + column[t]) =
          make_uint4(values[t].of[0], values[t].of[1], values[t].of[2], values[t].of[3]);
  }
#endif
#if NORM
  float total = 0.f;
#pragma unroll
  for (int t = 0; t < TURNS; t++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float first = low(values[t].of[i]), second = high(values[t].of[i]);
      total = fmaf(first, first, fmaf(second, second, total));
    }
#pragma unroll
  for (int step = 16; step; step /= 2) total += __shfl_xor_sync(~0u, total, step);
  if (lane == 0) squares[group][nth] = total;
  __syncthreads();
  total = 0.f;
#pragma unroll
  for (int i = 0; i < EACH; i++) total += squares[group][i];
  const float scale = rsqrtf(total / WIDTH + eps);
#pragma unroll
  for (int t = 0; t < TURNS; t++) {
#pragma unroll
    for (int i = 0; i < 4; i++)
      values[t].of[i] = pack(low(values[t].of[i]) * scale * low(gain[t].of[i]),
                             high(values[t].of[i]) * scale * high(gain[t].of[i]));
    if (part == 0 && group == 0 && inside[t])
      *(uint4*)(y + (u64)row * WIDTH + column[t]) =
          make_uint4(values[t].of[0], values[t].of[1], values[t].of[2], values[t].of[3]);
  }
#endif
  if (!SUMS || slot < 0) return;
  if (slot != early) ranks.fetch(a, slot, part, group, column, inside);

  float sum[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int t = 0; t < TURNS; t++) add_products(sum, values[t], ranks.of[t]);
  const float own = over_lanes(sum, lane);
  if ((lane & 3) == 0) sums[nth][group * 8 + (lane >> 2)] = own;
  __syncthreads();
  if (thread < RANK) {
    float whole = 0.f;
#pragma unroll
    for (int i = 0; i < EACH; i++) whole += sums[i][thread];
    inner[((u64)split * M + row) * PARTS * RANK + part * RANK + thread] = whole;
  }
}
