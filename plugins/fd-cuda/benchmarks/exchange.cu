// What it costs when all blocks of a running kernel tell each other something: nanoseconds a round.
//
//     nvcc -gencode=arch=compute_90a,code=sm_90a -O3 -o exchange exchange.cu && ./exchange
//
// 128 blocks of 256 threads, one a multiprocessor. In a round every block writes its share of the values, and
// every block reads all of them.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>

#define ROUNDS 2000
#define BLOCKS 128
#define THREADS 256

__device__ uint4 load16(const void* at) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
  return v;
}

__device__ void store8(void* at, uint32_t a, uint32_t b) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0],{%1,%2};" ::"l"(at), "r"(a), "r"(b) : "memory");
}

__device__ uint32_t acquire(const uint32_t* at) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0,[%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}

__device__ void add_release(uint32_t* at) {
  asm volatile("red.release.gpu.global.add.u32 [%0],1;" ::"l"(at) : "memory");
}

__device__ void store_release(uint32_t* at, uint32_t v) {
  asm volatile("st.release.gpu.global.u32 [%0],%1;" ::"l"(at), "r"(v) : "memory");
}

// Every four bytes have a flag beside them: whoever polls the flags has the values. UNITS: 16-byte pieces that a thread
// polls; COPIES: a block reads one of so many copies, and writes all.
template <int UNITS, int COPIES>
__global__ void __launch_bounds__(THREADS) flags_beside_values(uint4* data, uint32_t* sink, uint32_t base) {
  const int thread = threadIdx.x, own = 4 * UNITS;
  uint32_t sum = 0;
  for (uint32_t round = 1; round <= ROUNDS; ++round) {
    uint4* half = data + round % 2 * COPIES * UNITS * THREADS;
    for (int i = thread; i < own * COPIES; i += THREADS)
      store8((uint2*)(half + i / own * UNITS * THREADS) + blockIdx.x * own + i % own, sum + i, base + round);
    const uint4* from = half + blockIdx.x % COPIES * UNITS * THREADS + thread;
    uint4 v[UNITS];
    for (bool all = false; !all;) {
      all = true;
#pragma unroll
      for (int u = 0; u < UNITS; ++u) v[u] = load16(from + u * THREADS);
#pragma unroll
      for (int u = 0; u < UNITS; ++u) all = all && v[u].y == base + round && v[u].w == base + round;
    }
    sum += v[0].x;
    __syncthreads();
  }
  if (sum == 12345) *sink = sum;
}

// Values first, then one flag a block or a counter of all blocks, with release and acquire.
template <bool COUNTER>
__global__ void __launch_bounds__(THREADS)
flags_behind_values(uint4* data, uint32_t* flags, uint32_t* sink, uint32_t base) {
  const int thread = threadIdx.x;
  uint32_t sum = 0;
  for (uint32_t round = 1; round <= ROUNDS; ++round) {
    uint4* half = data + round % 2 * (THREADS / 2);
    if (thread < 2) store8((uint2*)half + blockIdx.x * 2 + thread, sum, round);
    __syncthreads();
    if (COUNTER && thread == 0) {
      add_release(flags);
      while (acquire(flags) < (base + round) * BLOCKS) {}
    }
    if (!COUNTER && thread == 0) store_release(flags + blockIdx.x, base + round);
    if (!COUNTER && thread < BLOCKS)
      while (acquire(flags + thread) < base + round) {}
    __syncthreads();
    if (thread < THREADS / 2) sum += load16(half + thread).x;
  }
  if (sum == 12345) *sink = sum;
}

template <class Launch>
void time(const char* name, uint4* data, uint32_t* flags, Launch launch) {
  cudaEvent_t begin, end;
  cudaEventCreate(&begin), cudaEventCreate(&end);
  cudaMemset(data, 0, 1 << 20), cudaMemset(flags, 0, 4 * BLOCKS);
  float least = 1e9f;
  for (uint32_t i = 0; i < 5; ++i) {
    float ms;
    cudaEventRecord(begin), launch(i * ROUNDS), cudaEventRecord(end);
    cudaEventSynchronize(end), cudaEventElapsedTime(&ms, begin, end);
    least = std::min(least, ms);
  }
  const cudaError_t error = cudaGetLastError();
  printf("%-60s %6.0f %s\n", name, least * 1e6f / ROUNDS, error ? cudaGetErrorString(error) : "");
}

#define BESIDE(UNITS, COPIES, NAME)                                                      \
  time(NAME, data, flags, [&](uint32_t base) {                                           \
    flags_beside_values<UNITS, COPIES><<<BLOCKS, THREADS>>>(data, sink, base);           \
  })
#define BEHIND(COUNTER, NAME)                                                            \
  time(NAME, data, flags, [&](uint32_t base) {                                           \
    flags_behind_values<COUNTER><<<BLOCKS, THREADS>>>(data, flags, sink, base);          \
  })

int main() {
  uint4* data;
  uint32_t *flags, *sink;
  cudaMalloc(&data, 1 << 20), cudaMalloc(&flags, 4 * BLOCKS), cudaMalloc(&sink, 4);
  BESIDE(1, 1, "2 KB, a flag beside every 4 bytes");
  BESIDE(1, 4, "2 KB, the same in 4 copies");
  BESIDE(2, 1, "4 KB, a flag beside every 4 bytes");
  BESIDE(2, 4, "4 KB, the same in 4 copies");
  BESIDE(3, 1, "6 KB, a flag beside every 4 bytes");
  BESIDE(3, 4, "6 KB, the same in 4 copies");
  BEHIND(true, "2 KB, then a counter of all blocks (release, acquire)");
  BEHIND(false, "2 KB, then a flag a block (release, acquire)");
}
