// y[M, N] = x[M, K] W[N, K]^T with W in the trellis code of two bits, for layers without experts and M <= 8 * TILES;
// tet_gemv.cu says how the code is multiplied.
//
// A block computes 64 outputs, the SPLIT blocks of a cluster divide K. The copy engine brings each of its WARPS warps the
// turns of 32 inputs that are its own, PIECE at a time and RING pieces ahead, so that weights are on their way while the
// kernel before ends and while x is rotated. x is int8, four numbers for two inputs (tet_rotate.cu), every lane copies what
// it will read itself. OWN: x is no such thing, and every block makes it of up to OWN rows.
// Sums are whole numbers: their order does not matter.

#include "common.cuh"
#include "trellis.cuh"
#include "feed.cuh"

#define COLUMNS (8 * TILES)
#define GROUP 1
#define DEPTH WARPS
#include "tet_sums.cuh"

#define TURNS (WIDTH / 32)
#define SHARE ((TURNS + SPLIT - 1) / SPLIT)  // turns of a block
#define EACH ((SHARE + WARPS - 1) / WARPS)   // turns of a warp
#define PIECES ((EACH + PIECE - 1) / PIECE)
#define SLOTS (RING < PIECES ? RING : PIECES)
#define EVEN (TURNS % SPLIT == 0 && SHARE % WARPS == 0)
#define WARP_BYTES (SLOTS * PIECE * 512)  // of weights
#if OWN
#include "rotate.cuh"
#endif

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
tet_few(const void* x, const float* x_scales, const int* x_sums, const unsigned char* __restrict__ w,
        const float* __restrict__ scales, const u16* __restrict__ bias, u16* y, int M, int N, long long x_stride,
        const signed char* __restrict__ signs, float spread, int barriers_at, int inbox_at) {
  // Weights, x; then parts of sums. After them barriers and what other blocks send.
  extern __shared__ __align__(128) unsigned char memory[];
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, g = lane >> 2, j = lane & 3;
  const int tile = blockIdx.x, rank = blockIdx.z, first_row = blockIdx.y * COLUMNS;
  const int own_turns = min(SHARE, TURNS - rank * SHARE);
  const int first = rank * SHARE + min(warp * EACH, own_turns);
  const int count = EVEN ? EACH : min(EACH, max(0, own_turns - warp * EACH));
  const unsigned char* from = w + ((u64)tile * TURNS + first) * 512;
  const u32 barriers = shared_address(memory) + barriers_at + warp * SLOTS * 8;
  const unsigned char* held = memory + warp * WARP_BYTES;
  const u32 ring = shared_address(held);
  const auto ask = [&](int piece, int slot) {
    const int bytes = min(PIECE, count - piece * PIECE) * 512;
    if (bytes <= 0) return;
    expect(barriers + slot * 8, bytes);
    copy_line(ring + slot * PIECE * 512, from + piece * PIECE * 512, bytes, barriers + slot * 8);
  };
  const float own_scale = load_once(scales + tile * 64 + thread % 64);  // waited for at the end
  if (lane == 0) {
    for (int slot = 0; slot < SLOTS; slot++) make_barrier(barriers + slot * 8, 1);
    publish_barriers();
  }
  // Every warp's first piece before the second ones: copies come one after the other.
#pragma unroll
  for (int slot = 0; slot < SLOTS; slot++) {
    if (lane == 0) ask(slot, slot);
    __syncthreads();
  }
#if OWN
  Rotation rotation;
  rotation.prepare(signs, warp, lane);
#endif
  announce_start();
  let_next_start();
  wait_for_previous();

  unsigned char* const inputs = memory + WARPS * WARP_BYTES;
#if OWN
  __shared__ float own_scales[OWN];
  __shared__ int own_sums[OWN];
  rotation.rotate_rows((const u16*)x, x_stride, M, inputs, spread, own_scales, own_sums);
  // Lanes of rows that are not there multiply others': what is not stored.
  const unsigned char* own_x = inputs + g % OWN * ROW_BYTES + j * 16;
#else
  uint4* const x_ring = (uint4*)inputs + warp * AHEAD * TILES * 32 + lane;
  const uint4* x_from = (const uint4*)x + (u64)(first_row + g) * TURNS * 4 + first * 4 + j;
  const auto ask_x = [&](int turn) {
    if (turn < count) {
#pragma unroll
      for (int t = 0; t < TILES; t++)
        if (first_row + g + t * 8 < M)
          copy_async(shared_address(x_ring + (turn % AHEAD * TILES + t) * 32), x_from + t * 8 * TURNS * 4 + turn * 4, true);
    }
    commit();
  };
#pragma unroll
  for (int turn = 0; turn < AHEAD; turn++) ask_x(turn);
#endif

  int sum[4][TILES][4];
#pragma unroll
  for (int e = 0; e < 16 * TILES; e++) sum[e / (4 * TILES)][e / 4 % TILES][e % 4] = 0;
  int slot = 0;
  u32 phase = 0;
#pragma unroll 1
  for (int begin = 0; begin < count; begin += PIECE) {
    await_phase(barriers + slot * 8, phase);
#pragma unroll
    for (int i = 0; i < PIECE; i++) {
      const int turn = begin + i;
      if (!(EVEN && EACH % PIECE == 0) && turn >= count) break;
      uint4 b[TILES];
#if OWN
      b[0] = *(const uint4*)(own_x + (first + turn >> 3) * LINE + (first + turn & 7) * 64);
#else
      await_own_copies<AHEAD - 1>();
#pragma unroll
      for (int t = 0; t < TILES; t++) b[t] = x_ring[(i % AHEAD * TILES + t) * 32];
#endif
      const uint4 v = *(const uint4*)(held + (slot * PIECE + i) * 512 + lane * 16);
      const u32 words[4] = {v.x, v.y, v.z, v.w};
      Before before = word_before(v, lane);
#pragma unroll
      for (int n = 0; n < 4; n++) {
        u32 p[8];
        products(before, words[n], p);
#pragma unroll
        for (int t = 0; t < TILES; t++) {
          multiply(sum[n][t], p[0], p[4], p[1], p[5], b[t].x, b[t].y);
          multiply(sum[n][t], p[2], p[6], p[3], p[7], b[t].z, b[t].w);
        }
      }
#if !OWN
      ask_x(turn + AHEAD);
#endif
    }
    __syncwarp();
    if (SLOTS < PIECES && lane == 0) ask(begin / PIECE + SLOTS, slot);
    if (++slot == SLOTS) slot = 0, phase ^= 1;
  }

#if !OWN
  await_own_copies<0>();
#endif
  __syncthreads();  // parts stand where weights and x were
  const auto store = [&](int c, int n, int total) {
    const int column = tile * 64 + c, row = first_row + n;
#if OWN
    const float offset = 127.5f * own_sums[row], x_scale = own_scales[row];
#else
    const float offset = 127.5f * x_sums[row], x_scale = x_scales[row];
#endif
    float value = (total - offset) * ((SPLIT == 1 ? own_scale : scales[column]) * x_scale);
    if (bias != nullptr) value += widen(bias[column]);
    y[(u64)row * N + column] = narrow(value);
  };
  finish(sum, (int*)memory, (int*)(memory + inbox_at), min(COLUMNS, M - first_row), store);
}
