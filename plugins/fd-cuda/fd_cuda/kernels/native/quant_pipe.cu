// y[M, N] = x[M, K] W[N, K]^T with packed W, for a hundred rows to thousands.
//
// One warp feeds: it asks the copy engine for tiles of x, 64 inputs each, STAGES of them ahead. The others bring the
// slabs of quant.cuh, each lane what it will read, and unpack a slab each into registers while wgmma multiplies the slab
// before with BN rows of x. A block computes 64 * GROUPS outputs; the SPLIT blocks of a cluster divide K (wide.cuh).
// A row of x comes out the same whatever M is.

#include "common.cuh"
#include "quant.cuh"
#include "wide.cuh"
#include "feed.cuh"

#define TILE_X (BN * 128)
#define SLABS (GROUPS * 4 * SLAB_BYTES)
#define TILE_W (SLABS + (GROUPS * 4 * GROUP_BYTES + 1023) / 1024 * 1024)
#define STAGE (TILE_X + TILE_W)
#define FEEDER (GROUPS * 4)  // the warp; of 256 rows, three idle ones give their registers too
#define OUT (GROUPS * 64)
#define EARLY (SPLIT == 1)  // whether factors are found before the products: where several blocks finish, it does not pay

// INSTRUCTIONS: emulated.h of the tests has C++ in the place of what follows.

