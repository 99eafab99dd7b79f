// What gemm.cu adds to a product for adapters: a second group of warps in each block, beside those that multiply.
//
// Rows with the same adapter are put side by side, in groups of eight. The first blocks multiply a group with the
// first half A of its adapter, over a part of K and a band of A's rows each, and leave the sums in global memory.
// Every block then waits for all sums, adds those of its rows up in a fixed order, and has B of their adapters in
// shared memory. Blocks that make sums find a place at a time, and make them before they wait.
//
// All that does not depend on the kernel before happens before it ends: rows are grouped, A and B are on their
// way. Slots may be written late; they are looked at again when it has ended.

#define EACH (PARTS * RANK)   // rows of an adapter's A
#define PIECES_B (RANK / 8)   // of 16 bytes, of an output's B
#define GROUP 8               // rows
#define GROUPED (MOST_ROWS + GROUP * SLOTS)  // rows in groups, gaps among them
#define NOBODY 0xffff
#define WARPS (HELPERS / 32)

// A block's work: a group's sums with BAND tiles of 16 of A's rows, over WARPS times DEEP tiles of K. A warp takes its
// DEEP tiles in turns of HELD chunks of 32 inputs, of which BAND * HELD * 8 registers hold A: see adapted.py.
#define A_TILES ((EACH + 15) / 16)
#define CHUNKS (DEEP * 2)
#define BANDS ((A_TILES + BAND - 1) / BAND)
#define TURNS_OF_SUM ((CHUNKS + HELD - 1) / HELD)
#define BAND_SUMS (BAND * 16 * GROUP)
// Numbers in shared memory: first the warps' sums, then those of the block's rows over all of K.
#define INNER (ROWS * EACH > WARPS * BAND_SUMS ? ROWS * EACH : WARPS * BAND_SUMS)

struct Adapters {
  const u16 *a, *b;  // [SLOTS, EACH, K], [SLOTS, N, RANK]
  const int* slots;  // of the rows; -1: none
  float* inner;      // [DEPTHS, M, EACH]: A x of each row's own adapter, over parts of K
  int* meeting;      // zeros: blocks that have left sums there, and blocks that have seen all of them
  int makers;        // blocks that may make sums
  int end0, end1;    // first output of the next part
};

// In shared memory.
struct Groups {
  int slots[MOST_ROWS];  // of all rows; -1 behind them
  u32 masks[MOST_ROWS / 32][SLOTS];  // rows of each adapter
  u16 rows[GROUPED];  // NOBODY in gaps
};

// INSTRUCTIONS: emulated_adapters.h of the tests has C++ in the place of what follows.

__device__ __forceinline__ void sync_helpers() { asm volatile("bar.sync 2, %0;" ::"n"(HELPERS) : "memory"); }

// Whether it is so for one of the helpers.
__device__ __forceinline__ bool any_helper(bool is_so) {
  u32 any;
  asm volatile("{.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, 2, %2, p;\nselp.u32 %0, 1, 0, q;}"
               : "=r"(any) : "r"((u32)is_so), "n"(HELPERS) : "memory");
  return any;
}

__device__ __forceinline__ void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

__device__ __forceinline__ void arrive(int* count) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(count) : "memory");
}

__device__ __forceinline__ void await_sums(const int* count, int wanted) {
  int seen;
  do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(count) : "memory");
  while (seen < wanted);
}

// A block has seen all sums. The last of them leaves zeros for the next launch.
__device__ __forceinline__ void leave_meeting(int* meeting, int blocks) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(meeting + 1) : "memory");
  if (before == blocks - 1) meeting[0] = meeting[1] = 0;
}

