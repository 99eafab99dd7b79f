// y[M, N] = x[M, K] W[N, K]^T of fp8 numbers that lie row by row, for hundreds of rows, or hundreds of rows an expert, with
// a scale for 128 inputs of a row of x [turns, num_x] and for 128 by 128 numbers of W [N / 128, turns]: as many blocks as
// there are multiprocessors take one tile of 128 rows by 128 outputs, or by 256 in four waves, after the other.
//
// The sums of a turn, 128 inputs, are multiplied with its scales and added up outside the matrix units. Rows of x are the
// left operand, 64 of them a group's of four warps: so a thread has two, and its factors are in registers. Sums go to two
// sets of registers in turn, and a group adds up one while the matrix units make the other. One warp feeds: the copy engine
// brings 128 numbers of every row, STAGES such turns ahead, those of the next tile while the last one is stored. Another one
// brings scales beside them: asked for by those who multiply, even a turn ahead, they came too late. A wave's results are
// stored while the matrix units are at the next one's last sums.
// BOXES: pieces of shared memory of a warp from which the copy engine stores its results; 0 where it cannot, whose rows
// begin at whole 16 bytes and follow each other.
// GROUPED: blocks of rows have an expert each, and x lies in their order; `slots` says which rows of y they are, M and more
// where there is none. SPLIT: blocks of a cluster that divide K, one tile each cluster. PAIRED: of four waves of outputs the
// first two are gates, the others what belongs to them; their products lie like the rows of x, in fp8 with scales y_scales
// [N / 256, rows].
// A row of x comes out the same whatever M is, with the same SPLIT.

#include "common.cuh"
#include "quant.cuh"
#include "wide.cuh"
#include "bytes.cuh"
#include "feed.cuh"
#define GROUPS 2
#define ROWS (GROUPS * 64)
#define COLUMNS (BN * WAVES)
#define APART 1         // waves of gates, waves of what belongs to them
#define EARLY !GROUPED
#define BY_BLOCK 1
#include "tiles.cuh"

#define PIECE 128                                 // bytes of a row that a warp stores at a time
#define ROOM ((BOXES ? BOXES : 1) * 16 * PIECE)  // bytes of shared memory of a warp for that

// INSTRUCTIONS: emulated.h of the tests has C++ in the place of what follows.

// The nearest fp8 numbers, of what is too large the largest.
__device__ __forceinline__ u16 narrow_fp8(float first, float second) {
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  return pair;
}

// END OF INSTRUCTIONS

// x / y, correctly rounded, with y's correctly rounded reciprocal (Markstein).
__device__ __forceinline__ float quotient(float x, float y, float inverse) {
  const float near = x * inverse;
  return __fmaf_rn(__fmaf_rn(-near, y, x), inverse, near);
}

#include "block_sums.cuh"

// What a group does with a tile in which it has no rows.
__device__ __forceinline__ void pass_by(const Problem& of, const Ring& ring, Place at, int lane) {
  for (int t = 0; t < of.turns; t++, advance<STAGES>(at)) {
    await_phase(ring.full + 8 * at.stage, at.parity);
    set_free(ring, at.stage, lane);
  }
}

// Where a lane finds or leaves 16 bytes of a row in its warp's piece of shared memory.
__device__ __forceinline__ u32 within(int row, int sixteen) { return row * PIECE + ((sixteen ^ row & 7) << 4); }

// A warp's 16 rows of 64 outputs, from the `first` of a wave's on, to a piece of shared memory that is its own.
__device__ __forceinline__ void put(const Problem& of, const u16* bias, const float* total, int first, int column, u32 piece,
                                    int lane) {
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
    store_matrices(piece + within(lane & 15, j + (lane >> 4)), pairs);
  }
}

