// y[M, N] = x[M, K] W[N, K]^T of fp8 numbers that lie row by row, for hundreds of rows, or hundreds of rows an expert, with
// a scale for 128 inputs of a row of x [turns, num_x] and for 128 by 128 numbers of W [N / 128, turns]: as many blocks as
// there are multiprocessors take one tile of 64 * GROUPS rows by 128 * WAVES outputs after the other.
//
// The sums of a turn, 128 inputs, are multiplied with its scales and added up outside the matrix units, which work for
// another group of four warps meanwhile. Rows of x are the left operand, 64 of them a group's: so a thread has two, and what
// it multiplies with is in registers, asked for a turn ahead. One warp feeds: the copy engine brings 128 numbers of every row,
// STAGES such turns ahead, those of the next tile while the last one is stored.
// GROUPED: blocks of rows have an expert each, and x lies in their order; `slots` says which rows of y they are, M and more
// where there is none. PAIRED: the first wave's outputs are gates, the second one's what belongs to them; their products lie
// like the rows of x, in fp8 with scales y_scales [N / 256, rows].
// A row of x comes out the same whatever M is.

#include "common.cuh"
#include "quant.cuh"
#define SPLIT 1
#include "wide.cuh"
#include "bytes.cuh"
#include "feed.cuh"
#define ROWS (GROUPS * 64)
#define COLUMNS (BN * WAVES)
#define APART 1  // a wave of gates, a wave of what belongs to them
#include "tiles.cuh"

#define PIECE 128  // bytes of a row that a warp stores at a time

// INSTRUCTIONS: emulated.h of the tests has C++ in the place of what follows.

__device__ __forceinline__ void store_matrices(u32 address, const u32* a) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(address), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]) : "memory");
}

// The nearest fp8 numbers, of what is too large the largest.
__device__ __forceinline__ u16 narrow_fp8(float first, float second) {
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  return pair;
}

#if GROUPS == 2
#define GIVE_REGISTERS() asm volatile("setmaxnreg.dec.sync.aligned.u32 40;")
#define TAKE_REGISTERS() asm volatile("setmaxnreg.inc.sync.aligned.u32 232;")
#else
#define GIVE_REGISTERS() asm volatile("setmaxnreg.dec.sync.aligned.u32 32;")
#define TAKE_REGISTERS() asm volatile("setmaxnreg.inc.sync.aligned.u32 160;")
#endif

// END OF INSTRUCTIONS

#ifndef GIVE_REGISTERS
#define GIVE_REGISTERS()
#define TAKE_REGISTERS()
#endif

// x / y, correctly rounded, with y's correctly rounded reciprocal (Markstein).
__device__ __forceinline__ float quotient(float x, float y, float inverse) {
  const float near = x * inverse;
  return __fmaf_rn(__fmaf_rn(-near, y, x), inverse, near);
}

// The division is not rounded correctly, what becomes of it is rounded to fewer bits.
__device__ __forceinline__ float quick_silu(float x) { return __fdividef(x, 1.f + __expf(-x)); }

