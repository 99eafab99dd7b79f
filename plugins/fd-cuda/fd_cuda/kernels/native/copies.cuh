// How weights and activations are fetched: weights once, past the first-level cache, into registers; activations
// asynchronously into shared memory.
#ifndef COPIES
#define COPIES

// INSTRUCTIONS: emulated.h of the tests has C++ in the place of what follows.

__device__ __forceinline__ uint4 load_once(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

// What is asked for before the kernel before has ended: the compiler moves loads of what it may take for constant (.nc) to
// where that is waited for.
__device__ __forceinline__ uint4 load_early(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ float load_early(const float* p) {
  float v;
  asm volatile("ld.global.f32 %0,[%1];" : "=f"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// 16 bytes; zeros where they are not inside.
__device__ __forceinline__ void copy_async(u32 to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// All but the last `left` groups of what this thread has copied are there for itself to read.
template <int left>
__device__ __forceinline__ void await_own_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory");
}

__device__ __forceinline__ float load_once(const float* p) {
  float v;
  asm volatile("ld.global.nc.f32 %0,[%1];" : "=f"(v) : "l"(p));
  return v;
}

// ldmatrix: lane 8 i + j has the address of row j of matrix i, and gets elements (lane / 4, 2 (lane % 4)) and the next of
// each.
__device__ __forceinline__ void load_matrices(u32* b, u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(address) : "memory");
}

// An address stays in a register: the compiler would make it anew, of all that it is made of, at every use.
template <class T>
__device__ __forceinline__ void keep(T*& address) { asm volatile("" : "+l"(address)); }
__device__ __forceinline__ void keep(u32& address) { asm volatile("" : "+r"(address)); }

// END OF INSTRUCTIONS
#endif
