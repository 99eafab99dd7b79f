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
// that they end early; they wait for nobody and are the first to be given a place. The others ask for these sums
// when they have multiplied their own share, and multiply them with the second halves B on top: rows of one
// adapter after the other, zeros in the place of other rows.

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
#define R8(d, i) R4(d, i), R4(d, i + 4)
#define R16(d, i) R8(d, i), R8(d, i + 8)
#define LIST_8 "{%0,%1,%2,%3,%4,%5,%6,%7}"
#define LIST_16 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}"
#define LIST_32 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23," \
  "%24,%25,%26,%27,%28,%29,%30,%31}"
#define LIST_64 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23," \
  "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
  "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}"
#define WGMMA(n, list) "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." TYPE "." TYPE " " list ", "
#define OF_SHARED(from, to) "%" from ", %" to ", 1, 1, 1, 0, 0;"
#define OF_REGISTERS(r, s, t, u, to) "{%" r ",%" s ",%" t ",%" u "}, %" to ", 1, 1, 1, 0;"

// 64 rows times `columns` rows of b; both, or b alone, from shared memory.
template <int columns>
__device__ __forceinline__ void multiply(float* d, u64 a, u64 b) {
  if constexpr (columns == 128)
    asm volatile(WGMMA("128", LIST_64) OF_SHARED("64", "65")
                 : R16(d, 0), R16(d, 16), R16(d, 32), R16(d, 48) : "l"(a), "l"(b));
  else if constexpr (columns == 64)
    asm volatile(WGMMA("64", LIST_32) OF_SHARED("32", "33") : R16(d, 0), R16(d, 16) : "l"(a), "l"(b));
  else
    asm volatile(WGMMA("32", LIST_16) OF_SHARED("16", "17") : R16(d, 0) : "l"(a), "l"(b));
}

