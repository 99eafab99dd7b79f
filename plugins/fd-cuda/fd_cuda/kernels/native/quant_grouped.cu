// y = x W^T of experts with packed W and few rows each: as many blocks as there are multiprocessors take one tile of an
// expert after the other, SLABS slabs of its W times up to ROWS of its rows, and compute as many eights of rows as it has.
//
// One warp feeds: the copy engine brings two turns of 64 inputs, as far ahead as STAGES such steps, those of the next tiles
// while one is stored. GROUPS of four warps unpack a slab of quant.cuh into registers while wgmma multiplies the slab
// before; a warp has MT, with PAIRED half of them gates, the others what belongs to them. NUMBERS: x is int8, its inputs by
// sixteens in the order of the bytes of a slab's words, and int4 becomes int8. The trellis code: x is rotated int8
// (tet_rotate.cu), four numbers for two inputs, which multiply products of windows as they are, or, with NUMBERS, one for an
// input, and weights are rounded to int8: twice the work of unpacking, half of that of the matrix units.
// x lies by blocks of ROWS rows, each of one expert, those that are there first. PAIRED: so does y; else `slots` says where
// rows of y go.
// A row of x comes out the same whatever stands beside it.

#include "common.cuh"
#include "quant.cuh"
#define SPLIT 1
#define ROWS BN
#include "wide.cuh"
#include "feed.cuh"

#if FORMAT == TRELLIS
#include "trellis.cuh"
#define SLAB_OUTPUTS 64  // four warps share a slab
#define INTEGERS 1
#else
#define SLAB_OUTPUTS 16
#define INTEGERS NUMBERS
#endif
#define MULTIPLIERS (GROUPS * 4)  // warps; four more have the feeder, and give it their registers
#define SLABS (MULTIPLIERS * MT * 16 / SLAB_OUTPUTS)
#define OUT (MULTIPLIERS * MT * 16 / (1 + PAIRED))
#define TILE_X (ROWS * 128 * (2 - NUMBERS))
#define TILE_W (SLABS * 2 * SLAB_BYTES)
#define STAGE (TILE_X + TILE_W + (FORMAT == MXFP4 ? SLABS * 64 : 0))
#define UNITS (MT * (2 - NUMBERS))  // of a step: what a warp unpacks at a time, 64 inputs of a slab, or as NUMBERS 128
#define STEP_INPUTS 128
#define SYNC (FORMAT == MXFP4 && ROWS == 32)  // few rows by mma.sync: sums are the same, bit for bit, and take less time

#if INTEGERS
typedef int Sum;
#else
typedef float Sum;
#endif

// INSTRUCTIONS: emulated.h of the tests has C++ in the place of what follows.

#if INTEGERS
#if FORMAT == TRELLIS && !NUMBERS
#define WORDS "k32.s32.u8.s8 "
#else
#define WORDS "k32.s32.s8.s8 "
#endif
#define AFTER ", 1;"
#define SUM "+r"
#else
#define WORDS "k16.f32." TYPE "." TYPE " "
#define AFTER ", 1, 1, 1, 0;"
#define SUM "+f"
#endif
#define D12 D8 ",%8,%9,%10,%11"
#define D24 D16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#if FORMAT == TRELLIS && NUMBERS
__device__ __forceinline__ u32 dot(u32 bytes, u32 factors, int sum) {
  u32 d;
  asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(bytes), "r"(factors), "r"(sum));
  return d;
}
#endif

#define MULTIPLY(size, list, operands, ...)                                                       \
  if constexpr (rows == size)                                                                     \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #size WORDS "{" list "}, " operands AFTER      \
               : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

template <int rows>
__device__ __forceinline__ void multiply_rows(Sum* d, const u32* a, u64 b) {
  MULTIPLY(8, D4, "{%4,%5,%6,%7}, %8", R4(SUM, d, 0));
  MULTIPLY(16, D8, "{%8,%9,%10,%11}, %12", R8(SUM, d, 0));
  MULTIPLY(24, D12, "{%12,%13,%14,%15}, %16", R8(SUM, d, 0), R4(SUM, d, 8));
  MULTIPLY(32, D16, "{%16,%17,%18,%19}, %20", R16(SUM, d, 0));
  MULTIPLY(48, D24, "{%24,%25,%26,%27}, %28", R16(SUM, d, 0), R8(SUM, d, 16));
  MULTIPLY(64, D32, "{%32,%33,%34,%35}, %36", R32(SUM, d, 0));
#if ROWS == 128
  MULTIPLY(96, D48, "{%48,%49,%50,%51}, %52", R32(SUM, d, 0), R16(SUM, d, 32));
  MULTIPLY(128, D64, "{%64,%65,%66,%67}, %68", R32(SUM, d, 0), R32(SUM, d, 32));
#endif
}

