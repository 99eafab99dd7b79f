// What tet_gemv.cu multiplies with: x times signs, Hadamard transforms of `block` inputs, then int8 by the largest
// magnitude of the row. Two inputs become four numbers (x0, x0 + x1, x1, x1 - x0). One block of threads a row.
// ORDER 0: pairs of inputs follow each other. 1: of every 32 inputs, the first pair of each eight, then the second ...

#include "common.cuh"


// Banks: elements that a warp touches together lie 1, 8, 64, ... apart.
__device__ __forceinline__ int at(int i) { return i + (i >> 3); }

// Elements h = 2^shift apart.
template <int RADIX>
__device__ __forceinline__ void pass(float* row, int K, int shift, int thread) {
  const int h = 1 << shift;
  for (int i = thread; i < K / RADIX; i += THREADS) {
    const int first = (i >> shift << shift) * RADIX + (i & (h - 1));
    float v[RADIX];
#pragma unroll
    for (int e = 0; e < RADIX; e++) v[e] = row[at(first + e * h)];
#pragma unroll
    for (int s = 1; s < RADIX; s *= 2)
#pragma unroll
      for (int e = 0; e < RADIX; e++)
        if ((e & s) == 0) {
          const float a = v[e], b = v[e + s];
          v[e] = a + b;
          v[e + s] = a - b;
        }
#pragma unroll
    for (int e = 0; e < RADIX; e++) row[at(first + e * h)] = v[e];
  }
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS)
tet_rotate(const u16* x, long long x_stride, const signed char* __restrict__ signs, signed char* rotated,
           u16* rounded, float* x_scales, int* x_sums, int K, int block, float norm, float spread) {
  extern __shared__ __align__(128) float row[];
  __shared__ float peaks[THREADS / 32];
  __shared__ int sums[THREADS / 32];
  const int thread = threadIdx.x, lane = thread & 31;
  let_next_start();
  wait_for_previous();
  const u16* from = x + (u64)blockIdx.x * x_stride;
  for (int i = thread * 8; i < K; i += THREADS * 8) {
    const uint4 v = *(const uint4*)(from + i);
    const uint2 s = *(const uint2*)(signs + i);
    const u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int e = 0; e < 8; e++) {
      const float value = e % 2 ? high(pairs[e / 2]) : low(pairs[e / 2]);
      const u32 sign = (e < 4 ? s.x : s.y) >> (e % 4 * 8) & 0x80u;
      row[at(i + e)] = sign ? -value : value;
    }
  }
  __syncthreads();
  int shift = 0;
  for (; 8 << shift <= block; shift += 3) pass<8>(row, K, shift, thread);
  if (4 << shift == block) pass<4>(row, K, shift, thread);
  if (2 << shift == block) pass<2>(row, K, shift, thread);
  if (rounded != nullptr) {  // for products in the dtype of x
    for (int i = thread; i < K; i += THREADS) rounded[(u64)blockIdx.x * K + i] = narrow(row[at(i)] * norm);
    return;
  }
  float peak = 0.f;
  for (int i = thread * 2; i < K; i += THREADS * 2) {
    const float a = row[at(i)], b = row[at(i + 1)];
    peak = fmaxf(peak, fabsf(a) + fabsf(b));  // the larger of |a + b| and |a - b|
  }
#pragma unroll
  for (int s = 16; s; s /= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, s));
  if (lane == 0) peaks[thread >> 5] = peak;
  __syncthreads();
  peak = 1e-30f;
#pragma unroll
  for (int i = 0; i < THREADS / 32; i++) peak = fmaxf(peak, peaks[i]);
  const float scale = 127.f / peak;
  int sum = 0;
  for (int i = thread * 8; i < K; i += THREADS * 8) {
    u32 words[4];
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const float a = row[at(i + 2 * e)] * scale, b = row[at(i + 2 * e + 1)] * scale;
      const int q[4] = {__float2int_rn(a), __float2int_rn(a + b), __float2int_rn(b), __float2int_rn(b - a)};
      sum += q[0] + q[1] + q[2] + q[3];
      words[e] = (q[0] & 255) | (q[1] & 255) << 8 | (q[2] & 255) << 16 | (u32)q[3] << 24;
    }
    signed char* to = rotated + (u64)blockIdx.x * 2 * K;
#if ORDER
#pragma unroll
    for (int e = 0; e < 4; e++) *(u32*)(to + i / 32 * 64 + e * 16 + i % 32 / 2) = words[e];
#else
    *(uint4*)(to + 2 * i) = make_uint4(words[0], words[1], words[2], words[3]);
#endif
  }
#pragma unroll
  for (int s = 16; s; s /= 2) sum += __shfl_xor_sync(~0u, sum, s);
  if (lane == 0) sums[thread >> 5] = sum;
  __syncthreads();
  if (thread == 0) {
    int total = 0;
#pragma unroll
    for (int i = 0; i < THREADS / 32; i++) total += sums[i];
    x_sums[blockIdx.x] = total;
    x_scales[blockIdx.x] = peak / 127.f * norm * spread;
  }
}
