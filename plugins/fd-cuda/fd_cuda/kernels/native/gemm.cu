// y[M, N] = x[M, K] W[N, K]^T for tens to hundreds of rows: decode steps of many sequences.
//
// wgmma with W from shared memory. A block computes BM x BN over its share of K; the SPLIT blocks of a
// cluster divide K and send their parts to each other's shared memory, where each adds up BM / SPLIT rows
// in a fixed order. Tiles arrive by cp.async in the 128-byte swizzle; those of W are asked for before the
// kernel waits for the one before it. RESIDENT: the whole share fits into STAGES tiles, so nothing is ever
// asked for again.
// Rows of y and of the residual are whole pieces of 8 bytes.
// Loops stay loops: a block goes through most of this code once, and it was slower unrolled (NOTES.md).
// GATED: the first half of a tile are gate rows, the second the up rows that belong to them.
// A row of x comes out the same whatever M is.
// LORA: with what adapters add to each row, see adapted.cuh. DEFERRING: without it, for a norm that reads x as soon as
// it starts, see row_sums.cu.

#include "common.cuh"
#include "cluster.cuh"

#define BK 64
#ifndef LORA
#define LORA 0
#endif
#define THREADS (BM * 2)
#define TILE_X (BM * 128)
#define TILE_W (BN * 128)
#define STAGE (TILE_X + TILE_W)
#define PITCH (BN + 4)
#define ROWS (BM / SPLIT)
#define W_PIECES (BN * 8 / THREADS)  // of 16 bytes, of a tile, that one thread asks for
#define X_PIECES (BM * 8 / THREADS)
#define ASKED (RESIDENT ? STAGES : STAGES - 2)

__device__ __forceinline__ u32 shared_address(const void* p) {
  return (u32)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ void copy_async(u32 to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(inside ? 16 : 0) : "memory");
}

__device__ __forceinline__ u64 descriptor(u32 address) {
  // K-major, 128-byte swizzle, 1024 bytes between groups of eight rows.
  return (u64)((address & 0x3ffff) >> 4) | ((u64)1 << 16) | ((u64)(1024 >> 4) << 32) | ((u64)1 << 62);
}

__device__ __forceinline__ void fence_registers(float* d) {
#pragma unroll
  for (int i = 0; i < BN / 2; i++) asm volatile("" : "+f"(d[i])::"memory");
}

#define R4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define R16(d, i) R4(d, i), R4(d, i + 4), R4(d, i + 8), R4(d, i + 12)
#if BN == 128
#define D_LIST "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23," \
  "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
  "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}"
#define D_REGS(d) R16(d, 0), R16(d, 16), R16(d, 32), R16(d, 48)
#define SHAPE "m64n128k16"
#define TAIL "%64, %65, 1, 1, 1, 0, 0;"
#elif BN == 64
#define D_LIST "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23," \
  "%24,%25,%26,%27,%28,%29,%30,%31}"
#define D_REGS(d) R16(d, 0), R16(d, 16)
#define SHAPE "m64n64k16"
#define TAIL "%32, %33, 1, 1, 1, 0, 0;"
#elif BN == 32
#define D_LIST "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}"
#define D_REGS(d) R16(d, 0)
#define SHAPE "m64n32k16"
#define TAIL "%16, %17, 1, 1, 1, 0, 0;"
#endif

__device__ __forceinline__ void multiply(float* d, u64 a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned." SHAPE ".f32." TYPE "." TYPE " " D_LIST ", " TAIL
               : D_REGS(d) : "l"(a), "l"(b));
}

#if SPLIT > 1
#define STORE "st.shared::cluster"
#else
#define STORE "st.shared"
#endif