// END OF INSTRUCTIONS

struct Problem {
  const u32* groups;
  const float *scales, *x_scales;
  const int* x_sums;
  const u16* bias;
  u16* y;
  const int *slots, *experts;
  int M, N, slabs, turns, per_group, scale_width, blocks, across;
  float alpha, limit;  // of MXFP4's activation

  __device__ __forceinline__ int steps() const { return (turns + 1) / 2; }
};

struct Ring {
  u32 full, empty, base;
  const unsigned char* tiles;
};

// A tile, and of two rows of its block where they go, M and more: nowhere. A block without expert has no rows.
struct Tile {
  int block, nth, expert, count, slot[ROWS / 32];
};

__device__ __forceinline__ Tile tile_of(const Problem& of, int id, int lane) {
  Tile tile = {id / of.across, id % of.across, -1, 0};
  const bool is_there = tile.block < of.blocks;
  if (is_there) tile.expert = of.experts[tile.block];
#pragma unroll
  for (int i = 0; i < ROWS / 32; i++) tile.slot[i] = is_there ? of.slots[tile.block * ROWS + lane + i * 32] : of.M;
  return tile;
}

__device__ __forceinline__ Tile known(const Problem& of, Tile tile) {
  tile.expert = uniform(tile.expert);
  int own = 0;
#pragma unroll
  for (int i = 0; i < ROWS / 32; i++) own += tile.slot[i] < of.M;
  tile.count = tile.expert < 0 ? 0 : uniform(__reduce_add_sync(~0u, own));
  return tile;
}

__device__ __forceinline__ int first_slab(const Problem& of, const Tile& tile, int half) {
  return PAIRED ? tile.nth * (SLABS / 2) + half * (of.slabs / 2) : tile.nth * SLABS + half * (SLABS / 2);
}

// Where the outputs of a warp's mth sixteen begin.
__device__ __forceinline__ int outputs_of(const Problem& of, const Tile& tile, int m, int warp) {
  return first_slab(of, tile, m / (MT / 2)) * SLAB_OUTPUTS + (m % (MT / 2) * MULTIPLIERS + warp) * 16;
}

// What one warp does. Its lanes stay together; one of them asks.
__device__ __forceinline__ void feed(const TensorMap& x, const TensorMap& w, const Problem& of, const Ring& ring, int lane) {
  const int steps = of.steps(), num_tiles = of.blocks * of.across;
  Place at = {0, 1};  // the phase before the first one counts as ended
  const auto ask_w = [&](const Tile& tile, int step, int stage, u32 full) {
    const int bytes_x = (tile.count + 7) / 8 * 1024 * (2 - NUMBERS);
    const u32 to = ring.base + stage * STAGE + TILE_X;
#if FORMAT == MXFP4
    const int row = tile.nth * SLABS * 16, powers = min(of.N - row, SLABS * 16) * 4;
    expect(full, TILE_W + powers + bytes_x);
    copy_box(to, w, step * 8, tile.expert * of.N + row, full);
    copy_line(to + TILE_W, of.groups + ((u64)tile.expert * steps + step) * of.N + row, powers, full);
    return;
#endif
    expect(full, TILE_W + bytes_x);
#pragma unroll
    for (int half = 0; half < 2; half++)
      copy_box(to + half * SLABS * SLAB_BYTES, w, step * 2 * SLAB_BYTES / 8,
               tile.expert * of.slabs + first_slab(of, tile, half), full);
  };
  const auto ask_x = [&](const Tile& tile, int step, int stage, u32 full) {
    for (int eight = 0; eight < (tile.count + 7) / 8; eight++) {
      const u32 to = ring.base + stage * STAGE + eight * 1024;
      copy_box(to, x, step * STEP_INPUTS, tile.block * ROWS + eight * 8, full);
      if (!NUMBERS) copy_box(to + ROWS * 128, x, step * STEP_INPUTS + 64, tile.block * ROWS + eight * 8, full);
    }
  };
  Tile next = tile_of(of, blockIdx.x, lane);
  int begun = 0;  // steps whose weights are asked for: of the second product the order is older than the kernel before
#if !PAIRED
  const Tile first = known(of, next);
  if (first.count && lane == 0)
    for (; begun < min(steps, STAGES); begun++) ask_w(first, begun, begun, ring.full + 8 * begun);
  wait_for_previous();
#endif
  for (int id = blockIdx.x; id < num_tiles; id += gridDim.x) {
    const Tile tile = known(of, next);
    next = tile_of(of, id + gridDim.x, lane);
    if (!tile.count || lane) continue;
    for (int step = 0; step < steps; step++, advance<STAGES>(at)) {
      const u32 full = ring.full + 8 * at.stage;
      if (begun > 0) {
        begun--;
      } else {
        await_phase(ring.empty + 8 * at.stage, at.parity);
        ask_w(tile, step, at.stage, full);
      }
      ask_x(tile, step, at.stage, full);
    }
  }
}

