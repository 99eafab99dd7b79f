// Tiles by the copy engine: a barrier in shared memory counts arrivals and bytes, and is of phase 0, 1, 0, ... A copy
// of x may land in several blocks of a cluster, at the same place in each, and counts on each one's barrier.

// INSTRUCTIONS: emulated_feed.h of the tests has C++ in the place of what follows.

// What cuTensorMapEncodeTiled makes: tensor_map.py.
struct __align__(64) TensorMap {
  u64 words[16];
};

__device__ __forceinline__ void make_barrier(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}

// Arrive, and announce bytes that copies will bring.
__device__ __forceinline__ void expect(u32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// At a barrier of the cluster: an address from at_rank. Nothing that was written is handed on, so it needs no fence.
__device__ __forceinline__ void arrive_at(u32 barrier) {
#if SPLIT * TEAM > 1
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
#else
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}

// The phase of this parity has ended.
__device__ __forceinline__ void await_phase(u32 barrier, u32 parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;}" ::"r"(barrier), "r"(parity) : "memory");
}

// All but the last `left` groups of what this thread has copied are there for itself to read.
template <int left>
__device__ __forceinline__ void await_own_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory");
}

// The box of the map at this input and row, in the blocks of the cluster that `mask` names.
__device__ __forceinline__ void copy_box(u32 to, const TensorMap& map, int input, int row, u32 barrier, u32 mask) {
#if TEAM > 1
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
               " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(&map), "r"(input), "r"(row), "r"(barrier),
               "h"((u16)mask) : "memory");
#else
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(&map), "r"(input), "r"(row), "r"(barrier) : "memory");
#endif
}

// END OF INSTRUCTIONS
