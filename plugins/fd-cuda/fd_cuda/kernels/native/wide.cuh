// What products of many rows share: wgmma with BN rows of x as its right operand, in shared memory in the 128-byte
// swizzle, and the meeting of a cluster whose SPLIT blocks divide K.

#include "copies.cuh"
#ifdef SPLIT
#include "cluster.cuh"
#endif

// INSTRUCTIONS: emulated.h of the tests has C++ in the place of what follows.

__device__ __forceinline__ void copy_word(u32 to, const void* from, bool inside) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(inside ? 4 : 0) : "memory");
}

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int left>
__device__ __forceinline__ void await_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(left) : "memory");
}

__device__ __forceinline__ u64 descriptor(u32 address) {
  // K-major, 128-byte swizzle, 1024 bytes between groups of eight rows.
  return (u64)((address & 0x3ffff) >> 4) | ((u64)1 << 16) | ((u64)(1024 >> 4) << 32) | ((u64)1 << 62);
}

// Lane 8 i + j has the address of row j of matrix i, and gives elements (lane / 4, 2 (lane % 4)) of each.
__device__ __forceinline__ void store_matrices(u32 address, const u32* a) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(address), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]) : "memory");
}

// Two matrices of eight by eight, each turned: lane 8 i + j has the address of column j of matrix i, and gives elements
// (lane / 4, 2 (lane % 4)) and the next of each.
__device__ __forceinline__ void store_transposed(u32 address, u32 first, u32 second) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
               ::"r"(address), "r"(first), "r"(second) : "memory");
}

// The sums of a thread as wgmma takes them, BN / 2, and the names of the operands after them.
#define R4(c, d, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3])
#define R8(c, d, i) R4(c, d, i), R4(c, d, i + 4)
#define R16(c, d, i) R8(c, d, i), R8(c, d, i + 8)
#define R32(c, d, i) R16(c, d, i), R16(c, d, i + 16)
#define D4 "%0,%1,%2,%3"
#define D8 D4 ",%4,%5,%6,%7"
#define D16 D8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define D32 D16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define D48 D32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define D64 D48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define D80 D64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define D96 D80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define D104 D96 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define D112 D104 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define D128 D112 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#if BN == 256
#define D_LIST "{" D128 "}"
#define D_REGS(c, d) R32(c, d, 0), R32(c, d, 32), R32(c, d, 64), R32(c, d, 96)
#define OTHERS 128, 129, 130, 131, 132
#elif BN == 208
#define D_LIST "{" D104 "}"
#define D_REGS(c, d) R32(c, d, 0), R32(c, d, 32), R32(c, d, 64), R8(c, d, 96)
#define OTHERS 104, 105, 106, 107, 108
#elif BN == 192
#define D_LIST "{" D96 "}"
#define D_REGS(c, d) R32(c, d, 0), R32(c, d, 32), R32(c, d, 64)
#define OTHERS 96, 97, 98, 99, 100
#elif BN == 160
#define D_LIST "{" D80 "}"
#define D_REGS(c, d) R32(c, d, 0), R32(c, d, 32), R16(c, d, 64)
#define OTHERS 80, 81, 82, 83, 84
#elif BN == 128
#define D_LIST "{" D64 "}"
#define D_REGS(c, d) R32(c, d, 0), R32(c, d, 32)
#define OTHERS 64, 65, 66, 67, 68
#elif BN == 96
#define D_LIST "{" D48 "}"
#define D_REGS(c, d) R32(c, d, 0), R16(c, d, 32)
#define OTHERS 48, 49, 50, 51, 52
#elif BN == 64
#define D_LIST "{" D32 "}"
#define D_REGS(c, d) R32(c, d, 0)
#define OTHERS 32, 33, 34, 35, 36
#elif BN == 32
#define D_LIST "{" D16 "}"
#define D_REGS(c, d) R16(c, d, 0)
#define OTHERS 16, 17, 18, 19, 20
#elif BN == 16
#define D_LIST "{" D8 "}"
#define D_REGS(c, d) R8(c, d, 0)
#define OTHERS 8, 9, 10, 11, 12
#endif
#define WITH(macro, ...) macro(__VA_ARGS__)
#define TEXT(x) #x
#define SIZE "m64n" WITH(TEXT, BN)
#define TWO(a, b, c, d, e) "%" #a ", %" #b
#define THIRD_ONE(a, b, c, d, e) "%" #c
#define FOUR_AND_ONE(a, b, c, d, e) "{%" #a ",%" #b ",%" #c ",%" #d "}, %" #e
#define BOTH_SHARED WITH(TWO, OTHERS)
#define FLAG WITH(THIRD_ONE, OTHERS)
#define ONE_SHARED WITH(FOUR_AND_ONE, OTHERS)

