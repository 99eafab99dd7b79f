// y[N] = x[K] W[N, K]^T with W in the trellis code of two bits, one row at a time: of layers without experts, or,
// GROUPED, every block's own row of one expert; tet_gemv.cu says how the code is multiplied.
//
// A block computes TILES times 64 outputs, PAIRED: 64 and those that belong to these gates; its WARPS warps take turns of
// 32 inputs. Every block rotates its row, to int8, four numbers for two inputs, while its weights are on their way straight
// to registers, AHEAD turns ahead. Sums are whole numbers: their order does not matter.

#include "common.cuh"
#include "trellis.cuh"
#include "rotate.cuh"

#define TURNS (WIDTH / 32)
#define ROUNDS ((TURNS + WARPS - 1) / WARPS)
#define OUT (PAIRED ? 64 : 64 * TILES)

// GROUPED: row n is row n / divisor of x and goes to expert ids[n], -1: to none.
extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT)
tet_row(const u16* x, long long x_stride, const uint4* __restrict__ w, const float* __restrict__ scales,
        const u16* __restrict__ bias, u16* y, const signed char* __restrict__ signs, float spread, const long long* ids,
        int N, int tiles, int divisor) {
  extern __shared__ __align__(128) unsigned char memory[];  // x, then sums of warps
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, g = lane >> 2;
  const int tile = blockIdx.x, row = blockIdx.y;
#if GROUPED
  // The second product reads ids while the first one runs, which starts it when the kernel that chose them has ended.
  if (PAIRED) wait_for_previous();
  let_next_start();
  const int expert = (int)ids[row];
  if (expert < 0) return leave_chain();
  w += (u64)expert * tiles * TURNS * 32;
  scales += (u64)expert * N;
#endif
  const uint4* from[TILES];
#pragma unroll
  for (int m = 0; m < TILES; m++)
    from[m] = w + ((u64)(PAIRED ? tile + m * (tiles / 2) : tile * TILES + m) * TURNS + warp) * 32 + lane;
  uint4 held[AHEAD][TILES];
#pragma unroll
  for (int i = 0; i < AHEAD; i++)
    if (warp + i * WARPS < TURNS) {
#pragma unroll
      for (int m = 0; m < TILES; m++) held[i][m] = load_once(from[m] + i * WARPS * 32);
    }
  const int column = tile * OUT + thread % OUT, width = N / (1 + PAIRED);
  const float own_scale = load_once(scales + column);  // waited for at the end
  const float other_scale = PAIRED ? load_once(scales + column + width) : 0.f;
  Rotation rotation;
  rotation.prepare(signs, warp, lane);
  if (!GROUPED) let_next_start();
  if (!(GROUPED && PAIRED)) wait_for_previous();
  __shared__ float x_scale[1];
  __shared__ int x_sum[1];
  rotation.rotate_rows(x + row / divisor * x_stride, 0, 1, memory, spread, x_scale, x_sum);

  int sum[TILES][4][4] = {};
  const unsigned char* own_x = memory + (lane & 3) * 16;  // all eight rows of a product are this one
#pragma unroll 1
  for (int begin = 0; begin < ROUNDS; begin += AHEAD) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int round = begin + i, turn = warp + round * WARPS;
      if (ROUNDS % AHEAD && round >= ROUNDS) break;
      if (TURNS % WARPS && turn >= TURNS) break;
      const uint4 b = *(const uint4*)(own_x + (turn >> 3) * LINE + (turn & 7) * 64);
#pragma unroll
      for (int m = 0; m < TILES; m++) multiply_words(sum[m], held[i][m], b, lane);
      const int next = round + AHEAD;
      const bool more = (ROUNDS % AHEAD ? next < ROUNDS : begin + AHEAD < ROUNDS) &&
                        (TURNS % WARPS == 0 || warp + next * WARPS < TURNS);
#pragma unroll
      for (int m = 0; m < TILES; m++) load_inside(held[i][m], from[m] + (AHEAD + i) * WARPS * 32, more);
    }
#pragma unroll
    for (int m = 0; m < TILES; m++) from[m] += AHEAD * WARPS * 32;
  }

  int* const parts = (int*)(memory + ROW_BYTES);
  if ((lane & 3) == 0) {
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
      for (int n = 0; n < 4; n++)
        *(uint2*)(parts + (warp * TILES + m) * 64 + g * 8 + n * 2) = make_uint2(sum[m][n][0], sum[m][n][2]);
  }
  __syncthreads();
  if (thread >= OUT) return;
  int total = 0, other = 0;
#pragma unroll
  for (int i = 0; i < WARPS; i++) {
    total += parts[i * TILES * 64 + thread];
    if (PAIRED) other += parts[i * TILES * 64 + 64 + thread];
  }
  const float offset = 127.5f * x_sum[0];
  float value = (total - offset) * (own_scale * x_scale[0]);
  if (PAIRED) value = silu(value) * ((other - offset) * (other_scale * x_scale[0]));
  if (bias != nullptr) value += widen(bias[column]);
  y[(u64)row * width + column] = narrow(value);
}
