// y[M, N] = x[M, K] W[N, K]^T with W in the trellis code of two bits, for layers without experts; tet_gemv.cu says how the code
// is multiplied.
//
// A block computes 64 * GROUP outputs of 8 * TILES rows, the SPLIT blocks of a cluster divide K. Its warps have a tile of
// outputs each, those of a tile take turns of 32 inputs. x is int8, four numbers for two inputs (tet_rotate.cu), and goes
// through shared memory chunk by chunk. OWN: x is no such thing, and every block makes it of up to OWN rows while its weights
// are on their way. Sums are whole numbers: their order does not matter.

#include "common.cuh"
#include "trellis.cuh"

#define COLUMNS (8 * TILES)
#define TURNS (WIDTH / 32)
#define SHARE ((TURNS + SPLIT - 1) / SPLIT)  // turns of a block
#define DEPTH (WARPS / GROUP)                // warps of a tile
#define ROUNDS ((SHARE + DEPTH - 1) / DEPTH)
#define EVEN (TURNS % SPLIT == 0 && SHARE % DEPTH == 0)
#define CHUNK (AHEAD * DEPTH)          // turns
#define ROWS_AT_ONCE (WARPS * 8 / CHUNK)  // that all threads copy a chunk of
#define PIECES ((COLUMNS + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE)
#define TURN_BYTES (TILES * 512 + 64)  // of x in shared memory; 64: banks
#include "tet_sums.cuh"
#if OWN
#include "rotate.cuh"
#endif

extern "C" __global__ void __maxnreg__(REGISTERS)
tet_rows(const void* x, const float* x_scales, const int* x_sums, const uint4* __restrict__ w,
         const float* __restrict__ scales, const u16* __restrict__ bias, u16* y, int M, int N, int tiles, long long x_stride,
         const signed char* __restrict__ signs, float spread, int inbox_at) {
  extern __shared__ __align__(128) unsigned char memory[];  // x, then parts of sums; at inbox_at what others send
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, g = lane >> 2, j = lane & 3;
  static_assert(OWN || WARPS * 8 % CHUNK == 0, "threads copy whole rows of a chunk");
  const int rank = blockIdx.z, first_turn = rank * SHARE, own_turns = min(SHARE, TURNS - first_turn), depth = warp / GROUP;
  const int first_row = blockIdx.y * COLUMNS, rows = min(COLUMNS, M - first_row);
  // Tiles after the last repeat it; nothing of theirs is stored.
  const int tile = min((int)blockIdx.x * GROUP + warp % GROUP, tiles - 1);
  const uint4* from = w + ((u64)tile * TURNS + first_turn + depth) * 32 + lane;
  uint4 held[AHEAD];
#pragma unroll
  for (int i = 0; i < AHEAD; i++)
    if (depth + i * DEPTH < own_turns) held[i] = load_once(from + i * DEPTH * 32);
  // What a thread's results are multiplied with, where one block has a product's: at the end it would be waited for.
  const float own_scale = load_once(scales + min((int)blockIdx.x * OUT + thread % OUT, N - 1));
#if OWN
  Rotation rotation;
  rotation.prepare(signs, warp, lane);
#endif
  announce_start();
  let_next_start();
  wait_for_previous();

#if OWN
  __shared__ float own_scales[OWN];
  __shared__ int own_sums[OWN];
  rotation.rotate_rows((const u16*)x, x_stride, M, memory, spread, own_scales, own_sums);
#else
  // Rows of x by turn, as lanes will read them; a thread has the same 16 bytes of a chunk of several rows.
  const int piece = thread % (CHUNK * 4), own_row = thread / (CHUNK * 4);
  const uint4* x_from[PIECES];
  u32 present = 0;
#pragma unroll
  for (int i = 0; i < PIECES; i++) {
    const int n = own_row + i * ROWS_AT_ONCE, row = n < COLUMNS ? first_row + n : M;
    x_from[i] = (const uint4*)x + (row < M ? (u64)row * TURNS * 4 : 0) + first_turn * 4 + piece;
    present |= (u32)(row < M) << i;
  }
  const u32 place = shared_address(memory) + piece / 4 * TURN_BYTES + own_row * 64 + piece % 4 * 16;
  const auto ask_x = [&](int chunk) {
    if (chunk * CHUNK + piece / 4 < own_turns) {
#pragma unroll
      for (int i = 0; i < PIECES; i++)
        if (present >> i & 1)
          copy_async(place + chunk % STAGES * CHUNK * TURN_BYTES + i * ROWS_AT_ONCE * 64, x_from[i] + chunk * CHUNK * 4, true);
    }
    commit();
  };
#pragma unroll
  for (int chunk = 0; chunk < STAGES - 1; chunk++) ask_x(chunk);
#endif

  int sum[4][TILES][4];
#pragma unroll
  for (int e = 0; e < 16 * TILES; e++) sum[e / (4 * TILES)][e / 4 % TILES][e % 4] = 0;
#pragma unroll 1
  for (int begin = 0; begin < ROUNDS; begin += AHEAD) {
#if OWN
    // Lanes of rows that are not there multiply others': what is not stored.
    const unsigned char* own_x = memory + g % OWN * ROW_BYTES + j * 16;
#else
    const int chunk = begin / AHEAD;
    await_own_copies<STAGES - 2>();
    __syncthreads();  // and all are through with the chunk before
    ask_x(chunk + STAGES - 1);
    const unsigned char* own_x = memory + (chunk % STAGES * CHUNK + depth) * TURN_BYTES + lane * 16;
#endif
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int round = begin + i, turn = depth + round * DEPTH;
      if (ROUNDS % AHEAD && round >= ROUNDS) break;
      if (!EVEN && turn >= own_turns) break;
      uint4 b[TILES];
#pragma unroll
      for (int t = 0; t < TILES; t++) {
#if OWN
        b[t] = *(const uint4*)(own_x + (first_turn + turn >> 3) * LINE + (first_turn + turn & 7) * 64);
#else
        b[t] = *(const uint4*)(own_x + i * DEPTH * TURN_BYTES + t * 512);
#endif
      }
      const u32 words[4] = {held[i].x, held[i].y, held[i].z, held[i].w};
      Before before = word_before(held[i], lane);
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
      if ((ROUNDS % AHEAD ? round + AHEAD < ROUNDS : begin + AHEAD < ROUNDS) && (EVEN || turn + AHEAD * DEPTH < own_turns))
        held[i] = load_once(from + (AHEAD + i) * DEPTH * 32);
    }
    from += AHEAD * DEPTH * 32;
  }

#if !OWN
  await_own_copies<0>();
#endif
  __syncthreads();  // parts stand where x was
  const auto store = [&](int c, int n, int total) {
    const int column = blockIdx.x * OUT + c, row = first_row + n;
    if (column >= N) return;
#if OWN
    const float offset = 127.5f * own_sums[row], x_scale = own_scales[row];
#else
    const float offset = 127.5f * x_sums[row], x_scale = x_scales[row];
#endif
    float value = (total - offset) * ((SPLIT == 1 && WARPS * 32 % OUT == 0 ? own_scale : scales[column]) * x_scale);
    if (bias != nullptr) value += widen(bias[column]);
    y[(u64)row * N + column] = narrow(value);
  };
  finish(sum, (int*)memory, (int*)(memory + inbox_at), rows, store);
}
