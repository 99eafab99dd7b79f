// y[M, N] = x[M, K] W[N, K]^T for tens to hundreds of rows: decode steps of many sequences.
//
// wgmma with W from shared memory. A block computes BM x BN over its share of K; the SPLIT blocks of a
// cluster divide K and send their parts to each other's shared memory, where each adds up BM / SPLIT rows
// in a fixed order. Tiles arrive by cp.async in the 128-byte swizzle; those of W are asked for before the
// kernel waits for the one before it. RESIDENT: the whole share fits into STAGES tiles, so nothing is ever
// asked for again.
// GATED: the first half of a tile are gate rows, the second the up rows that belong to them.
// A row of x comes out the same whatever M is.
// LORA 1: the first blocks multiply x with the first halves A of all adapters, over a small part of K each, so
// that they end early. In the others a second group of warps waits for these sums and fetches, while the
// first one multiplies, what its rows need of them and of the second halves B. Blocks that make sums are the
// first to be given a place, and wait for nobody.
// LORA 2: A x of each row is there, left by an earlier launch. B of all adapters is in shared memory before the
// tiles are multiplied, and a row's own is chosen by zeros in the places of the others.

#include "common.cuh"
#include "cluster.cuh"

#define BK 64
#ifndef LORA
#define LORA 0
#endif
#define THREADS (BM * 2)  // that multiply
#define ALL (LORA == 1 ? THREADS + HELPERS : THREADS)
#define HELPERS 128
#define TILE_X (BM * 128)
#define TILE_W (BN * 128)
#define STAGE (TILE_X + TILE_W)
#define PITCH (BN + 4)
#define ROWS (BM / SPLIT)
#define W_PIECES (BN * 8 / THREADS)  // of 16 bytes, of a tile, that one thread asks for
#define X_PIECES (BM * 8 / THREADS)
#define ASKED (RESIDENT ? STAGES : STAGES - 2)

// Of those that multiply.
__device__ __forceinline__ void sync_group() {
#if LORA == 1
  asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
#else
  __syncthreads();
#endif
}

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
#define EACH (PARTS * RANK)  // rows of an adapter's A

struct Adapters {
  const u16 *a, *b;  // [SLOTS, EACH, K], [SLOTS, N, RANK]
  const int* slots;  // of the rows; -1: none
  float* inner;      // [DEPTHS, M, EACH]: A x of each row's own adapter, over parts of K
  int* meeting;      // zeros: blocks that have left sums there, and blocks that have seen all of them
  int sums;          // blocks that make sums, along x
  int end0, end1;    // first output of the next part
};

__device__ __forceinline__ int part_of(const Adapters& of, int column) {
  return (column >= of.end0) + (column >= of.end1);
}
#endif

#if LORA == 1
#define PIECES_B (RANK / 8)  // of 16 bytes, of an output's B

__device__ __forceinline__ void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

__device__ __forceinline__ void arrive(int* count) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(count) : "memory");
}

__device__ __forceinline__ void await_sums(const int* count, int wanted) {
  int seen;
  do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(count) : "memory");
  while (seen < wanted);
}

// How many blocks had seen all sums before this one.
__device__ __forceinline__ int count_in(int* meeting) {
  int before;
  asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(meeting + 1) : "memory");
  return before;
}

// Where a piece of B stands in shared memory: threads that read at once read from different banks.
__device__ __forceinline__ int place_of(int piece) { return piece ^ (piece >> 3 & 7); }

// What an adapter adds to four outputs, of which b has pieces from the first one's on.
__device__ __forceinline__ void add_adapter(float* v, const uint4* b, int piece, const float* inner) {
#pragma unroll
  for (int r = 0; r < PIECES_B; r++) {
    const float4 p = ((const float4*)inner)[r * 2], q = ((const float4*)inner)[r * 2 + 1];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const uint4 w = b[place_of(piece + j * PIECES_B + r)];
      v[j] += low(w.x) * p.x + high(w.x) * p.y + low(w.y) * p.z + high(w.y) * p.w;
      v[j] += low(w.z) * q.x + high(w.z) * q.y + low(w.w) * q.z + high(w.w) * q.w;
    }
  }
}

