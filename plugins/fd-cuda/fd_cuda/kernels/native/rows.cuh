// INSTRUCTIONS: emulated.h of the tests has C++ in the place of what follows.

// d = c + a b
__device__ __forceinline__ void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, const float* c) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "
               "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};"
               : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// END OF INSTRUCTIONS

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

#ifdef OUT  // outputs of a block, of weights in slabs
// Sums of all warps, times scales, to y: outputs from `first` on, each of which has one thread that brings its scale, with
// PAIRED those of a gate and of what belongs to it.
__device__ __forceinline__ void store_results(const float* parts, const float* x_scales, float own_scale, float other_scale,
                                              const u16* bias, u16* y, int first, int width, int M, const int* slots,
                                              const long long* ids, int divisor) {
  constexpr int THREADS = WARPS * 32 / OUT * OUT;  // a thread finishes numbers of one output
  for (int e = threadIdx.x; e < COLUMNS * OUT && threadIdx.x < THREADS; e += THREADS) {
    const int c = e % OUT, n = e / OUT, column = first + c, at = slot_of(n, slots, ids, M);
    if (at >= M || column >= width) continue;
    const float* line = parts + c * PITCH + n;
    const float x_scale = x_scales == nullptr ? 1.f : x_scales[GROUPED ? at / divisor : at];
    float value = of_all_warps(line, MT * 16 * PITCH) * (own_scale * x_scale);
    if (PAIRED) value = silu(value) * (of_all_warps(line + 16 * PITCH, MT * 16 * PITCH) * (other_scale * x_scale));
    else if (bias != nullptr) value += widen_y(bias[column]);
    y[(u64)at * width + column] = narrow_y(value);
  }
}
#endif
