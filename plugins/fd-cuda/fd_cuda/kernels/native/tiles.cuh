// Of quant_persistent.cu: which tiles of the result a block takes, one after the other, and how what they are made of gets to
// its shared memory.

#define MULTIPLIERS (GROUPS * 4)  // warps; four more have the feeder, and give it their registers
#define OUT (PAIRED ? GROUPS * 32 : GROUPS * 64)
#define TILE_X (BN * 128)
#define TILE_W (BY_ROWS ? GROUPS * 64 * 128 : MULTIPLIERS * SLAB_BYTES)
#define LINE (BY_BLOCK ? BN * 4 : 0)  // bytes of the scales of a turn's rows
#define STAGE (TILE_X + TILE_W + (LINE + 1023) / 1024 * 1024)

// What is multiplied, and the tiles of the result: those of BAND blocks of rows together, so that what they share is in the
// second-level cache.
#define BAND 8
struct Problem {
  const u32* groups;
  const float *scales, *x_scales;
  const int *slots, *experts;
  int M, N, slabs, turns, per_group, scale_width, num_x, blocks, across;
};

struct Tile {
  int block, nth, expert;  // of rows; of outputs; negative where nobody has the rows
};

__device__ __forceinline__ Tile tile_of(const Problem& of, int id) {
  const int band = id / (BAND * of.across) * BAND, within = id - band * of.across;
  const int together = min(BAND, of.blocks - band), block = band + within % together;
  return {block, within / together, GROUPED ? of.experts[block] : 0};
}

// Of a block of threads: barriers of turns that are there and of those that are free, and their memory.
struct Ring {
  u32 full, empty, base;
  unsigned char* tiles;
};

// Ask for what one turn of a tile of W takes.
__device__ __forceinline__ void feed_weight(const TensorMap& w, const Problem& of, const Tile& tile, int turn, u32 to,
                                            u32 barrier) {
#if BY_ROWS && PAIRED
  copy_gates(to, w, turn * 128, tile.nth * OUT / 8, tile.expert, barrier);
#elif BY_ROWS
  copy_box(to, w, turn * 128, tile.expert * of.N + tile.nth * OUT, barrier);
#else
  const int word = turn * (SLAB_BYTES / 8), slab = tile.expert * of.slabs + tile.nth * (OUT / 16);
  copy_box(to, w, word, slab, barrier);
  if (PAIRED) copy_box(to + TILE_W / 2, w, word, slab + of.slabs / 2, barrier);
#endif
}

// What one thread does.
__device__ __forceinline__ void feed(const TensorMap& x, const TensorMap& w, const Problem& of, const Ring& ring) {
  Place at = {0, 1};  // the phase before the first one counts as ended
  for (int id = blockIdx.x; id < of.blocks * of.across; id += gridDim.x) {
    const Tile tile = tile_of(of, id);
    if (tile.expert < 0) continue;
    for (int t = 0; t < of.turns; t++, advance<STAGES>(at)) {
      const u32 to = ring.base + at.stage * STAGE, barrier = ring.full + 8 * at.stage;
      await_phase(ring.empty + 8 * at.stage, at.parity);
      expect(barrier, TILE_X + TILE_W + LINE);
      copy_box(to, x, t * (BY_ROWS ? 128 : 64), tile.block * BN, barrier);
      feed_weight(w, of, tile, t, to + TILE_X, barrier);
#if BY_BLOCK
      copy_line(to + TILE_X + TILE_W, of.x_scales + (u64)t * of.num_x + tile.block * BN, LINE, barrier);
#endif
    }
  }
}
