// What kernels that include attention.cuh need beside emulated.h. Copies to shared memory happen at once.
#include "emulated.h"

inline void __syncwarp() { gather(block->warp_turn, warp_first(), 32); }
inline u32 shared_address(const void* p) { return (u32)((const char*)p - (const char*)shared); }
inline void copy_async(u32 to, const void* from, bool inside) {
  if (inside) std::memcpy((char*)shared + to, from, 16);
  else std::memset((char*)shared + to, 0, 16);
}
inline void commit() {}
template <int left>
inline void await_own_copies() {}
template <class T>
inline void keep(T&) {}
