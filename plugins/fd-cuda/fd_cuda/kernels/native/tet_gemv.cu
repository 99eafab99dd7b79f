// y[M, N] = x[M, K] W[N, K]^T with W in the trellis code of two bits, for M <= 8 * TILES.
//
// A strand is 512 weights, 64 outputs by 8 inputs, a ring of 32 words; its 16-bit windows times a constant are four
// bytes each, which an integer product with (x0, x0 + x1, x1, x1 - x0) wants as they are: nothing is decoded.
// A lane loads four words of a strand, 8 outputs by 8 inputs, and borrows the word before from a neighbour. A block
// computes 64 * MT outputs; its WARPS warps take turns of 32 inputs. x is int8, four numbers for two inputs
// (tet_rotate.cu), every lane copies what it will read itself. OWN: x is no such thing, and every block makes it of up to
// OWN rows while its weights are on their way. GROUPED and PAIRED as in quant_gemv.cu.
// Sums are whole numbers: their order does not matter.

#include "common.cuh"
#include "trellis.cuh"

#define COLUMNS (8 * TILES)
#include "rows.cuh"

#define TURNS (WIDTH / 32)
#define ROUNDS ((TURNS + WARPS - 1) / WARPS)
#define PITCH (COLUMNS + 1)
#define OUT (PAIRED ? 64 : 64 * MT)
#define ORDER 0
#if OWN
#include "rotate.cuh"
#endif

// INSTRUCTIONS: emulated.h of the tests has C++ in the place of what follows.

__device__ __forceinline__ void await_turn() {
  asm volatile("cp.async.wait_group %0;" ::"n"(AHEAD - 1) : "memory");
}

__device__ __forceinline__ void multiply(int* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
               "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// END OF INSTRUCTIONS

extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT)
tet_gemv(const void* x, const float* x_scales, const int* x_sums, const uint4* __restrict__ w,
         const float* __restrict__ scales, const u16* __restrict__ bias, u16* y, const int* slots,
         const int* experts, const long long* ids, int M, int N, int tiles, int divisor, long long x_stride,
         const signed char* __restrict__ signs, float spread) {
  extern __shared__ __align__(128) unsigned char memory[];  // inputs, then parts of sums
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, g = lane >> 2, j = lane & 3;
  const int tile = blockIdx.x;
#if GROUPED
  let_next_start();
  wait_for_previous();
  const int expert = ids != nullptr ? (int)ids[blockIdx.y] : experts[blockIdx.y];
  if (expert < 0) return;
  w += (u64)expert * tiles * TURNS * 32;
  scales += (u64)expert * tiles * 64;
#endif
  const uint4* from[MT];
#pragma unroll
  for (int m = 0; m < MT; m++) {
    const int own = min(PAIRED ? tile + m * (tiles / 2) : tile * MT + m, tiles - 1);
    from[m] = w + (u64)own * TURNS * 32 + warp * 32 + j * 8 + g;
  }
  uint4 held[AHEAD][MT];
#pragma unroll
  for (int i = 0; i < AHEAD; i++)
    if (warp + i * WARPS < TURNS) {
#pragma unroll
      for (int m = 0; m < MT; m++) held[i][m] = load_once(from[m] + i * WARPS * 32);
    }
#if !GROUPED
  if (lane == 0 && ROUNDS > AHEAD) {
    // Every warp a part of what follows.
    constexpr int share = (ROUNDS - AHEAD) * 32, last = TURNS * 32;
#pragma unroll
    for (int m = 0; m < MT; m++) {
      const int own = min(PAIRED ? tile + m * (tiles / 2) : tile * MT + m, tiles - 1), first = AHEAD * WARPS * 32 + warp * share;
      if (first < last) fetch_ahead(w + (u64)own * TURNS * 32 + first, min(share, last - first) * 16);
    }
  }
#endif
#if OWN
  Rotation rotation;
  rotation.prepare(signs, warp, lane);
#endif
#if !GROUPED
  let_next_start();
  wait_for_previous();
#endif

#if OWN
  __shared__ float own_scales[OWN];
  __shared__ int own_sums[OWN];
#pragma unroll 1
  for (int n = 0; n < OWN; n++) {
    if (n >= M) break;
    float numbers[OWN_COLUMNS][BANDS][4], peak;
    int total;
    rotation.transform((const u16*)x + n * x_stride, memory + n * ROW_BYTES, numbers, warp, lane);
    round_row(numbers, memory + n * ROW_BYTES, warp, lane, peak, total);
    if (thread == 0) own_scales[n] = peak / 127.f * EXCESS * spread, own_sums[n] = total;
  }
  // Lanes of rows that are not there multiply others': what is not stored.
  const unsigned char* own_x = memory + g % OWN * ROW_BYTES + j * 16;
#else
  const uint4* x_from[TILES];
  u32 present = 0;
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    const int at = slot_of(t * 8 + g, slots, ids, M);
    const bool is_there = at < M;
    x_from[t] = (const uint4*)x + (is_there ? (u32)(GROUPED ? at / divisor : at) * TURNS * 4 + warp * 4 + j : 0);
    present |= (u32)is_there << t;
  }
  uint4* ring = (uint4*)memory + warp * AHEAD * TILES * 32 + lane;
  const auto ask_x = [&](int i, int rounds) {
#pragma unroll
    for (int t = 0; t < TILES; t++)
      if (present >> t & 1)
        copy_async(shared_address(ring + (i * TILES + t) * 32), x_from[t] + rounds * WARPS * 4, true);
  };
