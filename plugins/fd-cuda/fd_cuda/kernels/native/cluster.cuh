// The SPLIT blocks of a cluster, which divide K, and what they send each other.

// INSTRUCTIONS: emulated.h of the tests has C++ in the place of what follows.

// All blocks of the cluster have started: their shared memory may be written.
__device__ __forceinline__ void announce_start() {
#if SPLIT > 1
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void await_start() {
#if SPLIT > 1
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void meet() {
#if SPLIT > 1
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

__device__ __forceinline__ u32 at_rank(u32 address, int rank) {
#if SPLIT > 1
  u32 remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
#else
  return address;
#endif
}

__device__ __forceinline__ void send(u32 address, float value) {
#if SPLIT > 1
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
#else
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
#endif
}

__device__ __forceinline__ void send(u32 address, float4 v) {
#if SPLIT > 1
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};"
               ::"r"(address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
#else
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
#endif
}

// END OF INSTRUCTIONS