__device__ __forceinline__ void fence_registers(float* d) {
#pragma unroll
  for (int i = 0; i < BN / 2; i++) asm volatile("" : "+f"(d[i])::"memory");
}

__device__ __forceinline__ void fence_registers(int* d) {
#pragma unroll
  for (int i = 0; i < BN / 2; i++) asm volatile("" : "+r"(d[i])::"memory");
}

// END OF INSTRUCTIONS

// The division is not rounded correctly, what becomes of it is rounded to fewer bits.
__device__ __forceinline__ float quick_silu(float x) { return __fdividef(x, 1.f + __expf(-x)); }

#ifdef SPLIT
#define FINISHERS (SPLIT < BN / 8 ? SPLIT : BN / 8)  // blocks of a cluster that finish rows, whole eights
#define SHARE (BN / FINISHERS)                       // rows of such a block
static_assert(SHARE % 8 == 0, "a block finishes whole eights of rows");

// Where results go, and what they are multiplied with.
struct Ending {
  float* parts;                    // shared memory: sums that other blocks send, then what warps are about to store
  const float *scales, *x_scales;  // of outputs and of rows; may be null
  const int* x_sums;               // what 127.5 times is subtracted before; may be null
  const u16* bias;
  u16* y;
  const int* slots;  // of the block's rows, which rows of y they are; null where rows follow each other
  int first_row, rank, M, N;
};

// A row that the block finishes: where it goes (M and more: nowhere), what is subtracted, and its scale.
struct Row {
  int at;
  float offset, scale;
};

// Four of the sums that a thread has, of eight rows.
template <class Sum>
__device__ __forceinline__ float4 four_of(const Sum* sum, int eight) {
  const Sum* own = sum + eight * 4;
  return make_float4((float)own[0], (float)own[1], (float)own[2], (float)own[3]);
}

// A thread sends its sums of the rows that another block finishes to the same thread of that block.
template <int threads, class Sum>
__device__ __forceinline__ void send_sums(float* inbox, int rank, int thread, const Sum (&sum)[BN / 2]) {
#pragma unroll
  for (int to = 0; to < FINISHERS; to++) {
    if (to == rank) continue;
    const u32 slot = at_rank(shared_address(inbox + ((rank - (rank > to)) * SHARE / 8 * threads + thread) * 4), to);
#pragma unroll
    for (int e = 0; e < SHARE / 8; e++) send(slot + e * threads * 16, four_of(sum, to * SHARE / 8 + e));
  }
}

// The cluster's sums of the i-th eight rows that the block finishes, added in the order of its blocks.
template <int threads, class Sum>
__device__ __forceinline__ float4 total(const float* inbox, int rank, int thread, int i, const Sum (&sum)[BN / 2]) {
  float4 own = four_of(sum, i);
#pragma unroll
  for (int at = 1; at < FINISHERS; at++)
    if (at == rank) own = four_of(sum, at * SHARE / 8 + i);
  if (SPLIT == 1) return own;
  float4 all = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
  for (int s = 0; s < SPLIT; s++) {
    const float* slot = inbox + (((s - (s > rank)) * SHARE / 8 + i) * threads + thread) * 4;
    const float4 part = s == rank ? own : *(const float4*)slot;
    all.x += part.x, all.y += part.y, all.z += part.z, all.w += part.w;
  }
  return all;
}

// Fill the table of the rows that the block finishes.
template <int threads>
__device__ __forceinline__ void find_rows(const Ending& to, Row* rows, int thread) {
  for (int n = thread; n < SHARE; n += threads) {
    const int own = to.first_row + to.rank * SHARE + n, at = to.slots != nullptr ? to.slots[own] : own;
    rows[n] = {at, to.x_sums != nullptr && at < to.M ? 127.5f * to.x_sums[own] : 0.f,
               to.x_scales != nullptr && at < to.M ? to.x_scales[own] : 1.f};
  }
}

// Of outputs l / 4 and l / 4 + 8 of two rows.
__device__ __forceinline__ void finish_four(float4& all, const float* scale, const Row& first, const Row& second) {
  float* v = (float*)&all;
#pragma unroll
  for (int e = 0; e < 4; e++) {
    const Row& row = e % 2 ? second : first;
    v[e] = (v[e] - row.offset) * scale[e / 2] * row.scale;
  }
}

// Eight outputs, from `column` on, of row `at` of y, which has M.
__device__ __forceinline__ void store_piece(u16* y, int at, int M, int column, int width, const uint4& v) {
  if (at >= M || column >= width) return;
  y += (u64)at * width + column;
  if (width % 8 == 0) {
    *(uint4*)y = v;
  } else {
    const u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 8; j++)
      if (column + j < width) y[j] = (u16)(pairs[j / 2] >> j % 2 * 16);
  }
}

