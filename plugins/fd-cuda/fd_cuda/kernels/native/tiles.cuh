// Of quant_persistent.cu and quant_blocks.cu: which tiles of the result a block takes, one after the other, and how what
// they are made of gets to its shared memory.

#define MULTIPLIERS (GROUPS * 4)  // warps; four more have the feeder, and give it their registers
#ifndef EARLY
#define EARLY 0  // weights are older than the kernel before, and no expert's: the first ones are asked for while it runs
#endif
#ifndef BY_BLOCK
#define BY_BLOCK 0  // a ring has a line for every turn, of its scales: those of ROWS, and two or less of outputs
#endif
#define LINE (BY_BLOCK * (ROWS + 2) * 4)  // bytes
#define FEEDERS (BY_BLOCK ? 33 : 1)       // threads that say when a turn is there
#ifndef BOX
#define BOX ROWS  // rows that one copy brings
#endif
#define OUT (PAIRED ? COLUMNS / 2 : COLUMNS)
#define TILE_X (ROWS * 128)
#define TILE_W (BY_ROWS ? COLUMNS * 128 : MULTIPLIERS * SLAB_BYTES)
#define STAGE (TILE_X + TILE_W)

// What is multiplied, and the tiles of the result: those of BAND blocks of rows together, so that what they share is in the
// second-level cache.
#define BAND 8
struct Problem {
  const u32* groups;
  const float *scales, *x_scales;
  const int *slots, *experts;
  int M, N, slabs, turns, per_group, scale_width, num_x, blocks, across;
  int first, all;  // where blocks divide K: the turn that `turns` begin at, of how many
};

struct Tile {
  int block, nth, expert;  // of rows; of outputs; negative where nobody has the rows
};

__device__ __forceinline__ Tile tile_of(const Problem& of, int id) {
  const int band = id / (BAND * of.across) * BAND, within = id - band * of.across;
  const int together = min(BAND, of.blocks - band), block = band + within % together;
  return {block, within / together, GROUPED ? of.experts[block] : 0};
}

// How many rows of a tile are brought, whole boxes: an expert's are the first ones of its blocks.
__device__ __forceinline__ int rows_of(const Problem& of, const Tile& tile) {
  if (!GROUPED || BOX == ROWS) return ROWS;
  int boxes = 0;
#pragma unroll
  for (int row = 0; row < ROWS; row += BOX) boxes += of.slots[tile.block * ROWS + row] < of.M;
  return boxes * BOX;
}

__device__ __forceinline__ Tile uniform(const Tile& tile) {
  return {tile.block, tile.nth, GROUPED ? uniform(tile.expert) : 0};
}

// Of a block of threads: barriers of turns that are there and of those that are free, and their memory.
struct Ring {
  u32 full, empty, base;
  unsigned char *lines, *tiles;
};

// What all threads of a block begin with; after it, but for EARLY, what the kernel before has made may be read.
__device__ __forceinline__ Ring open_ring(const TensorMap& x, const TensorMap& w, unsigned char* start) {
  const u32 full = shared_address(start), empty = full + 8 * STAGES, base = (empty + (8 + LINE) * STAGES + 1023) & ~1023u;
  if (threadIdx.x == 0) {
    prefetch(x);
    prefetch(w);
    make_ring<STAGES>(full, FEEDERS, MULTIPLIERS);
  }
  __syncthreads();
  let_next_start();
  if (!EARLY) wait_for_previous();
  return {full, empty, base, start + 16 * STAGES, start + (base - full)};
}

// Ask for what one turn of a tile of W takes. PAIRED: gates and what belongs to them by eights in turn, or APART.
__device__ __forceinline__ void feed_weight(const TensorMap& w, const Problem& of, const Tile& tile, int turn, u32 to,
                                            u32 barrier) {
#if PAIRED && !APART
  copy_gates(to, w, turn * 128, tile.nth * OUT / 8, tile.expert, barrier);
#else
  const int at = (of.first + turn) * (BY_ROWS ? 128 : SLAB_BYTES / 8), height = BY_ROWS ? of.N : of.slabs;
  const int first = tile.expert * height + tile.nth * (BY_ROWS ? OUT : OUT / 16);
  copy_box(to, w, at, first, barrier);
  if (PAIRED) copy_box(to + TILE_W / 2, w, at, first + height / 2, barrier);
#endif
}

