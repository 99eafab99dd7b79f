// What adapters.cuh needs beside emulated_rows.h. Every block has its helpers alone.
#include "emulated_rows.h"

#define __ldg(at) (*(at))
#define BK 64
#define BM 64
#define THREADS 0
#define HELPERS 128
#define ROWS (BM / PARTS_OF_K)

inline u32 __ballot_sync(unsigned, bool is_so) {
  const Lanes<bool> all(is_so);
  u32 mask = 0;
  for (int i = 0; i < 32; ++i) mask |= (u32)all.value[i] << i;
  return mask;
}
inline u32 __reduce_or_sync(unsigned, u32 value) {
  const Lanes<u32> all(value);
  u32 any = 0;
  for (const u32 one : all.value) any |= one;
  return any;
}
template <class T>
inline T __shfl_up_sync(unsigned, T value, int step) {
  const Lanes<T> all(value);
  return all.value[lane_of() < step ? lane_of() : lane_of() - step];
}
inline int __popc(u32 mask) { return __builtin_popcount(mask); }

inline void* shared_address(const void* p) { return (void*)p; }
inline void copy_async(void* to, const void* from, bool inside) {
  std::memset(to, 0, 16);
  if (inside) std::memcpy(to, from, 16);
}
inline void await_copies() {}
inline void prefetch(const void*) {}
inline void sync_helpers() { __syncthreads(); }
inline bool any_helper(bool is_so) {
  static thread_local bool any;
  if (threadIdx.x == 0) any = false;
  __syncthreads();
  if (is_so) any = true;
  __syncthreads();
  const bool found = any;
  __syncthreads();
  return found;
}
inline void arrive(int* count) { __atomic_fetch_add(count, 1, __ATOMIC_RELEASE); }
inline void await_sums(const int* count, int wanted) {
  while (__atomic_load_n(count, __ATOMIC_ACQUIRE) < wanted) std::this_thread::yield();
}
inline void leave_meeting(int* meeting, int blocks) {
  if (__atomic_fetch_add(meeting + 1, 1, __ATOMIC_ACQ_REL) == blocks - 1) meeting[0] = meeting[1] = 0;
}
inline void multiply_group(float* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  multiply(*(float(*)[4])d, a0, a1, a2, a3, b0, b1);
}

// The kernel before this one writes slots until it ends.
static thread_local const int* late;
static thread_local int *slots_of_step, rows_of_step;
inline void previous_ends() { std::memcpy(slots_of_step, late, rows_of_step * sizeof(int)); }
#define wait_for_previous previous_ends
