// y[M, N] = x[M, K] W[N, K]^T with packed W, for M <= 8 * TILES: decode steps of few sequences.
//
// A block computes 16 * MT outputs; its WARPS warps take turns of 64 inputs. Weights and x come by cp.async through a ring
// of the warp's own, AHEAD turns ahead: a warp would wait for all that it has asked for to registers. What a turn has goes to
// registers while the turn before is multiplied. Half floats of int4 are MIDDLE more than the weights (CCQ: than twice the
// weights), for which sums of x, a product with ones for all slabs together, make up.
// w holds slabs (quant.cuh), or 8-bit numbers row by row. PER_GROUP: turns with one scale an output. GROUPED: blockIdx.y is a
// block of rows of one expert, and row n is row slots[n] / divisor of x and row slots[n] of y. PAIRED: slab 0 is gate rows,
// slab 1 the up rows that belong to them. A row of x comes out the same whatever M is.

#include "common.cuh"
#include "quant.cuh"

#define COLUMNS (8 * TILES)
#define OUT (PAIRED ? 16 : 16 * MT)
#include "rows.cuh"

// Bytes of a turn: x, slabs, scales; whole 128, as copies to other places take twice as long.
#define STAGE (COLUMNS * 128 + MT * SLAB_BYTES + (MT * GROUP_BYTES + 127) / 128 * 128)
#define UNROLLED (AHEAD % 2 ? 2 * AHEAD : AHEAD)  // turns take two places in registers by turns
#define SLABS_AT (COLUMNS * 128)
#define GROUPS_AT (SLABS_AT + MT * SLAB_BYTES)
#define GROUP_LANES (SCALED ? GROUP_BYTES / 16 : 1)
#define TURN_BYTES (BY_ROWS ? 64 : SLAB_BYTES)  // from a turn of the weights to the next one
#define IS_CCQ (FORMAT == CCQ)  // PER_GROUP is 2: scales of two turns lie together
#define SHIFTED ((FORMAT == INT4 || IS_CCQ) && MT > 1)  // for one slab the product with ones takes longer than it spares
static_assert(!IS_CCQ || WARPS % 2 == 0, "all turns of a warp have their scales in the same half");

// INSTRUCTIONS: emulated.h of the tests has C++ in the place of what follows.

// The turn before the last AHEAD - 1 is there.
__device__ __forceinline__ void await_turn() {
  asm volatile("cp.async.wait_group %0;" ::"n"(AHEAD - 1) : "memory");
}

// copy_async of a row's weights: the second-level cache brings what the next turn reads of them, too.
__device__ __forceinline__ void copy_once(u32 to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}

// Through addresses that are kept the compiler would not know shared memory as such.
__device__ __forceinline__ void load_chunk(u32* b, u32 address) {
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ uint2 load_pair(u32 address) {
  uint2 pair;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(pair.x), "=r"(pair.y) : "r"(address) : "memory");
  return pair;
}

__device__ __forceinline__ u32 load_word(u32 address) {
  u32 word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}

__device__ __forceinline__ u32 load_byte(u32 address) {
  u32 byte;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(byte) : "r"(address) : "memory");
  return byte;
}

// END OF INSTRUCTIONS

