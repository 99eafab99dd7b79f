// y[M, N] = x[M, K] W[N, K]^T with packed W, for tens of rows to a hundred, or codes that take long to unpack.
//
// UNPACKERS warps, in TEAMS that take turns of 64 inputs, bring slabs of quant.cuh AHEAD of their turns, and put what they
// unpack into shared memory as wgmma reads it, beside BN rows of x, which the copy engine brings; STAGES such tiles make a
// ring, in which every stage has its team. GROUPS of four warps multiply 64 outputs each with the rows and do nothing else.
// The SPLIT blocks of a cluster divide K (wide.cuh). GROUPED: a block of rows has an expert; PAIRED: half of the
// outputs are gates. The trellis code is not decoded: x is four int8 for two inputs (tet_rotate.cu), and what is stored are
// the products of tet_gemv.cu, which lie like half floats of as many weights.
// A row of x comes out the same whatever M is.

#include "common.cuh"
#include "quant.cuh"
#include "wide.cuh"
#include "feed.cuh"

#if FORMAT == TRELLIS
#include "trellis.cuh"
#define SLABS GROUPS
typedef int Sum;
#else
#define SLABS (GROUPS * 4)
typedef float Sum;
#endif
#define MULTIPLIERS (GROUPS * 4)                // warps
#define MEMBERS (UNPACKERS / TEAMS)             // warps of a team
#define MT (SLABS / MEMBERS)                    // slabs of a warp and turn
#define STORED (GROUPS * 8192 / SLABS)          // bytes of one that is unpacked
#define HELD (MT * (SLAB_BYTES + GROUP_BYTES))  // their bytes
#define TILE_X (BN * 128)
#define STAGE (TILE_X + GROUPS * 8192)
#define OUT (PAIRED ? 64 : GROUPS * 64)
#define EARLY (BN < 256)  // whether factors are found before the products: with 256 rows it does not pay
static_assert(STAGES % TEAMS == 0, "a stage of the ring has one team that writes it");
#if BN == 256  // one block a multiprocessor: saying so makes the loop that multiplies longer
#define BOUNDS __launch_bounds__(THREADS)
#else
#define BOUNDS __launch_bounds__(THREADS, RESIDENT)
#endif

// INSTRUCTIONS: emulated.h of the tests has C++ in the place of what follows.

__device__ __forceinline__ void multiply(Sum* d, u64 a, u64 b) {
#if FORMAT == TRELLIS
  asm volatile("wgmma.mma_async.sync.aligned." SIZE "k32.s32.u8.s8 " D_LIST ", " BOTH_SHARED ", 1;"
               : D_REGS("+r", d) : "l"(a), "l"(b));
#else
  asm volatile("wgmma.mma_async.sync.aligned." SIZE "k16.f32." TYPE "." TYPE " " D_LIST ", " BOTH_SHARED ", 1, 1, 1, 0, 0;"
               : D_REGS("+f", d) : "l"(a), "l"(b));
#endif
}

// END OF INSTRUCTIONS

__device__ __forceinline__ Place place_of(int turn) { return {turn % STAGES, (u32)(turn / STAGES) & 1}; }

#if FORMAT == TRELLIS
// Into 64 rows of the tile of weights, the first of them at `to`: eight outputs by four times two inputs of a lane, of which
// one lane of two takes the last ones first, so that eight lanes store to all banks.
__device__ __forceinline__ void store_slab(unsigned char* to, const Slab& slab, const Code&, const Group&, int lane) {
  const int g = lane >> 2, j = lane & 3, swap = g % 2 * 2;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const uint4& v = slab.piece[half];
    const u32 words[5] = {word_before(v, lane).word, v.x, v.y, v.z, v.w};
#pragma unroll
    for (int n = 0; n < 4; n++) {
      const u32 before = swap ? words[n ^ 2] : words[n], word = swap ? words[(n ^ 2) + 1] : words[n + 1];
      u32 p[8];
      Before own{before, before >> 16};
      products(own, word, p);
#pragma unroll
      for (int odd = 0; odd < 2; odd++) {
        const int row = (n ^ swap) * 2 + odd;
        *(uint4*)(to + (g * 8 + row) * 128 + ((half * 4 + j ^ row) << 4)) =
            make_uint4(p[odd * 4], p[odd * 4 + 1], p[odd * 4 + 2], p[odd * 4 + 3]);
      }
    }
  }
}
#else
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
#endif

extern "C" __global__ void BOUNDS
quant_tile(const __grid_constant__ TensorMap x, const unsigned char* __restrict__ w,
           const unsigned char* __restrict__ groups, const float* __restrict__ scales, const float* x_scales,
           const int* x_sums, const u16* __restrict__ bias, u16* y, const int* slots, const int* experts, int M, int N, int slabs, int turns,
           int per_group, const float2* __restrict__ codes) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, unpacker = warp - MULTIPLIERS;
  const int tile = blockIdx.x, first_row = blockIdx.y * BN, rank = blockIdx.z;
  const int share = (turns + SPLIT - 1) / SPLIT;
  const int first = min(rank * share, turns), count = min(turns - first, share);
  const u32 full = shared_address(memory), empty = full + 8 * STAGES;
  const u32 base = (empty + 8 * STAGES + 1023) & ~1023u;
  unsigned char* ring = memory + (base - full);
  const int group_bytes = (turns + per_group - 1) / per_group * (FORMAT == CCQ ? 8 : GROUP_BYTES);  // of a slab
