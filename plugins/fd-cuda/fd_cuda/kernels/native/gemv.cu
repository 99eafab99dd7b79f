// y[M, N] = x[M, K] W[N, K]^T for M <= 8 * TILES: decode steps of few sequences.
//
// A block holds 16 rows of W; its WARPS warps divide K. No shared memory until the end, and up to AHEAD
// loads of W are under way before the kernel waits for the one before it. Everything else is asked for in
// groups, one group ahead of the arithmetic: a load that a product waits for costs a third of the kernel.
// GATED: rows 0..7 of a block are gate rows, 8..15 the up rows that belong to them.
// A row of x comes out the same whatever M is.

#include "few_rows.cuh"

#define ROUNDS (K / (32 * WARPS))
// Where round i of a warp begins: two rounds read the two halves of the same lines of memory.
#define PAIRED (ROUNDS % 2 == 0)
#define AT(i) (PAIRED ? (i) / 2 * 64 * WARPS + (i) % 2 * 32 : (i) * 32 * WARPS)
#define HELD (ROUNDS < AHEAD ? ROUNDS : AHEAD)
#define GROUP (TILES > 1 || ROUNDS > 8 ? 3 : 6)  // rounds whose inputs are asked for at once
// Left to itself the compiler takes a few registers more than two blocks of eight warps have.
#if WARPS == 8 && TILES == 1 && ROUNDS > 2 * AHEAD
#define BOUNDS WARPS * 32, 2
#else
#define BOUNDS WARPS * 32
#endif

// What a thread needs of x, and of the norm's weights, for GROUP rounds.
struct Inputs {
  uint4 x[GROUP][TILES];
#if NORM
  uint4 gain[GROUP];
#endif
};

__device__ __forceinline__ void ask_for_gains(Inputs& in, const u16* norm, int begin) {
#if NORM
#pragma unroll
  for (int i = 0; i < GROUP; i++)
    if (begin + i < ROUNDS) in.gain[i] = load_weight(norm + AT(begin + i));
#endif
}

__device__ __forceinline__ void ask_for_inputs(Inputs& in, const u16* const (&x)[TILES], int begin) {
#pragma unroll
  for (int i = 0; i < GROUP; i++)
    if (begin + i < ROUNDS) {
#pragma unroll
      for (int m = 0; m < TILES; m++) in.x[i][m] = load_input(x[m] + AT(begin + i));
    }
}

extern "C" __global__ void __launch_bounds__(BOUNDS)
gemv(const u16* __restrict__ x, long long x_stride, const u16* __restrict__ norm,
     const u16* __restrict__ w, const u16* __restrict__ bias, const u16* residual, u16* y,
     int M, int N, float eps) {
  constexpr int OUT = EPILOGUE == GATED ? 8 : 16, COUNT = TILES * 8 * OUT, THREADS = WARPS * 32;
  constexpr int TURNS = (COUNT + THREADS - 1) / THREADS;
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, r = lane >> 2, q = lane & 3;
  const int row = blockIdx.x * OUT + r;
  const int offset = warp * (PAIRED ? 64 : 32) + q * 8;
  // Rows after the last repeat it; nothing of theirs is stored.
  const int last = EPILOGUE == GATED ? N / 2 - 1 : N - 1;
  const int first = min(row, last), second = EPILOGUE == GATED ? first + N / 2 : min(row + 8, last);
  const u16* upper = w + (u64)first * K + offset;
  const u16* lower = w + (u64)second * K + offset;

  uint4 a[HELD], b[HELD];
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    a[i] = load_weight(upper + AT(i));
    b[i] = load_weight(lower + AT(i));
  }
  Inputs in[2];
  ask_for_gains(in[0], norm + offset, 0);
  let_next_start();
  wait_for_previous();

  // Columns after the last row of x repeat it; nothing of theirs is stored either.
  const u16* own[TILES];
#pragma unroll
  for (int m = 0; m < TILES; m++) own[m] = x + min(m * 8 + r, M - 1) * x_stride + offset;
  ask_for_inputs(in[0], own, 0);
  // What this thread will finish: its residuals are asked for now.
  float addends[TURNS];