__device__ __forceinline__ void send(u32 address, float a, float b) {
  asm volatile(STORE ".v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(a), "f"(b) : "memory");
}

// One thread's pieces of a tile: where they come from and where they go.
struct Pieces {
  const u16 *w[W_PIECES], *x[X_PIECES];
  u32 place;  // of the first piece in a tile; the next is THREADS / 8 rows after it
  u32 w_inside, x_inside;  // a bit each
};

__device__ __forceinline__ void ask_for_weights(const Pieces& p, u32 tile, int k) {
#pragma unroll
  for (int i = 0; i < W_PIECES; i++)
    copy_async(tile + TILE_X + p.place + i * (THREADS / 8) * 128, p.w[i] + k, p.w_inside >> i & 1);
}

__device__ __forceinline__ void ask_for_inputs(const Pieces& p, u32 tile, int k) {
#pragma unroll
  for (int i = 0; i < X_PIECES; i++)
    copy_async(tile + p.place + i * (THREADS / 8) * 128, p.x[i] + k, p.x_inside >> i & 1);
}

// Multiply one tile; the one before it is finished afterwards.
__device__ __forceinline__ void multiply_tile(float* sum, u32 tile, int warp) {
  const u64 tile_w = descriptor(tile + TILE_X), tile_x = descriptor(tile + (warp >> 2) * 64 * 128);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int s = 0; s < 4; s++) multiply(sum, tile_x + s * 2, tile_w + s * 2);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
}