// What a warp holds of a slab, and a unit of it unpacked to four operands of wgmma.
#if FORMAT == MXFP4
#define UNIT_SCALE 1.f
// A lane has 32 inputs of two rows, which share a power of two each. Eight of them are a word; "inputs 2 q, 2 q + 1, 8 + 2 q
// and 9 + 2 q of step s" are 0, 4, 1 and 5 of word s / 2, or 2, 6, 3 and 7 where s is odd (gathered() and hidden outputs).
struct Held {
  uint4 row[2];
  u32 power[2];
};

// Of a tile, the first row of W that lanes have of a slab; the other one is eight after it. PAIRED: gates and what belongs
// to them take turns in W. Output n of a tile comes out at the place that it has as an input: bits 6 to 0 of a place are
// bits 4, 3, 1, 0, 6, 5, 2 of n. Eight places are a slab's.
__device__ __forceinline__ int first_output(int warp, int m, int lane) {
  return lane >> 3 << 5 | warp >> 1 << 3 | (warp & 1) << 1 | m;
}

__device__ __forceinline__ int row_of(int warp, int m, int lane) {
  return PAIRED ? first_output(warp, m, lane) * 2 + (lane >> 2 & 1) : (m * MULTIPLIERS + warp) * 16 + (lane >> 2);
}

__device__ __forceinline__ void hold(Held& held, const unsigned char* stage, int n, int warp, int lane) {
  if (n % 2) return;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int row = row_of(warp, n / 2, lane) + i * 8;
    held.row[i] = *(const uint4*)(stage + TILE_X + row * 64 + (lane & 3) * 16);
    held.power[i] = __byte_perm(stage[TILE_X + TILE_W + row * 4 + (lane & 3)], 0, 0x0404u) >> 1;
  }
}

// Sign and magnitude of a pair of numbers stand where those of bfloat16 are: they are 2^-126 of what they should be. A
// product puts a number there twice, once for its sign and once for its magnitude, as logic and shifts are what binds.
__device__ __forceinline__ void unpack_word(u32 (*a)[4], const Held& held, int nth) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint4& all = held.row[i];
    const u32 word = nth == 0 ? all.x : nth == 1 ? all.y : nth == 2 ? all.z : all.w;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const u32 pair = (k < 2 ? word : word >> 8) & (0x000f000fu << k % 2 * 4);
      const u32 bits = pair * (0x1040u >> k % 2 * 4) & 0x81c081c0u;
      a[k / 2][k % 2 * 2 + i] = fma2(bits, held.power[i], 0x80008000u);
    }
  }
}

__device__ __forceinline__ void unpack_unit(u32 (*a)[4], const Held& held, int n) {
  unpack_word(a, held, n % 2 * 2), unpack_word(a + 2, held, n % 2 * 2 + 1);
}
#elif FORMAT == TRELLIS
// A lane has one word of one strand of every turn of 32 inputs, two outputs by four times two inputs: of the sixteen outputs
// of a warp, those of the lower eight rows are the even ones.
#define UNIT_TURNS (NUMBERS ? 4 : 2)
struct Held {
  u32 word[UNIT_TURNS], before[UNIT_TURNS];
};