__device__ __forceinline__ void multiply(float* d, const u32* a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned." SIZE "k16.f32." TYPE "." TYPE " " D_LIST ", " ONE_SHARED ", 1, 1, 1, 0;"
               : D_REGS("+f", d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#if BN == 256
#define GIVE_REGISTERS() asm volatile("setmaxnreg.dec.sync.aligned.u32 40;")
#define TAKE_REGISTERS() asm volatile("setmaxnreg.inc.sync.aligned.u32 232;")
#endif

// END OF INSTRUCTIONS

#ifndef GIVE_REGISTERS
#define GIVE_REGISTERS()
#define TAKE_REGISTERS()
#endif

// What a warp that multiplies knows.
struct Source {
  const unsigned char *w, *groups;   // its first slab, and the slab's scales
  unsigned char *slabs, *entries;    // and where they stand in the first tile
  int first, per_group, lane;
};

__device__ __forceinline__ void ask_slab(const Source& from, int t, int count, int stage) {
  if (t < count) {
    bring_slab(shared_address(from.slabs + stage * STAGE), from.w + t * SLAB_BYTES, from.lane);
    bring_group(shared_address(from.entries + stage * STAGE), from.groups, from.first + t, from.per_group, from.lane);
  }
  commit();
}

__device__ __forceinline__ Slab await_slab(const Source& from, int t, int stage, Group& group) {
  await_own_copies<STAGES - 1>();
  if (GROUP_BYTES) __syncwarp();  // other lanes have brought the scales
  const Slab slab = slab_at(from.slabs + stage * STAGE, from.lane);
  group = group_at(from.entries + stage * STAGE, from.first + t, from.lane);
  if (GROUP_BYTES) __syncwarp();
  return slab;
}

__device__ __forceinline__ void unpack_slab(u32 (*a)[4], const Slab& slab, const Group& group) {
#pragma unroll
  for (int s = 0; s < 4; s++) {
    unpack(slab, s, Code{}, a[s]);
    apply_group(a[s], group);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
quant_pipe(const __grid_constant__ TensorMap x, const unsigned char* __restrict__ w, const u32* __restrict__ groups,
           const float* __restrict__ scales, const float* x_scales, const u16* __restrict__ bias, u16* y,
           int M, int N, int slabs, int turns, int per_group) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  const int tile = blockIdx.x, first_row = blockIdx.y * BN, rank = blockIdx.z;
  const int share = (turns + SPLIT - 1) / SPLIT;
  const int first = min(rank * share, turns), count = min(turns - first, share);
  const int num_groups = (turns + per_group - 1) / per_group;
  const u32 full = shared_address(memory), empty = full + 8 * STAGES;
  const u32 base = (full + 16 * STAGES + 1023) & ~1023u;
  unsigned char* tiles = memory + (base - full);
  float* parts = (float*)tiles;
  const int own = nth_slab<GROUPS * 4>(tile, warp, slabs);
  Source from;
  from.w = w + ((u64)own * turns + first) * SLAB_BYTES;
  from.slabs = tiles + TILE_X + warp * SLAB_BYTES;
  from.groups = (const unsigned char*)(groups + (u64)own * num_groups * 8 * SCALED);
  from.entries = tiles + TILE_X + SLABS + warp * GROUP_BYTES;
  from.first = first, from.per_group = per_group, from.lane = lane;
  if (warp < FEEDER) {
#pragma unroll
    for (int t = 0; t < STAGES; t++) ask_slab(from, t, count, t);
  } else if (thread == FEEDER * 32) {
    prefetch(x);
#pragma unroll
    for (int s = 0; s < STAGES; s++) {
      make_barrier(full + 8 * s, 1);
      make_barrier(empty + 8 * s, FEEDER);
    }
    publish_barriers();
  }
  __syncthreads();
  let_next_start();
  wait_for_previous();

  if (warp >= FEEDER) {
    GIVE_REGISTERS();
    if (warp == FEEDER) {
      Place at = {0, 1};  // the phase before the first one counts as ended
      for (int t = 0; t < count; t++, advance<STAGES>(at)) {
        await_phase(empty + 8 * at.stage, at.parity);
        if (lane == 0) {
          expect(full + 8 * at.stage, TILE_X);
          copy_box(base + at.stage * STAGE, x, (first + t) * 64, first_row, full + 8 * at.stage);
        }
      }
      __syncwarp();
    }
    rest<false>();
    return;
  }
  TAKE_REGISTERS();
  const Ending ending{parts, scales, x_scales, nullptr, bias, y, nullptr, 0, first_row, rank, M, N};
  const int column = tile * OUT + warp * 16;
  const auto find = [&] { return find_factors<GROUPS * 128, 1>(ending, column, thread); };
  Factors<1> factors;
  if (EARLY) factors = find();
  float sums[1][BN / 2];
  float(&sum)[BN / 2] = sums[0];
#pragma unroll
  for (int i = 0; i < BN / 2; i++) sum[i] = 0.f;
  fence_registers(sum);
  u32 a[2][4][4];  // of the slab that is multiplied, and of the next one
  Place next = {0, 0};
  int stage = 0, last = 0;
  if (count > 0) {
    Group group;
    const Slab slab = await_slab(from, 0, 0, group);
    unpack_slab(a[0], slab, group);
    ask_slab(from, STAGES, count, 0);
    await_phase(full, 0);
  }
  for (int begin = 0; begin < count; begin += 2) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int t = begin + i;
      if (t >= count) break;
      const u64 tile_x = descriptor(base + stage * STAGE);
      const bool goes_on = t + 1 < count;
      advance<STAGES>(next);
      Slab slab;
      Group group;
      begin_products();
#pragma unroll
      for (int s = 0; s < 4; s++) multiply(sum, a[i][s], tile_x + s * 2);
      end_products();
      if (goes_on) slab = await_slab(from, t + 1, next.stage, group);
      await_products<1>();  // those of the slab before: its operands and its tile of x are free
      if (t > 0 && lane == 0) arrive_at(empty + 8 * last);
      if (goes_on) unpack_slab(a[i ^ 1], slab, group);
      if (goes_on) {
        ask_slab(from, t + 1 + STAGES, count, next.stage);
        await_phase(full + 8 * next.stage, next.parity);
      }
      last = stage, stage = next.stage;
    }
  }
  await_products<0>();
  fence_registers(sum);
  if (!EARLY) factors = find();
  finish<GROUPS * 128, false>(ending, factors, sums, column, thread);
}
