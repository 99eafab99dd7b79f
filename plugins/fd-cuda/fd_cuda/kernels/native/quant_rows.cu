// y[M, N] = x[M, K] W[N, K]^T of int8 or fp8 numbers that lie row by row, for tens to hundreds of rows, or of
// rows an expert.
//
// wgmma reads both from shared memory: GROUPS * 64 rows of W and BN of x, 128 inputs a turn, in the 128-byte swizzle,
// by cp.async, STAGES turns; W is asked for before the kernel waits for the one before it. Sums of fp8 products
// have few bits in the matrix units, so those of every turn are added up outside. BY_BLOCK: there they are multiplied
// with the scales of the turn, which is a block of x's scales [K / 128, rows] and of W's [N / 128, K / 128]. The SPLIT
// blocks of a cluster divide K (wide.cuh). GROUPED as in quant_few.cu; PAIRED: one group of warps has gate
// rows, the other the up rows that belong to them.
// A row of x comes out the same whatever M is.

#include "common.cuh"
#include "quant.cuh"
#include "wide.cuh"
#include "bytes.cuh"

#define THREADS (GROUPS * 128)
#define OUT (PAIRED ? GROUPS * 32 : GROUPS * 64)
#define TILE_W (GROUPS * 64 * 128)
#define TILE_X (BN * 128)
#define STAGE (TILE_W + TILE_X)
#define ASKED (STAGES - 1)  // turns ahead
#define STEP (THREADS / 8)  // rows between pieces of 16 bytes that one thread asks for
#define PIECES_W 4
#define PIECES_X ((BN + STEP - 1) / STEP)
#define WHOLE (BN % STEP == 0)  // every thread has all of its pieces of x

extern "C" __global__ void __launch_bounds__(THREADS)
quant_rows(const uint4* x, const uint4* __restrict__ w, const float* x_scales, const float* __restrict__ scales,
           const u16* __restrict__ bias, u16* y, const int* slots, const int* experts, int M, int N, int K,
           int scale_width, int num_x, int divisor) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, rank = blockIdx.z;
  // Blocks that run together share what the second-level cache can hold: an expert's weights, else rows of x.
  const int tile = GROUPED ? blockIdx.x : blockIdx.y, block = GROUPED ? blockIdx.y : blockIdx.x;
  const int first_output = tile * OUT, first_row = block * BN;
  const int pieces = K / 16, turns = (K + 127) / 128, share = (turns + SPLIT - 1) / SPLIT;
  const int first = min(rank * share, turns), count = min(turns - first, share);
  const u32 base = (shared_address(memory) + 1023) & ~1023u;
  unsigned char* tiles = memory + (base - shared_address(memory));
  [[maybe_unused]] float* factors = (float*)(tiles + STAGES * STAGE);
  // Parts stand after the tiles where the cluster's other blocks may still read theirs.
  float* parts = SPLIT > 1 ? factors + (BY_BLOCK ? STAGES * BN : 0) : (float*)tiles;
#if GROUPED || FRESH
  let_next_start();
  wait_for_previous();
#endif
#if GROUPED
  const int expert = experts[block];
  if (expert < 0) return;  // the whole cluster: it has one
  w += (u64)expert * N * pieces;
  scales += (u64)expert * scale_width;
#endif
  announce_start();
  const int r = thread >> 3, c = thread & 7;
  const u32 place = r * 128 + ((c ^ (r & 7)) << 4);
  u32 from_w[PIECES_W], inside_w = 0;
#pragma unroll
  for (int i = 0; i < PIECES_W; i++) {
    const int row = r + i * STEP, half = PAIRED ? row / OUT : 0;
    const int output = first_output + row - half * OUT;
    const bool is_there = output < (PAIRED ? N / 2 : N);
    from_w[i] = is_there ? (u32)(output + half * (N / 2)) * pieces + first * 8 + c : 0;
    inside_w |= (u32)is_there << i;
  }
  const auto ask_w = [&](int t) {
    const u32 to = base + t % STAGES * STAGE + place;
    const bool inside = (first + t) * 8 + c < pieces;
#pragma unroll
    for (int i = 0; i < PIECES_W; i++) {
      const bool is_there = inside && (inside_w >> i & 1);
      copy_async(to + i * STEP * 128, w + (is_there ? from_w[i] + t * 8 : 0), is_there);
    }
  };
#pragma unroll
  for (int t = 0; t < ASKED; t++)
    if (t < count) ask_w(t);