__device__ __forceinline__ void hold(Held& held, const unsigned char* stage, int n, int warp, int lane) {
  const int m = n / (UNITS / MT), first = n % (UNITS / MT) * UNIT_TURNS, own = warp % 4 * 8 + (lane >> 2);
  const auto place = [&](int word) { return word / 4 * 64 + (lane & 3) * 16 + word % 4 * 4; };
  const unsigned char* slab = stage + TILE_X + (m * GROUPS + warp / 4) * 2 * SLAB_BYTES + first * 512;
#pragma unroll
  for (int t = 0; t < UNIT_TURNS; t++) {
    held.word[t] = *(const u32*)(slab + t * 512 + place(own));
    held.before[t] = *(const u32*)(slab + t * 512 + place(own - 1 & 31));
  }
}

#if NUMBERS
// A weight is a sum of three bytes, -382 to 382 from its middle. A third of it is the second byte of what the dot product gives.
#define UNIT_SCALE (256.f / 85.f)
__device__ __forceinline__ u32 four_weights(u32 first, u32 second) {
  const u32 low = 0xab005555u, high = 0x55555500u;  // (85, 85, 0, -85) and (0, 85, 85, 85)
  const u32 a = dot(first, low, -10709), b = dot(first, high, -32384), c = dot(second, low, -10709), d = dot(second, high, -32384);
  return __byte_perm(__byte_perm(a, b, 0x0051), __byte_perm(c, d, 0x0051), 0x5410);
}
#else
#define UNIT_SCALE 1.f
#endif

__device__ __forceinline__ void unpack_unit(u32 (*a)[4], const Held& held, int) {
#pragma unroll
  for (int t = 0; t < UNIT_TURNS; t++) {
    u32 p[8];
    Before before{held.before[t], held.before[t] >> 16};
    products(before, held.word[t], p);
#if NUMBERS
#pragma unroll
    for (int i = 0; i < 4; i++) a[t][i] = four_weights(p[i % 2 * 4 + i / 2 * 2], p[i % 2 * 4 + i / 2 * 2 + 1]);
#else
#pragma unroll
    for (int i = 0; i < 8; i++) a[t * 2 + i / 4][i % 4] = p[i % 2 * 4 + i / 2];
#endif
  }
}
#elif NUMBERS
#define UNIT_SCALE 0.0625f
struct Held {
  Slab slab[2];
};

__device__ __forceinline__ void hold(Held& held, const unsigned char* stage, int n, int warp, int lane) {
  const unsigned char* slab = stage + TILE_X + (n * MULTIPLIERS + warp) * 2 * SLAB_BYTES;
  held.slab[0] = slab_at(slab, lane), held.slab[1] = slab_at(slab + SLAB_BYTES, lane);
}

__device__ __forceinline__ void unpack_unit(u32 (*a)[4], const Held& held, int) {
#pragma unroll
  for (int s = 0; s < 8; s++) {
    const u32 both = word(held.slab[s / 4], s % 4);  // sixteen times what they are, of a row and of the row + 8
    a[s / 2][s % 2 * 2] = masked_xor(both << 4, 0xf0f0f0f0u, 0x80808080u);
    a[s / 2][s % 2 * 2 + 1] = masked_xor(both, 0xf0f0f0f0u, 0x80808080u);
  }
}
#else
#define UNIT_SCALE 1.f
struct Held {
  Slab slab;
  Group group;
};

__device__ __forceinline__ void hold(Held& held, const unsigned char* stage, int n, int warp, int lane) {
  held.slab = slab_at(stage + TILE_X + ((n / 2 * MULTIPLIERS + warp) * 2 + n % 2) * SLAB_BYTES, lane);
}

__device__ __forceinline__ void unpack_unit(u32 (*a)[4], const Held& held, int) {
#pragma unroll
  for (int s = 0; s < 4; s++) {
    unpack(held.slab, s, Code{}, a[s]);
    apply_group(a[s], held.group);
  }
}
#endif

