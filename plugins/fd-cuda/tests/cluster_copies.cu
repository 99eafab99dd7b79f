// What compute-sanitizer's racecheck knows of asynchronous copies, cluster barriers and stores to another block's
// shared memory. Every kernel fills a tile, waits as its name says, and stores where other threads have filled.
//
//     nvcc -arch=sm_90a -o cluster_copies cluster_copies.cu && compute-sanitizer --tool racecheck ./cluster_copies
#include <cstdint>
#include <cstdio>

enum Wait { NOTHING, BLOCK, CLUSTER, BLOCK_THEN_CLUSTER, CLUSTER_THEN_BLOCK };

__device__ uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

__device__ void meet() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The thread's own 16 bytes; copies have come when this returns.
template <bool COPIES>
__device__ void fill(float4* to, const float4* from) {
  if (COPIES) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
    asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;" ::: "memory");
  } else {
    *to = *from;
  }
}

template <Wait WAIT>
__device__ void wait_for_others() {
  if (WAIT == BLOCK || WAIT == BLOCK_THEN_CLUSTER) __syncthreads();
  if (WAIT >= CLUSTER) meet();
  if (WAIT == CLUSTER_THEN_BLOCK) __syncthreads();
}

template <bool COPIES, Wait WAIT, bool REMOTE>
__device__ void run(const float4* x, float* y) {
  __shared__ float4 tile[128];
  const int thread = threadIdx.x, other = (thread * 4 + 5) % 512;
  meet();  // both blocks have started
  fill<COPIES>(tile + thread, x + thread);
  wait_for_others<WAIT>();
  float* at = (float*)tile + other;
  if (REMOTE)
    asm volatile("{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; st.shared::cluster.f32 [there], %2;}" ::
                 "r"(shared_address(at)), "r"((blockIdx.x + 1) % 2), "f"((float)thread) : "memory");
  else
    *at = thread;
  meet();
  y[blockIdx.x * 128 + thread] = ((float*)tile)[thread * 4 + 1];
}

#define KERNEL(name, ...) \
  extern "C" __global__ void __cluster_dims__(2, 1, 1) name(const float4* x, float* y) { run<__VA_ARGS__>(x, y); }
KERNEL(stores_then_own_stores, false, CLUSTER, false)
KERNEL(stores_then_remote_stores, false, CLUSTER, true)
KERNEL(copies_then_own_stores, true, CLUSTER, false)
KERNEL(copies_then_own_stores_of_a_block, true, BLOCK, false)
KERNEL(copies_then_remote_stores, true, CLUSTER, true)
KERNEL(copies_then_remote_stores_block_before, true, BLOCK_THEN_CLUSTER, true)
KERNEL(copies_then_remote_stores_block_after, true, CLUSTER_THEN_BLOCK, true)
KERNEL(wrong_own_stores, false, NOTHING, false)
KERNEL(wrong_remote_stores, false, NOTHING, true)
KERNEL(wrong_own_stores_after_copies, true, NOTHING, false)

int main() {
  float4* x;
  float* y;
  cudaMalloc(&x, 1 << 12);
  cudaMalloc(&y, 1 << 12);
  cudaMemset(x, 0, 1 << 12);
#define LAUNCH(kernel)                                                        \
  kernel<<<4, 128>>>(x, y);                                                   \
  printf("%s: %s\n", #kernel, cudaGetErrorString(cudaDeviceSynchronize())); \
  fflush(stdout);
  LAUNCH(stores_then_own_stores)
  LAUNCH(stores_then_remote_stores)
  LAUNCH(copies_then_own_stores)
  LAUNCH(copies_then_own_stores_of_a_block)
  LAUNCH(copies_then_remote_stores)
  LAUNCH(copies_then_remote_stores_block_before)
  LAUNCH(copies_then_remote_stores_block_after)
  LAUNCH(wrong_own_stores)
  LAUNCH(wrong_remote_stores)
  LAUNCH(wrong_own_stores_after_copies)
}
