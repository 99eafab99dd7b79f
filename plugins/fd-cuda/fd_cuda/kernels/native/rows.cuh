// The row of y that a block of COLUMNS rows computes as its n-th; M or more where there is none. GROUPED: `slots` says
// so, or with `ids` every block has one.
__device__ __forceinline__ int slot_of(int n, const int* slots, const long long* ids, int M) {
#if GROUPED
  if (ids != nullptr) return n == 0 ? (int)blockIdx.y : M;
  return slots[blockIdx.y * COLUMNS + n];
#else
  return blockIdx.y * COLUMNS + n;
#endif
}

// One number of all warps, whose parts lie `step` apart.
template <class Sum>
__device__ __forceinline__ Sum of_all_warps(const Sum* part, int step) {
  Sum total = 0;
#pragma unroll
  for (int i = 0; i < WARPS; i++) total += part[i * step];
  return total;
}