// What a warp multiplies in a turn.
struct Turn {
  u32 b[2][TILES][4];
  Slab slab[MT];
  Group group[MT];
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT)
quant_few(const uint4* x, int x_stride, const uint4* __restrict__ w, const u32* __restrict__ groups,
          const float* __restrict__ scales, const float* x_scales, const u16* __restrict__ bias, u16* y, const int* slots,
          const int* experts, const long long* ids, int M, int N, int K, int slabs, int turns, int divisor,
          const float2* __restrict__ codes) {
  extern __shared__ __align__(128) unsigned char memory[];  // rings, then parts of sums
  const int thread = threadIdx.x, lane = thread & 31, warp = __shfl_sync(~0u, thread >> 5, 0);
  const int tile = blockIdx.x;
  const int rounds = (turns - warp + WARPS - 1) / WARPS, num_groups = (turns + PER_GROUP - 1) / PER_GROUP;
#if GROUPED
  let_next_start();
  wait_for_previous();
  const int expert = ids != nullptr ? (int)ids[blockIdx.y] : experts[blockIdx.y];
  if (expert < 0) return;
  w += (u64)expert * (BY_ROWS ? N * (K / 16) : slabs * turns * (SLAB_BYTES / 16));
  groups += (u64)expert * slabs * num_groups * (GROUP_BYTES / 4);
  scales += (u64)expert * slabs * 16;
  if (IS_CCQ) codes += (u64)expert * slabs * 16;
#endif
  // Slabs after the last repeat it; nothing of theirs is stored.
  const auto nth = [&](int m) { return min(PAIRED ? tile + m * (slabs / 2) : tile * MT + m, slabs - 1); };
  const unsigned char* from[MT];
  Code maps[MT];
  [[maybe_unused]] u32 second[MT];  // by rows: from a row to the row eight below
#pragma unroll
  for (int m = 0; m < MT; m++) {
    const int slab = nth(m);
    if (BY_ROWS) {
      const int row = min(slab * 16 + (lane >> 2), N - 1);
      from[m] = (const unsigned char*)w + (u64)row * K + warp * 64 + (lane & 3) * 16;
      second[m] = (min(slab * 16 + (lane >> 2) + 8, N - 1) - row) * K;
    } else {
      from[m] = (const unsigned char*)w + ((u64)slab * turns + warp) * SLAB_BYTES;
    }
    keep(from[m]);
    if (IS_CCQ) maps[m] = {codes[slab * 16 + (lane >> 2)], codes[slab * 16 + (lane >> 2) + 8]};
  }
  // Lanes copy 16 bytes of scales each, of all slabs.
  const int own_slab = nth(lane / GROUP_LANES), first_group = warp / PER_GROUP;
  const unsigned char* group_from =
      (const unsigned char*)groups + ((u64)own_slab * num_groups + first_group) * GROUP_BYTES + lane % GROUP_LANES * 16;
  keep(group_from);
  // What a thread's results are multiplied with, waited for at the end.
  const int width = PAIRED ? N / 2 : N, column = min(tile * OUT + thread % OUT, width - 1);
  const float unit = IS_CCQ && SHIFTED ? 0.5f : 1.f;
  const float scale = unit * load_once(scales + column);
  const float other_scale = PAIRED ? unit * load_once(scales + column + width) : 0.f;
  u32 to = shared_address(memory) + warp * AHEAD * STAGE;
  keep(to);
  // Of the round `rounds` after that at which `from` stands, into stage i.
  const auto ask_w = [&](int i, int rounds, int turn) {
#pragma unroll
    for (int m = 0; m < MT; m++) {
      const u32 slab = to + i * STAGE + SLABS_AT + m * SLAB_BYTES;
#if BY_ROWS
      const bool inside = EVEN || turn * 64 + (lane & 3) * 16 < K;
      const unsigned char* row = from[m] + (inside ? rounds * WARPS * 64 : 0);
      copy_once(slab + lane * 16, row, inside);
      copy_once(slab + 512 + lane * 16, row + second[m], inside);
#else
      bring_slab(slab, from[m] + rounds * WARPS * SLAB_BYTES, lane);
#endif
    }
    if (SCALED && lane < MT * GROUP_LANES) {
      const int group = WARPS % PER_GROUP ? turn / PER_GROUP - first_group : rounds * (WARPS / PER_GROUP);
      copy_async(to + i * STAGE + GROUPS_AT + lane * 16, group_from + group * GROUP_BYTES, true);
    }
  };
#pragma unroll
  for (int i = 0; i < AHEAD; i++)
    if (i < rounds) ask_w(i, i, warp + i * WARPS);
#if !GROUPED
  let_next_start();
  wait_for_previous();
#endif

  // Eight lanes copy a row's 128 bytes of a turn, in 16-byte pieces that rows exchange: banks.
  const uint4* x_from[2 * TILES];
  u32 present = 0;
#pragma unroll
  for (int i = 0; i < 2 * TILES; i++) {
    const int at = slot_of((lane >> 3) + 4 * i, slots, ids, M);
    x_from[i] = x + (at < M ? (u64)(GROUPED ? at / divisor : at) * x_stride : 0) + (lane & 7) + warp * 8;
    present |= (u32)(at < M) << i;
    keep(x_from[i]);
  }
  keep(present);
  const u32 own = to + (lane >> 3) * 128;
  u32 places[2] = {own + (((lane & 7) ^ (lane >> 3)) << 4), own + (((lane & 7) ^ (4 + (lane >> 3))) << 4)};
  keep(places[0]);
  keep(places[1]);
  const auto ask_x = [&](int i, int rounds, int turn) {
    const bool inside = EVEN || turn * 64 + (lane & 7) * 8 < K;
#pragma unroll
    for (int j = 0; j < 2 * TILES; j++)
      if (present >> j & 1)
        copy_async(places[j & 1] + i * STAGE + j * 512, x_from[j] + (inside ? rounds * WARPS * 8 : 0), inside);
  };
#pragma unroll
  for (int i = 0; i < AHEAD; i++) {
    if (i < rounds) ask_x(i, i, warp + i * WARPS);
    commit();
  }

  // Which 16 bytes of a row of a turn this lane reads: by rows the eight inputs it multiplies itself, else
  // one of those that ldmatrix hands out.
  const u32 row = INPUTS_BY_ROWS ? lane >> 2 : lane & 7, chunk = INPUTS_BY_ROWS ? (lane & 3) * 2 : lane >> 3;
  u32 reads[2] = {to + row * 128 + ((chunk ^ row) << 4), to + row * 128 + ((chunk + (INPUTS_BY_ROWS ? 1 : 4) ^ row) << 4)};
  keep(reads[0]);
  keep(reads[1]);
  u32 own_slab_at = to + SLABS_AT + lane * (IS_CCQ ? 8 : 16);
  u32 own_group_at = to + GROUPS_AT + (IS_CCQ ? warp % 2 * 8 + (lane >> 2) : (lane >> 2) * 4);
  keep(own_slab_at);
  keep(own_group_at);
  const auto take = [&](Turn& turn, int i) {
    await_turn();
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        const u32 at = reads[half] + i * STAGE + t * 1024;
        if (INPUTS_BY_ROWS) load_chunk(turn.b[half][t], at);
        else load_matrices(turn.b[half][t], at);
      }
#pragma unroll
    for (int m = 0; m < MT; m++) {
#if FORMAT == CCQ
      turn.slab[m].piece = load_pair(own_slab_at + i * STAGE + m * SLAB_BYTES);
      turn.group[m].scales = load_byte(own_group_at + i * STAGE + m * GROUP_BYTES);
#else
#pragma unroll
      for (int p = 0; p < PIECES; p++)
        load_chunk((u32*)&turn.slab[m].piece[p], own_slab_at + i * STAGE + m * SLAB_BYTES + p * 512);
      if (SCALED) turn.group[m].scales = load_word(own_group_at + i * STAGE + m * GROUP_BYTES);
      if (SCALED == 2) turn.group[m].offsets = load_word(own_group_at + i * STAGE + m * GROUP_BYTES + 32);
#endif
    }
  };

  float sum[MT][TILES][4] = {};
  Turn held[2];
  take(held[0], 0);
