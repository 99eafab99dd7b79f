// y[M, N] = x[M, K] W[N, K]^T with packed W, for tens to thousands of rows, or of rows an expert.
//
// UNPACKERS warps, in TEAMS that take turns of 64 inputs, bring slabs of quant.cuh AHEAD of their turns, and put what they
// unpack into shared memory as wgmma reads it, beside ROWS rows of x, which the copy engine brings; STAGES such tiles make a
// ring. Groups of four warps multiply 64 rows each with BN outputs and do nothing else. The SPLIT blocks of a cluster divide K; without, a block takes one tile of y after the other, unpacks the
// next one while this one is stored. PAIRED: half of the outputs are gate rows, half the up rows that belong to them.
// GROUPED: x and y have their rows by expert, ROWS to a block, or where there are slots, y has the rows that these say.
// A row of x comes out the same whatever M is.

#include "common.cuh"
#include "quant.cuh"
#include "wide.cuh"
#include "feed.cuh"

#define CONSUMERS (ROWS / 64)
#define MEMBERS (UNPACKERS / TEAMS)  // warps of a team
#define MT (BN / 16 / MEMBERS)       // slabs of a warp and turn
#define HELD (MT * (SLAB_BYTES + GROUP_BYTES))          // bytes of a warp's slabs of a turn
#define TILE_X (ROWS * 128)
#define STAGE (TILE_X + BN * 128)
#define OUT (PAIRED ? BN / 2 : BN)
#define PITCH (BN + 8)
static_assert(TEAMS <= STAGES, "a team that is two rounds behind takes one round for the other");
static_assert(!PAIRED || MT <= BN / 32, "a warp has gate rows or up rows");
#define OWN_ROWS (ROWS / SPLIT)  // that a block of a cluster finishes

// INSTRUCTIONS: emulated.h of the tests has C++ in the place of what follows.

__device__ __forceinline__ void multiply(float* d, u64 a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned." SIZE "k16.f32." TYPE "." TYPE " " D_LIST ", " BOTH_SHARED ", 1, 1, 1, 0, 0;"
               : D_REGS("+f", d) : "l"(a), "l"(b));
}

// Lane 8 i + j has the address of row j of matrix i, and gives elements (lane / 4, 2 (lane % 4)) of each.
__device__ __forceinline__ void store_matrices(u32 address, const u32* a) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(address), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]) : "memory");
}

// What threads have stored and announced is there for the matrix units. Those that stored it would wait for all their
// copies here.
__device__ __forceinline__ void show_stores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// END OF INSTRUCTIONS

// Of a ring of STAGES tiles: which one, and in which round.
struct Place {
  int stage;
  u32 parity;
};

__device__ __forceinline__ Place place_of(int turn) { return {turn % STAGES, (u32)(turn / STAGES) & 1}; }

struct Result {
  const float *scales, *x_scales;  // of outputs, and of rows or null
  const u16* bias;
  u16* y;
  const int* slots;
  int M, width;
};

// The n-th tile of y. Those that run together share an expert's rows, else the weights.
struct Job {
  int tile, block, expert;
};

__device__ __forceinline__ Job job_at(int n, int tiles, int blocks, const int* experts) {
#if GROUPED
  return {n % tiles, n / tiles, experts[n / tiles]};
#else
  return {n / blocks, n % blocks, 0};
#endif
}

struct Grid {
  int tiles, blocks, count;  // of y, and turns of each
  const int* experts;
};

// The turns of a team, through all tiles of y that the block computes.
struct Walk {
  int n, t;
  int before;  // turns of the block's tiles before this one
  Job job;
};

// To the next turn of the team, this one included; whether there is one.
__device__ __forceinline__ bool settle(Walk& at, const Grid& grid, int team) {
  while (at.n < grid.tiles * grid.blocks) {
    at.job = job_at(at.n, grid.tiles, grid.blocks, grid.experts);
    if (at.job.expert >= 0) {
      if (at.t < grid.count) return true;
      at.before += grid.count;
    }
    at.n += gridDim.x, at.t = team;
  }
  return false;
}

