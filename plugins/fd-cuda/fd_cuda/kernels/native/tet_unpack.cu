// The trellis code back to a matrix [N, K] in the space of rotated inputs, for the library's products. A warp unpacks
// 64 outputs by 32 inputs; a lane has the strand and the outputs that it has in tet_gemv.cu.

#include "common.cuh"
#include "trellis.cuh"

extern "C" __global__ void __launch_bounds__(WARPS * 32)
tet_unpack(const uint4* __restrict__ w, const float* __restrict__ scales, u16* y, int K, int turns, float unit) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, j = lane & 3;
  const int tile = blockIdx.y, turn = blockIdx.x * WARPS + warp;
  let_next_start();
  wait_for_previous();  // y is the allocator's: what is queued before may still read what was there
  if (turn >= turns) return;
  const uint4 v = load_once(w + ((u64)tile * turns + turn) * 32 + lane);
  const u32 words[4] = {v.x, v.y, v.z, v.w};
  Before before = word_before(v, lane);
#pragma unroll
  for (int n = 0; n < 4; n++) {
    u32 p[8];
    products(before, words[n], p);
#pragma unroll
    for (int odd = 0; odd < 2; odd++) {
      const int output = tile * 64 + g * 8 + n * 2 + odd;
      const float scale = scales[output] * unit;
      u32 pairs[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const u32 b = p[odd * 4 + i];
        // What (x0, x0 + x1, x1, x1 - x0) makes of four bytes, sorted by x0 and x1.
        const int first = (int)(b & 255) + (int)(b >> 8 & 255) - (int)(b >> 24);
        const int second = (int)(b >> 8 & 255) + (int)(b >> 16 & 255) + (int)(b >> 24);
        pairs[i] = pack((first - 127.5f) * scale, (second - 382.5f) * scale);
      }
      *(uint4*)(y + (u64)output * K + turn * 32 + j * 8) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  }
}
