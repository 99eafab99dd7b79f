// y[M, N] = x[M, K] W[N, K]^T with packed W, for tens to hundreds of rows, or of rows an expert.
//
// wgmma with W from registers: the slabs of quant.cuh are what its lanes hold, so weights go from memory to
// registers AHEAD turns of 64 inputs ahead and are unpacked while the matrix units work on the turn
// before. x is the other operand: BN rows by 64 inputs in shared memory, 128-byte swizzle, by cp.async, STAGES turns.
// A block computes 64 * GROUPS outputs of BN rows; the SPLIT blocks of a cluster divide K and send
// their parts to each other's shared memory, where each adds up BN / SPLIT rows in a fixed order.
// GROUPED, PAIRED and SCALED as in quant_gemv.cu; with PAIRED a block computes as many gate and up rows.
// A row of x comes out the same whatever M is.

#include "common.cuh"
#include "quant.cuh"

#define THREADS (GROUPS * 128)
#define MT (PAIRED ? 2 : 1)
#define OUT (GROUPS * 64)
#define STAGE (BN * 128)
#define PITCH (OUT * MT + 4)
#define SHARE (BN / SPLIT)  // rows that a block finishes
#define PIECES_X (BN * 8 / THREADS)

// INSTRUCTIONS: emulated.h of the tests has C++ in the place of what follows.

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void copy_async(u32 to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// The copies of all but the last `left` turns are there for the matrix units to read.
template <int left>
__device__ __forceinline__ void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void await_products() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// All blocks of the cluster have started: their shared memory may be written.
__device__ __forceinline__ void announce_start() {
#if SPLIT > 1
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void await_start() {
#if SPLIT > 1
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void meet() {
#if SPLIT > 1
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

__device__ __forceinline__ u64 descriptor(u32 address) {
  // K-major, 128-byte swizzle, 1024 bytes between groups of eight rows.
  return (u64)((address & 0x3ffff) >> 4) | ((u64)1 << 16) | ((u64)(1024 >> 4) << 32) | ((u64)1 << 62);
}

#define R4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define R16(d, i) R4(d, i), R4(d, i + 4), R4(d, i + 8), R4(d, i + 12)
#if BN == 128
#define D_LIST "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23," \
  "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
  "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}"
#define D_REGS(d) R16(d, 0), R16(d, 16), R16(d, 32), R16(d, 48)
#define SHAPE "m64n128k16"
#define TAIL "{%64,%65,%66,%67}, %68, 1, 1, 1, 0;"
#elif BN == 64
#define D_LIST "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23," \
  "%24,%25,%26,%27,%28,%29,%30,%31}"
#define D_REGS(d) R16(d, 0), R16(d, 16)
#define SHAPE "m64n64k16"
#define TAIL "{%32,%33,%34,%35}, %36, 1, 1, 1, 0;"
#elif BN == 32
#define D_LIST "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}"
#define D_REGS(d) R16(d, 0)
#define SHAPE "m64n32k16"
#define TAIL "{%16,%17,%18,%19}, %20, 1, 1, 1, 0;"
#endif

__device__ __forceinline__ void multiply(float* d, const u32* a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned." SHAPE ".f32." TYPE "." TYPE " " D_LIST ", " TAIL
               : D_REGS(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void fence_registers(float* d) {
#pragma unroll
  for (int i = 0; i < BN / 2; i++) asm volatile("" : "+f"(d[i])::"memory");
}

__device__ __forceinline__ u32 at_rank(u32 address, int rank) {
#if SPLIT > 1
  u32 remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
#else
  return address;
#endif
}

__device__ __forceinline__ void send(u32 address, float value) {
#if SPLIT > 1
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
#else
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
#endif
}

// END OF INSTRUCTIONS

// Where a lane's slabs come from, and the scales of their groups.
struct Source {
  const uint4* slab[MT];
  const u32* groups[MT];
};

__device__ __forceinline__ void unpack_turn(u32 (*a)[4][4], const Slab* held, const Group* groups) {
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int s = 0; s < 4; s++) {
      unpack(held[m], s, Code{}, a[m][s]);
      apply_group(a[m][s], groups[m]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
quant_gemm(const uint4* x, int x_stride, const uint4* __restrict__ w, const u32* __restrict__ groups,
           const float* __restrict__ scales, const float* x_scales, const u16* __restrict__ bias, u16* y,
           const int* slots, const int* experts, const long long* ids, int M, int N, int K, int slabs,
           int turns, int per_group, int divisor) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, rank = blockIdx.z;
  const int tile = blockIdx.x, first_row = blockIdx.y * BN;
  const int share = (turns + SPLIT - 1) / SPLIT;
  const int first = min(rank * share, turns), count = min(turns - first, share);
  const int num_groups = (turns + per_group - 1) / per_group;
  const u32 base = (shared_address(memory) + 1023) & ~1023u;
  float* parts = (float*)(memory + (base - shared_address(memory)) + (SPLIT > 1 ? STAGES * STAGE : 0));
#if GROUPED
  let_next_start();
  wait_for_previous();
  const int expert = experts[blockIdx.y];
  if (expert < 0) return;  // the whole cluster: it has one blockIdx.y
  w += (u64)expert * slabs * turns * 32 * PIECES;
  groups += (u64)expert * slabs * num_groups * 8 * SCALED;
  scales += (u64)expert * slabs * 16;
#endif
  announce_start();
  Source from;
#pragma unroll
  for (int m = 0; m < MT; m++) {
    // Slabs behind the last repeat it; nothing of theirs is stored.
    const int own = tile * GROUPS * 4 + warp, half = slabs / 2;
    const int slab = PAIRED ? min(own, half - 1) + m * half : min(own, slabs - 1);
    from.slab[m] = w + ((u64)slab * turns + first) * 32 * PIECES + lane;
    from.groups[m] = groups + (u64)slab * num_groups * 8 * SCALED + (lane >> 2);
  }
  Slab held[AHEAD][MT];
  Group held_groups[AHEAD][MT];
  // Scales are counted from the first turn of all, slabs from the first of the share.
  const auto ask = [&](int i, int t) {
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
      for (int p = 0; p < PIECES; p++) held[i][m].piece[p] = load_once(from.slab[m] + (t * PIECES + p) * 32);
      held_groups[i][m] = load_group(from.groups[m], (first + t) / per_group);
    }
  };
#pragma unroll
  for (int i = 0; i < AHEAD; i++)
    if (i < count) ask(i, i);
#if !GROUPED
  let_next_start();
  wait_for_previous();
#endif

  u32 x_from[PIECES_X], present = 0, place;
  {
    const int r = thread >> 3, c = thread & 7;
    place = r * 128 + ((c ^ (r & 7)) << 4);
#pragma unroll
    for (int i = 0; i < PIECES_X; i++) {
      const int row = r + i * (THREADS / 8);
#if GROUPED
      const int at = slots[first_row + row];
#else
      const int at = first_row + row;
#endif
      const bool is_there = at < M;
      x_from[i] = is_there ? (u32)(GROUPED ? at / divisor : at) * x_stride + first * 8 + c : 0;
      present |= (u32)is_there << i;
    }
  }
  const auto ask_x = [&](int t) {
    const u32 stage = base + (t % STAGES) * STAGE + place;
    const bool inside = (first + t) * 64 + (thread & 7) * 8 < K;
#pragma unroll
    for (int i = 0; i < PIECES_X; i++) {
      const bool is_there = inside && (present >> i & 1);
      copy_async(stage + i * (THREADS / 8) * 128, x + (is_there ? x_from[i] + t * 8 : 0), is_there);
    }
  };
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) {
    if (s < count) ask_x(s);
    commit();
  }

  float sum[MT][BN / 2];
#pragma unroll
  for (int m = 0; m < MT; m++) {
#pragma unroll
    for (int i = 0; i < BN / 2; i++) sum[m][i] = 0.f;
    fence_registers(sum[m]);
  }
  u32 a[2][MT][4][4];
  if (count > 0) unpack_turn(a[0], held[0], held_groups[0]);
  for (int begin = 0; begin < count; begin += AHEAD) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int t = begin + i;
      if (t >= count) break;
      await_copies<STAGES - 2>();
      __syncthreads();
      const u64 tile_x = descriptor(base + (t % STAGES) * STAGE);
      begin_products();
#pragma unroll
      for (int s = 0; s < 4; s++)
#pragma unroll
        for (int m = 0; m < MT; m++) multiply(sum[m], a[i & 1][m][s], tile_x + s * 2);
      end_products();
      // All have finished with the turn before: its place is free.
      if (t + STAGES - 1 < count) ask_x(t + STAGES - 1);
      commit();
      if (t + AHEAD < count) ask(i, t + AHEAD);
      if (t + 1 < count) unpack_turn(a[(i + 1) & 1], held[(i + 1) % AHEAD], held_groups[(i + 1) % AHEAD]);
      await_products();
    }
  }
#pragma unroll
  for (int m = 0; m < MT; m++) fence_registers(sum[m]);

#if SPLIT > 1
  await_start();
#else
  await_copies<0>();
  __syncthreads();  // parts stand where tiles were
#endif
  // Row n of x goes to the block that finishes it: there it is row (own rank, n % SHARE).
  const int r = lane >> 2, q = lane & 3;
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int j = 0; j < BN / 2; j++) {
      const int n = j / 4 * 8 + q * 2 + (j & 1), c = m * OUT + warp * 16 + r + (j >> 1 & 1) * 8;
      send(at_rank(shared_address(parts + (rank * SHARE + n % SHARE) * PITCH + c), n / SHARE), sum[m][j]);
    }
  meet();

  const int width = PAIRED ? N / 2 : N;
  for (int e = thread; e < SHARE * (OUT / 4); e += THREADS) {
    const int c = e % (OUT / 4) * 4, n = e / (OUT / 4), column = tile * OUT + c;
#if GROUPED
    const int at = slots[first_row + rank * SHARE + n];
#else
    const int at = first_row + rank * SHARE + n;
#endif
    if (at >= M || column >= width) continue;
    float v[4] = {0.f, 0.f, 0.f, 0.f}, u[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int s = 0; s < SPLIT; s++) {
      const float* line = parts + (s * SHARE + n) * PITCH + c;
      const float4 f = *(const float4*)line;
      v[0] += f.x; v[1] += f.y; v[2] += f.z; v[3] += f.w;
      if (PAIRED) {
        const float4 g = *(const float4*)(line + OUT);
        u[0] += g.x; u[1] += g.y; u[2] += g.z; u[3] += g.w;
      }
    }
    const float x_scale = x_scales == nullptr ? 1.f : x_scales[GROUPED ? at / divisor : at];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int own = min(column + j, width - 1);
      float value = v[j] * scales[own] * x_scale;
      if (PAIRED) {
        value = silu(value) * (u[j] * scales[own + width] * x_scale);
      } else if (bias != nullptr) {
        value += widen_y(bias[own]);
      }
      v[j] = value;
    }
    u16* to = y + (u64)at * width + column;
    if (column + 3 < width && (width & 3) == 0) {
      *(uint2*)to = make_uint2(narrow_y(v[0]) | (u32)narrow_y(v[1]) << 16, narrow_y(v[2]) | (u32)narrow_y(v[3]) << 16);
    } else {
#pragma unroll
      for (int j = 0; j < 4; j++)
        if (column + j < width) to[j] = narrow_y(v[j]);
    }
  }
}