#if !GROUPED && !FRESH
  let_next_start();
  wait_for_previous();
#endif

  u32 from_x[PIECES_X], inside_x = 0;
#pragma unroll
  for (int i = 0; i < PIECES_X; i++) {
    const int row = r + i * STEP;
    int at = M;
    if (WHOLE || row < BN) at = GROUPED ? slots[first_row + row] : first_row + row;
    const bool is_there = at < M;
    from_x[i] = is_there ? (u32)(GROUPED ? at / divisor : at) * pieces + first * 8 + c : 0;
    inside_x |= (u32)is_there << i;
  }
#if BY_BLOCK
  const float* factor = x_scales;  // of row `thread`
  if (thread < BN) {
    const int at = GROUPED ? slots[first_row + thread] : first_row + thread;
    factor += (u64)first * num_x + (at < M ? (GROUPED ? at / divisor : at) : 0);
  }
#endif
  const auto ask_x = [&](int t) {
    const u32 to = base + t % STAGES * STAGE + TILE_W + place;
    const bool inside = (first + t) * 8 + c < pieces;
#pragma unroll
    for (int i = 0; i < PIECES_X; i++) {
      const bool is_there = inside && (inside_x >> i & 1);
      if (WHOLE || r + i * STEP < BN) copy_async(to + i * STEP * 128, x + (is_there ? from_x[i] + t * 8 : 0), is_there);
    }
#if BY_BLOCK
    if (thread < BN) copy_word(shared_address(factors + t % STAGES * BN + thread), factor + (u64)t * num_x, true);
#endif
  };
#pragma unroll
  for (int t = 0; t < ASKED; t++) {
    if (t < count) ask_x(t);
    commit();
  }

#if BY_BLOCK
  // A warp's 16 outputs are of one block.
  const int own = warp * 16, up = PAIRED ? own / OUT : 0;
  const int output = min(first_output + own - up * OUT + up * (N / 2), N - 1);
  const float* factors_w = scales + (u64)(output / 128) * turns + first;
  float next_factor = count > 0 ? factors_w[0] : 0.f;
#endif
  Sum sums[1][BN / 2];
  Sum(&sum)[BN / 2] = sums[0];
#pragma unroll
  for (int i = 0; i < BN / 2; i++) sum[i] = 0;
  fence_registers(sum);
#if FORMAT == FP8_ROWS
  float totals[1][BN / 2];
  float(&total)[BN / 2] = totals[0];
#pragma unroll
  for (int i = 0; i < BN / 2; i++) total[i] = 0.f;
#else
  Sum(&totals)[1][BN / 2] = sums;
#endif
  for (int t = 0; t < count; t++) {
    await_copies<ASKED - 1>();
    __syncthreads();
    // All have finished with the turn before: its place is free.
    if (t + ASKED < count) {
      ask_w(t + ASKED);
      ask_x(t + ASKED);
    }
    commit();
    const u32 at = base + t % STAGES * STAGE;
    const u64 tile_w = descriptor(at + (warp >> 2) * 64 * 128), tile_x = descriptor(at + TILE_W);
    begin_products();
    multiply<FORMAT == INT8_ROWS>(sum, tile_w, tile_x);
#pragma unroll
    for (int s = 1; s < 4; s++) multiply<1>(sum, tile_w + s * 2, tile_x + s * 2);
    end_products();
#if BY_BLOCK
    const float factor_w = next_factor, *line = factors + t % STAGES * BN;
    if (t + 1 < count) next_factor = factors_w[t + 1];
#endif
    await_products<0>();
#if FORMAT == FP8_ROWS
    fence_registers(sum);
#pragma unroll
    for (int i = 0; i < BN / 2; i++) {
#if BY_BLOCK
      total[i] = fmaf(sum[i], line[i / 4 * 8 + (lane & 3) * 2 + (i & 1)] * factor_w, total[i]);
#else
      total[i] += sum[i];
#endif
    }
#endif
  }
  fence_registers(sum);

#if SPLIT > 1
  await_start();
#else
  await_copies<0>();
#endif
  const Ending ending{parts, BY_BLOCK ? nullptr : scales, BY_BLOCK ? nullptr : x_scales, nullptr, bias, y,
                      GROUPED ? slots : nullptr, divisor, first_row, rank, M, N};
  const int column = first_output + warp % (OUT / 16) * 16;
  finish<THREADS, (SPLIT > 1)>(ending, find_factors<THREADS, 1>(ending, column, thread), totals, column, thread);
}
