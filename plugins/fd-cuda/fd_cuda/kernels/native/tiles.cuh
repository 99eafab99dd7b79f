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

// INSTRUCTIONS: emulated.h of the tests has C++ in the place of what follows.

#if CLUSTER > 1
// All blocks of the cluster.
__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ u32 of_block(u32 address, int rank) {
  u32 remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

__device__ __forceinline__ void arrive_there(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// The box to the same place of every block's memory, announced to every block's barrier.
__device__ __forceinline__ void copy_box_to_all(u32 to, const TensorMap& map, int input, int row, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
               " [%0], [%1, {%2, %3}], [%4], %5;"
               ::"r"(to), "l"(&map), "r"(input), "r"(row), "r"(barrier), "h"((u16)((1 << CLUSTER) - 1)) : "memory");
}
#else
__device__ __forceinline__ void meet_cluster() { __syncthreads(); }
#endif

// END OF INSTRUCTIONS

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

// How many the blocks of a cluster take, one after the other.
__device__ __forceinline__ int num_works(const Problem& of) { return of.blocks * ((of.across + CLUSTER - 1) / CLUSTER); }

__device__ __forceinline__ Tile tile_of(const Problem& of, int id) {
  const int works = (of.across + CLUSTER - 1) / CLUSTER, band = id / (BAND * works) * BAND, within = id - band * works;
  const int together = min(BAND, of.blocks - band), block = band + within % together;
  return {block, within / together * CLUSTER + (int)blockIdx.z, GROUPED ? of.experts[block] : 0};
}

// Of a block of threads: barriers of turns that are there and of those that are free, and their memory.
struct Ring {
  u32 full, empty, base;
  unsigned char* tiles;
};

// A turn's place is free as far as this warp goes: for all that bring something there.
__device__ __forceinline__ void release(const Ring& ring, int stage, int lane) {
#if CLUSTER > 1
  if (lane < CLUSTER) arrive_there(of_block(ring.empty + 8 * stage, lane));
#else
  if (lane == 0) arrive_at(ring.empty + 8 * stage);
#endif
}

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
  for (int id = blockIdx.x; id < num_works(of); id += gridDim.x) {
    const Tile tile = tile_of(of, id);
    if (tile.expert < 0) continue;
    for (int t = 0; t < of.turns; t++, advance<STAGES>(at)) {
      const u32 to = ring.base + at.stage * STAGE, barrier = ring.full + 8 * at.stage;
      await_phase(ring.empty + 8 * at.stage, at.parity);
      if (lane == 0) {
        expect(barrier, TURN_BYTES);
        const int input = t * (BY_ROWS ? 128 : 64), row = tile.block * BN;
#if CLUSTER > 1
        copy_box_to_all(to + blockIdx.z * TILE_X / CLUSTER, x, input, row + blockIdx.z * BN / CLUSTER, barrier);
#else
        copy_box(to, x, input, row, barrier);
#endif
#if BY_BLOCK
        copy_line(to + TILE_X + TILE_W, of.x_scales + (u64)t * of.num_x + tile.block * BN, BN * 4, barrier);
#endif
      }
      __syncwarp();
      feed_weight(w, of, tile, t, to + TILE_X, barrier, lane);
    }
  }
}