#if LORA
#include "adapted.cuh"
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
gemm(const u16* __restrict__ x, long long x_stride, const u16* __restrict__ w, const u16* __restrict__ bias,
     const u16* residual, u16* y, int M, int N, int K
#if LORA
     , const __grid_constant__ Adapters adapters
#endif
     ) {
  extern __shared__ __align__(1024) unsigned char memory[];
  constexpr int OUT = EPILOGUE == GATED ? BN / 2 : BN;
  const int width = EPILOGUE == GATED ? N / 2 : N;
  const int tiles_m = (M + BM - 1) / BM, rank = blockIdx.z, all = K / BK;
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  const int nth = blockIdx.x, share = (all + SPLIT - 1) / SPLIT;
  const int first_row = nth % tiles_m * BM, first_column = nth / tiles_m * OUT;
  const int begin = min(rank * share, all), count = min(all - begin, share);

  // Tiles, then the parts that the cluster sends here.
  const u32 base = (shared_address(memory) + 1023) & ~1023u;
  unsigned char* tiles = memory + (base - shared_address(memory));
  float* parts = (float*)(tiles + (SPLIT > 1 ? STAGES * STAGE : 0));

  Pieces p;
  {
    const int r = thread >> 3, c = thread & 7;
    p.place = r * 128 + ((c ^ (r & 7)) << 4);
    p.w_inside = p.x_inside = 0;
#pragma unroll
    for (int i = 0; i < W_PIECES; i++) {
      const int row = r + i * (THREADS / 8);
      const int n = first_column + (EPILOGUE == GATED ? row % (BN / 2) : row);
      const bool inside = n < width;
      const u64 at = inside ? n + (EPILOGUE == GATED && row >= BN / 2 ? N / 2 : 0) : 0;
      p.w[i] = w + at * K + begin * BK + c * 8;
      p.w_inside |= inside << i;
    }
#pragma unroll
    for (int i = 0; i < X_PIECES; i++) {
      const int m = first_row + r + i * (THREADS / 8);
      p.x[i] = x + (u64)(m < M ? m : 0) * x_stride + begin * BK + c * 8;
      p.x_inside |= (m < M) << i;
    }
  }
  announce_start();
#if LORA
  const u32 b = base + STAGES * STAGE + (SPLIT > 1 ? BM * PITCH * 4 : 0);
  ask_for_b(adapters, b, first_column, width, N, rank);
#endif
#pragma unroll 1
  for (int s = 0; s < min(ASKED, count); s++) ask_for_weights(p, base + s * STAGE, s * BK);
#if DEFERRING
  wait_for_previous();
  let_next_start();
#else
  let_next_start();
  wait_for_previous();
#endif
#if LORA
  Inner inner;
  inner.ask(adapters, first_column, first_row, M);
#endif
#pragma unroll 1
  for (int s = 0; s < ASKED; s++) {
    if (s < count) ask_for_inputs(p, base + s * STAGE, s * BK);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  // What this thread will finish: four columns each. Their residuals are asked for now.
  constexpr int QUADS = OUT / 4, TURNS = (ROWS * QUADS + THREADS - 1) / THREADS;
#if EPILOGUE == ADD
  uint2 addends[TURNS];
#pragma unroll
  for (int i = 0; i < TURNS; i++) {
    const int e = i * THREADS + thread, m = first_row + rank * ROWS + e / QUADS;
    const int column = first_column + (e % QUADS) * 4;
    addends[i] = make_uint2(0, 0);
    if (e < ROWS * QUADS && m < M) {
      const u16* from = residual + (u64)m * width + column;
      if (column < width) addends[i] = *(const uint2*)from;
    }
  }
#endif

  float sum[BN / 2];
#pragma unroll
  for (int i = 0; i < BN / 2; i++) sum[i] = 0.f;
#if LORA
  inner.take(adapters, first_column, first_row, M);
  asm volatile("cp.async.wait_group %0;" ::"n"(ASKED - 1) : "memory");
  __syncthreads();
  inner.multiply_b(sum, b, rank);
#endif
  fence_registers(sum);
#pragma unroll 1
  for (int t = 0; t < count; t++) {
    asm volatile("cp.async.wait_group %0;" ::"n"(ASKED - 1) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    // All have finished with the tile before the previous one.
    const int next = t + STAGES - 2;
    if (!RESIDENT && next < count) {
      const u32 tile = base + (next % STAGES) * STAGE;
      ask_for_weights(p, tile, next * BK);
      ask_for_inputs(p, tile, next * BK);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    multiply_tile(sum, base + (t % STAGES) * STAGE, warp);
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  fence_registers(sum);

  const int r = warp * 16 + (lane >> 2);

  await_start();
#if SPLIT == 1
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();  // parts stand where tiles were
#endif
  // Every row goes to the block that finishes it: row r of rank d is there row (own rank, r % ROWS).
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = r + half * 8;
    const u32 line = shared_address(parts + (rank * ROWS + row % ROWS) * PITCH);
    const u32 to = at_rank(line, row / ROWS);
#pragma unroll
    for (int j = 0; j < BN / 8; j++)
      send(to + (j * 8 + (lane & 3) * 2) * 4, sum[j * 4 + half * 2], sum[j * 4 + half * 2 + 1]);
  }
  meet();

  constexpr int AT_ONCE = EPILOGUE == ADD ? TURNS : 1;  // residuals are in registers
#pragma unroll AT_ONCE
  for (int i = 0; i < TURNS; i++) {
    const int e = i * THREADS + thread;
    if (TURNS * THREADS > ROWS * QUADS && e >= ROWS * QUADS) break;
    const int row = e / QUADS, c = (e % QUADS) * 4;
    const int m = first_row + rank * ROWS + row, column = first_column + c;
    if (m >= M) break;
    float v[4] = {0.f, 0.f, 0.f, 0.f}, u[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int s = 0; s < SPLIT; s++) {
      const float4 f = *(const float4*)(parts + (s * ROWS + row) * PITCH + c);
      v[0] += f.x; v[1] += f.y; v[2] += f.z; v[3] += f.w;
      if (EPILOGUE == GATED) {
        const float4 h = *(const float4*)(parts + (s * ROWS + row) * PITCH + BN / 2 + c);
        u[0] += h.x; u[1] += h.y; u[2] += h.z; u[3] += h.w;
      }
    }
    if (bias != nullptr) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const bool inside = column + j < width;
        v[j] += inside ? widen(bias[column + j]) : 0.f;
        if (EPILOGUE == GATED) u[j] += inside ? widen(bias[column + j + N / 2]) : 0.f;
      }
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (EPILOGUE == GATED) v[j] = silu(v[j]) * u[j];
#if EPILOGUE == ADD
      const u32 pair = j < 2 ? addends[i].x : addends[i].y;
      v[j] += j % 2 ? high(pair) : low(pair);
#endif
    }
    u16* to = y + (u64)m * width + column;
    if (column < width) *(uint2*)to = make_uint2(pack(v[0], v[1]), pack(v[2], v[3]));
  }
}
