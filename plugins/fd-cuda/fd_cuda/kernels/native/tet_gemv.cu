// y[M, N] = x[M, K] W[N, K]^T with W in the trellis code of two bits, for few rows.
//
// A strand is 512 weights, 64 outputs by 8 inputs, a ring of 32 words; its 16-bit windows times a constant are four
// bytes each, which an integer product with (x0, x0 + x1, x1, x1 - x0) wants as they are: nothing is decoded.
// A lane loads four words of a strand, 8 outputs by 8 inputs, and borrows the word before from a neighbour. A block
// computes TILES times 64 outputs of up to COLUMNS rows, PAIRED: 64 and those that belong to these gates; the SPLIT blocks of
// a cluster divide K, and a block's WARPS warps take turns of 32 inputs. x is int8, four numbers for two inputs
// (tet_rotate.cu), every lane copies what it will read itself. OWN: every block rotates its one row.
// GROUPED: row n of blockIdx.y is row slots[n] / divisor of x and row slots[n] of y; with `ids` every block has one row,
// blockIdx.y, of expert ids[blockIdx.y].
// Sums are whole numbers: their order does not matter.

#include "common.cuh"
#include "trellis.cuh"
#include "cluster.cuh"
#include "rows.cuh"
#if OWN
#include "rotate.cuh"
#endif

#define TURNS (WIDTH / 32)
#define SHARE (TURNS / SPLIT)  // turns of a block
#define ROUNDS ((SHARE + WARPS - 1) / WARPS)
#define OUT (PAIRED ? 64 : 64 * TILES)
#define OWN_OUT (OUT / SPLIT)        // outputs that a block finishes
#define PART (TILES * 64 * PITCH)    // sums of a warp, or of a block for the cluster
#define EIGHTS (COLUMNS / 8)
static_assert(TURNS % SPLIT == 0, "blocks that divide K have turns alike");
static_assert(WARPS * 32 % OWN_OUT == 0, "a thread finishes numbers of one output");

// INSTRUCTIONS: emulated.h of the tests has C++ in the place of what follows.

__device__ __forceinline__ void await_turn() {
  asm volatile("cp.async.wait_group %0;" ::"n"(AHEAD - 1) : "memory");
}

// END OF INSTRUCTIONS

extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT)
tet_gemv(const void* x, long long x_stride, const float* x_scales, const int* x_sums, const uint4* __restrict__ w,
         const float* __restrict__ scales, const u16* __restrict__ bias, u16* y, const int* slots, const int* experts,
         const long long* ids, const signed char* __restrict__ signs, float spread, int M, int N, int tiles, int divisor) {
  extern __shared__ __align__(128) unsigned char memory[];  // x; sums of warps; what other blocks send
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, g = lane >> 2, j = lane & 3;
  const int tile = blockIdx.x, rank = blockIdx.z;
#if GROUPED
  // Who reads ids while the kernel before rotates is started by it when all before it have ended.
  if (OWN && PAIRED) wait_for_previous();
  let_next_start();
  const int expert = ids != nullptr ? (int)ids[blockIdx.y] : experts[blockIdx.y];
  if (expert < 0) return leave_chain();
  w += (u64)expert * tiles * TURNS * 32;
  scales += (u64)expert * N;
#else
  let_next_start();
#endif
  const uint4* from[TILES];
#pragma unroll
  for (int m = 0; m < TILES; m++)
    from[m] = w + ((u64)(PAIRED ? tile + m * (tiles / 2) : tile * TILES + m) * TURNS + rank * SHARE + warp) * 32 + lane;
  uint4 held[AHEAD][TILES];
#pragma unroll
  for (int i = 0; i < AHEAD; i++)
    if (warp + i * WARPS < SHARE) {
#pragma unroll
      for (int m = 0; m < TILES; m++) held[i][m] = load_early(from[m] + i * WARPS * 32);
    }
  const int first = rank * OWN_OUT, column = tile * OUT + first + thread % OWN_OUT, width = N / (1 + PAIRED);
  const float own_scale = load_early(scales + column);  // waited for at the end
  const float other_scale = PAIRED ? load_early(scales + column + width) : 0.f;
  if (SPLIT > 1) announce_start();

#if OWN
  Rotation rotation;
  rotation.prepare(signs, warp, lane);
  if (!(GROUPED && PAIRED)) wait_for_previous();
  __shared__ float rotated_scale[1];
  __shared__ int rotated_sum[1];
  rotation.rotate_rows((const u16*)x + blockIdx.y / divisor * x_stride, 0, 1, memory, spread, rotated_scale, rotated_sum);
  x_scales = rotated_scale, x_sums = rotated_sum;
  const unsigned char* own_x = memory + j * 16;  // all eight rows of a product are this one
  int* const parts = (int*)(memory + ROW_BYTES);
#else
  bool is_there[EIGHTS];
  const uint4* x_from[EIGHTS];
#pragma unroll
  for (int t = 0; t < EIGHTS; t++) {
    const int own = slot_of(t * 8 + g, slots, ids, M);
    is_there[t] = own < M;
    x_from[t] = (const uint4*)x + (is_there[t] ? ((u32)(own / divisor) * TURNS + rank * SHARE + warp) * 4 + j : 0);
  }
  wait_for_previous();
  uint4* const ring = (uint4*)memory + warp * AHEAD * EIGHTS * 32 + lane;
#pragma unroll
  for (int i = 0; i < AHEAD; i++) {
#pragma unroll
    for (int t = 0; t < EIGHTS; t++)  // rows that are not there are zeros
      copy_async(shared_address(ring + (i * EIGHTS + t) * 32), x_from[t] + i * WARPS * 4,
                 is_there[t] && warp + i * WARPS < SHARE);
    commit();
  }
  int* const parts = (int*)memory;  // where x was
#endif

  int sum[TILES][4][EIGHTS][4] = {};
#pragma unroll 1
  for (int begin = 0; begin < ROUNDS; begin += AHEAD) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int round = begin + i;
      if (ROUNDS % AHEAD && round >= ROUNDS) break;
      if (SHARE % WARPS && warp + round * WARPS >= SHARE) break;
      uint4 b[EIGHTS];
#if OWN
      const int turn = rank * SHARE + warp + round * WARPS;
      b[0] = *(const uint4*)(own_x + (turn >> 3) * LINE + (turn & 7) * 64);
#else
      await_turn();
#pragma unroll
      for (int t = 0; t < EIGHTS; t++) b[t] = ring[(i * EIGHTS + t) * 32];
#endif
#pragma unroll
      for (int m = 0; m < TILES; m++) multiply_words(sum[m], held[i][m], b, lane);
      const int next = round + AHEAD;
      const bool more = (ROUNDS % AHEAD ? next < ROUNDS : begin + AHEAD < ROUNDS) &&
                        (SHARE % WARPS == 0 || warp + next * WARPS < SHARE);
#pragma unroll
      for (int m = 0; m < TILES; m++) load_inside(held[i][m], from[m] + (AHEAD + i) * WARPS * 32, more);
#if !OWN
#pragma unroll
      for (int t = 0; t < EIGHTS; t++)
        copy_async(shared_address(ring + (i * EIGHTS + t) * 32), x_from[t] + (AHEAD + i) * WARPS * 4, is_there[t] && more);
      commit();
#endif
    }
