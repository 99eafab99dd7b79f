// y[M, N] = x[M, K] W[N, K]^T with packed W, for tens of rows and few outputs.
//
// wgmma with W from registers: the slabs of quant.cuh are what its lanes hold, so weights go from memory to
// registers AHEAD turns of 64 inputs ahead and are unpacked while the matrix units work on the slab
// before. x is the other operand: BN rows by 64 inputs in shared memory, by cp.async, STAGES turns.
// A block computes 64 * GROUPS outputs of BN rows; the SPLIT blocks of a cluster divide K (wide.cuh).
// A row of x comes out the same whatever M is.

#include "common.cuh"
#include "quant.cuh"
#include "wide.cuh"

#define THREADS (GROUPS * 128)
#define OUT (GROUPS * 64)
#define AHEAD 8
#define STAGE (BN * 128)
#define STEP (THREADS / 8)  // rows between pieces of 16 bytes that one thread asks for
#define PIECES_X ((BN + STEP - 1) / STEP)
#define WHOLE (BN % STEP == 0)  // every thread has all of its pieces

// INSTRUCTIONS: emulated.h of the tests has C++ in the place of what follows.

__device__ __forceinline__ void multiply(float* d, const u32* a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned." SIZE "k16.f32." TYPE "." TYPE " " D_LIST ", " ONE_SHARED ", 1, 1, 1, 0;"
               : D_REGS("+f", d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// END OF INSTRUCTIONS

__device__ __forceinline__ void unpack_slab(u32 (*a)[4], const Slab& held, const Group& group) {
#pragma unroll
  for (int s = 0; s < 4; s++) {
    unpack(held, s, Code{}, a[s]);
    apply_group(a[s], group);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
quant_gemm(const uint4* x, int x_stride, const uint4* __restrict__ w, const u32* __restrict__ groups,
           const float* __restrict__ scales, const float* x_scales, const u16* __restrict__ bias, u16* y,
           int M, int N, int K, int slabs, int turns, int per_group) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, rank = blockIdx.z;
  const int tile = blockIdx.x, first_row = blockIdx.y * BN;
  const int share = (turns + SPLIT - 1) / SPLIT;
  const int first = min(rank * share, turns), count = min(turns - first, share);
  const int num_groups = (turns + per_group - 1) / per_group;
  const u32 base = (shared_address(memory) + 1023) & ~1023u;
  unsigned char* tiles = memory + (base - shared_address(memory));
  float* parts = (float*)(tiles + STAGES * STAGE);
  announce_start();
  // A slab after the last repeats it; nothing of its is stored.
  const int slab = min(tile * GROUPS * 4 + warp, slabs - 1);
  w += ((u64)slab * turns + first) * 32 * PIECES + lane;
  groups += (u64)slab * num_groups * 8 * SCALED + (lane >> 2);
  // Scales are counted from the first turn of all, slabs from the first of the share.
  Slab held[AHEAD];
  Group held_groups[AHEAD];
  const auto ask = [&](int i, int t) {
#pragma unroll
    for (int p = 0; p < PIECES; p++) held[i].piece[p] = load_once(w + (t * PIECES + p) * 32);
    held_groups[i] = load_group(groups, (first + t) / per_group);
  };
#pragma unroll
  for (int i = 0; i < AHEAD; i++)
    if (i < count) ask(i, i);
  let_next_start();
  wait_for_previous();

  u32 x_from[PIECES_X], present = 0, place;
  {
    const int r = thread >> 3, c = thread & 7;
    place = r * 128 + ((c ^ (r & 7)) << 4);
#pragma unroll
    for (int i = 0; i < PIECES_X; i++) {
      const int row = r + i * STEP;
      const int at = WHOLE || row < BN ? first_row + row : M;
      const bool is_there = at < M;
      x_from[i] = is_there ? (u32)at * x_stride + first * 8 + c : 0;
      present |= (u32)is_there << i;
    }
  }
  const auto ask_x = [&](int t) {
    const u32 stage = base + (t % STAGES) * STAGE + place;
    const bool inside = (first + t) * 64 + (thread & 7) * 8 < K;
#pragma unroll
    for (int i = 0; i < PIECES_X; i++) {
      const bool is_there = inside && (present >> i & 1);
      if (WHOLE || (thread >> 3) + i * STEP < BN)
        copy_async(stage + i * STEP * 128, x + (is_there ? x_from[i] + t * 8 : 0), is_there);
    }
  };
#pragma unroll
  for (int s = 0; s < STAGES - 2; s++) {
    if (s < count) ask_x(s);
    commit();
  }

  float sum[1][BN / 2];
#pragma unroll
  for (int i = 0; i < BN / 2; i++) sum[0][i] = 0.f;
  fence_registers(sum[0]);
  u32 a[2][4][4];  // of the slab that is multiplied, and of the next one
  if (count > 0) unpack_slab(a[0], held[0], held_groups[0]);
  for (int begin = 0; begin < count; begin += AHEAD) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int t = begin + i;
      if (t >= count) break;
      await_copies<STAGES - 3>();
      __syncthreads();
      // All have finished with the turn before the previous one: its place is free.
      if (t + STAGES - 2 < count) ask_x(t + STAGES - 2);
      commit();
      const u64 tile_x = descriptor(base + (t % STAGES) * STAGE);
      begin_products();
#pragma unroll
      for (int s = 0; s < 4; s++) multiply(sum[0], a[i & 1][s], tile_x + s * 2);
      end_products();
      if (t + AHEAD < count) ask(i, t + AHEAD);
      await_products<1>();  // of the slab before: its operands are free
      if (t + 1 < count) unpack_slab(a[(i + 1) & 1], held[(i + 1) % AHEAD], held_groups[(i + 1) % AHEAD]);
    }
  }
  await_products<0>();
  fence_registers(sum[0]);

  await_start();
  const Ending ending{parts, scales, x_scales, nullptr, bias, y, nullptr, 0, first_row, rank, M, N};
  const int column = tile * OUT + warp * 16;
  finish<THREADS, true>(ending, find_factors<THREADS, 1>(ending, column, thread), sum, column, thread);
}
