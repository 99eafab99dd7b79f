// y[M, N] = x[M, K] W[N, K]^T for M <= 8 * TILES: decode steps of few sequences.
//
// A block holds 16 rows of W; its WARPS warps divide K. Every thread loads 16 bytes at a time straight
// into the operands of mma.m16n8k16: the sum over k may be taken in any order, so W and x agree on a
// permutation of k under which eight consecutive values are what one thread has to hold. No shared memory
// until the end, and up to AHEAD loads of W are under way before the kernel waits for the one before it.
// GATED: rows 0..7 of a block are gate rows, 8..15 the up rows that belong to them.
// A row of x comes out the same whatever M is.

#include "common.cuh"

__device__ __forceinline__ uint4 load_weight(const u16* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

__device__ __forceinline__ uint4 load_input(const u16* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ void multiply(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "
               "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
gemv(const u16* __restrict__ x, long long x_stride, const u16* __restrict__ norm,
     const u16* __restrict__ w, const u16* __restrict__ bias, const u16* residual, u16* y,
     int M, int N, float eps) {
  constexpr int STEP = 32 * WARPS, ROUNDS = K / STEP;
  constexpr int HELD = ROUNDS < AHEAD ? ROUNDS : AHEAD;
  constexpr int OUT = EPILOGUE == GATED ? 8 : 16;
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, r = lane >> 2, q = lane & 3;
  const int row = blockIdx.x * OUT + r;
  const int offset = warp * 32 + q * 8;
  // Rows behind the last repeat it; nothing of theirs is stored.
  const int last = EPILOGUE == GATED ? N / 2 - 1 : N - 1;
  const int first = min(row, last), second = EPILOGUE == GATED ? first + N / 2 : min(row + 8, last);
  const u16* upper = w + (u64)first * K + offset;
  const u16* lower = w + (u64)second * K + offset;

  uint4 a[HELD], b[HELD];
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    a[i] = load_weight(upper + i * STEP);
    b[i] = load_weight(lower + i * STEP);
  }
  let_next_start();
  wait_for_previous();

  float sum[TILES][4], squares[TILES];
#pragma unroll
  for (int m = 0; m < TILES; m++) {
    squares[m] = 0.f;
#pragma unroll
    for (int j = 0; j < 4; j++) sum[m][j] = 0.f;
  }
#pragma unroll
  for (int begin = 0; begin < ROUNDS; begin += HELD) {
    if (begin > 0) {
#pragma unroll
      for (int i = 0; i < HELD; i++)
        if (begin + i < ROUNDS) {
          a[i] = load_weight(upper + (begin + i) * STEP);
          b[i] = load_weight(lower + (begin + i) * STEP);
        }
    }
#pragma unroll
    for (int i = 0; i < HELD; i++)
      if (begin + i < ROUNDS) {
        const int k = (begin + i) * STEP + offset;
#if NORM
        const uint4 g = load_input(norm + k);
#endif
#pragma unroll
        for (int m = 0; m < TILES; m++) {
          const int n = m * 8 + r;
          uint4 v = make_uint4(0, 0, 0, 0);
          if (n < M) v = load_input(x + n * x_stride + k);
#if NORM
          v.x = scaled(v.x, g.x, squares[m]);
          v.y = scaled(v.y, g.y, squares[m]);
          v.z = scaled(v.z, g.z, squares[m]);
          v.w = scaled(v.w, g.w, squares[m]);
#endif
          multiply(sum[m], a[i].x, b[i].x, a[i].y, b[i].y, v.x, v.y);
          multiply(sum[m], a[i].z, b[i].z, a[i].w, b[i].w, v.z, v.w);
        }
      }
  }

  __shared__ float part[WARPS][TILES * 8][17];
  __shared__ float part_squares[WARPS][TILES * 8];
#pragma unroll
  for (int m = 0; m < TILES; m++) {
    part[warp][m * 8 + 2 * q][r] = sum[m][0];
    part[warp][m * 8 + 2 * q + 1][r] = sum[m][1];
    part[warp][m * 8 + 2 * q][r + 8] = sum[m][2];
    part[warp][m * 8 + 2 * q + 1][r + 8] = sum[m][3];
#if NORM
    float s = squares[m];
    s += __shfl_xor_sync(~0u, s, 1);
    s += __shfl_xor_sync(~0u, s, 2);
    if (q == 0) part_squares[warp][m * 8 + r] = s;
#endif
  }
  __syncthreads();

  const int count = TILES * 8 * OUT;
  for (int e = thread; e < count; e += WARPS * 32) {
    const int c = e % OUT, n = e / OUT, column = blockIdx.x * OUT + c;
    if (n >= M || column > last) continue;
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
    const float scale = rsqrtf(total / K + eps);
    value *= scale;
    other *= scale;
#endif
    if (bias != nullptr) {
      value += widen(bias[column]);
      if (EPILOGUE == GATED) other += widen(bias[column + N / 2]);
    }
    if (EPILOGUE == GATED) {
      y[(u64)n * (N / 2) + column] = narrow(silu(value) * other);
    } else {
      const u64 place = (u64)n * N + column;
      if (EPILOGUE == ADD) value += widen(residual[place]);
      y[place] = narrow(value);
    }
  }
}
