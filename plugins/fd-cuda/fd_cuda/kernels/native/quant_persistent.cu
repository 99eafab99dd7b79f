// y[M, N] = x[M, K] W[N, K]^T with packed W, for tens to thousands of rows, or as many an expert: as many blocks as there
// are multiprocessors take one tile of BN rows by 64 * GROUPS outputs after the other.
//
// One warp feeds: the copy engine brings 128 bytes of every row of x (64 half floats, or BY_ROWS 128 numbers) and of W what
// belongs to them, STAGES such turns ahead, those of the next tile while the last one is stored. GROUPS of four warps
// multiply 64 outputs each and share nothing: slabs of quant.cuh are unpacked into registers while wgmma multiplies the slab
// before; numbers that lie BY_ROWS are multiplied from shared memory as they are. BY_BLOCK: these have scales of a row and a
// turn [turns, num_x], and of 128 by 128 weights [N / 128, turns]. FRESH: the kernel before may have written the weights.
// GROUPED: blocks of rows have an expert each, and x lies in their order; `slots` says where rows of y go, without it they
// lie like those of x. PAIRED: the first eight of a warp's 16 outputs are gates, the others what belongs to them.
// BOXES: the copy engine stores results, BOX_ROWS rows of a group's 64 outputs at a time, while the next tile is multiplied;
// for so many such pieces a group has room, or 0: warps store. Of an expert's block as many times BOX_ROWS rows are brought
// as it has, and FEWER are computed where it has no more.
// SPLIT: blocks of a cluster that divide K, one tile each cluster (wide.cuh).
// A row of x comes out the same whatever M is, with the same SPLIT.

#include "common.cuh"
#include "quant.cuh"
#include "wide.cuh"
#include "bytes.cuh"
#include "feed.cuh"
#define ROWS BN
#define COLUMNS (GROUPS * 64)
#define APART (!BY_ROWS)
#define EARLY (!GROUPED && !FRESH)
#define BOX (GROUPED ? BOX_ROWS : BN)
#define APART_SUMS (FORMAT == FP8_ROWS && (BN <= 32 || GROUPS == 1 || SPLIT > 1 || BY_BLOCK))  // larger tiles would take longer
#include "tiles.cuh"

#define FEWER (GROUPED && !BY_ROWS && BN >= 128 ? 64 : BN)

#define PIECE 64  // rows that a warp stores at a time
#define ROOM (BOXES ? BOXES * BOX_ROWS * 128 : 4 * PIECE * 32)  // of a group, for what it is about to store

// INSTRUCTIONS: emulated.h of the tests has C++ in the place of what follows.