// A block's outputs.
struct Outputs {
  int first_column, width, N;
  // Of a row of the tile of W.
  __device__ __forceinline__ int of(int row, bool& inside) const {
    const int n = first_column + (EPILOGUE == GATED ? row % (BN / 2) : row);
    inside = n < width;
    return n + (EPILOGUE == GATED && row >= BN / 2 ? N / 2 : 0);
  }
  __device__ __forceinline__ int first_part(const Adapters& of) const {
    return EPILOGUE == GATED ? 0 : part_of(of, first_column);
  }
  __device__ __forceinline__ int last_part(const Adapters& of) const {
    return EPILOGUE == GATED ? 1 : part_of(of, min(first_column + BN, width) - 1);
  }
};

// The second group of warps: the slots of this block's rows, A x of their adapters, and B of these.
__device__ __forceinline__ void fetch_adapters(const Adapters& of, const Outputs& outputs, int first_row, int M,
                                               int* slots_of, float* inner_of, uint4* b, int wanted, int blocks) {
  const int thread = threadIdx.x - THREADS, lane = thread & 31;
  constexpr int LINES = BN * RANK * 2 / 128;
  for (int e = thread; e < SLOTS * LINES; e += HELPERS) {
    bool inside;
    const int row = e % LINES * 64 / RANK, n = outputs.of(row, inside);
    if (inside) prefetch(of.b + ((u64)(e / LINES) * outputs.N + n) * RANK);
  }
  wait_for_previous();
  u32 needed = 0;
  for (int m = lane; m < ROWS; m += 32) {
    const int slot = first_row + m < M ? __ldcg(of.slots + first_row + m) : -1;
    slots_of[m] = slot;  // by each warp, alike
    if (slot >= 0) needed |= 1u << slot;
  }
  needed = __reduce_or_sync(~0u, needed);
  for (int e = thread; e < SLOTS * BN * PIECES_B; e += HELPERS) {
    const int slot = e / (BN * PIECES_B);
    if (!(needed >> slot & 1)) continue;
    bool inside;
    const int n = outputs.of(e / PIECES_B % BN, inside);
    copy_async(shared_address(b + place_of(e)),
               of.b + ((u64)slot * outputs.N + (inside ? n : 0)) * RANK + e % PIECES_B * 8, inside);
  }
  int before = -1;
  if (thread == 0) await_sums(of.meeting, wanted), before = count_in(of.meeting);
  asm volatile("bar.sync 2, %0;" ::"n"(HELPERS) : "memory");
  if (needed) {
    const int first = outputs.first_part(of), quarters = (outputs.last_part(of) - first + 1) * (RANK / 4);
    for (int e = thread; e < ROWS * quarters; e += HELPERS) {
      const int row = e / quarters, c = first * RANK + e % quarters * 4;
      if (slots_of[row] < 0) continue;
      float4 sum = make_float4(0.f, 0.f, 0.f, 0.f), v[DEPTHS];
#pragma unroll
      for (int d = 0; d < DEPTHS; d++)
        v[d] = __ldcg((const float4*)(of.inner + ((u64)d * M + first_row + row) * EACH + c));
#pragma unroll
      for (int d = 0; d < DEPTHS; d++) sum.x += v[d].x, sum.y += v[d].y, sum.z += v[d].z, sum.w += v[d].w;
      *(float4*)(inner_of + row * EACH + c) = sum;
    }
  }
  if (before == blocks - 1) of.meeting[0] = of.meeting[1] = 0;  // the last one, for the next launch
  asm volatile("cp.async.wait_all;" ::: "memory");
}
#endif

