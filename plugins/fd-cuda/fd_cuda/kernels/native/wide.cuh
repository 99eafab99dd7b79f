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

// The copies of all but the last `left` turns are there for the matrix units to read.
template <int left>
__device__ __forceinline__ void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
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

// The sums of a thread as wgmma takes them, and the names of the operands behind them.
#define R4(c, d, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3])
#define R16(c, d, i) R4(c, d, i), R4(c, d, i + 4), R4(c, d, i + 8), R4(c, d, i + 12)
#if BN == 256
#define D_LIST "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23," \
  "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
  "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71," \
  "%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95," \
  "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119," \
  "%120,%121,%122,%123,%124,%125,%126,%127}"
#define D_REGS(c, d) R16(c, d, 0), R16(c, d, 16), R16(c, d, 32), R16(c, d, 48), R16(c, d, 64), R16(c, d, 80), \
  R16(c, d, 96), R16(c, d, 112)
#define SIZE "m64n256"
#define BOTH_SHARED "%128, %129"
#define ONE_SHARED "{%128,%129,%130,%131}, %132"
#elif BN == 192
#define D_LIST "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23," \
  "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
  "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71," \
  "%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95}"
#define D_REGS(c, d) R16(c, d, 0), R16(c, d, 16), R16(c, d, 32), R16(c, d, 48), R16(c, d, 64), R16(c, d, 80)
#define SIZE "m64n192"
#define BOTH_SHARED "%96, %97"
#elif BN == 128
#define D_LIST "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23," \
  "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
  "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}"
#define D_REGS(c, d) R16(c, d, 0), R16(c, d, 16), R16(c, d, 32), R16(c, d, 48)
#define SIZE "m64n128"
#define BOTH_SHARED "%64, %65"
#define FLAG "%66"
#define ONE_SHARED "{%64,%65,%66,%67}, %68"
#elif BN == 64
#define D_LIST "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23," \
  "%24,%25,%26,%27,%28,%29,%30,%31}"
#define D_REGS(c, d) R16(c, d, 0), R16(c, d, 16)
#define SIZE "m64n64"
#define BOTH_SHARED "%32, %33"
#define FLAG "%34"
#define ONE_SHARED "{%32,%33,%34,%35}, %36"
#elif BN == 32
#define D_LIST "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}"
#define D_REGS(c, d) R16(c, d, 0)
#define SIZE "m64n32"
#define BOTH_SHARED "%16, %17"
#define FLAG "%18"
#define ONE_SHARED "{%16,%17,%18,%19}, %20"
#elif BN == 16
#define D_LIST "{%0,%1,%2,%3,%4,%5,%6,%7}"
#define D_REGS(c, d) R4(c, d, 0), R4(c, d, 4)
#define SIZE "m64n16"
#define BOTH_SHARED "%8, %9"
#define FLAG "%10"
#define ONE_SHARED "{%8,%9,%10,%11}, %12"
#elif BN == 8
#define D_LIST "{%0,%1,%2,%3}"
#define D_REGS(c, d) R4(c, d, 0)
#define SIZE "m64n8"
#define BOTH_SHARED "%4, %5"
#define FLAG "%6"
#define ONE_SHARED "{%4,%5,%6,%7}, %8"
#endif

__device__ __forceinline__ void fence_registers(float* d) {
#pragma unroll
  for (int i = 0; i < BN / 2; i++) asm volatile("" : "+f"(d[i])::"memory");
}

__device__ __forceinline__ void fence_registers(int* d) {
#pragma unroll
  for (int i = 0; i < BN / 2; i++) asm volatile("" : "+r"(d[i])::"memory");
}

// END OF INSTRUCTIONS

#ifdef SPLIT
#define SHARE (BN / SPLIT)  // rows that a block finishes

// One wgmma's sums, of 64 outputs from `column` on. Row n of x goes to the block that finishes it: there it is
// row (own rank, n % SHARE).
template <class Sum>
__device__ __forceinline__ void send_parts(float* parts, int pitch, int rank, const Sum* sum, int column, int lane) {
  const int r = lane >> 2, q = lane & 3;
#pragma unroll
  for (int j = 0; j < BN / 2; j++) {
    const int n = j / 4 * 8 + q * 2 + (j & 1), c = column + r + (j >> 1 & 1) * 8;
    send(at_rank(shared_address(parts + (rank * SHARE + n % SHARE) * pitch + c), n / SHARE), (float)sum[j]);
  }
}

// Add up what the cluster sent, and store `out` outputs from `first` on of this block's rows. PAIRED: the up rows
// that belong to gate rows stand `out` behind them. slots: of the block's rows; null where rows follow each
// other. scales and x_scales may be null.
__device__ __forceinline__ void finish(const float* parts, int pitch, int out, int threads, int first, int first_row,
                                       int rank, const float* scales, const float* x_scales, const u16* bias, u16* y,
                                       const int* slots, int divisor, int M, int N) {
  const int width = PAIRED ? N / 2 : N;
  for (int e = threadIdx.x; e < SHARE * (out / 4); e += threads) {
    const int c = e % (out / 4) * 4, n = e / (out / 4), column = first + c;
    const int own_row = first_row + rank * SHARE + n, at = slots != nullptr ? slots[own_row] : own_row;
    if (at >= M || column >= width) continue;
    float v[4] = {0.f, 0.f, 0.f, 0.f}, u[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int s = 0; s < SPLIT; s++) {
      const float* line = parts + (s * SHARE + n) * pitch + c;
      const float4 f = *(const float4*)line;
      v[0] += f.x; v[1] += f.y; v[2] += f.z; v[3] += f.w;
      if (PAIRED) {
        const float4 g = *(const float4*)(line + out);
        u[0] += g.x; u[1] += g.y; u[2] += g.z; u[3] += g.w;
      }
    }
    const float x_scale = x_scales == nullptr ? 1.f : x_scales[slots != nullptr ? at / divisor : at];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int own = min(column + j, width - 1);
      float value = scales == nullptr ? v[j] : v[j] * scales[own] * x_scale;
      if (PAIRED) {
        value = silu(value) * (scales == nullptr ? u[j] : u[j] * scales[own + width] * x_scale);
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
#endif
