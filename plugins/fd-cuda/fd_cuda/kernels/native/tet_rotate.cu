// What tet_gemv.cu multiplies with: x times signs, Hadamard transforms of 2^LEVELS inputs, then int8 by the largest
// magnitude of the row. Two inputs become four numbers (x0, x0 + x1, x1, x1 - x0). One block of threads a row.
// ORDER 0: pairs of inputs follow each other. 1: of every 32 inputs, the first pair of each eight, then the second ...

#include "common.cuh"

// Three levels are done where inputs come in, the rest in as few passes over shared memory as 32 registers allow:
// what one multiprocessor's shared memory delivers is what a single row waits for.
#define EARLY (LEVELS < 3 ? LEVELS : 3)
#define LATE (LEVELS - EARLY)
#define PASSES ((LATE + 4) / 5)

// Banks: elements that a warp touches together lie 1, 8, 128 or 256 apart.
__device__ __forceinline__ constexpr int at(int i) { return i + (i >> 3) + (i >> 8) * 8; }

// The levels from SHIFT on, of elements 2^SHIFT apart.
template <int SHIFT, int BITS>
__device__ __forceinline__ void pass(float* row, int K, int thread) {
  constexpr int RADIX = 1 << BITS;
  for (int i = thread; i < K / RADIX; i += THREADS) {
    float* own = row + at((i >> SHIFT << SHIFT) * RADIX + (i & ((1 << SHIFT) - 1)));
    float v[RADIX];
#pragma unroll
    for (int e = 0; e < RADIX; e++) v[e] = own[at(e << SHIFT)];
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
    for (int e = 0; e < RADIX; e++) own[at(e << SHIFT)] = v[e];
  }
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS)
tet_rotate(const u16* x, long long x_stride, const signed char* __restrict__ signs, signed char* rotated,
           u16* rounded, float* x_scales, int* x_sums, int K, float norm, float spread) {
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
    float v8[8];
#pragma unroll
    for (int e = 0; e < 8; e++) {
      const float value = e % 2 ? high(pairs[e / 2]) : low(pairs[e / 2]);
      const u32 sign = (e < 4 ? s.x : s.y) >> (e % 4 * 8) & 0x80u;
      v8[e] = sign ? -value : value;
    }
#pragma unroll
    for (int h = 1; h < 1 << EARLY; h *= 2)
#pragma unroll
      for (int e = 0; e < 8; e++)
        if ((e & h) == 0) {
          const float a = v8[e], b = v8[e + h];
          v8[e] = a + b;
          v8[e + h] = a - b;
        }
#pragma unroll
    for (int e = 0; e < 8; e++) row[at(i) + e] = v8[e];
  }
  __syncthreads();
#if PASSES == 1
  pass<3, LATE>(row, K, thread);
#elif PASSES == 2
  pass<3, (LATE + 1) / 2>(row, K, thread);
  pass<3 + (LATE + 1) / 2, LATE / 2>(row, K, thread);
#elif PASSES == 3
  pass<3, 4>(row, K, thread);
  pass<7, 4>(row, K, thread);
  pass<11, LATE - 8>(row, K, thread);
#endif
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
