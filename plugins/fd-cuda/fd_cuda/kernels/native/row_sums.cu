// A x of the adapter that a row has, for products of few rows: before the product's launch, with NORM after the norm.
//
// A block takes a row, a part of the product, and SHARE of the inputs, with NORM all of them. A is read before the
// kernel before has ended, by a slot that may be an old one; then it is read again. A warp multiplies with eight
// ranks.

#include "common.cuh"

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

extern "C" __global__ void __launch_bounds__(WARPS * 32)
row_sums(const u16* __restrict__ x, long long x_stride, const u16* __restrict__ norm, const u16* __restrict__ a,
         const int* slots, u16* y, float* inner, int M, float eps) {
  __shared__ float sums[EACH][RANK];
  let_next_start();
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  const int row = blockIdx.x, part = blockIdx.y % PARTS, split = blockIdx.y / PARTS;
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
  if (early >= 0 && early < SLOTS) ranks.fetch(a, early, part, group, column, inside);

  wait_for_previous();
  const int slot = __ldcg(slots + row);
  Line values[TURNS];
#pragma unroll
  for (int t = 0; t < TURNS; t++) values[t] = line_at(x + row * x_stride + column[t], inside[t]);
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
  if (slot < 0) return;
  if (slot != early) ranks.fetch(a, slot, part, group, column, inside);

  float sum[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int t = 0; t < TURNS; t++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float first = low(values[t].of[i]), second = high(values[t].of[i]);
#pragma unroll
      for (int r = 0; r < 8; r++)
        sum[r] = fmaf(first, low(ranks.of[t][r].of[i]), fmaf(second, high(ranks.of[t][r].of[i]), sum[r]));
    }
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
  sum[0] += __shfl_xor_sync(~0u, sum[0], 1);
  if ((lane & 3) == 0) sums[nth][group * 8 + (lane >> 2)] = sum[0];
  __syncthreads();
  if (thread < RANK) {
    float whole = 0.f;
#pragma unroll
    for (int i = 0; i < EACH; i++) whole += sums[i][thread];
    inner[((u64)split * M + row) * PARTS * RANK + part * RANK + thread] = whole;
  }
}