__device__ __forceinline__ void await_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// d += a b: 16 of A's rows, 8 rows of x, 16 inputs.
__device__ __forceinline__ void multiply_group(float* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// END OF INSTRUCTIONS

__device__ __forceinline__ int part_of(const Adapters& of, int column) {
  return (column >= of.end0) + (column >= of.end1);
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

// Put rows with the same adapter side by side; how many groups they make.
__device__ __forceinline__ int group_rows(const Adapters& of, int M, Groups& groups) {
  const int thread = threadIdx.x - THREADS, lane = thread & 31, turns = (M + 31) / 32;
#pragma unroll 1
  for (int i = thread; i < GROUPED; i += HELPERS) groups.rows[i] = NOBODY;
#pragma unroll 1
  for (int m = thread; m < MOST_ROWS; m += HELPERS) {
    const int slot = m < M ? __ldcg(of.slots + m) : -1;
    groups.slots[m] = slot;
    if (m - lane < M)
      for (int s = 0; s < SLOTS; s++) {
        const u32 mask = __ballot_sync(~0u, slot == s);
        if (lane == 0) groups.masks[m / 32][s] = mask;
      }
  }
  sync_helpers();
  int count = 0;  // rows of adapter `lane`
  if (lane < SLOTS)
    for (int turn = 0; turn < turns; turn++) count += __popc(groups.masks[turn][lane]);
  const int own = (count + GROUP - 1) / GROUP;
  int end = own;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int before = __shfl_up_sync(~0u, end, d);
    if (lane >= d) end += before;
  }
#pragma unroll 1
  for (int m = thread; m - lane < M; m += HELPERS) {
    const int slot = groups.slots[m], turn = m / 32;
    const bool has = (u32)slot < SLOTS;
    int place = __shfl_sync(~0u, end - own, has ? slot : 0) * GROUP;
    if (!has) continue;
    for (int t = 0; t < turn; t++) place += __popc(groups.masks[t][slot]);
    groups.rows[place + __popc(groups.masks[turn][slot] & ((1u << lane) - 1))] = m;
  }
  sync_helpers();
  return __shfl_sync(~0u, end, 31);
}

// A warp's part of number `item` of the sums. Products are made with inputs in an order of their own, the same for A
// and x, so that a thread reads 16 bytes at a time.
struct Sums {
  int depth, band, slot, row;  // row: what this lane reads of x, or NOBODY
  const u16* rows;             // of the group, in shared memory
  uint4 a[BAND][2][HELD], x[HELD], gains[HELD];

  __device__ __forceinline__ void take(const Groups& groups, int item) {
    depth = item % DEPTHS;
    band = item / DEPTHS % BANDS;
    rows = groups.rows + item / (DEPTHS * BANDS) * GROUP;
    row = rows[(threadIdx.x & 31) / 4];
    slot = groups.slots[rows[0]];
  }

  __device__ __forceinline__ int first_tile() const { return (depth * WARPS + (threadIdx.x - THREADS) / 32) * DEEP; }

  __device__ __forceinline__ const u16* rows_of_a(const Adapters& of, int K) const {
    return of.a + ((u64)slot * EACH + band * BAND * 16) * K;
  }

  // Of all of A that this part needs.
  __device__ __forceinline__ void prefetch_a(const Adapters& of, int K) const {
    for (int e = threadIdx.x & 31; e < BAND * 16 * DEEP; e += 32) {
      const int r = e / DEEP, k = (first_tile() + e % DEEP) * BK;
      if (band * BAND * 16 + r < EACH && k < K) prefetch(rows_of_a(of, K) + (u64)r * K + k);
    }
  }

  __device__ __forceinline__ int first_input(int turn, int chunk) const {
    return first_tile() * BK + (turn * HELD + chunk) * 32 + (threadIdx.x & 3) * 8;
  }

  __device__ __forceinline__ bool is_inside(int turn, int chunk, int K) const {
    return turn * HELD + chunk < CHUNKS && first_input(turn, chunk) < K;
  }

  __device__ __forceinline__ void read_a(const Adapters& of, const u16* norm, int turn, int K) {
    const int g = (threadIdx.x & 31) / 4;
#if NORM
#pragma unroll
    for (int c = 0; c < HELD; c++)
      gains[c] = is_inside(turn, c, K) ? *(const uint4*)(norm + first_input(turn, c)) : make_uint4(0, 0, 0, 0);
#endif
#pragma unroll
    for (int t = 0; t < BAND; t++)
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int c = 0; c < HELD; c++) {
          const int r = t * 16 + half * 8 + g;
          const bool inside = band * BAND * 16 + r < EACH && is_inside(turn, c, K);
          a[t][half][c] = make_uint4(0, 0, 0, 0);
          if (inside) a[t][half][c] = __ldcg((const uint4*)(rows_of_a(of, K) + (u64)r * K + first_input(turn, c)));
        }
  }

  __device__ __forceinline__ void read_x(const u16* from, long long stride, int turn, int K) {
#pragma unroll
    for (int c = 0; c < HELD; c++) {
      x[c] = make_uint4(0, 0, 0, 0);
      if (row != NOBODY && is_inside(turn, c, K))
        x[c] = __ldcg((const uint4*)(from + row * stride + first_input(turn, c)));
    }
  }

  __device__ __forceinline__ void multiply(float (*sum)[4]) {
#pragma unroll
    for (int c = 0; c < HELD; c++) {
#if NORM
      float squares = 0.f;  // which the product itself sums up
      x[c] = make_uint4(scaled(x[c].x, gains[c].x, squares), scaled(x[c].y, gains[c].y, squares),
                        scaled(x[c].z, gains[c].z, squares), scaled(x[c].w, gains[c].w, squares));
#endif
#pragma unroll
      for (int t = 0; t < BAND; t++) {
        multiply_group(sum[t], a[t][0][c].x, a[t][1][c].x, a[t][0][c].y, a[t][1][c].y, x[c].x, x[c].y);
        multiply_group(sum[t], a[t][0][c].z, a[t][1][c].z, a[t][0][c].w, a[t][1][c].w, x[c].z, x[c].w);
      }
    }
  }

  // The warps' sums meet in shared memory; what they add up to goes to global memory.
  __device__ __forceinline__ void keep(const Adapters& of, const float (*sum)[4], int M, float* met) const {
    const int thread = threadIdx.x - THREADS, lane = thread & 31;
#pragma unroll
    for (int t = 0; t < BAND; t++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        met[thread / 32 * BAND_SUMS + (lane % 4 * 2 + i % 2) * BAND * 16 + t * 16 + (i / 2) * 8 + lane / 4] = sum[t][i];
    sync_helpers();
#pragma unroll
    for (int e = thread; e < BAND_SUMS; e += HELPERS) {
      float whole = 0.f;
#pragma unroll
      for (int w = 0; w < WARPS; w++) whole += met[w * BAND_SUMS + e];
      const int r = band * BAND * 16 + e % (BAND * 16), m = rows[e / (BAND * 16)];
      if (r < EACH && m != NOBODY) of.inner[((u64)depth * M + m) * EACH + r] = whole;
    }
    sync_helpers();
  }
};

// Of the rows that this block finishes: their sums over all of K, of the parts that its outputs belong to.
__device__ __forceinline__ void fetch_sums(const Adapters& of, const Outputs& outputs, const Groups& groups, int first,
                                           int M, float* inner_of) {
  const int part = outputs.first_part(of), quarters = (outputs.last_part(of) - part + 1) * (RANK / 4);
#pragma unroll 1
  for (int e = threadIdx.x - THREADS; e < ROWS * quarters; e += HELPERS) {
    const int row = e / quarters, c = part * RANK + e % quarters * 4;
    if (first + row >= M || groups.slots[first + row] < 0) continue;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f), v[DEPTHS];
#pragma unroll
    for (int d = 0; d < DEPTHS; d++) v[d] = __ldcg((const float4*)(of.inner + ((u64)d * M + first + row) * EACH + c));
#pragma unroll
    for (int d = 0; d < DEPTHS; d++) sum.x += v[d].x, sum.y += v[d].y, sum.z += v[d].z, sum.w += v[d].w;
    *(float4*)(inner_of + row * EACH + c) = sum;
  }
}