#pragma unroll
  for (int i = 0; i < AHEAD; i++) {
    if (warp + i * WARPS < TURNS) ask_x(i, i);
    commit();
  }
#endif

  int sum[MT][4][TILES][4];
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int e = 0; e < 16 * TILES; e++) ((int*)sum[m])[e] = 0;

#pragma unroll 1
  for (int begin = 0; begin < ROUNDS; begin += AHEAD) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int round = begin + i;
      if (ROUNDS % AHEAD && round >= ROUNDS) break;
      if (TURNS % WARPS && warp + round * WARPS >= TURNS) break;
      uint4 b[TILES];
#if OWN
      const int turn = warp + round * WARPS;
      b[0] = *(const uint4*)(own_x + (turn >> 3) * LINE + (turn & 7) * 64);
#else
      await_turn();
#pragma unroll
      for (int t = 0; t < TILES; t++) b[t] = ring[(i * TILES + t) * 32];
#endif
#pragma unroll
      for (int m = 0; m < MT; m++) {
        const uint4 v = held[i][m];
        const u32 words[4] = {v.x, v.y, v.z, v.w};
        Before before = word_before(v, lane);
#pragma unroll
        for (int n = 0; n < 4; n++) {
          u32 p[8];
          products(before, words[n], p);
#pragma unroll
          for (int t = 0; t < TILES; t++) {
            multiply(sum[m][n][t], p[0], p[4], p[1], p[5], b[t].x, b[t].y);
            multiply(sum[m][n][t], p[2], p[6], p[3], p[7], b[t].z, b[t].w);
          }
        }
      }
      const int next = round + AHEAD;
      if ((ROUNDS % AHEAD ? next < ROUNDS : begin + AHEAD < ROUNDS) && (TURNS % WARPS == 0 || warp + next * WARPS < TURNS)) {
#pragma unroll
        for (int m = 0; m < MT; m++) held[i][m] = load_once(from[m] + (AHEAD + i) * WARPS * 32);
#if !OWN
        ask_x(i, AHEAD + i);
#endif
      }
#if !OWN
      commit();
#endif
    }
#pragma unroll
    for (int m = 0; m < MT; m++) from[m] += AHEAD * WARPS * 32;
#if !OWN
#pragma unroll
    for (int t = 0; t < TILES; t++) x_from[t] += AHEAD * WARPS * 4;
#endif
  }

  __syncthreads();  // sums stand where x was
  int* part = (int*)memory + warp * MT * 64 * PITCH;
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
      for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int e = 0; e < 4; e++)
          part[(m * 64 + g * 8 + n * 2 + (e >> 1)) * PITCH + t * 8 + j * 2 + (e & 1)] = sum[m][n][t][e];
  __syncthreads();

  const int width = PAIRED ? N / 2 : N;
  for (int e = thread; e < COLUMNS * OUT; e += WARPS * 32) {
    const int c = e % OUT, n = e / OUT, column = tile * OUT + c;
    const int at = slot_of(n, slots, ids, M);
    if (at >= M || column >= width) continue;
    const int* line = (const int*)memory + c * PITCH + n;
    const int total = of_all_warps(line, MT * 64 * PITCH);
    const int other = PAIRED ? of_all_warps(line + 64 * PITCH, MT * 64 * PITCH) : 0;
    const int row = GROUPED ? at / divisor : at;
#if OWN
    const float offset_of_bytes = 127.5f * own_sums[row], x_scale = own_scales[row];
#else
    const float offset_of_bytes = 127.5f * x_sums[row], x_scale = x_scales[row];
#endif
    float value = (total - offset_of_bytes) * (scales[column] * x_scale);
    if (PAIRED) {
      value = silu(value) * ((other - offset_of_bytes) * (scales[column + width] * x_scale));
    } else if (bias != nullptr) {
      value += widen(bias[column]);
    }
    y[(u64)at * width + column] = narrow(value);
  }
}
