// y[N] = x[K] W[N, K]^T with W in the trellis code of two bits, for one row and layers without experts; tet_gemv.cu says how
// the code is multiplied.
//
// A block computes 64 outputs, its WARPS warps take turns of 32 inputs. Every block rotates x, to int8, four numbers for two
// inputs, while its weights are on their way straight to registers, AHEAD turns ahead. Sums are whole numbers: their order does
// not matter.

#include "common.cuh"
#include "trellis.cuh"

#define COLUMNS 8
#define TILES 1
#define GROUP 1
#define SPLIT 1
#define DEPTH WARPS
#define TURNS (WIDTH / 32)
#include "tet_sums.cuh"
#include "rotate.cuh"

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
tet_row(const u16* x, const uint4* __restrict__ w, const float* __restrict__ scales, const u16* __restrict__ bias, u16* y,
        const signed char* __restrict__ signs, float spread) {
  extern __shared__ __align__(128) unsigned char memory[];  // x, then parts of sums
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, tile = blockIdx.x;
  const uint4* from = w + ((u64)tile * TURNS + warp) * 32 + lane;
  uint4 held[AHEAD];
#pragma unroll
  for (int i = 0; i < AHEAD; i++)
    if (warp + i * WARPS < TURNS) held[i] = load_once(from + i * WARPS * 32);
  const float own_scale = load_once(scales + tile * OUT + thread % OUT);  // waited for at the end
  Rotation rotation;
  rotation.prepare(signs, warp, lane);
  let_next_start();
  wait_for_previous();
  __shared__ float own_scales[1];
  __shared__ int own_sums[1];
  rotation.rotate_rows(x, 0, 1, memory, spread, own_scales, own_sums);

  int sum[4][1][4] = {};
  const unsigned char* own_x = memory + (lane & 3) * 16;  // lanes of rows that are not there multiply this one, too
#pragma unroll 1
  for (int begin = warp; begin < TURNS; begin += AHEAD * WARPS) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int turn = begin + i * WARPS;
      if (TURNS % (AHEAD * WARPS) && turn >= TURNS) break;
      const uint4 b = *(const uint4*)(own_x + (turn >> 3) * LINE + (turn & 7) * 64);
      const u32 words[4] = {held[i].x, held[i].y, held[i].z, held[i].w};
      Before before = word_before(held[i], lane);
#pragma unroll
      for (int n = 0; n < 4; n++) {
        u32 p[8];
        products(before, words[n], p);
        multiply(sum[n][0], p[0], p[4], p[1], p[5], b.x, b.y);
        multiply(sum[n][0], p[2], p[6], p[3], p[7], b.z, b.w);
      }
      if (turn + AHEAD * WARPS < TURNS) held[i] = load_once(from + (AHEAD + i) * WARPS * 32);
    }
    from += AHEAD * WARPS * 32;
  }

  __syncthreads();  // parts stand where x was
  finish(sum, (int*)memory, nullptr, 1, [&](int c, int, int total) {
    const int column = tile * OUT + c;
    float value = (total - 127.5f * own_sums[0]) * (own_scale * own_scales[0]);
    if (bias != nullptr) value += widen(bias[column]);
    y[column] = narrow(value);
  });
}