#pragma unroll
    for (int m = 0; m < TILES; m++) from[m] += AHEAD * WARPS * 32;
#if !OWN
#pragma unroll
    for (int t = 0; t < EIGHTS; t++) x_from[t] += AHEAD * WARPS * 4;
#endif
  }

  await_own_copies<0>();  // zeros, too, are copied, to where sums will stand
  __syncthreads();
#pragma unroll
  for (int t = 0; t < EIGHTS; t++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int n = t * 8 + j * 2 + (e & 1);
      if (slot_of(n, slots, ids, M) >= M) continue;
#pragma unroll
      for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int word = 0; word < 4; word++)
          parts[warp * PART + (m * 64 + g * 8 + word * 2 + (e >> 1)) * PITCH + n] = sum[m][word][t][e];
    }
  __syncthreads();
#if SPLIT > 1
  // A block's sums go to the block that finishes their outputs.
  int* const inbox = parts + WARPS * PART;
  await_start();
  for (int e = thread; e < COLUMNS * TILES * 64; e += WARPS * 32) {
    const int c = e % (TILES * 64), n = e / (TILES * 64);
    if (slot_of(n, slots, ids, M) >= M) break;
    const int total = of_all_warps(parts + c * PITCH + n, PART);
    send(at_rank(shared_address(inbox + rank * PART + c * PITCH + n), c % OUT / OWN_OUT), __int_as_float(total));
  }
  meet();
  const int* const totals = inbox + (first + thread % OWN_OUT) * PITCH;
#else
  const int* const totals = parts + thread % OWN_OUT * PITCH;
#endif
  const auto total_of = [&](int at) {
    int total = 0;
#pragma unroll
    for (int i = 0; i < (SPLIT > 1 ? SPLIT : WARPS); i++) total += totals[at + i * PART];
    return total;
  };
  for (int n = thread / OWN_OUT; n < COLUMNS; n += WARPS * 32 / OWN_OUT) {
    const int at = slot_of(n, slots, ids, M);
    if (at >= M) return;  // rows that are there come first
    const int row = OWN ? 0 : at / divisor;
    const float offset = 127.5f * x_sums[row], x_scale = x_scales[row];
    float value = (total_of(n) - offset) * (own_scale * x_scale);
    if (PAIRED) value = silu(value) * ((total_of(64 * PITCH + n) - offset) * (other_scale * x_scale));
    if (bias != nullptr) value += widen(bias[column]);
    y[(u64)at * width + column] = narrow(value);
  }
}