#if !BY_ROWS
template <int rows>
__device__ __forceinline__ void multiply_rows(float* d, const u32* a, u64 b) {
  if constexpr (rows == BN)
    asm volatile("wgmma.mma_async.sync.aligned." SIZE "k16.f32." TYPE "." TYPE " " D_LIST ", " ONE_SHARED ", 1, 1, 1, 0;"
                 : D_REGS("+f", d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#if FEWER < BN
  else
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" D32 "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 0;"
                 : R32("+f", d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#endif
}
#endif

// All threads of a group of four warps.
__device__ __forceinline__ void meet_group(int group) {
  asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}

// END OF INSTRUCTIONS

// The outputs whose sums a thread has: of elements 0 and 1 of four, and of 2 and 3. Without PAIRED eight apart, with it a
// gate and what belongs to it. After the last they repeat it.
struct Outputs {
  int upper, lower;
};

// The first output of a warp, among the tile's.
__device__ __forceinline__ int column_of(int warp) {
  if (!PAIRED) return warp * 16;
  return BY_ROWS ? warp * 8 : warp % (MULTIPLIERS / 2) * 16 + warp / (MULTIPLIERS / 2) * 8;
}

__device__ __forceinline__ Outputs outputs_of(const Problem& of, const Tile& tile, int warp, int lane) {
  const int width = PAIRED ? of.N / 2 : of.N, first = tile.nth * OUT + column_of(warp) + (lane >> 2);
  const int upper = min(first, width - 1);
  return {upper, PAIRED ? upper + width : min(first + 8, width - 1)};
}

#if !BY_ROWS
// A warp's slab, or of its gates and of what belongs to them eight rows each.
__device__ __forceinline__ Slab slab_of(const unsigned char* slabs, int warp, int lane) {
#if PAIRED
  const int gate = warp % (MULTIPLIERS / 2), up = gate + MULTIPLIERS / 2, lower = warp / (MULTIPLIERS / 2);
  const Slab first = slab_at(slabs + gate * SLAB_BYTES, lane), second = slab_at(slabs + up * SLAB_BYTES, lane);
  const auto mixed = [&](u32 of_first, u32 of_second) {
#if FORMAT == INT4
    return lower ? of_first >> 4 & 0x0f0f0f0fu | of_second & 0xf0f0f0f0u
                 : of_first & 0x0f0f0f0fu | of_second << 4 & 0xf0f0f0f0u;
#else
    return __byte_perm(of_first, of_second, lower ? 0x7351u : 0x6240u);
#endif
  };
  Slab own;
#pragma unroll
  for (int p = 0; p < PIECES; p++) {
    const uint4 &a = first.piece[p], &b = second.piece[p];
    own.piece[p] = make_uint4(mixed(a.x, b.x), mixed(a.y, b.y), mixed(a.z, b.z), mixed(a.w, b.w));
  }
  return own;
#else
  return slab_at(slabs + warp * SLAB_BYTES, lane);
#endif
}

// Where scales of groups are: of a warp's slab, or of its gates and of what belongs to them.
struct Groups {
  const u32 *first, *second;
  u32 halves;
  int first_turn, per_group;

  __device__ __forceinline__ Group at(int turn) const {
    const int group = (first_turn + turn) / per_group;
    Group own = load_group(first, group);
    if (SCALED && PAIRED) {
      const Group other = load_group(second, group);
      own.scales = __byte_perm(own.scales, other.scales, halves);
      own.offsets = __byte_perm(own.offsets, other.offsets, halves);
    }
    return own;
  }
};

__device__ __forceinline__ Groups groups_of(const Problem& of, const Tile& tile, int warp, int lane) {
  const int num_groups = (of.all + of.per_group - 1) / of.per_group, held = MULTIPLIERS / (1 + PAIRED);
  const auto entries = [&](int nth) {
    const u64 slab = (u64)tile.expert * of.slabs + nth_slab<MULTIPLIERS>(tile.nth, nth, of.slabs);
    return of.groups + slab * num_groups * 8 * SCALED + (lane >> 2);
  };
  return {entries(warp % held), entries(warp % held + MULTIPLIERS - held), warp < held ? 0x5410u : 0x7632u, of.first,
          of.per_group};
}

__device__ __forceinline__ void unpack_slab(u32 (*a)[4], const Slab& slab, const Group& group) {
#pragma unroll
  for (int s = 0; s < 4; s++) {
    unpack(slab, s, Code{}, a[s]);
    apply_group(a[s], group);
  }
}

// A tile's sums of its first rows, from `at` on in the ring.
template <int rows>
__device__ __forceinline__ void add_up(float (&sum)[BN / 2], const Problem& of, const Tile& tile, const Ring& ring,
                                       Place& at, int warp, int lane) {
  const Groups groups = groups_of(of, tile, warp, lane);
  u32 a[2][4][4];  // of the slab that is multiplied, and of the next one
  int last = 0;
  const Group first = groups.at(0);
  await_phase(ring.full + 8 * at.stage, at.parity);
  unpack_slab(a[0], slab_of(ring.tiles + at.stage * STAGE + TILE_X, warp, lane), first);
  for (int begin = 0; begin < of.turns; begin += 2) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int t = begin + i, stage = at.stage;
      if (t >= of.turns) break;
      const u64 tile_x = descriptor(ring.base + stage * STAGE);
      const bool goes_on = t + 1 < of.turns;
      advance<STAGES>(at);
      Slab next;
      const Group group = groups.at(min(t + 1, of.turns - 1));  // long before it is looked at
      begin_products();
#pragma unroll
      for (int s = 0; s < 4; s++) multiply_rows<rows>(sum, a[i][s], tile_x + s * 2);
      end_products();
      if (goes_on) {
        await_phase(ring.full + 8 * at.stage, at.parity);
        next = slab_of(ring.tiles + at.stage * STAGE + TILE_X, warp, lane);
      }
      await_products<1>();  // those of the slab before: its operands and its tile of x are free
      if (t > 0 && lane == 0) arrive_at(ring.empty + 8 * last);
      if (goes_on) unpack_slab(a[i ^ 1], next, group);
      last = stage;
    }
  }
  await_products<0>();
  fence_registers(sum);
  if (lane == 0) arrive_at(ring.empty + 8 * last);
}
#elif APART_SUMS
// The same of fp8 numbers, of which the matrix units would lose bits in sums of many turns: those of a turn are added up outside.
template <int>
__device__ __forceinline__ void add_up(Sum (&total)[BN / 2], const Problem& of, const Tile&, const Ring& ring, Place& at,
                                       int warp, int lane) {
  Sum sum[BN / 2];
  for (int t = 0; t < of.turns; t++, advance<STAGES>(at)) {
    const u32 tile_at = ring.base + at.stage * STAGE;
    const u64 tile_x = descriptor(tile_at), tile_w = descriptor(tile_at + TILE_X + warp / 4 * 64 * 128);
    [[maybe_unused]] const float* line = (const float*)ring.lines + at.stage * (LINE / 4);
    await_phase(ring.full + 8 * at.stage, at.parity);
    fence_registers(sum);
    begin_products();
    multiply<0>(sum, tile_w, tile_x);
#pragma unroll
    for (int s = 1; s < 4; s++) multiply<1>(sum, tile_w + s * 2, tile_x + s * 2);
    end_products();
    await_products<0>();
    fence_registers(sum);
#pragma unroll
    for (int i = 0; i < BN / 2; i++) {
      const float scale = BY_BLOCK ? line[i / 4 * 8 + (lane & 3) * 2 + i % 2] * line[BN + (PAIRED && i % 4 > 1)] : 1.f;
      total[i] = fmaf(sum[i], scale, total[i]);
    }
    __syncwarp();  // all lanes have read the scales
    if (lane == 0) arrive_at(ring.empty + 8 * at.stage);
  }
}
#else
// A tile's sums, from `at` on in the ring.
template <int>
__device__ __forceinline__ void add_up(Sum (&sum)[BN / 2], const Problem& of, const Tile&, const Ring& ring, Place& at,
                                       int warp, int lane) {
  int last = 0;
  for (int t = 0; t < of.turns; t++, advance<STAGES>(at)) {
    const u32 tile_at = ring.base + at.stage * STAGE;
    const u64 tile_x = descriptor(tile_at), tile_w = descriptor(tile_at + TILE_X + warp / 4 * 64 * 128);
    await_phase(ring.full + 8 * at.stage, at.parity);
    begin_products();
#pragma unroll
    for (int s = 0; s < 4; s++) multiply<1>(sum, tile_w + s * 2, tile_x + s * 2);
    end_products();
    await_products<1>();  // those of the turn before
    if (t > 0 && lane == 0) arrive_at(ring.empty + 8 * last);
    last = at.stage;
  }
  await_products<0>();
  fence_registers(sum);
  if (lane == 0) arrive_at(ring.empty + 8 * last);
}
#endif

// What a thread multiplies its sums with and adds, and two rows or less of its group's table: asked for before the products,
// looked at after them.
struct Known {
  float scale[2], bias[2], of_row[2];
  int at[2];
};

__device__ __forceinline__ Known find(const Problem& of, const Tile& tile, const u16* bias, int thread) {
  const Outputs own = outputs_of(of, tile, thread / 32, thread % 32);
  const float* scales = of.scales + (u64)tile.expert * of.scale_width;
  Known found = {{BY_BLOCK ? 1.f : scales[own.upper], BY_BLOCK ? 1.f : scales[own.lower]},
                   {bias == nullptr ? 0.f : widen_y(bias[own.upper]), bias == nullptr ? 0.f : widen_y(bias[own.lower])}};
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int row = tile.block * BN + min(thread % 128 + i * 128, BN - 1);
    found.at[i] = of.slots == nullptr || PAIRED ? row : of.slots[row];
    found.of_row[i] = !BY_BLOCK && of.x_scales != nullptr && (GROUPED || row < of.M) ? of.x_scales[row] : 1.f;
  }
  return found;
}

