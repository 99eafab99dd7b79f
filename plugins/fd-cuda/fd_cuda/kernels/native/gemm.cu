// y[M, N] = x[M, K] W[N, K]^T for tens to hundreds of rows: decode steps of many sequences.
//
// wgmma with W from shared memory. A block computes BM x BN over its share of K; the SPLIT blocks of a
// cluster divide K and send their parts to each other's shared memory, where each adds up BM / SPLIT rows
// in a fixed order. Tiles arrive by cp.async in the 128-byte swizzle; those of W are asked for before the
// kernel waits for the one before it. RESIDENT: the whole share fits into STAGES tiles, so nothing is ever
// asked for again.
// GATED: the first half of a tile are gate rows, the second the up rows that belong to them.
// A row of x comes out the same whatever M is.
// LORA: the first blocks multiply x with the first halves A of all adapters, over a small part of K each, so
// that they end early, and leave the sums with the launch's number in each 16 bytes. The others fetch B, the
// second halves, while they multiply, look for the sums behind their last tile, and multiply them with B: zeros
// stand in the place of rows with other adapters. The blocks of a cluster divide the adapters among themselves.
// Blocks that make sums are the first to be given a place, and wait for nobody.

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
#define EACH (PARTS * RANK)  // rows of an adapter's A
#define GROUPS ((RANK + 15) / 16)  // of ranks: what is multiplied at once
#define UNITS (PARTS * GROUPS * 4)  // of 16 bytes: sums of a row
#define OWN ((SLOTS + SPLIT - 1) / SPLIT)  // adapters of a block of the cluster
#define TILE_B (BN * 128)
#define TILES_B ((OWN * GROUPS + 3) / 4)
#define SIDES (EPILOGUE == GATED ? 2 : 1)  // parts of a tile of W

struct Adapters {
  const u16 *a, *b;  // [SLOTS, EACH, K], [SLOTS, N, RANK]
  const int* slots;  // of the rows; -1: none
  uint4* inner;      // [DEPTHS, M, UNITS]: A x of each row's own adapter, over parts of K
  u64* meeting;      // blocks that have read it, of this launch and all before it, which had as many
  int sums;          // blocks that make sums, along x
  int end0, end1;    // first output of the next part
};

// A sum, cut to 15 bits of mantissa, and eight bits of the launch's number.
__device__ __forceinline__ u32 tagged(float sum, u32 number) {
  return (__float_as_uint(sum) & ~255u) | (number & 255);
}

__device__ __forceinline__ void leave(uint4* at, float a, float b, float c, float d, u32 number) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(tagged(a, number)),
               "r"(tagged(b, number >> 8)), "r"(tagged(c, number >> 16)), "r"(tagged(d, number >> 24)) : "memory");
}

__device__ __forceinline__ uint4 look(const uint4* at) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
  return v;
}

__device__ __forceinline__ bool is_of(const uint4& v, u32 number) {
  return __byte_perm(__byte_perm(v.x, v.y, 0x0040), __byte_perm(v.z, v.w, 0x0040), 0x5410) == number;
}

__device__ __forceinline__ float untagged(u32 v) { return __uint_as_float(v & ~255u); }

// A bit for each of these adapters.
__device__ __forceinline__ u32 between(int first, int last) { return (u32)((2ull << last) - (1ull << first)); }

// 16 rows of sums of 16 ranks with B of eight outputs: sums and result lie in registers as those of wgmma do.
__device__ __forceinline__ void add_product(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};" : R4(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
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
};

// B of this block's adapters that its rows need, as tiles like those of W.
__device__ __forceinline__ void ask_for_second_halves(const Adapters& of, const Outputs& outputs, int rank, u32 needed,
                                                      u32 to) {
  constexpr int PIECES = GROUPS * 2, ALL = OWN * PIECES;
  for (int e = threadIdx.x; e < BN * ALL; e += THREADS) {
    const int row = e / ALL, piece = e % ALL, slot = rank * OWN + piece / PIECES;
    bool inside;
    const int n = outputs.of(row, inside);
    inside = inside && slot < SLOTS && (needed >> slot & 1) && piece % PIECES * 8 < RANK;
    copy_async(to + piece / 8 * TILE_B + row * 128 + ((piece % 8 ^ (row & 7)) << 4),
               of.b + (inside ? ((u64)slot * outputs.N + n) * RANK + piece % PIECES * 8 : 0), inside);
  }
}

