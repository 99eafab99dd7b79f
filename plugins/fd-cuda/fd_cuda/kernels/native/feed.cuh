// Tiles of x by the copy engine. A barrier in shared memory counts arrivals and bytes, and is in phase 0, 1, 0, ...

// INSTRUCTIONS: emulated.h of the tests has C++ in the place of what follows.

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

// Arrive, and announce bytes that a copy will bring.
__device__ __forceinline__ void expect(u32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void arrive_at(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrive when what this thread has asked for by asynchronous copies is there.
__device__ __forceinline__ void arrive_when_copied(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// The phase of this parity has ended.
__device__ __forceinline__ void await_phase(u32 barrier, u32 parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;}" ::"r"(barrier), "r"(parity) : "memory");
}

// Ask for a map before it is used.
__device__ __forceinline__ void prefetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// The box of the map at this input and row.
__device__ __forceinline__ void copy_box(u32 to, const TensorMap& map, int input, int row, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(&map), "r"(input), "r"(row), "r"(barrier) : "memory");
}

// The same of a map of gates and what belongs to them, from this eight of a matrix on.
__device__ __forceinline__ void copy_gates(u32 to, const TensorMap& map, int input, int eight, int matrix, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%2, %3, %3, %4, %5}], [%6];"
               ::"r"(to), "l"(&map), "r"(input), "r"(0), "r"(eight), "r"(matrix), "r"(barrier) : "memory");
}

// Bytes that lie together, whole sixteens of them.
__device__ __forceinline__ void copy_line(u32 to, const void* from, int bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(barrier)
               : "memory");
}

// The other way: what lies outside the matrix is left out. The memory it comes from may be written again when all but so
// many of the copies that the same thread has asked for have read theirs.
__device__ __forceinline__ void store_box(const TensorMap& map, int input, int row, u32 from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];\n"
               "cp.async.bulk.commit_group;" ::"l"(&map), "r"(input), "r"(row), "r"(from) : "memory");
}

template <int left>
__device__ __forceinline__ void await_reads() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(left) : "memory");
}

// Groups of four warps that feed give registers to those that multiply.
template <int kept>
__device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kept)); }
template <int taken>
__device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(taken)); }

// What this thread has stored to shared memory, or knows to be stored, is there for the copy engine and the matrix units.
__device__ __forceinline__ void show_to_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// END OF INSTRUCTIONS

// What all lanes of a warp have alike, so that the compiler knows it and keeps what is made of it, such as the operands of wgmma,
// in uniform registers.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }

// Barriers of a ring: of turns that are there, from `full` on, which so many say, then of those that all readers are done with.
template <int stages>
__device__ __forceinline__ void make_ring(u32 full, int feeders, int readers) {
#pragma unroll
  for (int s = 0; s < stages; s++) {
    make_barrier(full + 8 * s, feeders);
    make_barrier(full + 8 * (stages + s), readers);
  }
  publish_barriers();
}

// Of a ring of STAGES tiles: which one, and in which round.
struct Place {
  int stage;
  u32 parity;
};

template <int stages>
__device__ __forceinline__ void advance(Place& place) {
  if (++place.stage == stages) place = {0, place.parity ^ 1};
}
