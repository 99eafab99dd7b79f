// y[M, N] = x[M, K] W[N, K]^T with packed W, for tens to thousands of rows, or of rows an expert.
//
// UNPACKERS warps bring the slabs of quant.cuh, AHEAD turns of 64 inputs ahead, and put what they unpack into shared
// memory as wgmma reads it, beside ROWS rows of x, which the copy engine brings; STAGES such tiles make a ring. Groups of four
// warps multiply 64 rows each with BN outputs and do nothing else, so that the matrix units never wait for what unpacking
// waits for. The SPLIT blocks of a cluster divide K; without, a block takes one tile of y after the other, unpacks the
// next one while this one is stored. PAIRED: half of the outputs are gate rows, half the up rows that belong to them.
// GROUPED: x and y have their rows by expert, ROWS to a block, or where there are slots, y has the rows that these say.
// A row of x comes out the same whatever M is.

#include "common.cuh"
#include "quant.cuh"
#include "wide.cuh"
#include "feed.cuh"

#define CONSUMERS (ROWS / 64)
#define MT (BN / 16 / UNPACKERS)  // slabs of a warp and turn
#define SLAB_BYTES (FORMAT == CCQ ? 256 : PIECES * 512)
#define TILE_X (ROWS * 128)
#define STAGE (TILE_X + BN * 128)
#define OUT (PAIRED ? BN / 2 : BN)
#define PITCH (BN + 8)
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

// What this thread has stored is there for the matrix units.
__device__ __forceinline__ void publish_stores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// END OF INSTRUCTIONS

// Of a ring of STAGES tiles: which one, and in which round.
struct Place {
  int stage;
  u32 parity;
};

__device__ __forceinline__ void advance(Place& place) {
  if (++place.stage == STAGES) place = {0, place.parity ^ 1};
}

struct Packed {
  const unsigned char* w;
  const Entry* groups;
  const float2* codes;
  int slabs, turns, per_group;
};

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

// A warp's slabs of one tile of y.
struct Source {
  const unsigned char* slab[MT];
  const Entry* groups[MT];
  Code maps[MT];
};

__device__ __forceinline__ Source source_of(const Packed& from, const Job& job, int first, int warp, int lane) {
  const int num_groups = (from.turns + from.per_group - 1) / from.per_group;
  Source own;
#pragma unroll
  for (int m = 0; m < MT; m++) {
    // Slabs behind the last repeat it; nothing of theirs is stored.
    const int i = warp * MT + m, half = from.slabs / 2, each = BN / 32;
    const int slab = PAIRED ? min(job.tile * each + i % each, half - 1) + i / each * half
                            : min(job.tile * (BN / 16) + i, from.slabs - 1);
    const u64 at = (u64)job.expert * from.slabs + slab;
    own.slab[m] = from.w + (at * from.turns + first) * SLAB_BYTES + lane * (FORMAT == CCQ ? 8 : 16);
    own.groups[m] = from.groups + at * num_groups * 8 * SCALED + (lane >> 2);
#if FORMAT == CCQ
    own.maps[m].upper = from.codes[at * 16 + (lane >> 2)];
    own.maps[m].lower = from.codes[at * 16 + (lane >> 2) + 8];
#endif
  }
  return own;
}

__device__ __forceinline__ Slab load_slab(const unsigned char* at) {
  Slab slab;
#if FORMAT == CCQ
  slab.piece = load_once((const uint2*)at);
#else
#pragma unroll
  for (int p = 0; p < PIECES; p++) slab.piece[p] = load_once((const uint4*)(at + p * 512));
#endif
  return slab;
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
quant_tile(const __grid_constant__ TensorMap x, const unsigned char* __restrict__ w, const Entry* __restrict__ groups,
           const float2* __restrict__ codes, const float* __restrict__ scales, const float* x_scales,
           const u16* __restrict__ bias, u16* y, const int* slots, const int* experts, int M, int N, int slabs,
           int turns, int per_group, int tiles, int blocks) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, unpacker = warp - CONSUMERS * 4;
  const int rank = blockIdx.z, share = (turns + SPLIT - 1) / SPLIT;
  const int first = min(rank * share, turns), count = min(turns - first, share);
  const u32 full = shared_address(memory), empty = full + 8 * STAGES;
  const u32 base = (full + 16 * STAGES + 1023) & ~1023u;
  unsigned char* ring = memory + (base - full);
  [[maybe_unused]] float* parts = (float*)ring;
  const Packed packed = {w, groups, codes, slabs, turns, per_group};
  Result result = {scales, x_scales, bias, y, slots, M, PAIRED ? N / 2 : N};
  if (thread == 0) {
#pragma unroll
    for (int s = 0; s < STAGES; s++) {
      make_barrier(full + 8 * s, UNPACKERS + 1);
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
    Place at = {0, 1};  // the phase before the first one counts as ended
    for (int n = blockIdx.x; n < tiles * blocks; n += gridDim.x) {
      const Job job = job_at(n, tiles, blocks, experts);
      if (job.expert < 0) continue;
      const Source from = source_of(packed, job, first, unpacker, lane);
      Slab held[AHEAD][MT];
      Group held_groups[AHEAD][MT];
      const auto ask = [&](int i, int t) {
#pragma unroll
        for (int m = 0; m < MT; m++) {
          held[i][m] = load_slab(from.slab[m] + t * SLAB_BYTES);
          held_groups[i][m] = load_group(from.groups[m], (first + t) / per_group);
        }
      };
#pragma unroll
      for (int i = 0; i < AHEAD; i++)
        if (i < count) ask(i, i);
#if !GROUPED
      if (unpacker == 0) wait_for_previous();  // who asks for x; weights need not wait
#endif
      for (int begin = 0; begin < count; begin += AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
          const int t = begin + i;
          if (t >= count) break;
          await_phase(empty + 8 * at.stage, at.parity);
          if (unpacker == 0 && lane == 0) {
            expect(full + 8 * at.stage, TILE_X);
            copy_box(base + at.stage * STAGE, x, (first + t) * 64, job.block * ROWS, full + 8 * at.stage);
          }
          unsigned char* to = ring + at.stage * STAGE + TILE_X + unpacker * MT * 2048;
#pragma unroll
          for (int m = 0; m < MT; m++) store_slab(to + m * 2048, held[i][m], from.maps[m], held_groups[i][m], lane);
          publish_stores();
          __syncwarp();
          if (lane == 0) arrive_at(full + 8 * at.stage);
          if (t + AHEAD < count) ask(i, t + AHEAD);
          advance(at);
        }
      }
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
    Place at = {0, 0};
    for (int n = blockIdx.x; n < tiles * blocks; n += gridDim.x) {
      const Job job = job_at(n, tiles, blocks, experts);
      if (job.expert < 0) continue;
#pragma unroll
      for (int i = 0; i < BN / 2; i++) sum[i] = 0.f;
      fence_registers(sum);
      int last = 0;
      for (int t = 0; t < count; t++) {
        await_phase(full + 8 * at.stage, at.parity);
        const u64 tile_x = descriptor(base + at.stage * STAGE + warp / 4 * 8192);
        const u64 tile_w = descriptor(base + at.stage * STAGE + TILE_X);
        begin_products();
#pragma unroll
        for (int s = 0; s < 4; s++) multiply(sum, tile_x + s * 2, tile_w + s * 2);
        end_products();
        await_products<1>();
        if (t > 0 && lane == 0) arrive_at(empty + 8 * last);
        last = at.stage;
        advance(at);
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