// What one thread does.
__device__ __forceinline__ void feed(const TensorMap& x, const TensorMap& w, const Problem& of, const Ring& ring) {
  const auto begin_turn = [&](const Tile& tile, int turn, int stage, int rows) {
    expect(ring.full + 8 * stage, TILE_W + rows * 128);
    feed_weight(w, of, tile, turn, ring.base + stage * STAGE + TILE_X, ring.full + 8 * stage);
  };
  Tile next = tile_of(of, blockIdx.x);
  int next_rows = rows_of(of, next), begun = 0;  // turns of the first tile
  if (EARLY) {
    for (; begun < min(of.turns, STAGES); begun++) begin_turn(next, begun, begun, ROWS);
    wait_for_previous();
  }
  Place at = {0, 1};  // the phase before the first one counts as ended
  for (int id = blockIdx.x; id < of.blocks * of.across; id += gridDim.x) {
    const Tile tile = next;
    const int rows = next_rows;
    if (id + gridDim.x < of.blocks * of.across) next = tile_of(of, id + gridDim.x), next_rows = rows_of(of, next);
    if (tile.expert < 0) continue;
    for (int t = 0; t < of.turns; t++, advance<STAGES>(at)) {
      if (begun > 0) {
        begun--;
      } else {
        await_phase(ring.empty + 8 * at.stage, at.parity);
        begin_turn(tile, t, at.stage, rows);
      }
      const int input = (of.first + t) * (BY_ROWS ? 128 : 64);
      for (int row = 0; row < rows; row += BOX)
        copy_box(ring.base + at.stage * STAGE + row * 128, x, input, tile.block * ROWS + row, ring.full + 8 * at.stage);
    }
  }
}

#if BY_BLOCK
// What a warp does beside that thread: bring scales of rows and of outputs to the lines of the turns.
__device__ __forceinline__ void feed_scales(const Problem& of, const Ring& ring, int lane) {
  constexpr int each = (ROWS + 31) / 32, parts = PAIRED ? 2 : (COLUMNS + 127) / 128;
  if (EARLY) wait_for_previous();
  const u32 lines = shared_address(ring.lines);
  Place at = {0, 1};
  for (int id = blockIdx.x; id < of.blocks * of.across; id += gridDim.x) {
    const Tile tile = tile_of(of, id);
    if (tile.expert < 0) continue;
    const int output = tile.nth * OUT + min(lane, parts - 1) * (PAIRED ? of.N / 2 : 128);
    const float *of_rows = of.x_scales, *of_outputs = of.scales + (u64)tile.expert * of.scale_width;
    of_rows += (u64)of.first * of.num_x, of_outputs += (u64)(min(output, of.N - 1) / 128) * of.all + of.first;
    int rows[each];
#pragma unroll
    for (int i = 0; i < each; i++) rows[i] = min(tile.block * ROWS + i * 32 + lane, of.num_x - 1);
#pragma unroll 1
    for (int t = 0; t < of.turns; t++, advance<STAGES>(at), of_rows += of.num_x, of_outputs++) {
      const u32 line = lines + at.stage * LINE;
      await_phase(ring.empty + 8 * at.stage, at.parity);
#pragma unroll
      for (int i = 0; i < each; i++)
        if (i * 32 + lane < ROWS) copy_word(line + (i * 32 + lane) * 4, of_rows + rows[i], true);
      if (lane < parts) copy_word(line + (ROWS + lane) * 4, of_outputs, true);
      arrive_when_copied(ring.full + 8 * at.stage);
    }
  }
}
#endif
