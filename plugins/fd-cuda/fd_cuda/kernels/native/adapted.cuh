// What adapters add to a product of gemm.cu: B times A x, which an earlier launch left. B of all adapters is in shared
// memory before the tiles are multiplied, and a row's own is chosen by zeros in the places of the others. The blocks of a
// cluster share the adapters out.

#define EACH (PARTS * RANK)  // of a row's A x
#define HALVES (EPILOGUE == GATED ? 2 : 1)  // of a tile of W, of different parts
#define WIDE (BN / HALVES)
#define SLABS ((RANK + 15) / 16)  // of an adapter's rank
#define TURNS_B ((SLOTS + SPLIT - 1) / SPLIT)  // adapters of which this block of the cluster adds what they add
#define SLAB (BN * 32)
#define HELD (HALVES * SLABS * DEPTHS <= 12)  // A x in registers while x arrives

struct Adapters {
  const u16* b;        // [SLOTS, N, RANK]
  const int* slots;    // of the rows; -1: none
  const float* inner;  // [DEPTHS, M, EACH]: A x of each row's own adapter, over parts of K
  int end0, end1;      // first output of the next part
};

__device__ __forceinline__ int part_of(const Adapters& of, int column) {
  return (column >= of.end0) + (column >= of.end1);
}

__device__ __forceinline__ void multiply_slab(float* d, const u32* a, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
               "{%0,%1,%2,%3};"
               : R4(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// B of this block's adapters: slabs of sixteen ranks, for each row of the tile of W.
__device__ __forceinline__ void ask_for_b(const Adapters& of, u32 to, int first_column, int width, int N, int rank) {
#pragma unroll 1
  for (int e = threadIdx.x; e < TURNS_B * SLABS * BN * 2; e += THREADS) {
    const int piece = e & 1, row = e / 2 % BN, slab = e / (2 * BN);
    const int slot = slab / SLABS * SPLIT + rank, at = slab % SLABS * 16 + piece * 8;
    const int n = first_column + row % WIDE;
    const bool inside = slot < SLOTS && n < width && at < RANK;
    const u64 line = inside ? (u64)slot * N + n + row / WIDE * (N / 2) : 0;
    copy_async(to + slab * SLAB + row * 32 + piece * 16, of.b + line * RANK + (inside ? at : 0), inside);
  }
}

// What the rows of this thread have of A x, and whose it is. A thread has ranks 4 q to 4 q + 3 of a slab, where mma has
// 2 q, 2 q + 1, 2 q + 8 and 2 q + 9, of A x as of B: the order of ranks changes nothing, and four lie in one piece.
struct Inner {
  int slots[2];
  float4 parts[2][HALVES][SLABS][HELD ? DEPTHS : 1];
  u32 own[HALVES][SLABS][4];

  __device__ __forceinline__ float4 fetch(const Adapters& of, int column, int m, int M, int h, int slab, int d) {
    const int part = EPILOGUE == GATED ? h : part_of(of, column), at = slab * 16 + (threadIdx.x & 3) * 4;
    const float* from = of.inner + ((u64)d * M + m) * EACH + part * RANK + at;
    return m < M && at < RANK ? __ldcg((const float4*)from) : make_float4(0.f, 0.f, 0.f, 0.f);
  }

  // Loads are under way, ahead of those of x; nothing waits for them.
  __device__ __forceinline__ void ask(const Adapters& of, int column, int first_row, int M) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int m = first_row + (threadIdx.x >> 5) * 16 + ((threadIdx.x & 31) >> 2) + i * 8;
      slots[i] = m < M ? __ldcg(of.slots + m) : -1;
#pragma unroll
      for (int e = 0; e < (HELD ? HALVES * SLABS * DEPTHS : 0); e++) {
        const int h = e / (SLABS * DEPTHS), slab = e / DEPTHS % SLABS, d = e % DEPTHS;
        parts[i][h][slab][d] = fetch(of, column, m, M, h, slab, d);
      }
    }
  }

  __device__ __forceinline__ void take(const Adapters& of, int column, int first_row, int M) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int m = first_row + (threadIdx.x >> 5) * 16 + ((threadIdx.x & 31) >> 2) + i * 8;
#pragma unroll
      for (int e = 0; e < HALVES * SLABS; e++) {
        const int h = e / SLABS, slab = e % SLABS;
        float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int d = 0; d < DEPTHS; d++) {
          const float4 v = HELD ? parts[i][h][slab][d] : fetch(of, column, m, M, h, slab, d);
          total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
        }
        own[h][slab][i] = pack(total.x, total.y), own[h][slab][2 + i] = pack(total.z, total.w);
      }
    }
  }

  // What this block's adapters add.
  __device__ __forceinline__ void multiply_b(float* sum, u32 b, int rank) const {
    const int lane = threadIdx.x & 31;
#pragma unroll 1
    for (int turn = 0; turn < TURNS_B; turn++) {
      const bool is_own[2] = {slots[0] == turn * SPLIT + rank, slots[1] == turn * SPLIT + rank};
#pragma unroll
      for (int e = 0; e < HALVES * SLABS; e++) {
        const int h = e / SLABS, slab = e % SLABS;
        u32 chosen[4];
#pragma unroll
        for (int i = 0; i < 4; i++) chosen[i] = is_own[i % 2] ? own[h][slab][i] : 0;
#pragma unroll
        for (int j = h * (WIDE / 8); j < (h + 1) * (WIDE / 8); j++) {
          u32 b0, b1;
          asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(b0), "=r"(b1)
                       : "r"(b + (turn * SLABS + slab) * SLAB + (j * 8 + (lane >> 2)) * 32 + (lane & 3) * 8));
          multiply_slab(sum + j * 4, chosen, b0, b1);
        }
      }
    }
  }
};