#if LORA == 2
#define HALVES (EPILOGUE == GATED ? 2 : 1)  // of a tile of W, of different parts
#define WIDE (BN / HALVES)
#define SLABS ((RANK + 15) / 16)  // of an adapter's rank
#define TURNS_B ((SLOTS + SPLIT - 1) / SPLIT)  // adapters of which this block of the cluster adds what they add
#define SLAB (BN * 32)
__device__ __forceinline__ void multiply_slab(float* d, const u32* a, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
               "{%0,%1,%2,%3};"
               : R4(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Where a piece of a row of a slab stands: threads that read at once read from different banks.
__device__ __forceinline__ int place_of(int row, int piece) { return row * 32 + ((piece ^ (row >> 2 & 1)) << 4); }

// B of this block's adapters: slabs of sixteen ranks, for each row of the tile of W.
__device__ __forceinline__ void ask_for_b(const Adapters& of, u32 to, int first_column, int width, int N, int rank) {
  for (int e = threadIdx.x; e < TURNS_B * SLABS * BN * 2; e += THREADS) {
    const int piece = e & 1, row = e / 2 % BN, slab = e / (2 * BN);
    const int slot = slab / SLABS * SPLIT + rank, at = slab % SLABS * 16 + piece * 8;
    const int n = first_column + row % WIDE;
    const bool inside = slot < SLOTS && n < width && at < RANK;
    const u64 line = inside ? (u64)slot * N + n + row / WIDE * (N / 2) : 0;
    copy_async(to + slab * SLAB + place_of(row, piece), of.b + line * RANK + (inside ? at : 0),
               inside);
  }
}

// What the rows of this thread have of A x, as mma takes it, and whose it is.
struct Inner {
  int slots[2];
  u32 own[HALVES][SLABS][4];

  __device__ __forceinline__ void fetch(const Adapters& of, int first_column, int first_row, int M) {
    const int part = EPILOGUE == GATED ? 0 : part_of(of, first_column), lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int m = first_row + (threadIdx.x >> 5) * 16 + (lane >> 2) + i * 8;
      slots[i] = m < M ? __ldcg(of.slots + m) : -1;
      const float* from = of.inner + (u64)(m < M ? m : 0) * EACH + part * RANK + (lane & 3) * 2;
#pragma unroll
      for (int h = 0; h < HALVES; h++)
#pragma unroll
        for (int k = 0; k < SLABS * 2; k++) {
          float2 total = make_float2(0.f, 0.f);
#pragma unroll
          for (int d = 0; d < (k * 8 < RANK ? DEPTHS : 0); d++) {
            const float2 v = __ldcg((const float2*)(from + (u64)d * M * EACH + h * RANK + k * 8));
            total.x += v.x, total.y += v.y;
          }
          own[h][k / 2][k % 2 * 2 + i] = pack(total.x, total.y);
        }
    }
  }

  // What this block's adapters add.
  __device__ __forceinline__ void multiply_b(float* sum, const unsigned char* b, int rank) const {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int turn = 0; turn < TURNS_B; turn++) {
      const bool is_own[2] = {slots[0] == turn * SPLIT + rank, slots[1] == turn * SPLIT + rank};
#pragma unroll
      for (int slab = 0; slab < SLABS; slab++) {
        const unsigned char* from = b + (turn * SLABS + slab) * SLAB + (lane & 3) * 4;
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
          u32 chosen[4];
#pragma unroll
          for (int i = 0; i < 4; i++) chosen[i] = is_own[i % 2] ? own[h][slab][i] : 0;
#pragma unroll
          for (int j = h * (WIDE / 8); j < (h + 1) * (WIDE / 8); j++) {
            const int row = j * 8 + (lane >> 2);
            multiply_slab(sum + j * 4, chosen, *(const u32*)(from + place_of(row, 0)),
                          *(const u32*)(from + place_of(row, 1)));
          }
        }
      }
    }
  }
};
#endif

