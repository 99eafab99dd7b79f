// y[token] = residual[token] + sum over its experts of weight * down(h): few tokens.
//
// Grid: (N / 16, tokens). A block makes 16 outputs of all CHOICES experts; its WARPS warps divide the
// rounds of 32 of k, which go through one expert after the other. Ids and weights were written before the
// kernel ahead of this one began, see experts_up.cu; h is that kernel's.
#include "few_rows.cuh"

#define CHOICES (TOP_K + SHARED)
#define PER (K / 32)  // rounds of one expert
#define ROUNDS (CHOICES * PER)
#define THREADS (WARPS * 32)

extern "C" __global__ void __launch_bounds__(THREADS)
experts_down(const u16* __restrict__ h, const u16* __restrict__ w, const int* ids, const float* weights,
             const u16* residual, u16* y, int N) {
  __shared__ __align__(16) u16 inputs[CHOICES * K];
  __shared__ float part[WARPS][16];
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, r = lane >> 2, q = lane & 3;
  const int token = blockIdx.y, first = blockIdx.x * 16;
  const u64 size = (u64)N * K;
  const u16* upper = w + (u64)min(first + r, N - 1) * K + q * 8;
  const u16* lower = w + (u64)min(first + r + 8, N - 1) * K + q * 8;
  const int id = lane < CHOICES ? __ldcg(ids + token * CHOICES + lane) : 0;
  const float weight = lane < CHOICES ? __ldcg(weights + token * CHOICES + lane) : 0.f;
  const int begin = warp * ROUNDS / WARPS, count = (warp + 1) * ROUNDS / WARPS - begin;
  uint4 a[AHEAD], b[AHEAD];
  auto ask = [&](uint4& to_upper, uint4& to_lower, int round) {
    const u64 at = __shfl_sync(~0u, id, round / PER) * size + round % PER * 32;
    to_upper = load_weight(upper + at);
    to_lower = load_weight(lower + at);
  };
#pragma unroll
  for (int i = 0; i < AHEAD; i++)
    if (i < count) ask(a[i], b[i], begin + i);
  let_next_start();
  wait_for_previous();

  const uint4* from = (const uint4*)(h + (u64)token * CHOICES * K);
  for (int i = thread; i < CHOICES * K / 8; i += THREADS) ((uint4*)inputs)[i] = load_input((const u16*)(from + i));
  float addend = 0.f;
  if (thread < 16 && first + thread < N) addend = widen(residual[(u64)token * N + first + thread]);
  __syncthreads();

  float total[2] = {}, sum[4] = {};
  for (int i = 0; i < count; i += AHEAD) {
#pragma unroll
    for (int j = 0; j < AHEAD; j++) {
      if (i + j >= count) break;
      const int round = begin + i + j;
      multiply(sum, a[j], b[j], *(const uint4*)(inputs + round * 32 + q * 8));
      if (i + j + AHEAD < count) ask(a[j], b[j], round + AHEAD);
      if ((round + 1) % PER == 0 || i + j + 1 == count) {
        const float by = __shfl_sync(~0u, weight, round / PER);
        total[0] = fmaf(by, sum[0], total[0]);
        total[1] = fmaf(by, sum[2], total[1]);
        sum[0] = sum[1] = sum[2] = sum[3] = 0.f;
      }
    }
  }
  // All columns are the same.
  if (q == 0) part[warp][r] = total[0], part[warp][r + 8] = total[1];
  __syncthreads();
  if (thread < 16 && first + thread < N) {
    float value = addend;
#pragma unroll
    for (int i = 0; i < WARPS; i++) value += part[i][thread];
    y[(u64)token * N + first + thread] = narrow(value);
  }
}
