// Slabs back to a matrix [N, K] for the library's products: in the dtype of activations, or with NUMBERS as int8
// before their scales. A warp unpacks a slab at a time and turns it through shared memory, so that whole
// lines are written.

#include "common.cuh"
#include "quant.cuh"

#define PITCH 72

extern "C" __global__ void __launch_bounds__(WARPS * 32)
quant_unpack(const uint4* __restrict__ w, const u32* __restrict__ groups, const float* __restrict__ scales,
             u16* y, int N, int K, int slabs, int turns, int per_group, const float2* __restrict__ codes) {
  __shared__ __align__(16) u16 turned[WARPS][16 * PITCH];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, r = lane >> 2, q = lane & 3;
  const int slab = blockIdx.y, turn = blockIdx.x * WARPS + warp;
  const int num_groups = (turns + per_group - 1) / per_group;
  let_next_start();
  wait_for_previous();  // y is the allocator's: what is queued before may still read what was there
  if (turn >= turns) return;
  u16* own = turned[warp];
  Slab held;
  Code maps;
  const u64 at = (u64)slab * turns + turn;
#if FORMAT == CCQ
  held.piece = load_once((const uint2*)w + at * 32 + lane);
  maps.upper = codes[slab * 16 + r];
  maps.lower = codes[slab * 16 + r + 8];
#else
#pragma unroll
  for (int p = 0; p < PIECES; p++) held.piece[p] = load_once(w + (at * PIECES + p) * 32 + lane);
#endif
  const Group group = load_group((const Entry*)groups + (u64)slab * num_groups * 8 * SCALED + r, turn / per_group);
  const float upper = scales[slab * 16 + r], lower = scales[slab * 16 + r + 8];
#pragma unroll
  for (int s = 0; s < 4; s++) {
    u32 a[4];
    unpack(held, s, maps, a);
    if (!NUMBERS) apply_group(a, group);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float scale = NUMBERS ? 1.f : i % 2 ? lower : upper;
      const int column = INPUTS_BY_ROWS ? q * 16 + s * 4 + i / 2 * 2 : s * 16 + i / 2 * 8 + q * 2;
      *(u32*)(own + (r + i % 2 * 8) * PITCH + column) = pack(low(a[i]) * scale, high(a[i]) * scale);
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int row = i * 4 + (lane >> 3), c = (lane & 7) * 8;
    const int n = slab * 16 + row, k = turn * 64 + c;
    if (n >= N || k >= K) continue;
    const uint4 v = *(const uint4*)(own + row * PITCH + c);
#if NUMBERS
    const u32 pairs[4] = {v.x, v.y, v.z, v.w};
    u32 bytes[2] = {0, 0};
#pragma unroll
    for (int e = 0; e < 8; e++) {
      const float value = e % 2 ? high(pairs[e / 2]) : low(pairs[e / 2]);
      bytes[e / 4] |= (u32)((int)value & 255) << (e % 4 * 8);
    }
    *(uint2*)((unsigned char*)y + (u64)n * K + k) = make_uint2(bytes[0], bytes[1]);
#else
    *(uint4*)(y + (u64)n * K + k) = v;
#endif
  }
}