#if BOXES
// The copy engine stores them, while the next tile is multiplied. Pieces take turns, from the nth on: of those stored before,
// so few are still being read that the next one is free.
__device__ __forceinline__ void store(const Problem& of, const TensorMap& y, const u16* bias, const float* total, int row,
                                      int column, u32 room, int lane, int& nth) {
#pragma unroll
  for (int first = 0; first < BN; first += PIECE / 2) {
    const u32 piece = room + nth * 16 * PIECE;
    if (lane == 0) await_reads<BOXES - 1>();
    __syncwarp();
    put(of, bias, total, first, column, piece, lane);
    show_to_copies();
    __syncwarp();
    if (lane == 0) store_box(y, column + first, row, piece);
    nth = nth + 1 == BOXES ? 0 : nth + 1;
  }
}
#elif !PAIRED
// Lanes store them, each to the row `at` of y that one of them has.
__device__ __forceinline__ void store(const Problem& of, u16* y, const u16* bias, const float* total, int at, int column,
                                      unsigned char* room, int lane) {
#pragma unroll
  for (int first = 0; first < BN; first += PIECE / 2) {
    put(of, bias, total, first, column, shared_address(room), lane);
    __syncwarp();
#pragma unroll
    for (int row = lane / 8; row < 16; row += 4) {
      const uint4 v = *(const uint4*)(room + within(row, lane % 8));
      store_piece(y, __shfl_sync(~0u, at, row), of.M, column + first + lane % 8 * 8, of.N, v);
    }
    __syncwarp();
  }
}
#endif