// What a warp has put into its stage: 16 outputs of a row after those of the row before, halves exchanged by n / 4.
__device__ __forceinline__ void store_rows(const Ending& to, const unsigned char* stage, const Row* rows, int column,
                                           int width, int lane) {
#pragma unroll 4
  for (int e = lane; e < SHARE * 2; e += 32) {
    const int n = e / 2;
    const uint4 v = *(const uint4*)(stage + n * 32 + ((e ^ n >> 2) % 2 << 4));
    store_piece(to.y, rows[n].at, to.M, column + e % 2 * 8, width, v);
  }
}

// What results are multiplied with, and bias: of the rows that the block finishes a table, of a thread's outputs its own.
struct Factors {
  const Row* rows;
  float scale[2], bias[2];
};

// Where it pays, found before the products, at whose end all would wait for it. finish() meets before it reads the table.
template <int threads>
__device__ __forceinline__ Factors find_factors(const Ending& to, int column, int thread) {
  const int width = PAIRED ? to.N / 2 : to.N;
  const bool is_up = PAIRED && thread >= threads / 2;
  __shared__ Row rows[SHARE];
  Factors own{rows};
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int output = min(column + (thread >> 2 & 7) + h * 8, width - 1);
    own.scale[h] = to.scales == nullptr ? 1.f : to.scales[output + is_up * width];
    own.bias[h] = to.bias == nullptr ? 0.f : widen_y(to.bias[output]);
  }
  if (to.rank < FINISHERS) find_rows<threads>(to, rows, thread);
  return own;
}

// The end of a product: `threads` threads hold sums, a warp those of 16 outputs from `column` on, with PAIRED the lower half of
// the warps those of gates, the upper half what belongs to them. Parts stand where tiles were. Warps without sums take part in
// every meeting by rest().
template <int threads, class Sum>
__device__ __forceinline__ void finish(const Ending& to, const Factors& factors, const Sum (&sum)[BN / 2], int column,
                                       int thread) {
  const int lane = thread & 31, width = PAIRED ? to.N / 2 : to.N;
  const bool is_up = PAIRED && thread >= threads / 2, finishes = to.rank < FINISHERS;
  meet();
  if (SPLIT > 1) {
    send_sums<threads>(to.parts, to.rank, thread, sum);
    meet();
  }
  unsigned char* stages = (unsigned char*)(to.parts + (SPLIT - 1) * SHARE / 8 * threads * 4);
  unsigned char* stage = stages + thread / 32 * SHARE * 32;
  float4* other = (float4*)(stages + threads * SHARE / 2) + thread % (threads / 2);  // what upper warps hold
  const Row* own_rows = factors.rows + (lane & 3) * 2;
  if (is_up) {
#pragma unroll
    for (int i = 0; i < SHARE / 8; i++) {
      float4 up = total<threads>(to.parts, to.rank, thread, i, sum);
      finish_four(up, factors.scale, own_rows[i * 8], own_rows[i * 8 + 1]);
      other[i * (threads / 2)] = up;
    }
  }
  if (PAIRED) __syncthreads();
  if (is_up || !finishes) return;
  const u32 place = shared_address(stage) + (lane & 7) * 32 + ((lane >> 3 & 1 ^ lane >> 2 & 1) << 4);
#pragma unroll
  for (int i = 0; i < SHARE / 8; i++) {
    float4 v = total<threads>(to.parts, to.rank, thread, i, sum);
    finish_four(v, factors.scale, own_rows[i * 8], own_rows[i * 8 + 1]);
    if (PAIRED) {
      const float4 up = other[i * (threads / 2)];
      v = make_float4(silu(v.x) * up.x, silu(v.y) * up.y, silu(v.z) * up.z, silu(v.w) * up.w);
    } else {
      v = make_float4(v.x + factors.bias[0], v.y + factors.bias[0], v.z + factors.bias[1], v.w + factors.bias[1]);
    }
    store_transposed(place + i * 256, narrow_y(v.x, v.y), narrow_y(v.z, v.w));
  }
  __syncwarp();
  store_rows(to, stage, factors.rows, column, width, lane);
}

// What warps without sums do meanwhile.
__device__ __forceinline__ void rest() {
  meet();
  if (SPLIT > 1) meet();
  if (PAIRED) __syncthreads();
}
#endif

// Which slab is the nth of the `own` of a block. Those after the last repeat it; nothing of theirs is stored.
template <int own>
__device__ __forceinline__ int nth_slab(int tile, int nth, int slabs) {
  constexpr int gates = own / 2;
  const int half = slabs / 2;
  return PAIRED ? min(tile * gates + nth % gates, half - 1) + nth / gates * half : min(tile * own + nth, slabs - 1);
}
