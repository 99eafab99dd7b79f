// How blocks of products with the trellis code end: sums of their warps, of the blocks of a cluster, numbers of y.
// A block has GROUP tiles of 64 outputs, DEPTH warps each.
#include "cluster.cuh"

#define PITCH (COLUMNS + 1)
#define OUT (64 * GROUP)
#define OWN_OUT (OUT / SPLIT)  // outputs that a block finishes

// store(c, n, total) stores output c of row n; `rows` are there. Shared memory from `parts` on may be written anew, to `inbox`, where
// other blocks send.
template <class Store>
__device__ __forceinline__ void finish(const int (&sum)[4][TILES][4], int* parts, int* inbox, int rows,
                                       const Store& store) {
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, g = lane >> 2, j = lane & 3;
  int* part = parts + warp * 64 * PITCH;
#pragma unroll
  for (int t = 0; t < TILES; t++)
#pragma unroll
    for (int e = 0; e < 4; e++)
      if (t * 8 + j * 2 + (e & 1) < rows) {
#pragma unroll
        for (int n = 0; n < 4; n++) part[(g * 8 + n * 2 + (e >> 1)) * PITCH + t * 8 + j * 2 + (e & 1)] = sum[n][t][e];
      }
  __syncthreads();
  const auto of_warps = [&](int c, int n) {
    const int* line = parts + c * PITCH + n;
    int total = 0;
#pragma unroll
    for (int i = 0; i < DEPTH; i++) total += line[i * GROUP * 64 * PITCH];
    return total;
  };
#if SPLIT == 1
  for (int e = thread; e < OUT * rows; e += WARPS * 32)
    store(e % OUT, e / OUT, of_warps(e % OUT, e / OUT));
#else
  const int rank = blockIdx.z;
  await_start();
  for (int e = thread; e < OUT * rows; e += WARPS * 32) {
    const int c = e % OUT, n = e / OUT;
    int* to = inbox + (rank * OWN_OUT + c % OWN_OUT) * COLUMNS + n;
    send(at_rank(shared_address(to), c / OWN_OUT), __int_as_float(of_warps(c, n)));
  }
  meet();
  for (int e = thread; e < OWN_OUT * rows; e += WARPS * 32) {
    const int c = e % OWN_OUT, n = e / OWN_OUT;
    int total = 0;
#pragma unroll
    for (int i = 0; i < SPLIT; i++) total += inbox[(i * OWN_OUT + c) * COLUMNS + n];
    store(rank * OWN_OUT + c, n, total);
  }
#endif
}
