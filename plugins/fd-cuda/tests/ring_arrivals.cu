// What compute-sanitizer's racecheck knows of lanes that read, meet, and arrive at an mbarrier by one of them. One warp fills
// two lines in turn, another one reads them; whoever fills a line again has waited for its readers.
//
//     nvcc -arch=sm_90a -o ring_arrivals ring_arrivals.cu && compute-sanitizer --tool racecheck ./ring_arrivals
#include <cstdint>
#include <cstdio>

__device__ uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

__device__ void make_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ void arrive_at(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ void await_phase(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;}" ::"r"(barrier), "r"(parity) : "memory");
}

template <bool ONE_ARRIVES>
__global__ void run(float* y, int rounds) {
  __shared__ uint64_t full[2], empty[2];
  __shared__ float line[2][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x < 2) {
    make_barrier(shared_address(full + threadIdx.x), 32);
    make_barrier(shared_address(empty + threadIdx.x), ONE_ARRIVES ? 1 : 32);
  }
  __syncthreads();
  float sum = 0.f;
  for (int i = 0; i < rounds; i++) {
    const uint32_t has = shared_address(full + i % 2), free = shared_address(empty + i % 2), parity = i / 2 % 2;
    if (warp == 0) {
      await_phase(free, parity ^ 1);
      line[i % 2][lane] = i + lane;
      arrive_at(has);
    } else {
      await_phase(has, parity);
      sum += line[i % 2][lane ^ 5];
      if (ONE_ARRIVES) __syncwarp();
      if (!ONE_ARRIVES || lane == 0) arrive_at(free);
    }
  }
  if (warp == 1) y[lane] = sum;
}

int main() {
  float* y;
  cudaMallocManaged(&y, 32 * sizeof(float));
  for (int one = 0; one < 2; one++) {
    if (one) run<true><<<1, 64>>>(y, 40);
    else run<false><<<1, 64>>>(y, 40);
    cudaDeviceSynchronize();
    bool right = true;
    for (int lane = 0; lane < 32; lane++) right &= y[lane] == 780 + 40 * (lane ^ 5);
    printf("%s: %s\n", one ? "one lane arrives" : "every lane arrives", right ? "right" : "WRONG");
  }
  return 0;
}
