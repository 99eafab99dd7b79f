// A row of x through signs and Hadamard transforms of 2^LEVELS inputs, on the matrix units: 16 inputs at a time times a
// matrix of ones. In a warp's 256 inputs a lane has eight that follow each other; bits 0, 3, 4, 1 of an input's index are
// transformed by one product, bits 5, 6, 7, 2 by a second one, whose operand is the first one's result as lanes hold
// it. Bits 8 to 11 are a third, after an exchange through shared memory, the rest sums of its results. Between products
// numbers have the precision of x; what follows rounds to eight bits.

#define SPANS ((WIDTH + 255) / 256)  // of 256 inputs
#define BANDS ((SPANS + 15) / 16)    // of 16 spans
#define LINE 528                     // bytes of a span in shared memory, 16 more than it has: banks
#define ROW_BYTES (BANDS * 16 * LINE)
#define OWN_SPANS ((BANDS * 16 + WARPS - 1) / WARPS)
#define OWN_COLUMNS (32 / WARPS)  // eights of columns: inputs as far in their spans
#ifndef SINGLE
#define SINGLE 0  // numbers are rounded as they are
#endif
#define UPPER (LEVELS > 8 ? LEVELS - 8 : 0)

// INSTRUCTIONS: emulated.h of the tests has C++ in the place of what follows.

__device__ __forceinline__ void load_transposed(u32* b, u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(address) : "memory");
}

// END OF INSTRUCTIONS

__device__ __forceinline__ constexpr int bits_of(int mask) {
  return (mask & 1) + (mask >> 1 & 1) + (mask >> 2 & 1) + (mask >> 3 & 1);
}

#define FIRST ((LEVELS > 0) | (LEVELS > 3) << 1 | (LEVELS > 4) << 2 | (LEVELS > 1) << 3)
#define SECOND ((LEVELS > 5) | (LEVELS > 6) << 1 | (LEVELS > 7) << 2 | (LEVELS > 2) << 3)
#define THIRD ((1 << (UPPER < 4 ? UPPER : 4)) - 1)
// Results are larger than an orthonormal transform's by this times 2^(-LEVELS / 2).
#define EXCESS (float)(1 << (bits_of(FIRST) / 2 + bits_of(SECOND) / 2 + bits_of(THIRD) / 2))

// What makes the transform orthonormal: 2^(-LEVELS / 2).
#define NORM ((LEVELS % 2 ? 0.70710678118654752440f : 1.f) / (1 << LEVELS / 2))

// A transform over the bits of MASK of sixteen numbers, as the left operand of a product, over 2^(bits / 2).
template <int MASK>
__device__ __forceinline__ void hadamard(u32* a, int lane) {
  constexpr u32 one = (HALF ? 0x3c00u : 0x3f80u) - (bits_of(MASK) / 2) * (HALF ? 0x400u : 0x80u);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    u32 pair = 0;
#pragma unroll
    for (int odd = 0; odd < 2; odd++) {
      const u32 row = (lane >> 2) + i % 2 * 8, k = (lane & 3) * 2 + i / 2 * 8 + odd, both = row & k & MASK;
      const u32 sign = (both ^ both >> 1 ^ both >> 2 ^ both >> 3) & 1;
      if (((row ^ k) & (15 ^ MASK)) == 0) pair |= (one | sign << 15) << odd * 16;
    }
    a[i] = pair;
  }
}

// What does not depend on x.
struct Rotation {
  u32 first[4], second[4], third[4];
  uint2 signs[OWN_SPANS];

  __device__ __forceinline__ void prepare(const signed char* __restrict__ given, int warp, int lane) {
    hadamard<FIRST>(first, lane);
    hadamard<SECOND>(second, lane);
    hadamard<THIRD>(third, lane);
#pragma unroll
    for (int i = 0; i < OWN_SPANS; i++) {
      const int at = (warp + i * WARPS) * 256 + lane * 8;
      signs[i] = at < WIDTH ? *(const uint2*)(given + at) : make_uint2(0, 0);
    }
  }

  // Rows of x rounded for a product, ROW_BYTES of shared memory each; what they are multiplied with, and their sums.
  template <int ROWS>
  __device__ __forceinline__ void rotate_rows(const u16* x, long long stride, int M, unsigned char* spans, float spread,
                                              float (&scales)[ROWS], int (&sums)[ROWS]) const;