#if GROUPED
  let_next_start();
  wait_for_previous();
  const int expert = experts[blockIdx.y];
  if (expert < 0) return;  // the whole cluster: it has one blockIdx.y
  w += (u64)expert * slabs * turns * SLAB_BYTES;
  groups += (u64)expert * slabs * group_bytes;
  scales += (u64)expert * slabs * (STORED / 128);
  codes += expert * slabs * 16;
#endif
  if (thread == 0) {
    prefetch(x);
    make_ring<STAGES>(full, MEMBERS + 1, MULTIPLIERS);
  }
  __syncthreads();
#if !GROUPED
  let_next_start();
#endif

  if (unpacker >= 0) {
    if (BN == 256) give_registers<UNPACKERS == 4 ? 88 : 72>();  // sums take more than all have at first
    const int team = unpacker / MEMBERS, place = unpacker % MEMBERS * MT;
    unsigned char* const held = ring + STAGES * STAGE + unpacker * AHEAD * HELD;
    const auto slab_of = [&](int m) { return nth_slab<SLABS>(tile, place + m, slabs); };
    const auto ask = [&](int slot, int t) {
      const u32 to = shared_address(held + slot * HELD);
#pragma unroll
      for (int m = 0; m < MT; m++) {
        const u64 slab = slab_of(m);
        if (t >= count) break;
        bring_slab(to + m * SLAB_BYTES, w + (slab * turns + first + t) * SLAB_BYTES, lane);
        bring_group(to + MT * SLAB_BYTES + m * GROUP_BYTES, groups + slab * group_bytes, first + t, per_group, lane);
      }
      commit();
    };
#pragma unroll
    for (int i = 0; i < AHEAD; i++) ask(i, team + i * TEAMS);
    Code maps[MT];
#if FORMAT == CCQ
#pragma unroll
    for (int m = 0; m < MT; m++) {
      maps[m].upper = codes[slab_of(m) * 16 + (lane >> 2)];
      maps[m].lower = codes[slab_of(m) * 16 + (lane >> 2) + 8];
    }
#endif
#if !GROUPED
    wait_for_previous();  // for x; weights need not wait
#endif
    for (int t = team, slot = 0; t < count; t += TEAMS) {
      const Place at = place_of(t);
      const unsigned char* own = held + slot * HELD;
      Slab slab[MT];
      Group group[MT];
      await_own_copies<AHEAD - 1>();
      if (GROUP_BYTES) __syncwarp();  // other lanes have brought the scales
#pragma unroll
      for (int m = 0; m < MT; m++) {
        slab[m] = slab_at(own + m * SLAB_BYTES, lane);
        group[m] = group_at(own + MT * SLAB_BYTES + m * GROUP_BYTES, first + t, lane);
      }
      await_phase(empty + 8 * at.stage, at.parity ^ 1);  // the phase before the first one counts as ended
      if (place == 0 && lane == 0) {
        expect(full + 8 * at.stage, TILE_X);
        copy_box(base + at.stage * STAGE, x, (first + t) * 64, first_row, full + 8 * at.stage);
      }
      unsigned char* to = ring + at.stage * STAGE + TILE_X + place * STORED;
#pragma unroll
      for (int m = 0; m < MT; m++) store_slab(to + m * STORED, slab[m], maps[m], group[m], lane);
      __syncwarp();
      if (lane == 0) arrive_at(full + 8 * at.stage);
      ask(slot, t + AHEAD * TEAMS);
      if (++slot == AHEAD) slot = 0;
    }
    rest();
    return;
  }
  if (BN == 256) take_registers<UNPACKERS == 4 ? 208 : 184>();
#if !GROUPED
  wait_for_previous();  // y is the allocator's: what is queued before may still read what was there
#endif
  // Parts stand where tiles were.
  const Ending ending{(float*)ring, scales, x_scales, x_sums, bias, y, slots, first_row, rank, M, N};
  const int column = tile * OUT + warp % (OUT / 16) * 16;
  const auto find = [&] { return find_factors<MULTIPLIERS * 32>(ending, column, thread); };
  Factors factors;
  if (EARLY) factors = find();
  Sum sum[BN / 2] = {};
  fence_registers(sum);
  int last = 0;
  for (int t = 0; t < count; t++) {
    const Place at = place_of(t);
    await_phase(full + 8 * at.stage, at.parity);
    show_to_copies();  // those that stored it would wait for all their copies here
    const u64 tile_x = descriptor(base + at.stage * STAGE);
    const u64 tile_w = descriptor(base + at.stage * STAGE + TILE_X + warp / 4 * 8192);
    begin_products();
#pragma unroll
    for (int s = 0; s < 4; s++) multiply(sum, tile_w + s * 2, tile_x + s * 2);
    end_products();
    await_products<1>();
    if (t > 0 && lane == 0) arrive_at(empty + 8 * last);
    last = at.stage;
  }
  await_products<0>();
  fence_registers(sum);
  if (!EARLY) factors = find();
  finish<MULTIPLIERS * 32>(ending, factors, sum, column, thread);
}
