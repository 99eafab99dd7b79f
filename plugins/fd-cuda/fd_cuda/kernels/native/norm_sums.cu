// y[M, K] = rms_norm(x), for a product whose rows have adapters, and beside it A y of each row's own adapter, over
// small parts of K: what native/gemm.cu then adds B times.
//
// Nobody here waits for a norm: the norm's weight goes into A, and what the norm divides by is left for gemm.cu to
// multiply with. The first blocks take a part of K of one adapter and read A while the kernel before still runs; each of
// the others takes a row.

#include "common.cuh"

#define THREADS 128
#define BM 64            // rows of a block, 16 a warp
#define MOST_TILES 6     // of 8 rows of A that a block takes
#define GROUPS ((EACH / 8 + MOST_TILES - 1) / MOST_TILES)
#define TILES ((EACH / 8 + GROUPS - 1) / GROUPS)
#define DEPTH ((K / 32 + DEPTHS - 1) / DEPTHS * 32)
#define CHUNKS 4         // of 32 inputs, read at a time
#define TURNS ((DEPTH / 32 + CHUNKS - 1) / CHUNKS)

// Eight rows of A times sixteen of x. Of 32 inputs a thread has eight that lie together, in x and in A alike: so the
// matrix units see the inputs in another order, the same one in both.
__device__ __forceinline__ void multiply(float* sum, const uint4& x, const uint4& x_below, const uint4& a) {
#define MULTIPLY(p, q)                                                                                            \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, " \
               "{%0,%1,%2,%3};"                                                                                   \
               : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                          \
               : "r"(x.p), "r"(x_below.p), "r"(x.q), "r"(x_below.q), "r"(a.p), "r"(a.q))
  MULTIPLY(x, y);
  MULTIPLY(z, w);
}

__device__ __forceinline__ u32 product(u32 a, u32 b) { return pack(low(a) * low(b), high(a) * high(b)); }

// Of one part of K and one adapter, for the rows that have it.
__device__ __forceinline__ void make_sums(const u16* x, long long x_stride, const u16* norm, const u16* a, const int* slots,
                                          float* inner, int M) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int depth = blockIdx.x % DEPTHS, of_a = blockIdx.x / DEPTHS;
  const int first_rank = of_a % GROUPS * TILES * 8, slot = of_a / GROUPS % SLOTS;
  const int row = of_a / (GROUPS * SLOTS) * BM + warp * 16 + lane / 4;  // and the one eight below
  const int begin = depth * DEPTH, end = min(begin + DEPTH, K);
  const uint4 none = make_uint4(0, 0, 0, 0);
  a += (u64)slot * EACH * K;

  uint4 scaled_a[TILES][CHUNKS], of_x[2][CHUNKS];
  float sum[TILES][4] = {};
  const auto read_a = [&](int turn) {
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      const int k = begin + (turn * CHUNKS + c) * 32 + lane % 4 * 8;
      const uint4 g = k < end ? *(const uint4*)(norm + k) : none;
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        const int rank = first_rank + t * 8 + lane / 4;
        const uint4 v = k < end && rank < EACH ? *(const uint4*)(a + (u64)rank * K + k) : none;
        scaled_a[t][c] = make_uint4(product(v.x, g.x), product(v.y, g.y), product(v.z, g.z), product(v.w, g.w));
      }
    }
  };
  read_a(0);
  let_next_start();
  wait_for_previous();
  int slot_of[2];
#pragma unroll
  for (int half = 0; half < 2; half++) slot_of[half] = row + half * 8 < M ? __ldcg(slots + row + half * 8) : -1;
#pragma unroll
  for (int turn = 0; turn < TURNS; turn++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const u16* from = x + (row + half * 8 < M ? row + half * 8 : 0) * x_stride;
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) {
        const int k = begin + (turn * CHUNKS + c) * 32 + lane % 4 * 8;
        of_x[half][c] = k < end ? __ldcg((const uint4*)(from + k)) : none;
      }
    }
    if (turn) read_a(turn);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
      for (int t = 0; t < TILES; t++) multiply(sum[t], of_x[0][c], of_x[1][c], scaled_a[t][c]);
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    if (slot_of[half] != slot) continue;
    float* to = inner + ((u64)depth * M + row + half * 8) * EACH + first_rank + lane % 4 * 2;
#pragma unroll
    for (int t = 0; t < TILES; t++)
      if (first_rank + t * 8 < EACH) *(float2*)(to + t * 8) = make_float2(sum[t][half * 2], sum[t][half * 2 + 1]);
  }
}

__device__ __forceinline__ u32 normed(u32 x, u32 g, float scale) {
  return pack(low(x) * scale * low(g), high(x) * scale * high(g));
}

__device__ __forceinline__ void norm_row(const u16* x, const u16* norm, u16* y, float* scale_of_row, float eps) {
  constexpr int PIECES = (K / 8 + THREADS - 1) / THREADS;
  __shared__ float totals[THREADS / 32];
  uint4 g[PIECES], v[PIECES];
#pragma unroll
  for (int i = 0; i < PIECES; i++) {
    const int k = (i * THREADS + threadIdx.x) * 8;
    if (k < K) g[i] = *(const uint4*)(norm + k);
  }
  let_next_start();
  wait_for_previous();
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < PIECES; i++) {
    const int k = (i * THREADS + threadIdx.x) * 8;
    v[i] = k < K ? __ldcg((const uint4*)(x + k)) : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int i = 0; i < PIECES; i++) {
    const u32 pairs[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
    for (int j = 0; j < 4; j++) total += low(pairs[j]) * low(pairs[j]) + high(pairs[j]) * high(pairs[j]);
  }
#pragma unroll
  for (int apart = 16; apart; apart /= 2) total += __shfl_xor_sync(~0u, total, apart);
  if (threadIdx.x % 32 == 0) totals[threadIdx.x / 32] = total;
  __syncthreads();
  total = 0.f;
#pragma unroll
  for (int w = 0; w < THREADS / 32; w++) total += totals[w];
  const float scale = rsqrtf(total / K + eps);
  if (threadIdx.x == 0) *scale_of_row = scale;
#pragma unroll
  for (int i = 0; i < PIECES; i++) {
    const int k = (i * THREADS + threadIdx.x) * 8;
    if (k < K)
      *(uint4*)(y + k) = make_uint4(normed(v[i].x, g[i].x, scale), normed(v[i].y, g[i].y, scale),
                                    normed(v[i].z, g[i].z, scale), normed(v[i].w, g[i].w, scale));
  }
}

// a [SLOTS, EACH, K], slots [M] (-1: none), inner [DEPTHS, M, EACH], scales [M].
extern "C" __global__ void __launch_bounds__(THREADS)
norm_sums(const u16* x, long long x_stride, const u16* norm, const u16* a, const int* slots, u16* y, float* inner,
          float* scales, int M, float eps) {
  const int sums = (M + BM - 1) / BM * SLOTS * GROUPS * DEPTHS, row = (int)blockIdx.x - sums;
  if (row < 0)
    make_sums(x, x_stride, norm, a, slots, inner, M);
  else
    norm_row(x + row * x_stride, norm, y + (u64)row * K, scales + row, eps);
}