#pragma unroll
  for (int t = 0; t < TURNS; t++) {
    const int e = t * THREADS + thread, column = blockIdx.x * OUT + e % OUT;
    addends[t] = 0.f;
    if (EPILOGUE == ADD && e / OUT < M && column <= last)
      addends[t] = widen(residual[(u64)(e / OUT) * N + column]);
  }
  if (GROUP < ROUNDS) {
    ask_for_gains(in[1], norm + offset, GROUP);
    ask_for_inputs(in[1], own, GROUP);
  }
  // Compilers like to put a load back after the products that do not need it, and then each waits for
  // memory once more. So the sums begin with a zero whose sign depends on all loads.
  u32 bits = 0;
#pragma unroll
  for (int t = 0; t < TURNS; t++) bits |= __float_as_uint(addends[t]);
#pragma unroll
  for (int i = 0; i < 2 * GROUP && i < ROUNDS; i++)
#pragma unroll
    for (int m = 0; m < TILES; m++) bits |= in[i / GROUP].x[i % GROUP][m].x;
  const float zero = bits == 0xffedcba9 ? -0.f : 0.f;

  // Two sums: a product that has to wait for the one before it takes twice as long.
  float sums[TILES][2][4], squares[TILES];
#pragma unroll
  for (int m = 0; m < TILES; m++) {
    squares[m] = 0.f;
#pragma unroll
    for (int j = 0; j < 8; j++) sums[m][j / 4][j % 4] = zero;
  }
#pragma unroll
  for (int begin = 0; begin < ROUNDS; begin += GROUP) {
    Inputs& now = in[begin / GROUP % 2];
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
      const int round = begin + i;
      if (round < ROUNDS) {
        uint4 &wa = a[round % HELD], &wb = b[round % HELD];
#pragma unroll
        for (int m = 0; m < TILES; m++) {
#if NORM
          scale(now.x[i][m], now.gain[i], squares[m]);
#endif
          multiply(sums[m][round % 2], wa, wb, now.x[i][m]);
        }
        if (round + HELD < ROUNDS) {
          wa = load_weight(upper + AT(round + HELD));
          wb = load_weight(lower + AT(round + HELD));
        }
      }
    }
    if (begin + 2 * GROUP < ROUNDS) {
      ask_for_gains(now, norm + offset, begin + 2 * GROUP);
      ask_for_inputs(now, own, begin + 2 * GROUP);
    }
  }

  __shared__ float part[WARPS][TILES * 8][17];
  __shared__ float part_squares[WARPS][TILES * 8];
#pragma unroll
  for (int m = 0; m < TILES; m++) {
#pragma unroll
    for (int j = 0; j < 4; j++)
      part[warp][m * 8 + 2 * q + j % 2][r + j / 2 * 8] = sums[m][0][j] + sums[m][1][j];
#if NORM
    float s = squares[m];
    s += __shfl_xor_sync(~0u, s, 1);
    s += __shfl_xor_sync(~0u, s, 2);
    if (q == 0) part_squares[warp][m * 8 + r] = s;
#endif
  }
  __syncthreads();

#pragma unroll
  for (int t = 0; t < TURNS; t++) {
    const int e = t * THREADS + thread;
    const int c = e % OUT, n = e / OUT, column = blockIdx.x * OUT + c;
    if (e >= COUNT || n >= M || column > last) continue;
    float value = 0.f, other = 0.f, total = 0.f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
      value += part[i][n][c];
      if (EPILOGUE == GATED) other += part[i][n][c + 8];
#if NORM
      total += part_squares[i][n];
#endif
    }
#if NORM
    const float divisor = rsqrtf(total / K + eps);
    value *= divisor;
    other *= divisor;
#endif
    if (bias != nullptr) {
      value += widen(bias[column]);
      if (EPILOGUE == GATED) other += widen(bias[column + N / 2]);
    }
    if (EPILOGUE == GATED) {
      y[(u64)n * (N / 2) + column] = narrow(silu(value) * other);
    } else {
      y[(u64)n * N + column] = narrow(value + addends[t]);
    }
  }
}