// A x of this thread's rows, as far as their adapters are this block's.
struct Sums {
  const uint4* at[2];
  bool is_own[2];
  u64 next;  // part of K
  uint4 seen[GROUPS][SIDES][2][DEPTHS];

  __device__ __forceinline__ void look_for(const Adapters& of, const int (&slots)[2], int rank, int row, int M, int part) {
    next = (u64)M * UNITS;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      is_own[half] = slots[half] >= 0 && slots[half] / OWN == rank;
      at[half] = of.inner + (u64)(row + half * 8) * UNITS + part * GROUPS * 4 + (threadIdx.x & 3);
    }
#pragma unroll
    for (int g = 0; g < GROUPS; g++)
#pragma unroll
      for (int side = 0; side < SIDES; side++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
          for (int d = 0; d < DEPTHS; d++)
            if (is_own[half]) seen[g][side][half][d] = look(at[half] + (side * GROUPS + g) * 4 + d * next);
  }

  // Of 16 ranks, once they are all there: two pairs.
  __device__ __forceinline__ void pairs(u32 (&to)[2], int g, int side, int half, u32 number) {
    float4 all = make_float4(0.f, 0.f, 0.f, 0.f);
    if (is_own[half]) {
#pragma unroll
      for (int d = 0; d < DEPTHS; d++) {
        uint4& v = seen[g][side][half][d];
        while (!is_of(v, number)) v = look(at[half] + (side * GROUPS + g) * 4 + d * next);
        all.x += untagged(v.x), all.y += untagged(v.y), all.z += untagged(v.z), all.w += untagged(v.w);
      }
    }
    to[0] = pack(all.x, all.y), to[1] = pack(all.z, all.w);
  }
};

// What adapters add to a tile. b: this block's part of B.
__device__ __forceinline__ void add_adapters(float* sum, Sums& sums, const int (&slots)[2], int rank, u32 number,
                                             const unsigned char* b) {
  constexpr int COLUMNS = BN / SIDES;
  const int lane = threadIdx.x & 31;
  u32 own[GROUPS][SIDES][2][2];
#pragma unroll
  for (int g = 0; g < GROUPS; g++)
#pragma unroll
    for (int side = 0; side < SIDES; side++)
#pragma unroll
      for (int half = 0; half < 2; half++) sums.pairs(own[g][side][half], g, side, half, number);
#pragma unroll 1
  for (int i = 0; i < OWN; i++) {
    const bool is_first = slots[0] == rank * OWN + i, is_second = slots[1] == rank * OWN + i;
    if (!__any_sync(~0u, is_first || is_second)) continue;
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      const int step = i * GROUPS + g, piece = step % 4 * 2, row = lane >> 2;
      const unsigned char* line = b + step / 4 * TILE_B + row * 128 + (lane & 3) * 4;
      const int low = (piece ^ row) << 4, high = (piece + 1 ^ row) << 4;
#pragma unroll
      for (int side = 0; side < SIDES; side++) {
        const u32(&of)[2][2] = own[g][side];
        const u32 a[4] = {is_first ? of[0][0] : 0, is_second ? of[1][0] : 0, is_first ? of[0][1] : 0,
                          is_second ? of[1][1] : 0};
#pragma unroll
        for (int j = side * COLUMNS / 8; j < (side + 1) * COLUMNS / 8; j++)
          add_product(sum + j * 4, a, *(const u32*)(line + j * 1024 + low), *(const u32*)(line + j * 1024 + high));
      }
    }
  }
}
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
#if LORA
  const bool makes_sums = blockIdx.x < adapters.sums;
  const int nth = makes_sums ? blockIdx.x / (DEPTHS / SPLIT) : blockIdx.x - adapters.sums;
  const int depth = makes_sums ? blockIdx.x % (DEPTHS / SPLIT) * SPLIT + rank : rank;
  const int share = (all + (makes_sums ? DEPTHS : SPLIT) - 1) / (makes_sums ? DEPTHS : SPLIT);
