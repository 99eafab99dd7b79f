// y[M, N] = x[M, K] W[N, K]^T with W in the trellis code of two bits, for M <= 8 * TILES.
//
// A strand is 512 weights, 64 outputs by 8 inputs, a ring of 32 words; its 16-bit windows times a constant are four
// bytes each, which an integer product with (x0, x0 + x1, x1, x1 - x0) wants as they are: nothing is decoded.
// A lane loads four words of a strand, 8 outputs by 8 inputs, and borrows the word before from a neighbour. A block
// computes 64 * MT outputs; its WARPS warps take turns of 32 inputs. x is int8, four numbers for two inputs
// (tet_rotate.cu), every lane copies what it will read itself. GROUPED and PAIRED as in quant_gemv.cu.
// Sums are whole numbers: their order does not matter.

#include "common.cuh"
#include "trellis.cuh"

#define COLUMNS (8 * TILES)
#include "rows.cuh"

#define PITCH (COLUMNS + 1)
#define OUT (PAIRED ? 64 : 64 * MT)

// INSTRUCTIONS: emulated.h of the tests has C++ in the place of what follows.

__device__ __forceinline__ void await_turn() {
  asm volatile("cp.async.wait_group %0;" ::"n"(AHEAD - 1) : "memory");
}

__device__ __forceinline__ void multiply(int* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
               "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// END OF INSTRUCTIONS

extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT)
tet_gemv(const uint4* x, const float* x_scales, const int* x_sums, const uint4* __restrict__ w,
         const float* __restrict__ scales, const u16* __restrict__ bias, u16* y, const int* slots,
         const int* experts, const long long* ids, int M, int N, int tiles, int turns, int divisor) {
  extern __shared__ __align__(128) unsigned char memory[];  // inputs in rings, then parts of sums
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, g = lane >> 2, j = lane & 3;
  const int tile = blockIdx.x;
#if GROUPED
  let_next_start();
  wait_for_previous();
  const int expert = ids != nullptr ? (int)ids[blockIdx.y] : experts[blockIdx.y];
  if (expert < 0) return;
  w += (u64)expert * tiles * turns * 32;
  scales += (u64)expert * tiles * 64;
#endif
  const uint4* from[MT];
#pragma unroll
  for (int m = 0; m < MT; m++) {
    const int own = min(PAIRED ? tile + m * (tiles / 2) : tile * MT + m, tiles - 1);
    from[m] = w + (u64)own * turns * 32 + j * 8 + g;
  }
  uint4 held[AHEAD][MT];
#pragma unroll
  for (int i = 0; i < AHEAD; i++)
    if (warp + i * WARPS < turns) {
#pragma unroll
      for (int m = 0; m < MT; m++) held[i][m] = load_once(from[m] + (warp + i * WARPS) * 32);
    }
#if !GROUPED
  let_next_start();
  wait_for_previous();
#endif

  u32 offset[TILES];
  u32 present = 0;
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    const int at = slot_of(t * 8 + g, slots, ids, M);
    const bool is_there = at < M;
    offset[t] = is_there ? (u32)(GROUPED ? at / divisor : at) * turns * 4 + j : 0;
    present |= (u32)is_there << t;
  }
  uint4* ring = (uint4*)memory + warp * AHEAD * TILES * 32 + lane;
  const auto ask_x = [&](int i, int turn) {
#pragma unroll
    for (int t = 0; t < TILES; t++)
      if (present >> t & 1) copy_async(shared_address(ring + (i * TILES + t) * 32), x + offset[t] + turn * 4, true);
  };
#pragma unroll
  for (int i = 0; i < AHEAD; i++) {
    if (warp + i * WARPS < turns) ask_x(i, warp + i * WARPS);
    commit();
  }

  int sum[MT][4][TILES][4];
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int e = 0; e < 16 * TILES; e++) ((int*)sum[m])[e] = 0;

  for (int begin = warp; begin < turns; begin += AHEAD * WARPS) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int turn = begin + i * WARPS;
      if (turn >= turns) break;
      await_turn();
      uint4 b[TILES];
#pragma unroll
      for (int t = 0; t < TILES; t++) b[t] = ring[(i * TILES + t) * 32];
#pragma unroll
      for (int m = 0; m < MT; m++) {
        const uint4 v = held[i][m];
        const u32 words[5] = {__shfl_sync(~0u, v.w, ((g + 7) & 7) * 4 + j), v.x, v.y, v.z, v.w};
#pragma unroll
        for (int n = 0; n < 4; n++) {
          u32 p[8];
          products(words[n], words[n + 1], p);
#pragma unroll
          for (int t = 0; t < TILES; t++) {
            multiply(sum[m][n][t], p[0], p[4], p[1], p[5], b[t].x, b[t].y);
            multiply(sum[m][n][t], p[2], p[6], p[3], p[7], b[t].z, b[t].w);
          }
        }
      }
      const int next = turn + AHEAD * WARPS;
      if (next < turns) {
#pragma unroll
        for (int m = 0; m < MT; m++) held[i][m] = load_once(from[m] + next * 32);
        ask_x(i, next);
      }
      commit();
    }
  }

  __syncthreads();  // sums stand where x was
  int* part = (int*)memory + warp * MT * 64 * PITCH;
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
      for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int e = 0; e < 4; e++)
          part[(m * 64 + g * 8 + n * 2 + (e >> 1)) * PITCH + t * 8 + j * 2 + (e & 1)] = sum[m][n][t][e];
  __syncthreads();

  const int width = PAIRED ? N / 2 : N;
  for (int e = thread; e < COLUMNS * OUT; e += WARPS * 32) {
    const int c = e % OUT, n = e / OUT, column = tile * OUT + c;
    const int at = slot_of(n, slots, ids, M);
    if (at >= M || column >= width) continue;
    const int* line = (const int*)memory + c * PITCH + n;
    const int total = of_all_warps(line, MT * 64 * PITCH);
    const int other = PAIRED ? of_all_warps(line + 64 * PITCH, MT * 64 * PITCH) : 0;
    const int row = GROUPED ? at / divisor : at;
    const float offset_of_bytes = 127.5f * x_sums[row], x_scale = x_scales[row];
    float value = (total - offset_of_bytes) * (scales[column] * x_scale);
    if (PAIRED) {
      value = silu(value) * ((other - offset_of_bytes) * (scales[column + width] * x_scale));
    } else if (bias != nullptr) {
      value += widen(bias[column]);
    }
    y[(u64)at * width + column] = narrow(value);
  }
}