// Into 16 rows of the tile of weights, the first of them at `to`.
__device__ __forceinline__ void store_slab(unsigned char* to, const Slab& slab, const Code& maps, const Group& group,
                                           int lane) {
#if INPUTS_BY_ROWS
  // A lane has four inputs side by side of each step, so the eight of two steps are a piece of 16 bytes.
  const int r = lane >> 2, q = lane & 3;
#pragma unroll
  for (int s = 0; s < 4; s += 2) {
    u32 a[2][4];
    unpack(slab, s, maps, a[0]);
    unpack(slab, s + 1, maps, a[1]);
    apply_group(a[0], group);
    apply_group(a[1], group);
    unsigned char* at = to + r * 128 + ((q * 2 + s / 2 ^ r) << 4);
    *(uint4*)at = make_uint4(a[0][0], a[0][2], a[1][0], a[1][2]);
    *(uint4*)(at + 1024) = make_uint4(a[0][1], a[0][3], a[1][1], a[1][3]);
  }
#else
  const u32 row = (lane & 7) + (lane & 8), at = shared_address(to) + row * 128 + ((lane >> 4 ^ lane & 7) << 4);
#pragma unroll
  for (int s = 0; s < 4; s++) {
    u32 a[4];
    unpack(slab, s, maps, a);
    apply_group(a, group);
    store_matrices(at ^ s << 5, a);
  }
#endif
}

// Where a row's results go.
struct Row {
  u16* y;
  float x_scale;
  bool is_there;
};

__device__ __forceinline__ Row row_of(const Result& to, int row) {
  const int at = to.slots != nullptr ? to.slots[row] : row;
  const bool is_there = at < to.M;
  const float x_scale = to.x_scales != nullptr && is_there ? to.x_scales[row] : 1.f;
  return {to.y + (u64)(is_there ? at : 0) * to.width, x_scale, is_there};
}