#if PAIRED
// silu(gate) times what belongs to it, of 16 rows: a tile's are of one block, rounded to y's dtype and then as quant_round.py
// would.
__device__ __forceinline__ void store_rounded(const Problem& of, unsigned char* y, float* y_scales, float (&total)[WAVES][BN / 2],
                                              int first_row, int nth, unsigned char* room, int lane) {
  float peak[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < 64; i++) {  // of two waves of gates
    float &gate = total[i / 32][i % 32], up = total[2 + i / 32][i % 32];
    gate = widen_y(narrow_y(quick_silu(gate) * up));
    peak[i / 2 % 2] = fmaxf(peak[i / 2 % 2], fabsf(gate));
  }
#pragma unroll
  for (int h = 0; h < 2; h++) {
    peak[h] = fmaxf(peak[h], __shfl_xor_sync(~0u, peak[h], 1));
    peak[h] = fmaxf(peak[h], __shfl_xor_sync(~0u, peak[h], 2));
    const float scale = fmaxf(__fdiv_rn(peak[h], 448.f), 1e-12f), inverse = __frcp_rn(scale);
    const int row = (lane >> 2) + h * 8;
    if ((lane & 3) == 0) y_scales[(u64)nth * of.num_x + first_row + row] = scale;
#pragma unroll
    for (int eight = 0; eight < 16; eight++) {
      const float* v = total[eight / 8] + eight % 8 * 4 + h * 2;
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

#if SPLIT > 1
// A warp's sums to the block of the cluster that stores its rows; whether that is this one, which then has all of them, added
// in the order of the blocks.
__device__ __forceinline__ bool gather(float (&total)[BN / 2], float4* inbox, int warp, int lane) {
  constexpr int each = MULTIPLIERS / SPLIT;  // warps whose rows a block stores
  const int rank = blockIdx.z, storer = warp / each;
  const auto slot = [&](int from) { return inbox + (warp % each * (SPLIT - 1) + from - (from > storer)) * (BN / 8 * 32) + lane; };
  await_start();
  if (storer != rank) {
    const u32 to = at_rank(shared_address(slot(rank)), storer);
#pragma unroll
    for (int i = 0; i < BN / 8; i++) send(to + i * 512, four_of(total, i));
  }
  meet();
  if (storer != rank) return false;
#pragma unroll
  for (int i = 0; i < BN / 8; i++) {
    const float4 own = four_of(total, i);
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int from = 0; from < SPLIT; from++) {
      const float4 part = from == rank ? own : slot(from)[i * 32];
      sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
    total[i * 4] = sum.x, total[i * 4 + 1] = sum.y, total[i * 4 + 2] = sum.z, total[i * 4 + 3] = sum.w;
  }
  return true;
}
#endif

// Where results go, and what is added.
struct Results {
  unsigned char* y;
  float* y_scales;
  const u16* bias;
};

// What the warps that multiply do.
__device__ __forceinline__ void multiply_tiles(const Problem& of, const TensorMap& y_boxes, const Results& to,
                                               const Ring& ring, unsigned char* room,
                                               [[maybe_unused]] float4* inbox, int warp, int lane) {
  if (EARLY) wait_for_previous();
  const Own own = own_of(ring, warp, lane);
  const int num_tiles = of.blocks * of.across;
  Place at = {0, 0};
  [[maybe_unused]] int piece = 0;
  const auto is_there = [&](const Tile& tile) {  // an expert's rows are the first ones of its blocks
    return !GROUPED || of.slots[tile.block * ROWS + warp / 4 * 64] < of.M;
  };
  Tile next = tile_of(of, blockIdx.x);  // asked for while the tile before is multiplied
  bool is_next = is_there(next);
  for (int id = blockIdx.x; id < num_tiles; id += gridDim.x) {
    const Tile tile = uniform(next);
    const bool has_rows = !GROUPED || uniform(is_next);
    if (id + gridDim.x < num_tiles) next = tile_of(of, id + gridDim.x), is_next = is_there(next);
    if (tile.expert < 0) continue;
    const Place from = at;  // the same for all warps, whatever they do
    at = {(from.stage + of.turns) % STAGES, from.parity ^ (from.stage + of.turns) / STAGES & 1};
    if (!has_rows) {
      pass_by(of, ring, from, lane);
      continue;
    }
    const int first_row = tile.block * ROWS + warp * 16;
    [[maybe_unused]] const int own_at = GROUPED ? of.slots[first_row + (lane & 15)] : first_row + (lane & 15);
    float total[WAVES][BN / 2];
#pragma unroll
    for (int n = 0; n < WAVES; n++)
#pragma unroll
      for (int i = 0; i < BN / 2; i++) total[n][i] = 0.f;
    add_up(total, of.turns, ring, own, from, lane, [&]([[maybe_unused]] int wave) {
#if SPLIT > 1
      if (!gather(total[wave], inbox, warp, lane)) return;
#endif
      [[maybe_unused]] const int column = tile.nth * OUT + wave * BN;
#if BOXES
      store(of, y_boxes, to.bias, total[wave], first_row, column, shared_address(room), lane, piece);
#elif !PAIRED
      store(of, (u16*)to.y, to.bias, total[wave], own_at, column, room, lane);
#endif
    });
#if PAIRED
    store_rounded(of, to.y, to.y_scales, total, first_row, tile.nth, room, lane);
#endif
  }
  if (BOXES && lane == 0) await_reads<0>();  // the block's memory is somebody else's when it has ended
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
quant_blocks(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w,
             const __grid_constant__ TensorMap boxes_of_y, const float* __restrict__ scales, const float* x_scales,
             const u16* __restrict__ bias, unsigned char* y, float* y_scales, const int* slots, const int* experts, int M,
             int N, int turns, int scale_width, int num_x, int blocks) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const int thread = threadIdx.x, lane = thread & 31, warp = uniform(thread >> 5);
  const int across = ((PAIRED ? N / 2 : N) + OUT - 1) / OUT;
  const int rank = SPLIT > 1 ? blockIdx.z : 0, first = rank * turns / SPLIT, own = (rank + 1) * turns / SPLIT - first;
  const Problem of{nullptr, scales, x_scales, slots,  experts, M,     N,    0, own, 1, scale_width,
                   num_x,   blocks, across,   first, turns};
  const Ring ring = open_ring(x, w, memory);
  announce_start();
  unsigned char* const rooms = ring.tiles + STAGES * STAGE;
  float4* const inbox = (float4*)(rooms + MULTIPLIERS * ROOM);
  if (warp < MULTIPLIERS) {
    take_registers<232>();
    multiply_tiles(of, boxes_of_y, {y, y_scales, bias}, ring, rooms + warp * ROOM, inbox, warp, lane);
  } else {
    give_registers<40>();
    if (thread == MULTIPLIERS * 32) feed(x, w, of, ring);
    if (warp == MULTIPLIERS + 1) feed_scales(of, ring, lane);
#if SPLIT > 1
    __syncwarp();
    await_start();
    meet();
#endif
  }
}