// A tile's sums, from `at` on in the ring.
__device__ __forceinline__ void add_up(float (&total)[WAVES][BN / 2], const Problem& of, const Tile& tile, const Ring& ring,
                                       Place at, int warp, int lane) {
  const int row = tile.block * ROWS + warp * 16 + (lane >> 2), last = of.num_x - 1;
  const float *scales[WAVES], *own = of.scales + (u64)tile.expert * of.scale_width;
  const float *upper = of.x_scales + min(row, last), *lower = of.x_scales + min(row + 8, last);
  float next[WAVES], next_x[2] = {*upper, *lower}, sum[BN / 2];
#pragma unroll
  for (int n = 0; n < WAVES; n++) {
    const int output = tile.nth * OUT + n * (PAIRED ? of.N / 2 : BN);
    scales[n] = own + (u64)(min(output, of.N - 1) / 128) * of.turns;
    next[n] = scales[n][0];
  }
  for (int t = 0; t < of.turns; t++, advance<STAGES>(at)) {
    const u32 tile_at = ring.base + at.stage * STAGE;
    const u64 tile_x = descriptor(tile_at + warp / 4 * 64 * 128);
    const float of_x[2] = {next_x[0], next_x[1]};
    await_phase(ring.full + 8 * at.stage, at.parity);
#pragma unroll
    for (int n = 0; n < WAVES; n++) {
      const u64 tile_w = descriptor(tile_at + TILE_X + n * BN * 128);
      fence_registers(sum);
      begin_products();
      multiply<0>(sum, tile_x, tile_w);
#pragma unroll
      for (int s = 1; s < 4; s++) multiply<1>(sum, tile_x + s * 2, tile_w + s * 2);
      end_products();
      const float factors[2] = {next[n] * of_x[0], next[n] * of_x[1]};
      if (t + 1 < of.turns) {
        next[n] = scales[n][t + 1];
        if (n == 0) next_x[0] = *(upper += of.num_x), next_x[1] = *(lower += of.num_x);
      }
      await_products<0>();
      fence_registers(sum);
      if (n == WAVES - 1 && lane == 0) arrive_at(ring.empty + 8 * at.stage);
#pragma unroll
      for (int i = 0; i < BN / 2; i++) total[n][i] = fmaf(sum[i], factors[i / 2 % 2], total[n][i]);
    }
  }
}

// What a group does with a tile in which it has no rows.
__device__ __forceinline__ void pass_by(const Problem& of, const Ring& ring, Place at, int lane) {
  for (int t = 0; t < of.turns; t++, advance<STAGES>(at)) {
    await_phase(ring.full + 8 * at.stage, at.parity);
    __syncwarp();
    if (lane == 0) arrive_at(ring.empty + 8 * at.stage);
  }
}

// Where a lane finds or leaves 16 bytes of a row in its warp's piece of shared memory.
__device__ __forceinline__ u32 within(int row, int sixteen) { return row * PIECE + ((sixteen ^ row & 7) << 4); }

// y's rows `at` of the lanes get sums of 16 rows, through a piece of shared memory that is the warp's own.
__device__ __forceinline__ void store(const Problem& of, u16* y, const u16* bias, const float* total, int at, int column,
                                      unsigned char* room, int lane) {
#pragma unroll
  for (int first = 0; first < BN; first += PIECE / 2) {
#pragma unroll
    for (int j = 0; j < PIECE / 16; j += 2) {
      u32 pairs[4];
#pragma unroll
      for (int odd = 0; odd < 2; odd++) {
        const int eight = first / 8 + j + odd;
        const float* v = total + eight * 4;
        float2 plus = {0.f, 0.f};
        if (bias != nullptr) {
          const int output = column + eight * 8 + (lane & 3) * 2;
          plus.x = widen_y(bias[min(output, of.N - 1)]), plus.y = widen_y(bias[min(output + 1, of.N - 1)]);
        }
        pairs[odd * 2] = narrow_y(v[0] + plus.x, v[1] + plus.y), pairs[odd * 2 + 1] = narrow_y(v[2] + plus.x, v[3] + plus.y);
      }
      store_matrices(shared_address(room) + within(lane & 15, j + (lane >> 4)), pairs);
    }
    __syncwarp();
#pragma unroll
    for (int row = lane / 8; row < 16; row += 4) {
      const uint4 v = *(const uint4*)(room + within(row, lane % 8));
      store_piece(y, __shfl_sync(~0u, at, row), of.M, column + first + lane % 8 * 8, of.N, v);
    }
    __syncwarp();
  }
}

