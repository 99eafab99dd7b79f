// y[M, N] = x[M, K] W[N, K]^T with W in the affine code of ERNIE 4.5's published 2-bit checkpoints (quant.cuh, format CCQ),
// for M <= 8 * TILES.
//
// Bound by instructions, not by bytes: a byte becomes four weights in seven. Its code is a multiple of the byte, a whole
// number in 2^-16, plus an offset, in the upper half of a word, where whole numbers say what the definition's floats do;
// slabs with a row for which none do (`lines` has a zero) go by floats. Windows become half floats MIDDLE more than the
// weights, for which sums of x, a product with ones for all slabs together, make up.
// A block computes 16 * MT outputs; its WARPS warps take turns of 64 inputs. Every lane copies the inputs that it will
// read itself. GROUPED and PAIRED as in quant_gemv.cu.

#include "common.cuh"
#include "quant.cuh"

#define COLUMNS (8 * TILES)
#include "rows.cuh"

#define TURNS (WIDTH / 64)
#define ROUNDS ((TURNS + WARPS - 1) / WARPS)
#define PITCH (COLUMNS + 1)
#define OUT (PAIRED ? 16 : 16 * MT)
#if HALF
#define MIDDLE 1056.f
#else
#define MIDDLE 160.f
#endif

// INSTRUCTIONS: emulated.h of the tests has C++ in the place of what follows.

__device__ __forceinline__ void await_turn() {
  asm volatile("cp.async.wait_group %0;" ::"n"(AHEAD - 1) : "memory");
}

// d = c + a b
__device__ __forceinline__ void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, const float (&c)[4]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "
               "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};"
               : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// A number that the compiler does not know: it would make a shift of what is multiplied with it.
__device__ __forceinline__ u32 unknown(u32 number) {
  asm volatile("mov.u32 %0, %0;" : "+r"(number));
  return number;
}

// END OF INSTRUCTIONS

// The operand of step 0 to 3 of a turn, MIDDLE more than the weights. Codes stand in the upper half of a word.
// Where shifts wait for each other, a product's upper half is one too: by 19 with `eighth`, 2^13.
template <class Coded>
__device__ __forceinline__ void windows(const uint2& piece, u32 eighth, u32* a, const Coded& coded) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 code = coded(i ? piece.y : piece.x, i);
    // The windows at bits 3 and 0 of the code, six bits above those at 9 and 6.
    const u32 both = __byte_perm(__umulhi(code, eighth), code, 0x7610u);
    a[i] = masked_or(both >> 6, 0x003f003fu, MAGIC);
    a[2 + i] = masked_or(both, 0x003f003fu, MAGIC);
  }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT)
ccq_gemv(const u16* x, long long x_stride, const uint2* __restrict__ w, const unsigned char* __restrict__ groups,
         const float* __restrict__ scales, const float2* __restrict__ codes, const uint2* __restrict__ lines,
         const u16* __restrict__ bias, u16* y, const int* slots, const int* experts, const long long* ids, int M,
         int N, int slabs, int divisor) {
  extern __shared__ __align__(128) unsigned char memory[];  // inputs in rings, then parts of sums
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, g = lane >> 2, q = lane & 3;
  const int tile = blockIdx.x;
#if GROUPED
  let_next_start();
  wait_for_previous();
  const int expert = ids != nullptr ? (int)ids[blockIdx.y] : experts[blockIdx.y];
  if (expert < 0) return;
  w += (u64)expert * slabs * TURNS * 32;
  groups += (u64)expert * slabs * TURNS * 8;
  scales += (u64)expert * slabs * 16;
  codes += (u64)expert * slabs * 16;
  lines += (u64)expert * slabs * 16;
#endif
  const uint2* from[MT];
  const unsigned char* scales_from[MT];
  uint2 upper[MT], lower[MT];  // of a lane's two rows
  u32 by_floats = 0;
#pragma unroll
  for (int m = 0; m < MT; m++) {
    // Slabs behind the last repeat it; nothing of theirs is stored.
    const int slab = min(PAIRED ? tile + m * (slabs / 2) : tile * MT + m, slabs - 1);
    from[m] = w + ((u64)slab * TURNS + warp) * 32 + lane;
    scales_from[m] = groups + ((u64)slab * TURNS + warp) * 8 + g;
    upper[m] = lines[slab * 16 + g];
    lower[m] = lines[slab * 16 + g + 8];
  }
  uint2 held[AHEAD][MT];
  u32 held_scales[AHEAD][MT];
  const auto ask_w = [&](int i, int rounds) {
#pragma unroll
    for (int m = 0; m < MT; m++) {
      held[i][m] = load_once(from[m] + rounds * WARPS * 32);
      held_scales[i][m] = load_once(scales_from[m] + rounds * WARPS * 8);
    }
  };
#pragma unroll
  for (int i = 0; i < AHEAD; i++)
    if (warp + i * WARPS < TURNS) ask_w(i, i);
#if !GROUPED
  if (lane == 0 && ROUNDS > AHEAD) {
    // Every warp a part of what follows.
    constexpr int share = (ROUNDS - AHEAD) * 32, last = TURNS * 32;
    const int first = AHEAD * WARPS * 32 + warp * share;
#pragma unroll
    for (int m = 0; m < MT; m++)
      if (first < last) fetch_ahead(w + (u64)min(tile * MT + m, slabs - 1) * last + first, min(share, last - first) * 8);
  }
#endif
#pragma unroll
  for (int m = 0; m < MT; m++) by_floats |= (u32)__any_sync(~0u, upper[m].x == 0 || lower[m].x == 0) << m;
#if !GROUPED
  let_next_start();
  wait_for_previous();
#endif

  const u16* x_from[TILES];
  u32 present = 0;
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    const int at = slot_of(t * 8 + g, slots, ids, M);
    x_from[t] = x + (at < M ? (GROUPED ? at / divisor : at) * x_stride : 0) + warp * 64 + q * 16;
    present |= (u32)(at < M) << t;
  }
  uint4* ring = (uint4*)memory + warp * AHEAD * TILES * 64 + lane;
  const auto ask_x = [&](int i, int rounds) {
#pragma unroll
    for (int t = 0; t < TILES; t++)
      if (present >> t & 1) {
        copy_async(shared_address(ring + (i * TILES + t) * 64), x_from[t] + rounds * WARPS * 64, true);
        copy_async(shared_address(ring + (i * TILES + t) * 64 + 32), x_from[t] + rounds * WARPS * 64 + 8, true);
      }
  };
