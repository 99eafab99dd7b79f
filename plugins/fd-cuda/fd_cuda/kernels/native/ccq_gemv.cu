// y[M, N] = x[M, K] W[N, K]^T with W in the affine code of ERNIE 4.5's published 2-bit checkpoints (quant.cuh, format CCQ),
// for M <= 8 * TILES.
//
// Bound by instructions, not by bytes: two bytes become eight weights in twelve. A byte's code is a multiple of the byte, a whole
// number in 2^-16, plus an offset, in the upper half of a word, where whole numbers say what the definition's floats do;
// slabs with a row for which none do (`lines` has a zero) go by floats. Windows become half floats MIDDLE more than the
// weights, for which sums of x, a product with ones for all slabs together, make up.
// A block computes 16 * MT outputs; its WARPS warps take turns of 64 inputs. GROUPED and PAIRED as in quant_few.cu.

#include "common.cuh"
#include "quant.cuh"

#define COLUMNS (8 * TILES)
#define OUT (PAIRED ? 16 : 16 * MT)
#include "rows.cuh"

#define TURNS (WIDTH / 64)
#define ROUNDS ((TURNS + WARPS - 1) / WARPS)
#if HALF
#define MIDDLE 1056.f
#else
#define MIDDLE 160.f
#endif

// INSTRUCTIONS: emulated.h of the tests has C++ in the place of what follows.

__device__ __forceinline__ void await_turn() {
  asm volatile("cp.async.wait_group %0;" ::"n"(AHEAD - 1) : "memory");
}

// By an integer dot product, as the unit for logic and shifts has most to do; what picks a byte is read where it is used.
__constant__ u32 pick[4] = {1u, 1u << 8, 1u << 16, 1u << 24};
__device__ __forceinline__ u32 byte_of(u32 bytes, int which) {
  u32 byte;
  asm("dp4a.u32.u32 %0, %1, %2, 0;" : "=r"(byte) : "r"(bytes), "r"(pick[which]));
  return byte;
}

// END OF INSTRUCTIONS

// A turn's sums of one slab, from `middle` on. coded(bytes, s, i): the code of byte s, in the upper half, of row 8 i.
template <class Coded>
__device__ __forceinline__ void add_slab(float (&own)[TILES][4], const float (&middle)[TILES][4], const u32 (&b)[TILES][8],
                                         const uint2& piece, const Coded& coded) {
#pragma unroll
  for (int s = 0; s < 4; s += 2) {
    u32 both[2];  // codes of two bytes
#pragma unroll
    for (int i = 0; i < 2; i++)
      both[i] = __byte_perm(coded(i ? piece.y : piece.x, s, i), coded(i ? piece.y : piece.x, s + 1, i), 0x7632u);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      u32 a[4];  // MIDDLE more than the weights
#pragma unroll
      for (int n = 0; n < 4; n++) a[n] = masked_or(both[n % 2] >> (9 - 6 * h - n / 2 * 3), 0x003f003fu, MAGIC);
#pragma unroll
      for (int t = 0; t < TILES; t++)
        multiply(own[t], a[0], a[1], a[2], a[3], b[t][2 * (s + h)], b[t][2 * (s + h) + 1], s + h ? own[t] : middle[t]);
    }
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
    // Slabs after the last repeat it; nothing of theirs is stored.
    const int slab = min(PAIRED ? tile + m * (slabs / 2) : tile * MT + m, slabs - 1);
    from[m] = w + ((u64)slab * TURNS + warp) * 32 + lane;
    scales_from[m] = groups + ((u64)slab * TURNS + warp) * 8 + g;
    upper[m] = lines[slab * 16 + g];
    lower[m] = lines[slab * 16 + g + 8];
  }
  // What a thread's results are multiplied with, asked for here: at the end it would be waited for.
  const int width = PAIRED ? N / 2 : N, own_column = min(tile * OUT + thread % OUT, width - 1);
  const float own_scale = load_once(scales + own_column), other_scale = PAIRED ? load_once(scales + own_column + width) : 0.f;

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
#pragma unroll
  for (int m = 0; m < MT; m++) by_floats |= (u32)__any_sync(~0u, upper[m].x == 0 || lower[m].x == 0) << m;
#if !GROUPED
  let_next_start();
  wait_for_previous();
#endif

  // Eight lanes copy a row's 128 bytes of a turn, in 16-byte pieces that rows exchange: banks.
  const u16* x_from[2 * TILES];
  u32 present = 0;
