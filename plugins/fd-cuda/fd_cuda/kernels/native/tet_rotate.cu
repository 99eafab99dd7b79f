// What products with the trellis code multiply: rows of x, rotated, as int8, four numbers for two inputs, or in the dtype of
// x for the library's products. A block takes a row. PLACED: as quant_grouped.cu reads them, once for each of the row's
// `copies` experts, or, without copies, where the row already stands. SINGLE: one number for an input.

#include "common.cuh"
#include "copies.cuh"
#include "rotate.cuh"

extern "C" __global__ void __launch_bounds__(WARPS * 32)
tet_rotate(const u16* x, long long x_stride, const signed char* __restrict__ signs, uint4* rotated, uint4* rounded,
           float* x_scales, int* x_sums, float spread, const int* places, int copies) {
  extern __shared__ __align__(128) unsigned char memory[];
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  Rotation rotation;
  rotation.prepare(signs, warp, lane);
  wait_for_previous();
  let_next_start();  // products with experts read these, which an earlier kernel chose, without waiting for this one
  const int row = PLACED && copies == 0 ? places[blockIdx.x] : (int)blockIdx.x;
  if (row < 0) return;
  float y[OWN_COLUMNS][BANDS][4];
  rotation.transform(x + (u64)row * x_stride, memory, y, warp, lane);
  const float norm = NORM * EXCESS;
  float peak = 0.f;
  int sum = 0;
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
    round_row(y, memory, warp, lane, peak, sum);
  }
  __syncthreads();
  uint4* const to = rounded != nullptr ? rounded : rotated;
#if PLACED
  // Of every 32 inputs, first the first bytes of all four strands.
  const int pieces = SINGLE ? WIDTH / 16 : WIDTH / 8, each = SINGLE ? 2 : 4;
  for (int nth = 0; nth < max(copies, 1); nth++) {
    const int place = copies ? places[blockIdx.x * copies + nth] : row;
    if (place < 0) continue;
    if (thread == 0) x_sums[place] = sum, x_scales[place] = peak / 127.f * norm * spread;
    for (int i = thread; i < pieces; i += WARPS * 32) {
      const int turn = i / each;
      const unsigned char* from = memory + turn / 8 * LINE + turn % 8 * each * 16 + i % each * 4;
      to[(u64)place * pieces + i] = make_uint4(*(const u32*)from, *(const u32*)(from + each * 4),
                                               *(const u32*)(from + each * 8), *(const u32*)(from + each * 12));
    }
  }
#else
  if (thread == 0 && rounded == nullptr) x_sums[row] = sum, x_scales[row] = peak / 127.f * norm * spread;
  for (int i = thread; i < WIDTH / 8; i += WARPS * 32) to[(u64)row * (WIDTH / 8) + i] = *(const uint4*)(memory + i / 32 * LINE + i % 32 * 16);
#endif
}
