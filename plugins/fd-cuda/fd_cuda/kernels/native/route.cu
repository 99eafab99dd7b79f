// Scores of all experts for few tokens, and which experts each token visits: norm, router and routing.
//
// A warp scores one expert for one token, with the router's row at hand before the kernel waits for the one
// before it. The last block of a token to come chooses: as routing.py does, and then the SHARED experts
// behind the routed ones, which every token visits.
#include "few_rows.cuh"

#define CHUNK 256  // values of a row that a warp reads at once
#define CHUNKS (K / CHUNK)
#define HELD (CHUNKS < 10 ? CHUNKS : 10)
#define CHOICES (TOP_K + SHARED)
#define OWN ((EXPERTS + 31) / 32)  // experts of a lane

typedef long long i64;

// INSTRUCTIONS: emulated.h of the tests has C++ in the place of what follows.

// What the block has written before is seen by whoever counts later.
__device__ __forceinline__ int count_up(int* at) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(at) : "memory");
  return before;
}

// END OF INSTRUCTIONS

// Orders by the value, NaN before all, then by the smaller index.
__device__ __forceinline__ i64 rank_of(float value, int index) {
  const int bits = __float_as_int(value == 0.f ? 0.f : value);
  const int key = value == value ? bits ^ ((bits >> 31) & 0x7fffffff) : 0x7fffffff;
  return (i64)((u64)(u32)key << 32 | (u32)(0x7fffffff - index));
}

__device__ __forceinline__ float sum_of(float x) {
#pragma unroll
  for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// By one warp.
__device__ __forceinline__ void choose(const float* scores, const float* bias, int* ids, float* weights,
                                       float floor, float scaling, int lane) {
  const i64 taken = (i64)1 << 63;
  float score[OWN], peak = LOWEST;
  i64 rank[OWN];
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    const int expert = i * 32 + lane;
    score[i] = expert < EXPERTS ? __ldcg(scores + expert) : LOWEST;
    peak = fmaxf(peak, score[i]);
  }
#if SIGMOID
#pragma unroll
  for (int i = 0; i < OWN; i++) score[i] = 1.f / (1.f + __expf(-score[i]));
#else
#pragma unroll
  for (int step = 16; step; step >>= 1) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, step));
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < OWN; i++) total += score[i] = __expf(score[i] - peak);
  total = sum_of(total);
#pragma unroll
  for (int i = 0; i < OWN; i++) score[i] /= total;
#endif
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    const int expert = i * 32 + lane;
    const float more = bias != nullptr && expert < EXPERTS ? bias[expert] : 0.f;
    rank[i] = expert < EXPERTS ? rank_of(score[i] + more, expert) : taken;
  }
  int chosen = EXPERTS + lane - TOP_K;  // of this lane's place in the list
  float weight = 1.f, sum = 0.f;
#pragma unroll
  for (int j = 0; j < TOP_K; j++) {
    i64 best = rank[0];
#pragma unroll
    for (int i = 1; i < OWN; i++) best = rank[i] > best ? rank[i] : best;
#pragma unroll
    for (int step = 16; step; step >>= 1) {
      const i64 other = __shfl_xor_sync(~0u, best, step);
      best = other > best ? other : best;
    }
    const int expert = 0x7fffffff - (int)(u32)(best & 0x7fffffff);
    float own = 0.f;
#pragma unroll
    for (int i = 0; i < OWN; i++)
      if (i * 32 + lane == expert) own = score[i], rank[i] = taken;
    own = __shfl_sync(~0u, own, expert % 32);
    sum += own;
    if (lane == j) chosen = expert, weight = own;
  }
  if (lane < TOP_K) weight = (RENORMALIZE ? weight / fmaxf(sum, floor) : weight) * scaling;
  if (lane < CHOICES) ids[lane] = chosen, weights[lane] = weight;
}

// Grid: (experts / WARPS, tokens). `arrived` is zero before and after.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
route(const u16* __restrict__ x, long long x_stride, const u16* __restrict__ norm,
      const float* __restrict__ router, const float* __restrict__ bias, float* scores, int* arrived,
      int* ids, float* weights, float eps, float floor, float scaling) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, token = blockIdx.y;
  const int expert = blockIdx.x * WARPS + warp;
  const float* row = router + (u64)min(expert, EXPERTS - 1) * K + lane * 8;
  const u16* gains = norm + lane * 8;
  float4 first[HELD], second[HELD];
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    first[i] = *(const float4*)(row + i * CHUNK);
    second[i] = *(const float4*)(row + i * CHUNK + 4);
  }
  let_next_start();
  wait_for_previous();

  const u16* own = x + token * x_stride + lane * 8;
  float score = 0.f, squares = 0.f;
#pragma unroll
  for (int begin = 0; begin < CHUNKS; begin += HELD) {
    uint4 v[HELD];
#pragma unroll
    for (int i = 0; i < HELD; i++)
      if (begin + i < CHUNKS) v[i] = load_input(own + (begin + i) * CHUNK);
#pragma unroll
    for (int i = 0; i < HELD; i++)
      if (begin + i < CHUNKS) {
        const int c = begin + i;
        const float4 a = begin ? *(const float4*)(row + c * CHUNK) : first[i];
        const float4 b = begin ? *(const float4*)(row + c * CHUNK + 4) : second[i];
        uint4 g = load_weight(gains + c * CHUNK);
        uint4 y = v[i];
        scale(y, g, squares);
        score = fmaf(low(y.x), a.x, fmaf(high(y.x), a.y, score));
        score = fmaf(low(y.y), a.z, fmaf(high(y.y), a.w, score));
        score = fmaf(low(y.z), b.x, fmaf(high(y.z), b.y, score));
        score = fmaf(low(y.w), b.z, fmaf(high(y.w), b.w, score));
      }
  }
  score = sum_of(score) * rsqrtf(sum_of(squares) / K + eps);
  __shared__ int is_last;
  if (lane == 0 && expert < EXPERTS) scores[token * EXPERTS + expert] = score;
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = count_up(arrived + token) == (EXPERTS + WARPS - 1) / WARPS - 1;
    if (is_last) arrived[token] = 0;
  }
  __syncthreads();
  if (!is_last || warp) return;
  choose(scores + token * EXPERTS, bias, ids + token * CHOICES, weights + token * CHOICES, floor, scaling,
         lane);
}
