// What adapters add to a product of gemm.cu: B times A x, which an earlier launch left. B of all adapters is in shared
// memory before the tiles are multiplied, and a row's own is chosen by zeros in the places of the others. The blocks of a
// cluster share the adapters out.

#define EACH (PARTS * RANK)  // of a row's A x
#define HALVES (EPILOGUE == GATED ? 2 : 1)  // of a tile of W, of different parts
#define WIDE (BN / HALVES)
#define SLABS ((RANK + 15) / 16)  // of an adapter's rank
#define TURNS_B ((SLOTS + SPLIT - 1) / SPLIT)  // adapters of which this block of the cluster adds what they add
#define SLAB (BN * 32)

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
