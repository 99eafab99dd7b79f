// y[M, N] = x[M, K] W[N, K]^T with packed W, for M <= 8 * TILES: decode steps of few sequences.
//
// A block computes 16 * MT outputs; its WARPS warps take turns of 64 inputs. Weights go from memory
// straight to registers, AHEAD turns ahead, and become matrix operands there (quant.cuh); x comes by
// cp.async through a ring of the warp's own. GROUPED: blockIdx.y is a block of rows of one expert, and row n is row
// slots[n] / divisor of x and row slots[n] of y. PAIRED: slab 0 is gate rows, slab 1 the up rows that belong to them.
// w holds slabs, or 8-bit numbers row by row.
// A row of x comes out the same whatever M is.

#include "common.cuh"
#include "quant.cuh"

#define COLUMNS (8 * TILES)
#define OUT (PAIRED ? 16 : 16 * MT)
#include "rows.cuh"

#define STAGE (COLUMNS * 128)  // bytes of x of one turn
#define RING (AHEAD * STAGE)

// INSTRUCTIONS: emulated.h of the tests has C++ in the place of what follows.

__device__ __forceinline__ void await_turns() {
  asm volatile("cp.async.wait_group %0;" ::"n"(AHEAD / 2 - 1) : "memory");
  __syncwarp();
}

