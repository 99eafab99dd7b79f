// tet_gemv.cu's product for tens of rows an expert, on the matrix units of Hopper.
//
// A warp turns the strands of 64 outputs into operands of wgmma (tet_gemv.cu says how), four accumulators of which are
// its outputs; the four warps of a group share x: BN rows by 64 inputs, 128 bytes, in shared memory in the 128-byte
// swizzle, by cp.async. So that operands find each other, 32 inputs of x lie pair by pair: the first pair of every
// strand, then the second ... (ORDER of tet_rotate.cu). PAIRED: two warps of a group have gate rows, two the up
// rows that belong to them. Rows are grouped by expert.

#include "common.cuh"
#include "trellis.cuh"
#include "wide.cuh"

#define THREADS (GROUPS * 128)
#define OUT (GROUPS * (PAIRED ? 128 : 256))
#define STAGE (BN * 128)
#define PITCH (GROUPS * 256 + 4)
#define PIECES ((BN * 8 + THREADS - 1) / THREADS)

// INSTRUCTIONS: emulated.h of the tests has C++ in the place of what follows.

__device__ __forceinline__ void multiply(int* d, u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned." SIZE "k32.s32.u8.s8 " D_LIST ", " ONE_SHARED ", 1;"
               : D_REGS("+r", d) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}

// END OF INSTRUCTIONS

extern "C" __global__ void __launch_bounds__(THREADS)
tet_gemm(const uint4* x, const float* x_scales, const int* x_sums, const uint4* __restrict__ w,
         const float* __restrict__ scales, u16* y, const int* slots, const int* experts, int M, int N, int tiles,
         int turns, int divisor) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, g = lane >> 2, j = lane & 3;
  const u32 base = (shared_address(memory) + 1023) & ~1023u;
  float* parts = (float*)(memory + (base - shared_address(memory)));
  let_next_start();
  wait_for_previous();
  const int expert = experts[blockIdx.y];
  if (expert < 0) return;
  scales += (u64)expert * tiles * 64;
  const int half = warp >> 1 & 1;  // of a pair of tiles
  const int own = PAIRED ? (blockIdx.x * GROUPS + (warp >> 2)) * 2 + (warp & 1) : blockIdx.x * GROUPS * 4 + warp;
  // Tiles behind the last repeat it; nothing of theirs is stored.
  const int tile = PAIRED ? min(own, tiles / 2 - 1) + half * (tiles / 2) : min(own, tiles - 1);
  const uint4* from = w + ((u64)expert * tiles + tile) * turns * 64 + j * 8 + g;
  uint4 held[AHEAD][2];
#pragma unroll
  for (int i = 0; i < AHEAD; i++)
    if (i < turns) {
      held[i][0] = load_once(from + i * 64);
      held[i][1] = load_once(from + i * 64 + 32);
    }

  const uint4* x_from[PIECES];
  u32 present = 0;
  const int first_slot = blockIdx.y * BN;
#pragma unroll
  for (int i = 0; i < PIECES; i++) {
    const int row = (thread >> 3) + i * (THREADS / 8);
    const int at = row < BN ? slots[first_slot + row] : M;
    x_from[i] = x + (at < M ? (u64)(at / divisor) * turns * 8 : 0) + (thread & 7);
    present |= (u32)(at < M) << i;
  }
  const u32 place = (thread >> 3) * 128 + (((thread & 7) ^ (thread >> 3 & 7)) << 4);
  const auto ask_x = [&](int t) {
#pragma unroll
    for (int i = 0; i < PIECES; i++)
      if (present >> i & 1)
        copy_async(base + t % STAGES * STAGE + place + i * (THREADS / 8) * 128, x_from[i] + t * 8, true);
  };
#pragma unroll
  for (int t = 0; t < STAGES - 2; t++) {
    if (t < turns) ask_x(t);
    commit();
  }

  int sum[4][BN / 2];
#pragma unroll
  for (int n = 0; n < 4; n++) {
#pragma unroll
    for (int i = 0; i < BN / 2; i++) sum[n][i] = 0;
    fence_registers(sum[n]);
  }
  u32 p[2][4][8];
  for (int begin = 0; begin < turns; begin += AHEAD) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int t = begin + i;
      if (t >= turns) break;
      await_copies<STAGES - 3>();
      __syncthreads();
      // All have finished with the turn before the previous one.
      if (t + STAGES - 2 < turns) ask_x(t + STAGES - 2);
      commit();
      const u64 tile_x = descriptor(base + t % STAGES * STAGE);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const uint4 v = held[i][h];
        const u32 words[5] = {__shfl_sync(~0u, v.w, ((g + 7) & 7) * 4 + j), v.x, v.y, v.z, v.w};
#pragma unroll
        for (int n = 0; n < 4; n++) products(words[n], words[n + 1], p[h][n]);
        if (t + AHEAD < turns) held[i][h] = load_once(from + (t + AHEAD) * 64 + h * 32);
        begin_products();
#pragma unroll
        for (int n = 0; n < 4; n++) {
          const u32* a = p[h][n];
          multiply(sum[n], a[0], a[4], a[1], a[5], tile_x + h * 4);
          multiply(sum[n], a[2], a[6], a[3], a[7], tile_x + h * 4 + 2);
        }
        end_products();
        await_products<1>();
      }
    }
  }
  await_products<0>();
#pragma unroll
  for (int n = 0; n < 4; n++) fence_registers(sum[n]);
  await_copies<0>();
  __syncthreads();  // parts stand where tiles were
#pragma unroll
  for (int n = 0; n < 4; n++)
#pragma unroll
    for (int i = 0; i < BN / 2; i++)
      parts[(i / 4 * 8 + j * 2 + (i & 1)) * PITCH + warp * 64 + g * 8 + n * 2 + (i >> 1 & 1)] = (float)sum[n][i];
  __syncthreads();

  const int width = PAIRED ? N / 2 : N;
  for (int e = thread; e < BN * OUT; e += THREADS) {
    const int c = e % OUT, n = e / OUT, column = blockIdx.x * OUT + c, at = slots[first_slot + n];
    if (at >= M || column >= width) continue;
    const int row = at / divisor;
    const float offset = 127.5f * x_sums[row], x_scale = x_scales[row];
    const float* line = parts + n * PITCH + (PAIRED ? c / 128 * 256 + c % 128 : c);
    float value = (line[0] - offset) * (scales[column] * x_scale);
    if (PAIRED) value = silu(value) * ((line[128] - offset) * (scales[column + width] * x_scale));
    y[(u64)at * width + column] = narrow(value);
  }
}