// Where a tile's rows go (M and more: nowhere), and what they are multiplied with.
struct Table {
  float scale[BN];
  int at[BN];

  __device__ __forceinline__ void fill(const Known& found, int nth) {
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (nth + i * 128 < BN) scale[nth + i * 128] = found.of_row[i], at[nth + i * 128] = found.at[i];
  }
};

// What becomes of the sums of 16 rows from `begin` on, as matrix stores take it: with PAIRED one register for eight rows.
struct Sixteen {
  u32 pairs[2][2];
};

__device__ __forceinline__ Sixteen finished(const Sum* sum, const Table& rows, const Known& own, int begin, int lane) {
  Sixteen all;
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const float4 v = four_of(sum, begin / 8 + j);
    const float2 row = *(const float2*)(rows.scale + begin + j * 8 + (lane & 3) * 2);
    float4 z = make_float4(v.x * own.scale[0] * row.x, v.y * own.scale[0] * row.y, v.z * own.scale[1] * row.x,
                           v.w * own.scale[1] * row.y);
    if (PAIRED) z = make_float4(quick_silu(z.x) * z.z, quick_silu(z.y) * z.w, 0.f, 0.f);
    else z = make_float4(z.x + own.bias[0], z.y + own.bias[0], z.z + own.bias[1], z.w + own.bias[1]);
    all.pairs[j][0] = narrow_y(z.x, z.y), all.pairs[j][1] = narrow_y(z.z, z.w);
  }
  return all;
}

