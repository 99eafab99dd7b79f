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

#define PITCH (COLUMNS + 1)  // of an output's sums in shared memory

// A warp's sums of slabs by eights of rows to where all warps find them; `rows` are there.
template <int SLABS, int EIGHTS>
__device__ __forceinline__ void store_sums(float* parts, const float (&sum)[SLABS][EIGHTS][4], int warp, int lane, int rows) {
  const int row = (lane & 3) * 2;
  float* part = parts + (warp * SLABS * 16 + (lane >> 2)) * PITCH + row;
#pragma unroll
  for (int t = 0; t < EIGHTS; t++)
#pragma unroll
    for (int e = 0; e < 4; e++)
      if (t * 8 + row + (e & 1) < rows) {
#pragma unroll
        for (int m = 0; m < SLABS; m++) part[(m * 16 + (e >> 1) * 8) * PITCH + t * 8 + (e & 1)] = sum[m][t][e];
      }
}

// One number of all warps, whose parts lie `step` apart.
template <class Sum>
__device__ __forceinline__ Sum of_all_warps(const Sum* part, int step) {
  Sum total = 0;
#pragma unroll
  for (int i = 0; i < WARPS; i++) total += part[i * step];
  return total;
}