template <int columns>
__device__ __forceinline__ void multiply(float* d, const u32 (&a)[4], u64 b) {
  if constexpr (columns == 128)
    asm volatile(WGMMA("128", LIST_64) OF_REGISTERS("64", "65", "66", "67", "68")
                 : R16(d, 0), R16(d, 16), R16(d, 32), R16(d, 48)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  else if constexpr (columns == 64)
    asm volatile(WGMMA("64", LIST_32) OF_REGISTERS("32", "33", "34", "35", "36")
                 : R16(d, 0), R16(d, 16) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  else if constexpr (columns == 32)
    asm volatile(WGMMA("32", LIST_16) OF_REGISTERS("16", "17", "18", "19", "20")
                 : R16(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  else
    asm volatile(WGMMA("16", LIST_8) OF_REGISTERS("8", "9", "10", "11", "12")
                 : R8(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
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
  for (int s = 0; s < 4; s++) multiply<BN>(sum, tile_x + s * 2, tile_w + s * 2);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
}

#if LORA
#define EACH (PARTS * RANK)           // rows of an adapter's A
#define STEPS ((RANK + 15) / 16)      // sixteens of an adapter's rank, the last one filled up with zeros
#define SIXTEENS (PARTS * STEPS)      // of an adapter's sums of one row
#define OWN_SLOTS ((SLOTS + SPLIT - 1) / SPLIT)  // of all that the blocks of a cluster divide among themselves
#define TILES_B ((OWN_SLOTS * STEPS + 3) / 4)
#define HALVES (EPILOGUE == GATED ? 2 : 1)  // of a block's outputs, each with sums of its own
#define FRAGMENTS (HALVES * STEPS)
#define AT_ONCE (FRAGMENTS * DEPTHS < 8 ? FRAGMENTS * DEPTHS : 8)  // sums of two rows that a thread asks for at once
#define EARLY 2  // tiles before the last that a block asks for sums
#define SLOTS_AT_ONCE (FRAGMENTS < 4 ? 4 / FRAGMENTS : 1)

struct Adapters {
  const u16 *a, *b;  // [SLOTS, EACH, K], [SLOTS, N, RANK]
  const int* slots;  // of the rows; -1: none
  uint4* inner;      // [DEPTHS, M, SIXTEENS, 4]: A x of each row's own adapter over parts of K, see Sums
  int* meeting;      // the number of the last launch, and how many blocks of this one have read it
  int sums;          // blocks that make sums, along x
  int end0, end1;    // first output of the next part
};

// Of a sixteen of a row's sums the four that a thread has after and before it multiplies, with 16 bits of mantissa,
// and the number of the launch. They come together: who finds the number needs not wait for anything else.
struct Sums {
  u64 first, second;
  __device__ __forceinline__ u32 launch() const { return (u32)(second >> 32); }
  __device__ __forceinline__ float value(int i) const {
    const u32 x = (u32)first, y = (u32)(first >> 32), z = (u32)second;
    const u32 last = x << 24 | (y & 0xff) << 16 | (z & 0xff) << 8;
    return __uint_as_float(i == 0 ? x & ~0xffu : i == 1 ? y & ~0xffu : i == 2 ? z & ~0xffu : last);
  }
};

__device__ __forceinline__ void leave(uint4* to, float a, float b, float c, float d, u32 launch) {
  const u32 last = __float_as_uint(d);
  const u64 first = __byte_perm(__float_as_uint(a), last, 0x3217) | (u64)__byte_perm(__float_as_uint(b), last, 0x3216) << 32;
  const u64 second = __byte_perm(__float_as_uint(c), last, 0x3215) | (u64)launch << 32;
  asm volatile("{.reg .b128 v;\nmov.b128 v, {%1, %2};\nst.relaxed.gpu.global.b128 [%0], v;}" ::"l"(to), "l"(first),
               "l"(second) : "memory");
}

__device__ __forceinline__ Sums look(const uint4* from) {
  Sums sums;
  asm volatile("{.reg .b128 v;\nld.relaxed.gpu.global.b128 v, [%2];\nmov.b128 {%0, %1}, v;}"
               : "=l"(sums.first), "=l"(sums.second) : "l"(from) : "memory");
  return sums;
}

// The slots of the nth of a cluster's blocks.
__device__ __forceinline__ int slot_of(int nth, int rank) { return SPLIT > 1 ? nth * SPLIT + rank : nth; }
__device__ __forceinline__ bool is_own(int slot, int rank) { return slot >= 0 && (SPLIT == 1 || slot % SPLIT == rank); }

__device__ __forceinline__ u32 last_launch(const int* meeting) {
  u32 last;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(last) : "l"(meeting) : "memory");
  return last;
}

// How many blocks had read the number of the last launch before this one, whose own is `launch`. It is not 0, so that
// min() is 1; it makes the count wait for what was read.
__device__ __forceinline__ int count_in(int* meeting, u32 launch) {
  int before;
  asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(meeting + min(launch, 1u)) : "memory");
  return before;
}

// The last block to read leaves the number for the next launch.
__device__ __forceinline__ void count_out(int* meeting, u32 launch, int before) {
  if (before == (int)(gridDim.x * SPLIT) - 1) meeting[0] = launch, meeting[1] = 0;
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

// B of the block's adapters for its outputs, as tiles of W lie: of each output, sixteen after sixteen.
__device__ __forceinline__ void ask_for_b(const Adapters& of, const Outputs& outputs, int rank, u32 tiles) {
#pragma unroll 4
  for (int e = threadIdx.x; e < TILES_B * BN * 8; e += THREADS) {
    const int c = e & 7, row = e / 8 % BN, eight = e / (8 * BN) * 8 + c;
    const int slot = slot_of(eight / (STEPS * 2), rank), first = eight % (STEPS * 2) * 8;
    bool inside;
    const int n = outputs.of(row, inside);
    inside &= slot < SLOTS && first < RANK;
    copy_async(tiles + e / (8 * BN) * TILE_W + row * 128 + ((c ^ (row & 7)) << 4),
               of.b + (inside ? ((u64)slot * outputs.N + n) * RANK + first : 0), inside);
  }
}

// Leave what a block that makes sums has of each row's own adapter. The columns are sixteens of all adapters.
__device__ __forceinline__ void leave_sums(const float* sum, const Adapters& of, int depth, int row, int M,
                                           int first_column, const int (&slots)[2], u32 launch) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    uint4* to = of.inner + (u64)(depth * M + row + half * 8) * SIXTEENS * 4 + (threadIdx.x & 3);
#pragma unroll
    for (int j = 0; j < BN / 16; j++) {
      const int nth = first_column / 16 + j;
      const float* v = sum + j * 8 + half * 2;
      if (nth / SIXTEENS == slots[half])
        leave(to + nth % SIXTEENS * 4, v[0], v[1], v[4], v[5], launch);
    }
  }
}

// Where a thread finds sums of its rows.
struct Place {
  const uint4* inner;  // of the first row over the first part of K
  int M;
  u32 launch;
  bool has[2];  // the rows have one of the block's adapters
};

// Look for AT_ONCE sums of each row.
__device__ __forceinline__ void ask(Sums (&found)[AT_ONCE][2], const Place& at, int start) {
#pragma unroll
  for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int nth = start + i;
      found[i][half] = {0, (u64)at.launch << 32};
      if (nth < FRAGMENTS * DEPTHS && at.has[half])
        found[i][half] = look(at.inner + ((u64)(nth % DEPTHS * at.M + half * 8) * SIXTEENS + nth / DEPTHS) * 4);
    }
}

// The sums of this thread's rows, as they are multiplied; the first have been asked for.
__device__ __forceinline__ void collect(u32 (&a)[FRAGMENTS][4], Sums (&found)[AT_ONCE][2], const Place& at) {
  float total[FRAGMENTS][2][4] = {};
#pragma unroll
  for (int start = 0; start < FRAGMENTS * DEPTHS; start += AT_ONCE) {
    if (start) ask(found, at, start);
    for (;;) {
      bool are_there = true;
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) are_there &= found[i][0].launch() == at.launch && found[i][1].launch() == at.launch;
      if (are_there) break;
      ask(found, at, start);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
      if (start + i < FRAGMENTS * DEPTHS)
#pragma unroll
        for (int e = 0; e < 8; e++) total[(start + i) / DEPTHS][e / 4][e % 4] += found[i][e / 4].value(e % 4);
  }
  __syncwarp();
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
    for (int i = 0; i < 4; i++) a[f][i] = pack(total[f][i & 1][i & 2], total[f][i & 1][(i & 2) + 1]);
}

// Sums times B, on top of the product.
__device__ __forceinline__ void add_adapters(float* sum, const u32 (&a)[FRAGMENTS][4], u32 tiles, int rank, const int (&slots)[2]) {
  constexpr int COLUMNS = BN / HALVES;
#pragma unroll 1
  for (int first = 0; first < OWN_SLOTS; first += SLOTS_AT_ONCE) {
    u32 own[SLOTS_AT_ONCE][FRAGMENTS][4];
#pragma unroll
    for (int s = 0; s < SLOTS_AT_ONCE; s++)
#pragma unroll
      for (int e = 0; e < FRAGMENTS * 4; e++) own[s][e / 4][e % 4] = slots[e & 1] == slot_of(first + s, rank) ? a[e / 4][e % 4] : 0;
    fence_registers(sum);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int s = 0; s < SLOTS_AT_ONCE; s++)
#pragma unroll
      for (int f = 0; f < FRAGMENTS; f++) {
        const int sixteen = min(first + s, OWN_SLOTS - 1) * STEPS + f % STEPS, half = f / STEPS;
        const u64 b = descriptor(tiles + sixteen / 4 * TILE_W + half * COLUMNS * 128) + sixteen % 4 * 2;
        multiply<COLUMNS>(sum + half * (COLUMNS / 2), own[s][f], b);
      }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    fence_registers(sum);
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
  const int begin = min(depth * share, all);
  int count = min(all - begin, share);

  // Tiles, those of B, then the parts that the cluster sends here.
  const u32 base = (shared_address(memory) + 1023) & ~1023u;
#if LORA
  constexpr int TILES = STAGES * STAGE + TILES_B * TILE_W;
#else
  constexpr int TILES = STAGES * STAGE;
#endif
  unsigned char* tiles = memory + (base - shared_address(memory));
  float* parts = (float*)(tiles + (SPLIT > 1 ? TILES : 0));
#if LORA
  u32* number = (u32*)(tiles + TILES + (SPLIT > 1 ? BM * PITCH * 4 : 0));  // of the launch
#endif

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
        const int part = (first_column + row) / (STEPS * 16), nth = (first_column + row) % (STEPS * 16);
        const bool inside = part < SLOTS * PARTS && nth < RANK;
        p.w[i] = adapters.a + (u64)(inside ? part * RANK + nth : 0) * K + begin * BK + c * 8;
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
#if LORA
  if (!makes_sums) ask_for_b(adapters, {first_column, width, N}, rank, base + STAGES * STAGE);
#endif
  let_next_start();
  wait_for_previous();
#pragma unroll
  for (int s = 0; s < ASKED; s++) {
    if (s < count) ask_for_inputs(p, base + s * STAGE, s * BK);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

#if LORA
  u32 last = 0;
  if (thread == 0) last = last_launch(adapters.meeting);
  int slots[2] = {-1, -1};  // of this thread's rows
  bool has_adapter = false;  // one of the block's rows
#pragma unroll
  for (int m = first_row + lane; m < first_row + BM; m += 32) has_adapter |= m < M && __ldcg(adapters.slots + m) >= 0;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int m = first_row + warp * 16 + (lane >> 2) + half * 8;
    if (m < M) slots[half] = __ldcg(adapters.slots + m);
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
  fence_registers(sum);
  const auto turn = [&](int t) {
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
  };
#if LORA
  // The first sums are on their way while the last tiles are multiplied.
  const int early = makes_sums ? count : max(count - EARLY, 0);
  for (int t = 0; t < early; t++) turn(t);
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  fence_registers(sum);
  int before = -1;
  if (thread == 0) {
    *number = last + 1 + (last == ~0u);
    before = count_in(adapters.meeting, *number);
  }
  __syncthreads();
  const u32 launch = *number;
  const bool adds = !makes_sums && __any_sync(~0u, has_adapter);
  const int part = EPILOGUE == GATED ? 0 : (first_column >= adapters.end0) + (first_column >= adapters.end1);
  const int row = first_row + warp * 16 + (lane >> 2);
  const Place place = {adapters.inner + ((u64)row * SIXTEENS + part * STEPS) * 4 + (lane & 3), M, launch,
                       {is_own(slots[0], rank), is_own(slots[1], rank)}};
  Sums found[AT_ONCE][2];
  if (adds) ask(found, place, 0);
  for (int t = early; t < count; t++) turn(t);
#else
  for (int t = 0; t < count; t++) turn(t);
#endif
#if LORA
  asm volatile("cp.async.wait_group 0;" ::: "memory");  // B, where a block has no tile
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  u32 inner[FRAGMENTS][4];
  if (adds) collect(inner, found, place);
#endif
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  fence_registers(sum);

  const int r = warp * 16 + (lane >> 2);
#if LORA
  if (makes_sums) {
    leave_sums(sum, adapters, depth, first_row + r, M, first_column, slots, launch);
    if (thread == 0) count_out(adapters.meeting, launch, before);
    return;
  }
  if (adds) add_adapters(sum, inner, base + STAGES * STAGE, rank, slots);
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
#if LORA
  if (thread == 0) count_out(adapters.meeting, launch, before);
#endif
}
