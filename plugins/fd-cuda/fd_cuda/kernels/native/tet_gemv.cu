// y[M, N] = x[M, K] W[N, K]^T with W in the trellis code of two bits, for experts of few rows.
//
// A strand is 512 weights, 64 outputs by 8 inputs, a ring of 32 words; its 16-bit windows times a constant are four
// bytes each, which an integer product with (x0, x0 + x1, x1, x1 - x0) wants as they are: nothing is decoded.
// A lane loads four words of a strand, 8 outputs by 8 inputs, and borrows the word before from a neighbour. A block
// computes TILES times 64 outputs of up to eight rows, PAIRED: 64 and those that belong to these gates; its WARPS warps take
// turns of 32 inputs. x is int8, four numbers for two inputs (tet_rotate.cu), every lane copies what it will read itself. Row n of
// blockIdx.y is row slots[n] / divisor of x and row slots[n] of y.
// Sums are whole numbers: their order does not matter.

#include "common.cuh"
#include "trellis.cuh"

#define COLUMNS 8
#include "rows.cuh"

#define TURNS (WIDTH / 32)
#define ROUNDS ((TURNS + WARPS - 1) / WARPS)
#define MT TILES
#define OUT (PAIRED ? 64 : 64 * MT)

// INSTRUCTIONS: emulated.h of the tests has C++ in the place of what follows.

__device__ __forceinline__ void await_turn() {
  asm volatile("cp.async.wait_group %0;" ::"n"(AHEAD - 1) : "memory");
}

// END OF INSTRUCTIONS

extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT)
tet_gemv(const uint4* x, const float* x_scales, const int* x_sums, const uint4* __restrict__ w,
         const float* __restrict__ scales, u16* y, const int* slots, const int* experts, int M, int N, int tiles,
         int divisor) {
  extern __shared__ __align__(128) unsigned char memory[];  // inputs, then parts of sums
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, g = lane >> 2, j = lane & 3;
  const int tile = blockIdx.x;
  let_next_start();
  // Weights are asked for while the kernel before rotates x: it starts this one when all before it have ended.
  const int expert = experts[blockIdx.y];
  if (expert < 0) return leave_chain();
  w += (u64)expert * tiles * TURNS * 32;
  scales += (u64)expert * tiles * 64;
  const uint4* from[MT];
#pragma unroll
  for (int m = 0; m < MT; m++) {
    from[m] = w + ((u64)(PAIRED ? tile + m * (tiles / 2) : tile * MT + m) * TURNS + warp) * 32 + lane;
  }
  uint4 held[AHEAD][MT];
#pragma unroll
  for (int i = 0; i < AHEAD; i++)
    if (warp + i * WARPS < TURNS) {
#pragma unroll
      for (int m = 0; m < MT; m++) held[i][m] = load_once(from[m] + i * WARPS * 32);
    }

  const int* own_slots = slots + blockIdx.y * COLUMNS;
  const int own = own_slots[g];
  const bool is_there = own < M;
  wait_for_previous();
  const uint4* x_from = x + (is_there ? (u32)(own / divisor) * TURNS * 4 + warp * 4 + j : 0);
  uint4* ring = (uint4*)memory + warp * AHEAD * 32 + lane;
#pragma unroll
  for (int i = 0; i < AHEAD; i++) {
    if (is_there && warp + i * WARPS < TURNS) copy_async(shared_address(ring + i * 32), x_from + i * WARPS * 4, true);
    commit();
  }

  int sum[MT][4][4] = {};
#pragma unroll 1
  for (int begin = 0; begin < ROUNDS; begin += AHEAD) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int round = begin + i;
      if (ROUNDS % AHEAD && round >= ROUNDS) break;
      if (TURNS % WARPS && warp + round * WARPS >= TURNS) break;
      await_turn();
      const uint4 b = ring[i * 32];
#pragma unroll
      for (int m = 0; m < MT; m++) multiply_words(sum[m], held[i][m], b, lane);
      const int next = round + AHEAD;
      const bool more = (ROUNDS % AHEAD ? next < ROUNDS : begin + AHEAD < ROUNDS) &&
                        (TURNS % WARPS == 0 || warp + next * WARPS < TURNS);
#pragma unroll
      for (int m = 0; m < MT; m++) load_inside(held[i][m], from[m] + (AHEAD + i) * WARPS * 32, more);
      copy_async(shared_address(ring + i * 32), x_from + (AHEAD + i) * WARPS * 4, is_there && more);
      commit();
    }
#pragma unroll
    for (int m = 0; m < MT; m++) from[m] += AHEAD * WARPS * 32;
    x_from += AHEAD * WARPS * 4;
  }

  static_assert(WARPS * 32 % OUT == 0, "a thread finishes numbers of one output");
  const int column = tile * OUT + thread % OUT, width = N / (1 + PAIRED);
  const float own_scale = load_once(scales + column);
  const float other_scale = PAIRED ? load_once(scales + column + width) : 0.f;
  __syncthreads();  // sums stand where x was
  int* part = (int*)memory + warp * MT * 64 * PITCH;
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
      for (int e = 0; e < 4; e++)
        part[(m * 64 + g * 8 + n * 2 + (e >> 1)) * PITCH + j * 2 + (e & 1)] = sum[m][n][e];
  __syncthreads();

  for (int e = thread; e < COLUMNS * OUT; e += WARPS * 32) {
    const int n = e / OUT, at = own_slots[n];
    if (at >= M) return;  // rows that are there come first
    const int* line = (const int*)memory + e % OUT * PITCH + n;
    const int row = at / divisor;
    const float offset = 127.5f * x_sums[row], x_scale = x_scales[row];
    float value = (of_all_warps(line, MT * 64 * PITCH) - offset) * (own_scale * x_scale);
    if (PAIRED) {
      const int other = of_all_warps(line + 64 * PITCH, MT * 64 * PITCH);
      value = silu(value) * ((other - offset) * (other_scale * x_scale));
    }
    y[(u64)at * width + column] = narrow(value);
  }
}