// Two outputs of a row; there are even numbers of them. `up`: of PAIRED. Nothing branches, so that the loads of many
// are on their way at a time.
__device__ __forceinline__ void store_two(const Result& to, const Row& row, int column, float2 sum, float2 up) {
  const bool is_there = row.is_there && column < to.width;
  const int near = column < to.width ? column : 0;
  const float2 scale = *(const float2*)(to.scales + near);
  sum.x *= scale.x * row.x_scale, sum.y *= scale.y * row.x_scale;
#if PAIRED
  const float2 up_scale = *(const float2*)(to.scales + to.width + near);
  sum.x = silu(sum.x) * (up.x * (up_scale.x * row.x_scale)), sum.y = silu(sum.y) * (up.y * (up_scale.y * row.x_scale));
#else
  const u32 bias = to.bias != nullptr ? *(const u32*)(to.bias + near) : 0;
  sum.x += widen_y((u16)bias), sum.y += widen_y((u16)(bias >> 16));
#endif
  const u32 both = narrow_y(sum.x) | (u32)narrow_y(sum.y) << 16;
  if (is_there) *(u32*)(row.y + column) = both;
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
quant_tile(const __grid_constant__ TensorMap x, const unsigned char* __restrict__ w,
           const unsigned char* __restrict__ groups, const float2* __restrict__ codes,
           const float* __restrict__ scales, const float* x_scales, const u16* __restrict__ bias, u16* y, const int* slots, const int* experts, int M, int N,
           int slabs, int turns, int per_group, int tiles, int blocks) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, unpacker = warp - CONSUMERS * 4;
  const int rank = blockIdx.z, share = (turns + SPLIT - 1) / SPLIT;
  const int first = min(rank * share, turns), count = min(turns - first, share);
  const u32 full = shared_address(memory), empty = full + 8 * STAGES;
  const u32 base = (empty + 8 * STAGES + 1023) & ~1023u;
  unsigned char* ring = memory + (base - full);
  [[maybe_unused]] float* parts = (float*)ring;
  Result result = {scales, x_scales, bias, y, slots, M, PAIRED ? N / 2 : N};
  if (thread == 0) {
#pragma unroll
    for (int s = 0; s < STAGES; s++) {
      make_barrier(full + 8 * s, MEMBERS + 1);
      make_barrier(empty + 8 * s, CONSUMERS * 4);
    }
    publish_barriers();
  }
  __syncthreads();
  let_next_start();
#if GROUPED
  wait_for_previous();
#endif

  if (unpacker >= 0) {
    const int team = unpacker / MEMBERS, slab = unpacker % MEMBERS * MT;
    const Grid grid = {tiles, blocks, count, experts};
    unsigned char* const held = ring + STAGES * STAGE + unpacker * AHEAD * HELD;
    const int group_bytes = (turns + per_group - 1) / per_group * (FORMAT == CCQ ? 8 : GROUP_BYTES);  // of a slab
    const auto slab_of = [&](const Job& job, int m) {
      // Slabs behind the last repeat it; nothing of theirs is stored.
      const int i = slab + m, each = BN / 32, half = slabs / 2;
      return job.expert * slabs + (PAIRED ? min(job.tile * each + i % each, half - 1) + i / each * half
                                          : min(job.tile * (BN / 16) + i, slabs - 1));
    };
    Walk now = {(int)blockIdx.x, team, 0, {}}, next = now;
    bool goes_on = settle(next, grid, team);
    const auto ask = [&](int slot) {
      if (goes_on) {
        const u32 to = shared_address(held + slot * HELD);
#pragma unroll
        for (int m = 0; m < MT; m++) {
          const u64 own = slab_of(next.job, m);
          bring_slab(to + m * SLAB_BYTES, w + (own * turns + first + next.t) * SLAB_BYTES, lane);
          bring_group(to + MT * SLAB_BYTES + m * GROUP_BYTES, groups + own * group_bytes, first + next.t, per_group, lane);
        }
        next.t += TEAMS;
        goes_on = settle(next, grid, team);
      }
      commit();
    };
    for (int i = 0; i < AHEAD; i++) ask(i);
#if !GROUPED
    wait_for_previous();  // for x; weights need not wait
#endif
    [[maybe_unused]] int mapped = -1;
    Code maps[MT];
    for (int slot = 0; settle(now, grid, team); now.t += TEAMS) {
      const Place at = place_of(now.before + now.t);
      const unsigned char* own = held + slot * HELD;
      Slab slabs_held[MT];
      Group groups_held[MT];
#if FORMAT == CCQ
      if (now.n != mapped) {
#pragma unroll
        for (int m = 0; m < MT; m++) {
          const float2* map = codes + (u64)slab_of(now.job, m) * 16 + (lane >> 2);
          maps[m].upper = map[0], maps[m].lower = map[8];
        }
        mapped = now.n;
      }
#endif
      await_own_copies<AHEAD - 1>();
      if (GROUP_BYTES) __syncwarp();  // other lanes have brought the scales
#pragma unroll
      for (int m = 0; m < MT; m++) {
        slabs_held[m] = slab_at(own + m * SLAB_BYTES, lane);
        groups_held[m] = group_at(own + MT * SLAB_BYTES + m * GROUP_BYTES, first + now.t, lane);
      }
      await_phase(empty + 8 * at.stage, at.parity ^ 1);  // the phase before the first one counts as ended
      if (slab == 0 && lane == 0) {
        expect(full + 8 * at.stage, TILE_X);
        copy_box(base + at.stage * STAGE, x, (first + now.t) * 64, now.job.block * ROWS, full + 8 * at.stage);
      }
      unsigned char* to = ring + at.stage * STAGE + TILE_X + slab * 2048;
#pragma unroll
      for (int m = 0; m < MT; m++) store_slab(to + m * 2048, slabs_held[m], maps[m], groups_held[m], lane);
      __syncwarp();
      if (lane == 0) arrive_at(full + 8 * at.stage);
      ask(slot);
      if (++slot == AHEAD) slot = 0;
    }
#if SPLIT > 1
    meet();
    meet();
#endif
  } else {
#if !GROUPED
    wait_for_previous();  // y is the allocator's: what is queued before may still read what was there
#endif
    const int row = warp * 16 + (lane >> 2), column = (lane & 3) * 2;
    float sum[BN / 2];
    int passed = 0;
    for (int n = blockIdx.x; n < tiles * blocks; n += gridDim.x) {
      const Job job = job_at(n, tiles, blocks, experts);
      if (job.expert < 0) continue;
#pragma unroll
      for (int i = 0; i < BN / 2; i++) sum[i] = 0.f;
      fence_registers(sum);
      int last = 0;
      for (int t = 0; t < count; t++) {
        const Place at = place_of(passed++);
        await_phase(full + 8 * at.stage, at.parity);
        show_stores();
        const u64 tile_x = descriptor(base + at.stage * STAGE + warp / 4 * 8192);
        const u64 tile_w = descriptor(base + at.stage * STAGE + TILE_X);
        begin_products();
#pragma unroll
        for (int s = 0; s < 4; s++) multiply(sum, tile_x + s * 2, tile_w + s * 2);
        end_products();
        await_products<1>();
        if (t > 0 && lane == 0) arrive_at(empty + 8 * last);
        last = at.stage;
      }
      await_products<0>();
      if (count > 0 && lane == 0) arrive_at(empty + 8 * last);
      fence_registers(sum);
#if SPLIT == 1
      result.scales = scales + (u64)job.expert * slabs * 16;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const Row to = row_of(result, job.block * ROWS + row + h * 8);
#pragma unroll
        for (int j = 0; j < OUT / 8; j++) {
          const int i = j * 4 + h * 2, up = (j + OUT / 8) * 4 % (BN / 2) + h * 2;
          if (j % 8 == 0) asm volatile("" ::: "memory");  // more at a time than registers hold
          store_two(result, to, job.tile * OUT + j * 8 + column, {sum[i], sum[i + 1]}, {sum[up], sum[up + 1]});
        }
      }
#endif
    }
#if SPLIT > 1
    meet();  // parts stand where tiles were
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int own = row + h * 8;
      const u32 to = at_rank(shared_address(parts + (rank * OWN_ROWS + own % OWN_ROWS) * PITCH + column), own / OWN_ROWS);
#pragma unroll
      for (int j = 0; j < BN / 8; j++) send(to + j * 32, sum[j * 4 + h * 2], sum[j * 4 + h * 2 + 1]);
    }
    meet();
#endif
  }
#if SPLIT > 1
  const Job job = job_at(blockIdx.x, tiles, blocks, experts);
  if (job.expert < 0) return;
  result.scales = scales + (u64)job.expert * slabs * 16;
  for (int e = thread; e < OWN_ROWS * (OUT / 2); e += THREADS) {
    const int n = e / (OUT / 2), c = e % (OUT / 2) * 2;
    float2 sum = {0.f, 0.f}, up = {0.f, 0.f};
#pragma unroll
    for (int s = 0; s < SPLIT; s++) {
      const float* line = parts + (s * OWN_ROWS + n) * PITCH + c;
      const float2 v = *(const float2*)line;
      sum.x += v.x, sum.y += v.y;
      if (PAIRED) {
        const float2 u = *(const float2*)(line + OUT);
        up.x += u.x, up.y += u.y;
      }
    }
    store_two(result, row_of(result, job.block * ROWS + rank * OWN_ROWS + n), job.tile * OUT + c, sum, up);
  }
#endif
}