__device__ __forceinline__ void load_chunk(u32* b, u32 address) {
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ void multiply(float* c, const u32* a, const u32* b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "
               "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// END OF INSTRUCTIONS

// A lane's part of x: the rows it fetches 16 bytes of.
struct Rows {
  const uint4* from[2 * TILES];
  u32 present;
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT)
quant_gemv(const uint4* x, int x_stride, const uint4* __restrict__ w, const u32* __restrict__ groups,
           const float* __restrict__ scales, const float* x_scales, const u16* __restrict__ bias, u16* y,
           const int* slots, const int* experts, const long long* ids, int M, int N, int K, int slabs,
           int turns, int per_group, int divisor) {
  const Entry* entries = (const Entry*)groups;
  // Inputs in the rings, then the warps' parts of the sums.
  extern __shared__ __align__(128) unsigned char memory[];
  const int thread = threadIdx.x, lane = thread & 31, warp = __shfl_sync(~0u, thread >> 5, 0);
  const int tile = blockIdx.x;
  const int num_groups = (turns + per_group - 1) / per_group;
#if GROUPED
  let_next_start();
  wait_for_previous();
  const int expert = ids != nullptr ? (int)ids[blockIdx.y] : experts[blockIdx.y];
  if (expert < 0) return;
  w += (u64)expert * (BY_ROWS ? N * (K / 16) : slabs * turns * 32 * PIECES);
  entries += (u64)expert * slabs * num_groups * 8 * SCALED;
  scales += (u64)expert * slabs * 16;
#endif
  const uint4* from[MT];
  [[maybe_unused]] u32 second[MT];  // by rows: from a row to the row eight below
  const Entry* group_of[MT];
#pragma unroll
  for (int m = 0; m < MT; m++) {
    // Slabs after the last repeat it; nothing of theirs is stored.
    const int slab = min(PAIRED ? tile + m * (slabs / 2) : tile * MT + m, slabs - 1);
    if (BY_ROWS) {
      const int row = min(slab * 16 + (lane >> 2), N - 1);
      from[m] = w + (u64)row * (K / 16) + (lane & 3);
      second[m] = (min(slab * 16 + (lane >> 2) + 8, N - 1) - row) * (K / 16);
    } else {
      from[m] = w + (u64)slab * turns * 32 * PIECES + lane;
    }
    group_of[m] = entries + (u64)slab * num_groups * 8 * SCALED + (lane >> 2);
  }

  // What a thread's results are multiplied with, asked for here: at the end it would be waited for.
  const int width = PAIRED ? N / 2 : N, own_column = min(tile * OUT + thread % OUT, width - 1);
  const float own_scale = load_once(scales + own_column), other_scale = PAIRED ? load_once(scales + own_column + width) : 0.f;

  Group held_groups[AHEAD][MT];
  Slab held[AHEAD][MT];
  const auto ask_w = [&](int i, int turn) {
#pragma unroll
    for (int m = 0; m < MT; m++) {
#if BY_ROWS
      const bool inside = turn * 4 + (lane & 3) < K / 16;
#pragma unroll
      for (int p = 0; p < 2; p++)
        held[i][m].piece[p] = inside ? load_once(from[m] + (p ? second[m] : 0) + turn * 4) : make_uint4(0, 0, 0, 0);
#else
#pragma unroll
      for (int p = 0; p < PIECES; p++) held[i][m].piece[p] = load_once(from[m] + (turn * PIECES + p) * 32);
#endif
      held_groups[i][m] = load_group(group_of[m], turn / per_group);
    }
  };
#pragma unroll
  for (int i = 0; i < AHEAD; i++)
    if (warp + i * WARPS < turns) ask_w(i, warp + i * WARPS);
#if !GROUPED
  let_next_start();
  wait_for_previous();
#endif

  Rows rows;
  rows.present = 0;
#pragma unroll
  for (int i = 0; i < 2 * TILES; i++) {
    const int row = (lane >> 3) + 4 * i;
    const int at = slot_of(row, slots, ids, M);
    const bool is_there = at < M;
    rows.from[i] = x + (is_there ? (u64)(GROUPED ? at / divisor : at) * x_stride : 0) + (lane & 7);
    rows.present |= (u32)is_there << i;
  }
  // Row 4 i + lane / 8, 16 bytes lane % 8, swizzled: 4 i does not change which.
  const u32 ring = shared_address(memory) + warp * RING;
  const u32 own = ring + (lane >> 3) * 128;
  const u32 swizzled[2] = {((lane & 7u) ^ (lane >> 3)) << 4, ((lane & 7u) ^ (4 + (lane >> 3))) << 4};
  const auto ask_x = [&](int i, int turn) {
    const bool inside = EVEN || turn * 64 + (lane & 7) * 8 < K;
#pragma unroll
    for (int j = 0; j < 2 * TILES; j++)
      if (rows.present >> j & 1)
        copy_async(own + i * STAGE + j * 512 + swizzled[j & 1], rows.from[j] + (inside ? turn * 8 : 0), inside);
  };
#pragma unroll
  for (int i = 0; i < AHEAD; i++) {
    if (warp + i * WARPS < turns) ask_x(i, warp + i * WARPS);
    if (i % 2) commit();
  }

  float sum[MT][TILES][4];
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int j = 0; j < 4; j++) sum[m][t][j] = 0.f;

  // Which 16 bytes of a row of a turn this lane reads: by rows the eight inputs it multiplies itself, else
  // one of those that ldmatrix hands out.
  const u32 row = INPUTS_BY_ROWS ? lane >> 2 : lane & 7, chunk = INPUTS_BY_ROWS ? (lane & 3) * 2 : lane >> 3;
  const u32 reads[2] = {row * 128 + ((chunk ^ row) << 4), row * 128 + (((chunk + (INPUTS_BY_ROWS ? 1 : 4)) ^ row) << 4)};
  for (int begin = warp; begin < turns; begin += AHEAD * WARPS) {
#pragma unroll
    for (int two = 0; two < AHEAD; two += 2) {
      if (begin + two * WARPS >= turns) break;
      await_turns();
#pragma unroll
      for (int i = two; i < two + 2; i++) {
        if (begin + i * WARPS >= turns) break;
        const Slab* own_slab = held[i];
        const Group* own_groups = held_groups[i];
#if SCALED
        // Sums of the turn, to be multiplied with its scales: fewer numbers than its weights.
        float own_sum[MT][TILES][4] = {};
        float(*to)[TILES][4] = own_sum;
#else
        float(*to)[TILES][4] = sum;
#endif
#pragma unroll
        for (int half = 0; half < 2; half++) {
          u32 b[TILES][4];
#pragma unroll
          for (int t = 0; t < TILES; t++) {
            const u32 at = ring + i * STAGE + t * 1024 + reads[half];
            if (INPUTS_BY_ROWS) load_chunk(b[t], at);
            else load_matrices(b[t], at);
          }
#pragma unroll
          for (int m = 0; m < MT; m++)
#pragma unroll
            for (int s = 0; s < 2; s++) {
              u32 a[4];
              unpack(own_slab[m], half * 2 + s, Code(), a);
              add_offsets(a, own_groups[m]);
#pragma unroll
              for (int t = 0; t < TILES; t++) multiply(to[m][t], a, b[t] + 2 * s);
            }
        }
#if SCALED
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
          for (int e = 0; e < TILES * 4; e++) {
            const u32 both = own_groups[m].scales;
            sum[m][e / 4][e % 4] = fmaf(own_sum[m][e / 4][e % 4], e % 4 < 2 ? low(both) : high(both), sum[m][e / 4][e % 4]);
          }
#endif
        if (begin + (i + AHEAD) * WARPS < turns) ask_w(i, begin + (i + AHEAD) * WARPS);
      }
      __syncwarp();
#pragma unroll
      for (int i = two; i < two + 2; i++)
        if (begin + (i + AHEAD) * WARPS < turns) ask_x(i, begin + (i + AHEAD) * WARPS);
      commit();
    }
  }

  __syncthreads();  // sums stand where x was
  store_sums((float*)memory, sum, warp, lane, GROUPED ? COLUMNS : M - (int)blockIdx.y * COLUMNS);
  __syncthreads();
  store_results((const float*)memory, x_scales, own_scale, other_scale, bias, y, tile * OUT, width, M, slots, ids, divisor);
}
