// tet_gemv.cu's product for tens of rows, of all or an expert, on the matrix units of Hopper.
//
// A warp turns the strands of 64 outputs into operands of wgmma (tet_gemv.cu says how), four accumulators of which are
// its outputs; the four warps of a block share x: BN rows by 64 inputs, 128 bytes, in shared memory in the 128-byte
// swizzle, by cp.async. So that operands find each other, 32 inputs of x lie pair by pair: the first pair of every
// strand, then the second ... (ORDER of rotate.cuh). The SPLIT blocks of a cluster divide K. PAIRED: two warps of a block
// have gate rows, two the up rows that belong to them. slots and experts: rows are grouped by expert.

#include "common.cuh"
#include "trellis.cuh"
#define narrow_y narrow  // results are in the dtype of x
#define widen_y widen
#include "wide.cuh"

#define THREADS 128
#define OUT (PAIRED ? 128 : 256)
#define STAGE (BN * 128)
#define PITCH (256 + 4)
#define PIECES ((BN * 8 + THREADS - 1) / THREADS)

// INSTRUCTIONS: emulated.h of the tests has C++ in the place of what follows.

__device__ __forceinline__ void multiply(int* d, u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned." SIZE "k32.s32.u8.s8 " D_LIST ", " ONE_SHARED ", 1;"
               : D_REGS("+r", d) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}

// END OF INSTRUCTIONS

extern "C" __global__ void __launch_bounds__(THREADS)
tet_gemm(const uint4* x, const float* x_scales, const int* x_sums, const uint4* __restrict__ w,
         const float* __restrict__ scales, const u16* __restrict__ bias, u16* y, const int* slots, const int* experts,
         int M, int N, int tiles, int turns, int divisor) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, g = lane >> 2, j = lane & 3;
  const int rank = blockIdx.z, share = (turns + SPLIT - 1) / SPLIT, first_turn = rank * share;
  const int own_turns = min(share, turns - first_turn);  // none or less where K does not suffice
  const u32 base = (shared_address(memory) + 1023) & ~1023u;
  int* parts = (int*)(memory + (base - shared_address(memory)) + (SPLIT > 1 ? STAGES * STAGE : 0));
  int expert = 0;
  if (experts != nullptr) {
    let_next_start();
    wait_for_previous();
    expert = experts[blockIdx.y];
    if (expert < 0) return;
  }
  announce_start();
  scales += (u64)expert * tiles * 64;
  const int half = warp >> 1 & 1;  // of a pair of tiles
  const int own = PAIRED ? blockIdx.x * 2 + (warp & 1) : blockIdx.x * 4 + warp;
  // Tiles behind the last repeat it; nothing of theirs is stored.
  const int tile = PAIRED ? min(own, tiles / 2 - 1) + half * (tiles / 2) : min(own, tiles - 1);
  const uint4* from = w + (((u64)expert * tiles + tile) * turns + first_turn) * 64 + j * 8 + g;
  uint4 held[AHEAD][2];
#pragma unroll
  for (int i = 0; i < AHEAD; i++)
    if (i < own_turns) {
      held[i][0] = load_once(from + i * 64);
      held[i][1] = load_once(from + i * 64 + 32);
    }
  if (lane == 0 && own_turns > AHEAD) fetch_ahead(from + AHEAD * 64, (own_turns - AHEAD) * 1024);
  if (experts == nullptr) {
    let_next_start();
    wait_for_previous();
  }

  const uint4* x_from[PIECES];
  u32 present = 0;
  const int first_slot = blockIdx.y * BN;
#pragma unroll
  for (int i = 0; i < PIECES; i++) {
    const int row = (thread >> 3) + i * (THREADS / 8);
    const int at = row >= BN ? M : slots != nullptr ? slots[first_slot + row] : first_slot + row;
    x_from[i] = x + (at < M ? (u64)(at / divisor) * turns * 8 : 0) + first_turn * 8 + (thread & 7);
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
    if (t < own_turns) ask_x(t);
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
  for (int begin = 0; begin < own_turns; begin += AHEAD) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int t = begin + i;
      if (t >= own_turns) break;
      await_copies<STAGES - 3>();
      __syncthreads();
      // All have finished with the turn before the previous one.
      if (t + STAGES - 2 < own_turns) ask_x(t + STAGES - 2);
      commit();
      const u64 tile_x = descriptor(base + t % STAGES * STAGE);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const uint4 v = held[i][h];
        const u32 words[4] = {v.x, v.y, v.z, v.w};
        Before before = word_before(v, lane);
#pragma unroll
        for (int n = 0; n < 4; n++) products(before, words[n], p[h][n]);
        if (t + AHEAD < own_turns) held[i][h] = load_once(from + (t + AHEAD) * 64 + h * 32);
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
#if SPLIT > 1
  await_start();
#else
  __syncthreads();  // parts stand where tiles were
#endif
#pragma unroll
  for (int n = 0; n < 4; n++)
#pragma unroll
    for (int i = 0; i < BN / 2; i++) {
      const int row = i / 4 * 8 + j * 2 + (i & 1), column = warp * 64 + g * 8 + n * 2 + (i >> 1 & 1);
      int* to = parts + (rank * SHARE + row % SHARE) * PITCH + column;
      send(at_rank(shared_address(to), row / SHARE), __int_as_float(sum[n][i]));
    }
  meet();

  const int width = PAIRED ? N / 2 : N;
  for (int e = thread; e < SHARE * OUT; e += THREADS) {
    const int c = e % OUT, n = e / OUT, column = blockIdx.x * OUT + c, slot = first_slot + rank * SHARE + n;
    const int at = slots != nullptr ? slots[slot] : slot;
    if (at >= M || column >= width) continue;
    const int row = at / divisor;
    const float offset = 127.5f * x_sums[row], x_scale = x_scales[row];
    const int* line = parts + n * PITCH + c;
    int total = 0, other = 0;
#pragma unroll
    for (int s = 0; s < SPLIT; s++) {
      total += line[s * SHARE * PITCH];
      if (PAIRED) other += line[s * SHARE * PITCH + 128];
    }
    float value = (total - offset) * (scales[column] * x_scale);
    if (PAIRED) value = silu(value) * ((other - offset) * (scales[column + width] * x_scale));
    else if (bias != nullptr) value += widen(bias[column]);
    y[(u64)at * width + column] = narrow(value);
  }
}