#pragma unroll
  for (int i = 0; i < 2 * TILES; i++) {
    const int at = slot_of(i * 4 + (lane >> 3), slots, ids, M);
    x_from[i] = x + (at < M ? (GROUPED ? at / divisor : at) * x_stride : 0) + warp * 64 + (lane & 7) * 8;
    present |= (u32)(at < M) << i;
  }
  unsigned char* ring = memory + warp * AHEAD * TILES * 1024;
  const u32 own = shared_address(ring) + (lane >> 3) * 128;
  const u32 place[2] = {own + (((lane & 7) ^ (lane >> 3)) << 4), own + 512 + (((lane & 7) ^ (4 + (lane >> 3))) << 4)};
  const auto ask_x = [&](int i, int rounds) {
#pragma unroll
    for (int j = 0; j < 2 * TILES; j++)
      if (present >> j & 1) copy_async(place[j & 1] + (i * TILES + j / 2) * 1024, x_from[j] + rounds * WARPS * 64, true);
  };
#pragma unroll
  for (int i = 0; i < AHEAD; i++) {
    if (warp + i * WARPS < TURNS) ask_x(i, i);
    commit();
  }
  const unsigned char* reads[2] = {ring + g * 128 + ((2 * q ^ g) << 4), ring + g * 128 + ((2 * q + 1 ^ g) << 4)};

  float sum[MT][TILES][4] = {};
#pragma unroll 1
  for (int begin = 0; begin < ROUNDS; begin += AHEAD) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int round = begin + i;
      if (ROUNDS % AHEAD && round >= ROUNDS) break;
      if (TURNS % WARPS && warp + round * WARPS >= TURNS) break;
      await_turn();
      __syncwarp();
      u32 b[TILES][8];
      float middle[TILES][4];
#pragma unroll
      for (int t = 0; t < TILES; t++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const uint4 v = *(const uint4*)(reads[h] + (i * TILES + t) * 1024);
          // Two bytes' first inputs, second ones, third, fourth.
          b[t][h * 4] = __byte_perm(v.x, v.z, 0x5410u), b[t][h * 4 + 1] = __byte_perm(v.x, v.z, 0x7632u);
          b[t][h * 4 + 2] = __byte_perm(v.y, v.w, 0x5410u), b[t][h * 4 + 3] = __byte_perm(v.y, v.w, 0x7632u);
        }
        float total[4] = {};
#pragma unroll
        for (int s = 0; s < 4; s++) multiply(total, ONES, ONES, ONES, ONES, b[t][2 * s], b[t][2 * s + 1], total);
        middle[t][0] = middle[t][2] = -MIDDLE * total[0];
        middle[t][1] = middle[t][3] = -MIDDLE * total[1];
      }
      const auto add = [&](int m, bool is_by_floats) {
        const uint2 piece = held[i][m];
        float own[TILES][4];
        if (is_by_floats) {
          const int slab = min(PAIRED ? tile + m * (slabs / 2) : tile * MT + m, slabs - 1);
          const float2 maps[2] = {codes[slab * 16 + g], codes[slab * 16 + g + 8]};
          add_slab(own, middle, b, piece, [&](u32 bytes, int s, int i) { return code_of(bytes, s, maps[i]) << 15; });
        } else {
          add_slab(own, middle, b, piece, [&](u32 bytes, int s, int i) {
            const uint2 line = i ? lower[m] : upper[m];
            return byte_of(bytes, s) * line.x + line.y;
          });
        }
        const u32 both = held_scales[i][m];
        const float scale[2] = {(float)(both & 15), (float)(both >> 4)};
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
          for (int e = 0; e < 4; e++) sum[m][t][e] = fmaf(own[t][e], scale[e / 2], sum[m][t][e]);
      };
      if (by_floats == 0) {
#pragma unroll
        for (int m = 0; m < MT; m++) add(m, false);
      } else {
#pragma unroll
        for (int m = 0; m < MT; m++) add(m, by_floats >> m & 1);
      }
      const int next = round + AHEAD;
      if ((ROUNDS % AHEAD ? next < ROUNDS : begin + AHEAD < ROUNDS) && (TURNS % WARPS == 0 || warp + next * WARPS < TURNS)) {
        ask_w(i, AHEAD + i);
        __syncwarp();
        ask_x(i, AHEAD + i);
      }
      commit();
    }
#pragma unroll
    for (int m = 0; m < MT; m++) from[m] += AHEAD * WARPS * 32, scales_from[m] += AHEAD * WARPS * 8;
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++) x_from[i] += AHEAD * WARPS * 64;
  }

  __syncthreads();  // sums stand where x was
  store_sums((float*)memory, sum, warp, lane, GROUPED ? COLUMNS : M - (int)blockIdx.y * COLUMNS);
  __syncthreads();
  store_results((const float*)memory, nullptr, own_scale, other_scale, bias, y, tile * OUT, width, M, slots, ids, divisor);
}