#if BOXES
// Through BOXES pieces of shared memory that are the group's, in turn, from the nth on. When all have met, the next one is
// free: of those that were stored before, so few are still being read.
__device__ __forceinline__ void store_tile(const Tile& tile, const TensorMap& y, const Table& rows, const Known& own,
                                           const Sum* sum, unsigned char* room, int group, int thread, int& nth) {
  const int lane = thread & 31, chunk = thread / 32 % 4 * 2 + (lane >> 3 & 1);
  const u32 own_place = shared_address(room) + (lane & 7) * 128 + ((chunk ^ lane & 7) << 4);
#pragma unroll
  for (int first = 0; first < BN; first += BOX_ROWS) {
    const u32 piece = nth * BOX_ROWS * 128;
#pragma unroll
    for (int i = 0; i < BOX_ROWS; i += 16) {
      const Sixteen all = finished(sum, rows, own, first + i, lane);
      store_transposed(own_place + piece + i * 128, all.pairs[0][0], all.pairs[0][1]);
      store_transposed(own_place + piece + i * 128 + 1024, all.pairs[1][0], all.pairs[1][1]);
    }
    show_to_copies();
    if (thread % 128 == 0) await_reads<BOXES - 2>();
    meet_group(group);
    if (thread % 128 == 0)
      store_box(y, tile.nth * OUT + group * 64, tile.block * BN + first, shared_address(room) + piece);
    nth = nth + 1 == BOXES ? 0 : nth + 1;
  }
}
#else
// Through a piece of shared memory that is the warp's own, where matrix stores turn PIECE rows at a time.
__device__ __forceinline__ void store_tile(const Problem& of, const Tile& tile, u16* y, const Table& rows,
                                           const Known& own, const Sum* sum, unsigned char* room, int warp, int lane) {
  const int width = PAIRED ? of.N / 2 : of.N, matrix = lane >> 3 & 1, n = PAIRED ? lane : lane / 2;
  const int half = PAIRED ? 0 : lane % 2, column = tile.nth * OUT + column_of(warp) + half * 8;
  const int num_rows = GROUPED && PAIRED ? of.blocks * BN : of.M;
  constexpr int bytes = PAIRED ? 256 : 512;  // of 16 rows
  const u32 place = shared_address(room) + (PAIRED ? (lane & 15) * 16 : (lane & 7) * 32 + ((matrix ^ lane >> 2 & 1) << 4));
  const unsigned char* from = room + (PAIRED ? n * 16 : n * 32 + ((half ^ n >> 2 & 1) << 4));
#pragma unroll
  for (int first = 0; first < BN; first += PIECE) {
#pragma unroll
    for (int i = 0; i < PIECE / 16 && first + i * 16 < BN; i++) {
      const Sixteen all = finished(sum, rows, own, first + i * 16, lane);
      if (PAIRED) {
        store_transposed(place + i * bytes, all.pairs[0][0], all.pairs[1][0]);
      } else {
        store_transposed(place + i * bytes, all.pairs[0][0], all.pairs[0][1]);
        store_transposed(place + i * bytes + 256, all.pairs[1][0], all.pairs[1][1]);
      }
    }
    __syncwarp();
    if (n < 16) {
#pragma unroll
      for (int i = 0; i < PIECE / 16 && first + i * 16 < BN; i++)
        store_piece(y, rows.at[first + i * 16 + n], num_rows, column, width, *(const uint4*)(from + i * bytes));
    }
    __syncwarp();
  }
}