  // `spans`: BANDS * 16 * LINE bytes of shared memory. Result: inputs 256 * (16 * band + g + 8 * (e / 2)) +
  // 8 * (own first + n) + 2 * j + e % 2 are y[n][band][e], with g = lane / 4, j = lane % 4.
  __device__ __forceinline__ void transform(const u16* x, unsigned char* spans, float (&y)[OWN_COLUMNS][BANDS][4], int warp,
                                            int lane) const {
    uint4 v[OWN_SPANS];
#pragma unroll
    for (int i = 0; i < OWN_SPANS; i++) {
      const int at = (warp + i * WARPS) * 256 + lane * 8;
      v[i] = at < WIDTH ? *(const uint4*)(x + at) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < OWN_SPANS; i++) {
      const int span = warp + i * WARPS;
      if (span >= BANDS * 16) break;
      const uint2 s = signs[i];
      const u32 b[4] = {v[i].x ^ (__byte_perm(s.x, 0, 0x1404u) & 0x80008000u), v[i].y ^ (__byte_perm(s.x, 0, 0x3424u) & 0x80008000u),
                        v[i].z ^ (__byte_perm(s.y, 0, 0x1404u) & 0x80008000u), v[i].w ^ (__byte_perm(s.y, 0, 0x3424u) & 0x80008000u)};
      float c[2][4] = {}, d[2][4] = {};
#pragma unroll
      for (int n = 0; n < 2; n++) multiply(c[n], first[0], first[1], first[2], first[3], b[2 * n], b[2 * n + 1]);
#pragma unroll
      for (int n = 0; n < 2; n++)
        multiply(d[n], second[0], second[1], second[2], second[3], pack(c[0][2 * n], c[0][2 * n + 1]),
                 pack(c[1][2 * n], c[1][2 * n + 1]));
      *(uint4*)(spans + span * LINE + lane * 16) =
          make_uint4(pack(d[0][0], d[0][1]), pack(d[1][0], d[1][1]), pack(d[0][2], d[0][3]), pack(d[1][2], d[1][3]));
    }
    __syncthreads();
    const u32 from = shared_address(spans) + (lane & 15) * LINE + warp * OWN_COLUMNS * 16;
#pragma unroll
    for (int n = 0; n < OWN_COLUMNS; n++) {
#pragma unroll
      for (int band = 0; band < BANDS; band += 2) {
        u32 b[4];  // of two bands
        load_transposed(b, from + (band + (band + 1 < BANDS ? lane >> 4 : 0)) * 16 * LINE + n * 16);
#pragma unroll
        for (int m = band; m < band + 2 && m < BANDS; m++) {
          y[n][m][0] = y[n][m][1] = y[n][m][2] = y[n][m][3] = 0.f;
          multiply(y[n][m], third[0], third[1], third[2], third[3], b[(m - band) * 2], b[(m - band) * 2 + 1]);
        }
      }
#pragma unroll
      for (int apart = 1; apart < 1 << (UPPER > 4 ? UPPER - 4 : 0); apart *= 2)
#pragma unroll
        for (int m = 0; m < BANDS; m++)
          if ((m & apart) == 0) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
              const float a = y[n][m][e], b = y[n][m + apart][e];
              y[n][m][e] = a + b;
              y[n][m + apart][e] = a - b;
            }
          }
    }
  }
};

// The numbers of a row in the places of its spans, each of two inputs four (x0, x0 + x1, x1, x1 - x0) by the largest
// magnitude, and their sum. All threads get both.
__device__ __forceinline__ void round_row(const float (&y)[OWN_COLUMNS][BANDS][4], unsigned char* spans, int warp,
                                          int lane, float& peak, int& sum) {
  __shared__ u32 peaks[WARPS];
  __shared__ int sums[WARPS];
  peak = 1e-30f;
#pragma unroll
  for (int n = 0; n < OWN_COLUMNS; n++)
#pragma unroll
    for (int e = 0; e < BANDS * 4; e += 2) {
      const float a = fabsf(y[n][e / 4][e % 4]), b = fabsf(y[n][e / 4][e % 4 + 1]);
      peak = fmaxf(peak, SINGLE ? fmaxf(a, b) : a + b);  // the larger of |a + b| and |a - b|
    }
  // Bits of what is not negative are in the numbers' order.
  u32 largest = __reduce_max_sync(~0u, __float_as_uint(peak));
  if (lane == 0) peaks[warp] = largest;
  __syncthreads();  // and nobody reads spans any more
#pragma unroll
  for (int i = 0; i < WARPS; i++) largest = max(largest, peaks[i]);
  peak = __uint_as_float(largest);
  const float scale = 127.f / peak;
  sum = 0;
#pragma unroll
  for (int n = 0; n < OWN_COLUMNS; n++)
#pragma unroll
    for (int e = 0; e < BANDS * 4; e += 2) {
      const float a = y[n][e / 4][e % 4], b = y[n][e / 4][e % 4 + 1], middle = 12582912.f;
      const int span = e / 4 * 16 + (lane >> 2) + e % 4 / 2 * 8, column = warp * OWN_COLUMNS + n, j = lane & 3;
#if SINGLE
      *(u16*)(spans + span * LINE + column * 8 + j * 2) =
          (u16)__byte_perm(__float_as_uint(fmaf(a, scale, middle)), __float_as_uint(fmaf(b, scale, middle)), 0x0040);
      continue;
#endif
      // The last byte of 1.5 * 2^23 + a whole number is that number's.
      const u32 q[4] = {__float_as_uint(fmaf(a, scale, middle)), __float_as_uint(fmaf(a + b, scale, middle)),
                        __float_as_uint(fmaf(b, scale, middle)), __float_as_uint(fmaf(b - a, scale, middle))};
      sum += (int)(q[0] + q[1] + q[2] + q[3] - 4u * 0x4b400000u);
      const u32 word = __byte_perm(__byte_perm(q[0], q[1], 0x0040), __byte_perm(q[2], q[3], 0x0040), 0x5410);
      *(u32*)(spans + span * LINE + column * 16 + j * 4) = word;
    }
  sum = __reduce_add_sync(~0u, sum);
  if (lane == 0) sums[warp] = sum;
  __syncthreads();
  sum = 0;
#pragma unroll
  for (int i = 0; i < WARPS; i++) sum += sums[i];
}

template <int ROWS>
__device__ __forceinline__ void Rotation::rotate_rows(const u16* x, long long stride, int M, unsigned char* spans,
                                                      float spread, float (&scales)[ROWS], int (&sums)[ROWS]) const {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#pragma unroll 1
  for (int n = 0; n < min(ROWS, M); n++) {
    float numbers[OWN_COLUMNS][BANDS][4], peak;
    int total;
    transform(x + n * stride, spans + n * ROW_BYTES, numbers, warp, lane);
    round_row(numbers, spans + n * ROW_BYTES, warp, lane, peak, total);
    if (threadIdx.x == 0) scales[n] = peak / 127.f * (NORM * EXCESS) * spread, sums[n] = total;
  }
}