extern "C" __global__ void __launch_bounds__(ALL)
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
#if LORA == 1
  const bool makes_sums = blockIdx.x < adapters.sums;
  const int nth = makes_sums ? blockIdx.x / (DEPTHS / SPLIT) : blockIdx.x - adapters.sums;
  const int depth = makes_sums ? blockIdx.x % (DEPTHS / SPLIT) * SPLIT + rank : rank;
  const int share = (all + (makes_sums ? DEPTHS : SPLIT) - 1) / (makes_sums ? DEPTHS : SPLIT);
  if (makes_sums && thread >= THREADS) return;
#else
  constexpr bool makes_sums = false;
  const int nth = blockIdx.x, depth = rank, share = (all + SPLIT - 1) / SPLIT;
#endif
  const int first_row = nth % tiles_m * BM, first_column = nth / tiles_m * (makes_sums ? BN : OUT);
  const int begin = min(depth * share, all), count = min(all - begin, share);

  // Tiles, then the parts that the cluster sends here.
  const u32 base = (shared_address(memory) + 1023) & ~1023u;
  unsigned char* tiles = memory + (base - shared_address(memory));
  float* parts = (float*)(tiles + (SPLIT > 1 ? STAGES * STAGE : 0));
#if LORA == 1
  int* slots_of = (int*)(tiles + STAGES * STAGE + (SPLIT > 1 ? BM * PITCH * 4 : 0));  // [ROWS]
  float* inner_of = (float*)(slots_of + BM);                                       // [ROWS][EACH]
  uint4* b = (uint4*)(inner_of + ROWS * EACH);                                     // [SLOTS][BN][PIECES_B]
  if (thread >= THREADS) {
    announce_start();
    let_next_start();
    const Outputs outputs = {first_column, width, N};
    const int blocks = (gridDim.x - adapters.sums) * SPLIT;
    fetch_adapters(adapters, outputs, first_row + rank * ROWS, M, slots_of, inner_of, b, adapters.sums * SPLIT, blocks);
    await_start();
    meet();
    return;
  }