// What the second group of warps does before the block's parts meet; whether the meeting is to be left afterwards.
// first: the first row that this block finishes; nth: the block's number.
__device__ __forceinline__ bool serve_adapters(const Adapters& of, const Outputs& outputs, const u16* x,
                                               long long x_stride, const u16* norm, int first, int M, int K,
                                               Groups& groups, float* inner_of, uint4* b, int nth) {
  const int thread = threadIdx.x - THREADS, lane = thread & 31;
  const int begin = nth < of.makers ? nth : 1 << 30;
  int items;
  u32 needed;  // adapters of this block's rows
  Sums sums;
  for (bool is_stale = true; is_stale;) {
    items = group_rows(of, M, groups) * DEPTHS * BANDS;
    if (begin < items) sums.take(groups, begin), sums.read_a(of, norm, 0, K);
    needed = 0;
    for (int m = lane; m < ROWS; m += 32) {
      const int slot = first + m < M ? groups.slots[first + m] : -1;
      if ((u32)slot < SLOTS) needed |= 1u << slot;
    }
    needed = __reduce_or_sync(~0u, needed);
#pragma unroll 1
    for (int e = thread; e < SLOTS * BN * PIECES_B; e += HELPERS) {
      const int slot = e / (BN * PIECES_B);
      if (!(needed >> slot & 1)) continue;
      bool inside;
      const int n = outputs.of(e / PIECES_B % BN, inside);
      copy_async(shared_address(b + place_of(e)),
                 of.b + ((u64)slot * outputs.N + (inside ? n : 0)) * RANK + e % PIECES_B * 8, inside);
    }
#pragma unroll 1
    for (int item = begin + (TURNS_OF_SUM > 1 ? 0 : of.makers); item < items; item += of.makers) {
      Sums later;
      later.take(groups, item);
      later.prefetch_a(of, K);
    }
    wait_for_previous();
    if (begin < items) sums.read_x(x, x_stride, 0, K);
    bool differs = false;
    for (int m = thread; m < M; m += HELPERS) differs |= __ldcg(of.slots + m) != groups.slots[m];
    is_stale = any_helper(differs);
    if (is_stale) await_copies();
  }
  if (!items) return false;

#pragma unroll 1
  for (int item = begin; item < items;) {
    float sum[BAND][4] = {};
    sums.multiply(sum);
#pragma unroll 1
    for (int turn = 1; turn < TURNS_OF_SUM; turn++) {
      sums.read_a(of, norm, turn, K), sums.read_x(x, x_stride, turn, K);
      sums.multiply(sum);
    }
    sums.keep(of, sum, M, inner_of);
    if ((item += of.makers) < items)
      sums.take(groups, item), sums.read_a(of, norm, 0, K), sums.read_x(x, x_stride, 0, K);
  }
  const int makers = min(items, of.makers);
  if (thread == 0) {
    if (nth < makers) arrive(of.meeting);  // releases what all of them stored
    if (needed) await_sums(of.meeting, makers);
  }
  sync_helpers();
  if (needed) fetch_sums(of, outputs, groups, first, M, inner_of);
  await_copies();
  return true;
}