#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
quant_persistent(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w,
                 const __grid_constant__ TensorMap boxes_of_y, const u32* __restrict__ groups, const float* __restrict__ scales, const float* x_scales,
                 const u16* __restrict__ bias, u16* y, const int* slots, const int* experts, int M, int N, int slabs,
                 int turns, int per_group, int scale_width, int num_x, int blocks) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const int thread = threadIdx.x, lane = thread & 31, warp = uniform(thread >> 5), group = warp / 4;
  const int across = ((PAIRED ? N / 2 : N) + OUT - 1) / OUT;
  const int rank = SPLIT > 1 ? blockIdx.z : 0, first = rank * turns / SPLIT, own = (rank + 1) * turns / SPLIT - first;
  const Problem of{groups, scales,    x_scales,    slots, experts, M,      N,     slabs,
                   own,    per_group, scale_width, num_x, blocks,  across, first, turns};
  const Ring ring = open_ring(x, w, memory);

  if (warp >= MULTIPLIERS) {
    give_registers<40>();
    if (thread == MULTIPLIERS * 32) feed(x, w, of, ring);
#if BY_BLOCK
    if (warp == MULTIPLIERS + 1) feed_scales(of, ring, lane);
#endif
#if SPLIT > 1
    __syncwarp();
    rest();
#endif
    return;
  }
  take_registers<232>();
  if (EARLY) wait_for_previous();
#if SPLIT > 1
  const Tile tile = tile_of(of, blockIdx.x);
  Sum sum[BN / 2] = {};
  fence_registers(sum);
  Place at = {0, 0};
  if (of.turns > 0) add_up<BN>(sum, of, tile, ring, at, warp, lane);
  const Ending ending{(float*)ring.tiles, BY_BLOCK ? nullptr : scales, BY_BLOCK ? nullptr : x_scales, nullptr, bias, y,
                      nullptr, tile.block * BN, rank, M, N};
  const int column = tile.nth * OUT + warp * 16;
  finish<MULTIPLIERS * 32>(ending, find_factors<MULTIPLIERS * 32>(ending, column, thread), sum, column, thread);
#else
  unsigned char* const rooms = ring.tiles + STAGES * STAGE;
  Table* const tables = (Table*)(rooms + GROUPS * ROOM) + group * 2;  // of this tile, and of the next one
  const int num_tiles = blocks * across;
  Place at = {0, 0};
  int odd = 0;
  [[maybe_unused]] int piece = 0;
  Tile next = tile_of(of, blockIdx.x);
  int next_rows = rows_of(of, next);
  for (int id = blockIdx.x; id < num_tiles; id += gridDim.x) {
    const Tile tile = uniform(next);
    const int rows = uniform(next_rows);
    if (id + gridDim.x < num_tiles) next = tile_of(of, id + gridDim.x), next_rows = rows_of(of, next);
    if (tile.expert < 0) continue;
    const Known found = find(of, tile, bias, thread);
    Sum sum[BN / 2] = {};
    fence_registers(sum);
    if (FEWER == BN || rows > FEWER) add_up<BN>(sum, of, tile, ring, at, warp, lane);
    else add_up<FEWER>(sum, of, tile, ring, at, warp, lane);
    tables[odd].fill(found, thread % 128);
    meet_group(group);
#if BOXES
    store_tile(tile, boxes_of_y, tables[odd], found, sum, rooms + group * ROOM, group, thread, piece);
#else
    store_tile(of, tile, y, tables[odd], found, sum, rooms + group * ROOM + warp % 4 * PIECE * 32, warp, lane);
#endif
    odd ^= 1;
  }
#if BOXES
  if (thread % 128 == 0) await_reads<0>();  // the block's memory is somebody else's when it has ended
#endif
#endif
}
