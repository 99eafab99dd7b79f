// silu(gate) * up of what each token's experts make of its norm: few tokens, one expert's rows a block.
//
// Grid: (WIDTH / 8, tokens * CHOICES), a block as in gemv.cu with one row of x. The experts that every
// token visits come first, their weights are asked for before the kernel waits. The kernel behind this one
// (experts_down.cu) starts once every block here has waited, so it finds the ids without waiting.
#include "few_rows.cuh"

#define ROUNDS (K / (32 * WARPS))
// Where round i of a warp begins: two rounds read the two halves of the same lines of memory.
#define AT(i) ((i) / 2 * 64 * WARPS + (i) % 2 * 32)
#define HELD (ROUNDS < AHEAD ? ROUNDS : AHEAD)
#define CHOICES (TOP_K + SHARED)

struct Weights {
  uint4 a[HELD], b[HELD];
};

__device__ __forceinline__ void ask(Weights& w, const u16* upper, const u16* lower) {
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    w.a[i] = load_weight(upper + AT(i));
    w.b[i] = load_weight(lower + AT(i));
  }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
experts_up(const u16* __restrict__ x, long long x_stride, const u16* __restrict__ norm,
           const u16* __restrict__ w, const int* ids, u16* y, float eps) {
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, r = lane >> 2, q = lane & 3;
  const int token = blockIdx.y / CHOICES, choice = CHOICES - 1 - blockIdx.y % CHOICES;
  const int row = min(blockIdx.x * 8 + r, WIDTH - 1), offset = warp * 64 + q * 8;
  const u16* gate = w + (u64)row * K + offset;
  const u64 size = (u64)2 * WIDTH * K, half = (u64)WIDTH * K;
  Weights held;
  const u16* upper;
  if (choice >= TOP_K) {
    upper = gate + (EXPERTS + choice - TOP_K) * size;
    ask(held, upper, upper + half);
    wait_for_previous();
  } else {
    wait_for_previous();
    upper = gate + __ldcg(ids + token * CHOICES + choice) * size;
    ask(held, upper, upper + half);
  }
  let_next_start();

  // x times the norm's weights, once for all warps; what the norm divides by comes at the end.
  __shared__ __align__(16) u16 inputs[K];
  __shared__ float part[WARPS][16], part_squares[WARPS];
  float squares = 0.f;
  for (int i = thread * 8; i < K; i += WARPS * 32 * 8) {
    uint4 v = load_input(x + token * x_stride + i);
    scale(v, load_weight(norm + i), squares);
    *(uint4*)(inputs + i) = v;
  }
#pragma unroll
  for (int step = 16; step; step >>= 1) squares += __shfl_xor_sync(~0u, squares, step);
  if (lane == 0) part_squares[warp] = squares;
  __syncthreads();

  float sums[2][4] = {};
#pragma unroll
  for (int i = 0; i < ROUNDS; i++) {
    // All columns are the same row; only the first is kept.
    multiply(sums[i % 2], held.a[i % HELD], held.b[i % HELD], *(const uint4*)(inputs + offset + AT(i)));
    if (i + HELD < ROUNDS) {
      held.a[i % HELD] = load_weight(upper + AT(i + HELD));
      held.b[i % HELD] = load_weight(upper + half + AT(i + HELD));
    }
  }

  if (q == 0) {
    part[warp][r] = sums[0][0] + sums[1][0];
    part[warp][r + 8] = sums[0][2] + sums[1][2];
  }
  __syncthreads();
  const int column = blockIdx.x * 8 + thread;
  if (thread < 8 && column < WIDTH) {
    float value = 0.f, other = 0.f, total = 0.f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
      value += part[i][thread];
      other += part[i][thread + 8];
      total += part_squares[i];
    }
    const float divisor = rsqrtf(total / K + eps);
    y[(u64)(token * CHOICES + choice) * WIDTH + column] = narrow(silu(value * divisor) * (other * divisor));
  }
}