#endif

  Pieces p;
  {
    const int r = thread >> 3, c = thread & 7;
    p.place = r * 128 + ((c ^ (r & 7)) << 4);
    p.w_inside = p.x_inside = 0;
#pragma unroll
    for (int i = 0; i < W_PIECES; i++) {
      const int row = r + i * (THREADS / 8);
#if LORA == 1
      if (makes_sums) {
        const bool inside = first_column + row < SLOTS * EACH;
        p.w[i] = adapters.a + (u64)(inside ? first_column + row : 0) * K + begin * BK + c * 8;
        p.w_inside |= inside << i;
        continue;
      }
#endif
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
  if (!makes_sums) announce_start();
#if LORA == 2
  unsigned char* b = tiles + STAGES * STAGE + (SPLIT > 1 ? BM * PITCH * 4 : 0);
  ask_for_b(adapters, shared_address(b), first_column, width, N, rank);
#endif
#pragma unroll
  for (int s = 0; s < ASKED; s++)
    if (s < count) ask_for_weights(p, base + s * STAGE, s * BK);
  let_next_start();
  wait_for_previous();
#pragma unroll
  for (int s = 0; s < ASKED; s++) {
    if (s < count) ask_for_inputs(p, base + s * STAGE, s * BK);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

#if LORA == 2
  Inner inner;
  inner.fetch(adapters, first_column, first_row, M);
#endif
#if LORA == 1
  int slots[2] = {-1, -1};  // of this thread's rows
  if (makes_sums) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int m = first_row + warp * 16 + (lane >> 2) + half * 8;
      if (m < M) slots[half] = __ldcg(adapters.slots + m);
    }
  }
#endif
  // What this thread will finish: four columns each. Their residuals are asked for now.
  constexpr int QUADS = OUT / 4, TURNS = (ROWS * QUADS + THREADS - 1) / THREADS;
#if EPILOGUE == ADD
  uint2 addends[TURNS];
#pragma unroll
  for (int i = 0; i < TURNS; i++) {
    const int e = i * THREADS + thread, m = first_row + rank * ROWS + e / QUADS;
    const int column = first_column + (e % QUADS) * 4;
    addends[i] = make_uint2(0, 0);
    if (!makes_sums && e < ROWS * QUADS && m < M) {
      const u16* from = residual + (u64)m * width + column;
      if (column + 3 < width && (width & 3) == 0) {
        addends[i] = *(const uint2*)from;
      } else {
        if (column < width) addends[i].x = from[0];
        if (column + 1 < width) addends[i].x |= (u32)from[1] << 16;
        if (column + 2 < width) addends[i].y = from[2];
        if (column + 3 < width) addends[i].y |= (u32)from[3] << 16;
      }
    }
  }
#endif

  float sum[BN / 2];
#pragma unroll
  for (int i = 0; i < BN / 2; i++) sum[i] = 0.f;
#if LORA == 2
  asm volatile("cp.async.wait_group %0;" ::"n"(ASKED - 1) : "memory");
  sync_group();
  inner.multiply_b(sum, b, rank);
#endif
  fence_registers(sum);
  for (int t = 0; t < count; t++) {
    asm volatile("cp.async.wait_group %0;" ::"n"(ASKED - 1) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    sync_group();
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
#if LORA == 1
  if (makes_sums) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float* to = adapters.inner + ((u64)depth * M + first_row + r + half * 8) * EACH;
#pragma unroll
      for (int j = 0; j < BN / 8; j++) {
        const int n = first_column + j * 8 + (lane & 3) * 2;
        if (n / EACH == slots[half])
          *(float2*)(to + n % EACH) = make_float2(sum[j * 4 + half * 2], sum[j * 4 + half * 2 + 1]);
      }
    }
    sync_group();
    if (thread == 0) arrive(adapters.meeting);  // releases what all of them stored
    return;
  }
#endif

  await_start();
#if SPLIT == 1
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  sync_group();  // parts stand where tiles were
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

#pragma unroll
  for (int i = 0; i < TURNS; i++) {
    const int e = i * THREADS + thread;
    if (TURNS * THREADS > ROWS * QUADS && e >= ROWS * QUADS) break;
    const int row = e / QUADS, c = (e % QUADS) * 4;
    const int m = first_row + rank * ROWS + row, column = first_column + c;
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
#if LORA == 1
    const int slot = slots_of[row];
    if (slot >= 0) {
      const int part = EPILOGUE == GATED ? 0 : part_of(adapters, column);
      const float* inner = inner_of + row * EACH;
      add_adapter(v, b, (slot * BN + c) * PIECES_B, inner + part * RANK);
      if (EPILOGUE == GATED) add_adapter(u, b, (slot * BN + BN / 2 + c) * PIECES_B, inner + RANK);
    }
#endif
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float value = v[j], other = u[j];
      if (bias != nullptr && column + j < width) {
        value += widen(bias[column + j]);
        if (EPILOGUE == GATED) other += widen(bias[column + j + N / 2]);
      }
      if (EPILOGUE == GATED) value = silu(value) * other;
#if EPILOGUE == ADD
      const u32 pair = j < 2 ? addends[i].x : addends[i].y;
      value += j % 2 ? high(pair) : low(pair);
#endif
      v[j] = value;
    }
    if (m < M) {
      u16* to = y + (u64)m * width + column;
      if (column + 3 < width && (width & 3) == 0) {
        *(uint2*)to = make_uint2(pack(v[0], v[1]), pack(v[2], v[3]));
      } else {
#pragma unroll
        for (int j = 0; j < 4; j++)
          if (column + j < width) to[j] = narrow(v[j]);
      }
    }
  }
}