// Sums of a warp's slabs, as wgmma gives them, times `rows` rows.
#if SYNC
template <int rows>
__device__ __forceinline__ void add_up(Sum (&sum)[MT][ROWS / 2], const Problem& of, const Tile& tile, const Ring& ring,
                                       Place& at, int warp, int lane) {
  for (int step = 0; step < of.steps(); step++, advance<STAGES>(at)) {
    Held held[MT];
    await_phase(ring.full + 8 * at.stage, at.parity);
#pragma unroll
    for (int m = 0; m < MT; m++) hold(held[m], ring.tiles + at.stage * STAGE, m * 2, warp, lane);
#pragma unroll
    for (int nth = 0; nth < 4; nth++) {  // 32 inputs
      u32 b[rows / 8][4];
      const u32 own = ring.base + at.stage * STAGE + nth / 2 * ROWS * 128 + (lane & 7) * 128;
#pragma unroll
      for (int n = 0; n < rows / 8; n++)
        load_matrices(b[n], own + n * 1024 + ((nth % 2 * 4 + (lane >> 3) ^ lane & 7) << 4));
#pragma unroll
      for (int m = 0; m < MT; m++) {
        u32 a[2][4];
        unpack_word(a, held[m], nth);
#pragma unroll
        for (int s = 0; s < 2; s++)
#pragma unroll
          for (int n = 0; n < rows / 8; n++)
            multiply(*(float(*)[4])(sum[m] + n * 4), a[s][0], a[s][1], a[s][2], a[s][3], b[n][s * 2], b[n][s * 2 + 1]);
      }
    }
    __syncwarp();
    if (lane == 0) arrive_at(ring.empty + 8 * at.stage);
  }
}
#else
template <int rows>
__device__ __forceinline__ void add_up(Sum (&sum)[MT][ROWS / 2], const Problem& of, const Tile& tile, const Ring& ring,
                                       Place& at, int warp, int lane) {
  const int steps = of.steps();
#if SCALED
  const int num_groups = (of.turns + of.per_group - 1) / of.per_group;
  const u32* entries[MT];
#pragma unroll
  for (int m = 0; m < MT; m++) {
    const int slab = min(outputs_of(of, tile, m, warp) / 16, of.slabs - 1);
    entries[m] = of.groups + ((u64)tile.expert * of.slabs + slab) * num_groups * 8 * SCALED + (lane >> 2);
  }
  // Scales of the nth unit of a step.
  const auto group_of = [&](int step, int n) {
    return load_group(entries[n / 2], min(step * 2 + n % 2, of.turns - 1) / of.per_group);
  };
#endif
  u32 a[2][4][4];  // of the unit that is multiplied, and of the next one
  Held held;       // of the one after these, asked for long before it is looked at
  const auto take = [&](int step, int stage, int n) {
    hold(held, ring.tiles + stage * STAGE, n, warp, lane);
#if SCALED
    held.group = group_of(step, n);
#endif
  };
  await_phase(ring.full + 8 * at.stage, at.parity);
  take(0, at.stage, 0);
  unpack_unit(a[0], held, 0);
  take(0, at.stage, 1);
  int last = 0;
  for (int step = 0; step < steps; step++) {
    const int stage = at.stage;
    const u64 tile_x = descriptor(ring.base + stage * STAGE);
    advance<STAGES>(at);
#pragma unroll
    for (int n = 0; n < UNITS; n++) {
      const int m = n / (UNITS / MT), half = n % (UNITS / MT), next = (n + 1) % UNITS, after = (n + 2) % UNITS;
      const bool is_last = step + 1 == steps;
      begin_products();
#pragma unroll
      for (int s = 0; s < 4; s++) multiply_rows<rows>(sum[m], a[n % 2][s], tile_x + half * (ROWS * 8) + s * 2);
      end_products();
      await_products<1>();  // those of the unit before: its operands are free
      if (n == 0 && step > 0 && lane == 0) arrive_at(ring.empty + 8 * last);
      if (next || !is_last) unpack_unit(a[(n + 1) % 2], held, next);
      if (n + 2 < UNITS) {
        take(step, stage, after);
      } else if (!is_last) {
        if (!after) await_phase(ring.full + 8 * at.stage, at.parity);
        take(step + 1, at.stage, after);
      }
    }
    last = stage;
  }
  await_products<0>();
  if (lane == 0) arrive_at(ring.empty + 8 * last);
}
#endif