#pragma unroll
  for (int i = 0; i < AHEAD; i++) {
    if (warp + i * WARPS < TURNS) ask_x(i, i);
    commit();
  }

  float sum[MT][TILES][4] = {};
  const u32 eighth = unknown(1 << 13);
#pragma unroll 1
  for (int begin = 0; begin < ROUNDS; begin += AHEAD) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int round = begin + i;
      if (ROUNDS % AHEAD && round >= ROUNDS) break;
      if (TURNS % WARPS && warp + round * WARPS >= TURNS) break;
      await_turn();
      u32 b[TILES][8];
      float middle[TILES][4];
#pragma unroll
      for (int t = 0; t < TILES; t++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const uint4 v = ring[(i * TILES + t) * 64 + h * 32];
          b[t][h * 4] = v.x, b[t][h * 4 + 1] = v.y, b[t][h * 4 + 2] = v.z, b[t][h * 4 + 3] = v.w;
        }
        float total[4] = {};
#pragma unroll
        for (int s = 0; s < 4; s++) multiply(total, ONES, ONES, ONES, ONES, b[t][2 * s], b[t][2 * s + 1], total);
        middle[t][0] = middle[t][2] = -MIDDLE * total[0];
        middle[t][1] = middle[t][3] = -MIDDLE * total[1];
      }
#pragma unroll
      for (int m = 0; m < MT; m++) {
        const uint2 piece = held[i][m];
        u32 a[4][4];
        if (by_floats >> m & 1) {
          const int slab = min(PAIRED ? tile + m * (slabs / 2) : tile * MT + m, slabs - 1);
          const float2 maps[2] = {codes[slab * 16 + g], codes[slab * 16 + g + 8]};
#pragma unroll
          for (int s = 0; s < 4; s++)
            windows(piece, eighth, a[s], [&](u32 bytes, int i) { return code_of(bytes, s, maps[i]) << 15; });
        } else {
#pragma unroll
          for (int s = 0; s < 4; s++)
            windows(piece, eighth, a[s], [&](u32 bytes, int i) {
              const uint2 line = i ? lower[m] : upper[m];
              return __byte_perm(bytes, 0, 0x4440u | s) * line.x + line.y;
            });
        }
        const u32 both = held_scales[i][m];
        const float scale[2] = {(float)(both & 15), (float)(both >> 4)};
#pragma unroll
        for (int t = 0; t < TILES; t++) {
          float own[4];
#pragma unroll
          for (int s = 0; s < 4; s++)
            multiply(own, a[s][0], a[s][1], a[s][2], a[s][3], b[t][2 * s], b[t][2 * s + 1], s ? own : middle[t]);
#pragma unroll
          for (int e = 0; e < 4; e++) sum[m][t][e] = fmaf(own[e], scale[e / 2], sum[m][t][e]);
        }
      }
      const int next = round + AHEAD;
      if ((ROUNDS % AHEAD ? next < ROUNDS : begin + AHEAD < ROUNDS) && (TURNS % WARPS == 0 || warp + next * WARPS < TURNS)) {
        ask_w(i, AHEAD + i);
        ask_x(i, AHEAD + i);
      }
      commit();
    }
#pragma unroll
    for (int m = 0; m < MT; m++) from[m] += AHEAD * WARPS * 32, scales_from[m] += AHEAD * WARPS * 8;
#pragma unroll
    for (int t = 0; t < TILES; t++) x_from[t] += AHEAD * WARPS * 64;
  }

  __syncthreads();  // sums stand where x was
  float* part = (float*)memory + warp * MT * 16 * PITCH;
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int e = 0; e < 4; e++) part[(m * 16 + g + (e >> 1) * 8) * PITCH + t * 8 + 2 * q + (e & 1)] = sum[m][t][e];
  __syncthreads();

  const int width = PAIRED ? N / 2 : N;
  for (int e = thread; e < COLUMNS * OUT; e += WARPS * 32) {
    const int c = e % OUT, n = e / OUT, column = tile * OUT + c;
    const int at = slot_of(n, slots, ids, M);
    if (at >= M || column >= width) continue;
    const float* line = (const float*)memory + c * PITCH + n;
    float value = of_all_warps(line, MT * 16 * PITCH) * scales[column];
    if (PAIRED) {
      value = silu(value) * (of_all_warps(line + 16 * PITCH, MT * 16 * PITCH) * scales[column + width]);
    } else if (bias != nullptr) {
      value += widen(bias[column]);
    }
    y[(u64)at * width + column] = narrow(value);
  }
}