#else
  constexpr bool makes_sums = false;
  const int nth = blockIdx.x, depth = rank, share = (all + SPLIT - 1) / SPLIT;
#endif
  const int first_row = nth % tiles_m * BM, first_column = nth / tiles_m * (makes_sums ? BN : OUT);
  const int begin = min(depth * share, all), count = min(all - begin, share);

  // Tiles, those of B, then the parts that the cluster sends here.
  const u32 base = (shared_address(memory) + 1023) & ~1023u;
  unsigned char* tiles = memory + (base - shared_address(memory));
#if LORA
  constexpr int AFTER = STAGES * STAGE + TILES_B * TILE_B;
#else
  constexpr int AFTER = STAGES * STAGE;
#endif
  float* parts = (float*)(tiles + (SPLIT > 1 ? AFTER : 0));

  Pieces p;
  {
    const int r = thread >> 3, c = thread & 7;
    p.place = r * 128 + ((c ^ (r & 7)) << 4);
    p.w_inside = p.x_inside = 0;
#pragma unroll
    for (int i = 0; i < W_PIECES; i++) {
      const int row = r + i * (THREADS / 8);
#if LORA
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

  const int r = warp * 16 + (lane >> 2);
#if LORA
  u64 before = 0;
  if (thread == 0) before = __ldcg(adapters.meeting);
  int slots[2] = {-1, -1};  // of this thread's rows
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int m = first_row + warp * 16 + (lane >> 2) + half * 8;
    if (m < M) slots[half] = __ldcg(adapters.slots + m);
  }
  int slots_of_block[BM / 32];
#pragma unroll
  for (int i = 0; i < BM / 32; i++)
    slots_of_block[i] = first_row + i * 32 + lane < M ? __ldcg(adapters.slots + first_row + i * 32 + lane) : -1;
  u32 needed = 0;  // by rows of this block, of its own
  Sums sums;
  const int part = EPILOGUE == GATED ? 0 : (first_column >= adapters.end0) + (first_column >= adapters.end1);
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
  fence_registers(sum);
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
#if LORA
    if (makes_sums) continue;
    if (t == 0) {
#pragma unroll
      for (int i = 0; i < BM / 32; i++)
        if (slots_of_block[i] >= 0) needed |= 1u << slots_of_block[i];
      needed = __reduce_or_sync(~0u, needed) & between(rank * OWN, rank * OWN + OWN - 1);
    }
    if (!needed) continue;
    if (t == 0) ask_for_second_halves(adapters, {first_column, width, N}, rank, needed, base + STAGES * STAGE);
    if (t == max(0, count - EARLY)) sums.look_for(adapters, slots, rank, first_row + r, M, part);
#endif
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  fence_registers(sum);

#if LORA
  asm volatile("cp.async.wait_all;" ::: "memory");
  u32* number_of_all = (u32*)(tiles + AFTER + (SPLIT > 1 ? BM * PITCH * 4 : 0));
  if (thread == 0) {
    *number_of_all = (u32)(before / (gridDim.x * SPLIT)) + 1;
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], 1;" ::"l"(adapters.meeting) : "memory");
  }
  __syncthreads();  // B is there, and the number
  const u32 number = *number_of_all;
  if (makes_sums) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      uint4* to = adapters.inner + ((u64)depth * M + first_row + r + half * 8) * UNITS + (lane & 3);
#pragma unroll
      for (int j = 0; j < BN / 8; j += RANK == 8 ? 1 : 2) {
        const int n = first_column + j * 8, part = n % EACH / RANK;
        const float* of = sum + j * 4 + half * 2;
        if (n / EACH != slots[half]) continue;
        leave(to + (part * GROUPS + n % RANK / 16) * 4, of[0], of[1], RANK == 8 ? 0.f : of[4], RANK == 8 ? 0.f : of[5],
              number);
      }
    }
    return;
  }
  if (needed) add_adapters(sum, sums, slots, rank, number, tiles + STAGES * STAGE);
#endif

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
