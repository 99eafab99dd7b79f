// What products with the trellis code multiply: rows of x, rotated, as int8, four numbers for two inputs, or in the dtype of
// x for the library's products. A block takes a row.

#include "common.cuh"
#include "copies.cuh"
#include "rotate.cuh"

extern "C" __global__ void __launch_bounds__(WARPS * 32)
tet_rotate(const u16* x, long long x_stride, const signed char* __restrict__ signs, uint4* rotated, uint4* rounded,
           float* x_scales, int* x_sums, float norm, float spread) {
  extern __shared__ __align__(128) unsigned char memory[];
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  let_next_start();
  Rotation rotation;
  rotation.prepare(signs, warp, lane);
  wait_for_previous();
  float y[OWN_COLUMNS][BANDS][4];
  rotation.transform(x + (u64)blockIdx.x * x_stride, memory, y, warp, lane);
  norm *= EXCESS;
  if (rounded != nullptr) {
    __syncthreads();
#pragma unroll
    for (int n = 0; n < OWN_COLUMNS; n++)
#pragma unroll
      for (int e = 0; e < BANDS * 4; e += 2) {
        const int span = e / 4 * 16 + (lane >> 2) + e % 4 / 2 * 8, column = warp * OWN_COLUMNS + n;
        *(u32*)(memory + span * LINE + column * 16 + (lane & 3) * 4) = pack(y[n][e / 4][e % 4] * norm, y[n][e / 4][e % 4 + 1] * norm);
      }
  } else {
    float peak;
    int sum;
    round_row(y, memory, warp, lane, peak, sum);
    if (thread == 0) {
      x_sums[blockIdx.x] = sum;
      x_scales[blockIdx.x] = peak / 127.f * norm * spread;
    }
  }
  __syncthreads();
  uint4* to = (rounded != nullptr ? rounded : rotated) + (u64)blockIdx.x * (WIDTH / 8);
  for (int i = thread; i < WIDTH / 8; i += WARPS * 32) to[i] = *(const uint4*)(memory + i / 32 * LINE + i % 32 * 16);
}