#if PAIRED
// silu(gate) times what belongs to it, of 16 rows: a tile's are of one block, rounded to y's dtype and then as quant_round.py
// would.
__device__ __forceinline__ void store_rounded(const Problem& of, unsigned char* y, float* y_scales, float (&total)[WAVES][BN / 2],
                                              int first_row, int nth, unsigned char* room, int lane) {
  float peak[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < BN / 2; i++) {
    total[0][i] = widen_y(narrow_y(quick_silu(total[0][i]) * total[1][i]));
    peak[i / 2 % 2] = fmaxf(peak[i / 2 % 2], fabsf(total[0][i]));
  }
#pragma unroll
  for (int h = 0; h < 2; h++) {
    peak[h] = fmaxf(peak[h], __shfl_xor_sync(~0u, peak[h], 1));
    peak[h] = fmaxf(peak[h], __shfl_xor_sync(~0u, peak[h], 2));
    const float scale = fmaxf(__fdiv_rn(peak[h], 448.f), 1e-12f), inverse = __frcp_rn(scale);
    const int row = (lane >> 2) + h * 8;
    if ((lane & 3) == 0) y_scales[(u64)nth * of.num_x + first_row + row] = scale;
#pragma unroll
    for (int eight = 0; eight < BN / 8; eight++) {
      const float* v = total[0] + eight * 4 + h * 2;
      const u16 pair = narrow_fp8(quotient(v[0], scale, inverse), quotient(v[1], scale, inverse));
      *(u16*)(room + within(row, eight / 2) + eight % 2 * 8 + (lane & 3) * 2) = pair;
    }
  }
  __syncwarp();
#pragma unroll
  for (int row = lane / 8; row < 16; row += 4) {
    const uint4 v = *(const uint4*)(room + within(row, lane % 8));
    *(uint4*)(y + (u64)(first_row + row) * (of.N / 2) + nth * OUT + lane % 8 * 16) = v;
  }
  __syncwarp();
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
quant_blocks(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const float* __restrict__ scales,
             const float* x_scales, const u16* __restrict__ bias, unsigned char* y, float* y_scales, const int* slots,
             const int* experts, int M, int N, int turns, int scale_width, int num_x, int blocks) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const int thread = threadIdx.x, lane = thread & 31, warp = uniform(thread >> 5);
  const int across = ((PAIRED ? N / 2 : N) + OUT - 1) / OUT;
  const Problem of{nullptr, scales, x_scales, slots, experts, M, N, 0, turns, 1, scale_width, num_x, blocks, across};
  const Ring ring = open_ring(x, w, memory);

  if (warp >= MULTIPLIERS) {
    GIVE_REGISTERS();
    if (thread == MULTIPLIERS * 32) feed(x, w, of, ring);
    return;
  }
  TAKE_REGISTERS();
  unsigned char* const room = ring.tiles + STAGES * STAGE + warp * 16 * PIECE;
  const int num_tiles = blocks * across;
  Place at = {0, 0};
  const auto is_there = [&](const Tile& tile) {  // an expert's rows are the first ones of its blocks
    return !GROUPED || slots[tile.block * ROWS + warp / 4 * 64] < M;
  };
  Tile next = tile_of(of, blockIdx.x);  // asked for while the tile before is multiplied
  bool is_next = is_there(next);
  for (int id = blockIdx.x; id < num_tiles; id += gridDim.x) {
    const Tile tile = uniform(next);
    const bool has_rows = !GROUPED || uniform(is_next);
    if (id + gridDim.x < num_tiles) next = tile_of(of, id + gridDim.x), is_next = is_there(next);
    if (tile.expert < 0) continue;
    const Place from = at;  // the same for all warps, whatever they do
    at = {(from.stage + turns) % STAGES, from.parity ^ (from.stage + turns) / STAGES & 1};
    if (!has_rows) {
      pass_by(of, ring, from, lane);
      continue;
    }
    const int first_row = tile.block * ROWS + warp * 16;
    [[maybe_unused]] const int own_at = GROUPED ? slots[first_row + (lane & 15)] : first_row + (lane & 15);
    float total[WAVES][BN / 2];
#pragma unroll
    for (int n = 0; n < WAVES; n++)
#pragma unroll
      for (int i = 0; i < BN / 2; i++) total[n][i] = 0.f;
    add_up(total, of, tile, ring, from, warp, lane);
#if PAIRED
    store_rounded(of, y, y_scales, total, first_row, tile.nth, room, lane);
#else
#pragma unroll
    for (int n = 0; n < WAVES; n++) store(of, (u16*)y, bias, total[n], own_at, tile.nth * OUT + n * BN, room, lane);
#endif
  }
}
