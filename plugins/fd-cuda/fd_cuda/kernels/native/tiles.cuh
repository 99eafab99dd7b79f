// Of quant_persistent.cu: which tiles of the result a block takes, one after the other, and how what they are made of gets to
// its shared memory.

#define MULTIPLIERS (GROUPS * 4)  // warps; four more have the feeder, and give it their registers
#define OUT (PAIRED ? GROUPS * 32 : GROUPS * 64)
#define TILE_X (BN * 128)
#if BY_ROWS
#define TILE_W (GROUPS * 64 * 128)
#define BOX (PAIRED ? 8 : 64)  // rows of W that one copy brings
#define LINE_BYTES (BY_BLOCK ? (BN * 4 + 1023) / 1024 * 1024 : 0)
#define TURN_BYTES (TILE_X + TILE_W + (BY_BLOCK ? BN * 4 : 0))
typedef TensorMap Weight;
#else
#define TILE_W (MULTIPLIERS * SLAB_BYTES)
#define LINE_BYTES ((MULTIPLIERS * GROUP_BYTES + 1023) / 1024 * 1024)  // scales of groups
#define TURN_BYTES (TILE_X + TILE_W + MULTIPLIERS * GROUP_BYTES)
typedef const unsigned char* Weight;
#endif
#define STAGE (TILE_X + TILE_W + LINE_BYTES)

// What is multiplied, and the tiles of the result: those of BAND blocks of rows together, so that what they share is in the
// second-level cache.
#define BAND 8
struct Problem {
  const unsigned char* groups;
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

// Ask for what one turn of a tile of W takes; a lane for every copy.
__device__ __forceinline__ void feed_weight(const Weight& w, const Problem& of, const Tile& tile, int turn, u32 to,
                                            u32 barrier, int lane) {
#if BY_ROWS
  if (lane < GROUPS * 64 / BOX) {
    const int half = PAIRED ? lane % 2 : 0, nth = PAIRED ? lane / 2 : lane;
    const int row = tile.expert * of.N + half * (of.N / 2) + tile.nth * OUT + nth * BOX;
    copy_box(to + lane * BOX * 128, w, turn * 128, row, barrier);
  }
#else
  if (lane < MULTIPLIERS) {
    const u64 slab = (u64)tile.expert * of.slabs + nth_slab<MULTIPLIERS>(tile.nth, lane, of.slabs);
    copy_line(to + lane * SLAB_BYTES, w + (slab * of.turns + turn) * SLAB_BYTES, SLAB_BYTES, barrier);
    if (GROUP_BYTES) {
      const int groups = (of.turns + of.per_group - 1) / of.per_group;
      copy_line(to + TILE_W + lane * GROUP_BYTES, of.groups + (slab * groups + turn / of.per_group) * GROUP_BYTES,
                GROUP_BYTES, barrier);
    }
  }
#endif
}

__device__ __forceinline__ void feed(const TensorMap& x, const Weight& w, const Problem& of, const Ring& ring, int lane) {
  Place at = {0, 1};  // the phase before the first one counts as ended
  for (int id = blockIdx.x; id < of.blocks * of.across; id += gridDim.x) {
    const Tile tile = tile_of(of, id);
    if (tile.expert < 0) continue;
    for (int t = 0; t < of.turns; t++, advance<STAGES>(at)) {
      const u32 to = ring.base + at.stage * STAGE, barrier = ring.full + 8 * at.stage;
      await_phase(ring.empty + 8 * at.stage, at.parity);
      if (lane == 0) {
        expect(barrier, TURN_BYTES);
        copy_box(to, x, t * (BY_ROWS ? 128 : 64), tile.block * BN, barrier);
#if BY_BLOCK
        copy_line(to + TILE_X + TILE_W, of.x_scales + (u64)t * of.num_x + tile.block * BN, BN * 4, barrier);
#endif
      }
      __syncwarp();
      feed_weight(w, of, tile, t, to + TILE_X, barrier, lane);
    }
  }
}