// Sixteen outputs of all rows, from `column` on, through a piece of shared memory that is the warp's own.
template <class Values>
__device__ __forceinline__ void store_outputs(const Problem& of, const Tile& tile, unsigned char* stage, int column,
                                              int lane, const Values& values_of) {
  const int width = PAIRED && FORMAT == MXFP4 ? of.across * OUT : of.N / (1 + PAIRED);
  const u32 place = shared_address(stage) + (lane & 7) * 32 + ((lane >> 3 & 1 ^ lane >> 2 & 1) << 4);
#pragma unroll
  for (int eight = 0; eight < ROWS / 8; eight++) {
    if (eight * 8 >= tile.count) break;
    const uint2 pairs = values_of(eight);
    store_transposed(place + eight * 256, pairs.x, pairs.y);
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < ROWS / 16; i++) {
    if (i * 16 >= tile.count) break;
    const int n = i * 16 + lane / 2, half = lane % 2;
    const int slot = __shfl_sync(~0u, tile.slot[i / 2], n % 32);
    if (n >= tile.count) continue;
#if FORMAT == TRELLIS
    const uint2 even = *(const uint2*)(stage + n * 32 + ((n >> 2 & 1) << 4) + half * 8);
    const uint2 odd = *(const uint2*)(stage + n * 32 + ((1 ^ n >> 2 & 1) << 4) + half * 8);
    const uint4 v = make_uint4(__byte_perm(even.x, odd.x, 0x5410), __byte_perm(even.x, odd.x, 0x7632),
                               __byte_perm(even.y, odd.y, 0x5410), __byte_perm(even.y, odd.y, 0x7632));
#else
    const uint4 v = *(const uint4*)(stage + n * 32 + ((half ^ n >> 2 & 1) << 4));
#endif
    store_piece(of.y, PAIRED ? tile.block * ROWS + n : slot, PAIRED ? of.blocks * ROWS : of.M, column + half * 8, width, v);
  }
  __syncwarp();
}

__device__ __forceinline__ void compute(const Problem& of, const Tile& tile, const Ring& ring, Place& at,
                                        unsigned char* stage, int warp, int lane) {
  const float* scales = of.scales + (u64)tile.expert * of.scale_width;
  // Of a lane's two outputs of each slab, with PAIRED of gates and of what belongs to them; and of its own two rows.
  float scale[MT][2], bias[MT][2] = {}, of_row[ROWS / 32];
#pragma unroll
  for (int i = 0; i < ROWS / 32; i++) of_row[i] = INTEGERS ? of.x_scales[tile.block * ROWS + lane + i * 32] : 1.f;
#pragma unroll
  for (int m = 0; m < MT; m++) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
#if FORMAT == MXFP4
      const int output = min(tile.nth * SLABS * 16 + row_of(warp, m, lane) + h * 8, of.N - 1);
      if (of.bias != nullptr) bias[m][h] = widen_y(of.bias[(u64)tile.expert * of.N + output]);
#elif FORMAT == TRELLIS
      const int output = min(outputs_of(of, tile, m, warp) + (lane >> 2) * 2 + h, of.N - 1);
#else
      const int output = min(outputs_of(of, tile, m, warp) + (lane >> 2) + h * 8, of.N - 1);
#endif
      scale[m][h] = scales[output] * UNIT_SCALE;
    }
  }
  Sum sum[MT][ROWS / 2];
#pragma unroll
  for (int m = 0; m < MT; m++) {
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) sum[m][i] = 0;
    fence_registers(sum[m]);
  }
#if ROWS == 128  // more sizes would need more registers than there are
  if (tile.count <= 64) add_up<64>(sum, of, tile, ring, at, warp, lane);
  else if (tile.count <= 96) add_up<96>(sum, of, tile, ring, at, warp, lane);
  else add_up<128>(sum, of, tile, ring, at, warp, lane);
#else
  if (tile.count <= 8) add_up<8>(sum, of, tile, ring, at, warp, lane);
  else if (tile.count <= 16) add_up<16>(sum, of, tile, ring, at, warp, lane);
  else if (tile.count <= 24) add_up<24>(sum, of, tile, ring, at, warp, lane);
  else if (ROWS == 32 || tile.count <= 32) add_up<32>(sum, of, tile, ring, at, warp, lane);
#if ROWS == 64
  else if (tile.count <= 48) add_up<48>(sum, of, tile, ring, at, warp, lane);
  else add_up<64>(sum, of, tile, ring, at, warp, lane);
#endif
#endif
#pragma unroll
  for (int m = 0; m < MT; m++) fence_registers(sum[m]);
  // Outputs of two rows each.
  const auto scaled_four = [&](int m, int eight) {
    float first = 1.f, second = 1.f;
    float4 v = four_of(sum[m], eight);
    if (INTEGERS) {
      const int row = eight * 8 + (lane & 3) * 2;
      first = __shfl_sync(~0u, of_row[eight / 4], row % 32), second = __shfl_sync(~0u, of_row[eight / 4], row % 32 + 1);
    }
    if (FORMAT == TRELLIS && !NUMBERS) {
      const int* sums = of.x_sums + tile.block * ROWS + eight * 8 + (lane & 3) * 2;
      const float a = 127.5f * sums[0], b = 127.5f * sums[1];
      v.x -= a, v.y -= b, v.z -= a, v.w -= b;
    }
    return make_float4(v.x * scale[m][0] * first + bias[m][0], v.y * scale[m][0] * second + bias[m][0],
                       v.z * scale[m][1] * first + bias[m][1], v.w * scale[m][1] * second + bias[m][1]);
  };