#pragma unroll 1
  for (int begin = 0; begin < rounds; begin += UNROLLED) {
#pragma unroll
    for (int i = 0; i < UNROLLED; i++) {
      const int round = begin + i, again = warp + (round + AHEAD) * WARPS;
      if (round >= rounds) break;
      const Turn& turn = held[i % 2];
      __syncwarp();  // all lanes have what this turn brought
      if (round + AHEAD < rounds) {
        ask_w(i % AHEAD, AHEAD + i, again);
        ask_x(i % AHEAD, AHEAD + i, again);
      }
      commit();
      if (round + 1 < rounds) take(held[(i + 1) % 2], (i + 1) % AHEAD);
      float middle[TILES][4] = {};  // where sums of a turn begin
#pragma unroll
      for (int t = 0; t < TILES && SHIFTED; t++) {
        float total[4] = {};
#pragma unroll
        for (int s = 0; s < 4; s++)
          multiply(total, ONES, ONES, ONES, ONES, turn.b[s / 2][t][s % 2 * 2], turn.b[s / 2][t][s % 2 * 2 + 1], total);
        middle[t][0] = middle[t][2] = -MIDDLE * total[0];
        middle[t][1] = middle[t][3] = -MIDDLE * total[1];
      }
#pragma unroll
      for (int m = 0; m < MT; m++) {
        float turn_sum[TILES][4];
        float(&own_sum)[TILES][4] = SHIFTED || SCALED ? turn_sum : sum[m];
#pragma unroll
        for (int s = 0; s < 4; s++) {
          u32 a[4];
          if (SHIFTED) unpack_shifted(turn.slab[m], s, maps[m], a);
          else unpack(turn.slab[m], s, maps[m], a);
          add_offsets(a, turn.group[m]);
#pragma unroll
          for (int t = 0; t < TILES; t++)
            multiply(own_sum[t], a[0], a[1], a[2], a[3], turn.b[s / 2][t][s % 2 * 2], turn.b[s / 2][t][s % 2 * 2 + 1],
                     s == 0 && (SHIFTED || SCALED) ? middle[t] : own_sum[t]);
        }
        const u32 both = turn.group[m].scales;
        const float of_rows[2] = {IS_CCQ ? (float)(both & 15) : low(both), IS_CCQ ? (float)(both >> 4) : high(both)};
#pragma unroll
        for (int e = 0; e < TILES * 4 && (SHIFTED || SCALED); e++) {
          float& all = sum[m][e / 4][e % 4];
          all = SCALED ? fmaf(own_sum[e / 4][e % 4], of_rows[e % 4 / 2], all) : all + own_sum[e / 4][e % 4];
        }
      }
    }
#pragma unroll
    for (int m = 0; m < MT; m++) from[m] += UNROLLED * WARPS * TURN_BYTES;
    if (WARPS % PER_GROUP == 0) group_from += UNROLLED * WARPS / PER_GROUP * GROUP_BYTES;
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++) x_from[i] += UNROLLED * WARPS * 8;
  }

  __syncthreads();  // sums stand where x was
  store_sums((float*)memory, sum, warp, lane, GROUPED ? COLUMNS : M - (int)blockIdx.y * COLUMNS);
  __syncthreads();
  store_results((const float*)memory, x_scales, scale, other_scale, bias, y, tile * OUT, width, M, slots, ids, divisor);
}