#if PAIRED && FORMAT == MXFP4
  // One lane of two has gates, of its own output and of the other one's, the other one what belongs to them.
  const bool is_up = lane >> 2 & 1;
  const auto clamped = [&](int m, int eight) {
    const float4 v = scaled_four(m, eight);
    const float x = __shfl_xor_sync(~0u, is_up ? v.x : v.z, 4), y = __shfl_xor_sync(~0u, is_up ? v.y : v.w, 4);
    const bool is_there = tile.nth * OUT + first_output(warp, m, lane) + is_up * 4 < of.N / 2;
    const auto gated = [&](float gate, float up) {
      gate = gate > of.limit ? of.limit : gate;  // what is no number stays so
      up = up > of.limit ? of.limit : up < -of.limit ? -of.limit : up;
      return is_there ? (up + 1.f) * __fdividef(gate, 1.f + __expf(-of.alpha * gate)) : 0.f;
    };
    return narrow_y(is_up ? gated(x, v.z) : gated(v.x, x), is_up ? gated(y, v.w) : gated(v.y, y));
  };
  store_outputs(of, tile, stage, tile.nth * OUT + warp * 16, lane,
                [&](int eight) { return make_uint2(clamped(0, eight), clamped(1, eight)); });
#elif PAIRED
#pragma unroll
  for (int m = 0; m < MT / 2; m++)
    store_outputs(of, tile, stage, outputs_of(of, tile, m, warp), lane, [&](int eight) {
      const float4 v = scaled_four(m, eight), up = scaled_four(m + MT / 2, eight);
      return make_uint2(narrow_y(quick_silu(v.x) * up.x, quick_silu(v.y) * up.y),
                        narrow_y(quick_silu(v.z) * up.z, quick_silu(v.w) * up.w));
    });
#else
#pragma unroll
  for (int m = 0; m < MT; m++)
    store_outputs(of, tile, stage, outputs_of(of, tile, m, warp), lane, [&](int eight) {
      const float4 v = scaled_four(m, eight);
      return make_uint2(narrow_y(v.x, v.y), narrow_y(v.z, v.w));
    });
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
quant_grouped(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const u32* __restrict__ groups,
              const float* __restrict__ scales, const float* x_scales, const int* x_sums, const u16* __restrict__ bias,
              u16* y, const int* slots, const int* experts, int M, int N, int slabs, int turns, int per_group, int scale_width,
              int blocks, int across, float alpha, float limit) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const int lane = threadIdx.x & 31, warp = uniform(threadIdx.x >> 5);
  const Problem of{groups, scales, x_scales, x_sums, bias, y, slots, experts, M, N, slabs, turns, per_group, scale_width, blocks,
                   across, alpha, limit};
  const u32 full = shared_address(memory), empty = full + 8 * STAGES, base = (empty + 8 * STAGES + 1023) & ~1023u;
  const Ring ring = {full, empty, base, memory + (base - full)};
  if (threadIdx.x == 0) {
    prefetch(x);
    prefetch(w);
    make_ring<STAGES>(full, 1, MULTIPLIERS);
  }
  __syncthreads();
  // The next kernel starts when this one knows the order, which it reads without waiting for this one.
  if (PAIRED || warp < MULTIPLIERS) wait_for_previous();
  let_next_start();
  if (warp >= MULTIPLIERS) {
    give_registers<40>();
    if (warp == MULTIPLIERS) feed(x, w, of, ring, lane);
    return;
  }
  take_registers<232>();
  unsigned char* stage = memory + (base - full) + STAGES * STAGE + warp * ROWS * 32;
  Place at = {0, 0};
  Tile next = tile_of(of, blockIdx.x, lane);
  for (int id = blockIdx.x; id < blocks * across; id += gridDim.x) {
    const Tile tile = known(of, next);
    next = tile_of(of, id + gridDim.x, lane);
    if (!tile.count) continue;
    compute(of, tile, ring, at, stage, warp, lane);
  }
}
