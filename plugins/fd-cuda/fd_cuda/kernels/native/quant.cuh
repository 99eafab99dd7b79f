// Packed weights to matrix operands. A slab is 16 outputs by 64 inputs; lane l of the warp that reads it holds
// the rows l / 4 and l / 4 + 8 of it, in the places that mma.m16n8k16 and wgmma want, four registers for
// each 16 inputs: (row, 2 q), (row + 8, 2 q), (row, 8 + 2 q), (row + 8, 8 + 2 q) with q = l % 4, each
// with the input after it. quant_layout.py packs them. FORMAT: what a slab's 16-byte pieces hold.
#include "copies.cuh"

#define INT4 0  // one piece: word s is inputs 16 s; pair i of it has its nibbles at bits 4 i and 16 + 4 i
#define INT8 1  // two pieces: words 2 s and 2 s + 1; pair i of a word has bytes i and 2 + i
#define FP8 2   // as INT8
// Two pieces, of the row and of the row + 8, cut from a matrix that lies row by row: 16 inputs in a piece, so
// "input 2 q of step s" is input 16 q + 4 s of the turn, and 8 + 2 q the second one after it.
#define INT8_ROWS 3
#define FP8_ROWS 4
// Inputs as by rows, in slabs of eight bytes a lane: a byte, of the row or of the row + 8, is four inputs in the
// affine code of ERNIE 4.5's published 2-bit checkpoints (fd-quant-wint2's ccq.py).
#define CCQ 5
// The trellis code (trellis.cuh), of which quant_tile.cu and quant_grouped.cu know: 64 outputs by 64 inputs in two pieces.
#define TRELLIS 6
// Four bits of a float and powers of two of 32 inputs, row by row, of which quant_grouped.cu alone knows.
#define MXFP4 7
#define PIECES (FORMAT == INT4 || FORMAT == MXFP4 ? 1 : 2)
#define SLAB_BYTES (FORMAT == CCQ ? 256 : PIECES * 512)
#define GROUP_BYTES (FORMAT == CCQ ? 16 : SCALED * 32)  // of a slab's scales; CCQ: of two turns, as copies are 16 bytes
#define BY_ROWS (FORMAT == INT8_ROWS || FORMAT == FP8_ROWS)
#define INPUTS_BY_ROWS (FORMAT >= INT8_ROWS)

#if HALF
#define ONES 0x3c003c00u
#define MAGIC 0x64006400u         // 1024 + q
#define MINUS_MIDDLE 0xe408e408u  // -1032
#define MIDDLE (FORMAT == CCQ ? 1088.f : 1032.f)
#define HALVES 0x38003800u
#define MINUS_CODE 0xe040e040u    // -512 - 32
#define MINUS_BASE 0xe400e400u    // -1024
#else
#define ONES 0x3f803f80u
#define MAGIC 0x43004300u         // 128 + q
#define MINUS_MIDDLE 0xc308c308u  // -136
#define MIDDLE (FORMAT == CCQ ? 192.f : 136.f)
#define HALVES 0x3f003f00u
#define MINUS_CODE 0xc2c0c2c0u    // -64 - 32
#define MINUS_BASE 0xc300c300u    // -128
#endif

// INSTRUCTIONS: emulated.h of the tests has C++ in the place of what follows.

__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn." TYPE "x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// Two fp8 numbers that lie side by side.
__device__ __forceinline__ u32 widen_fp8(u32 v) {
  u32 d;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low;}" : "=r"(d) : "r"(v));
  return d;
}

// Results and biases are in the model's dtype, whatever x is in.
__device__ __forceinline__ u16 narrow_y(float value) {
  u16 y;
#if Y_HALF
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(value));
#else
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(value));
#endif
  return y;
}

__device__ __forceinline__ u32 narrow_y(float first, float second) {
  u32 pair;
#if Y_HALF
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
#endif
  return pair;
}

__device__ __forceinline__ float widen_y(u16 value) {
#if Y_HALF
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(value));
  return y;
#else
  return __uint_as_float((u32)value << 16);
#endif
}

// (v & mask) | bits: one instruction, which two constants written in C++ would not become.
__device__ __forceinline__ u32 masked_or(u32 v, u32 mask, u32 bits) {
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(v), "r"(mask), "r"(bits));
  return d;
}

__device__ __forceinline__ u32 masked_xor(u32 v, u32 mask, u32 bits) {
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(d) : "r"(v), "r"(mask), "r"(bits));
  return d;
}

__device__ __forceinline__ uint2 load_once(const uint2* p) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0,%1},[%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}

__device__ __forceinline__ u32 load_once(const unsigned char* p) {
  u32 v;
  asm volatile("ld.global.nc.u8 %0,[%1];" : "=r"(v) : "l"(p));
  return v;
}

__device__ __forceinline__ u32 load_once(const u32* p) {
  u32 v;
  asm volatile("ld.global.nc.u32 %0,[%1];" : "=r"(v) : "l"(p));
  return v;
}

#if FORMAT == CCQ
// 2^23 and a byte. By an integer dot product, as the unit for logic and shifts has most to do; what picks a byte is read where
// it is used.
__constant__ u32 pick[4] = {1u, 1u << 8, 1u << 16, 1u << 24};
__device__ __forceinline__ float byte_of(u32 bytes, int which) {
  u32 byte;
  asm("dp4a.u32.u32 %0, %1, %2, %3;" : "=r"(byte) : "r"(bytes), "r"(pick[which]), "r"(0x4b000000u));
  return __uint_as_float(byte);
}
#endif

// END OF INSTRUCTIONS

// The affine maps of a lane's two rows, of format CCQ.
struct Code {
  float2 upper, lower;  // scale and offset
};

#if FORMAT == CCQ
struct Slab {
  uint2 piece;
};

// A byte's code, from bit 1 on. (2^23 + byte) x - 2^23 x is byte x rounded once; below, the floor is the last bits of
// 1.5 * 2^22 + it, but for one that is worth a half: conversions are slow.
__device__ __forceinline__ u32 code_of(u32 bytes, int which, float2 map) {
  // Rounded after every operation, as the definition is.
  const float value = __fadd_rn(__fmaf_rn(byte_of(bytes, which), map.x, -8388608.f * map.x), map.y);
  return __float_as_uint(__fadd_rd(value, 6291456.5f));
}

// Twice the weights, and MIDDLE more.
__device__ __forceinline__ void unpack_shifted(const Slab& slab, int step, const Code& maps, u32* a) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 code = code_of(i ? slab.piece.y : slab.piece.x, step, i ? maps.lower : maps.upper);
    // From bit 1 on of the halves the windows at bits 3 and 0 of the code, from bit 7 on those at 9 and 6.
    const u32 both = __byte_perm(code >> 3, code, 0x5410u);
    a[i] = masked_or(both >> 6, 0x007e007eu, MAGIC);
    a[2 + i] = masked_or(both, 0x007e007eu, MAGIC);
  }
}

__device__ __forceinline__ void unpack(const Slab& slab, int step, const Code& maps, u32* a) {
  unpack_shifted(slab, step, maps, a);
#pragma unroll
  for (int i = 0; i < 4; i++) a[i] = fma2(a[i], HALVES, MINUS_CODE);
}
#else
struct Slab {
  uint4 piece[PIECES];
};

__device__ __forceinline__ u32 word(const Slab& slab, int n) {
  const uint4& p = slab.piece[n / 4];
  return n % 4 == 0 ? p.x : n % 4 == 1 ? p.y : n % 4 == 2 ? p.z : p.w;
}

// Two 8-bit numbers: bytes 0 and 2 of v where they are integers, 1 and 3 where they are floats.
__device__ __forceinline__ u32 widen_pair(u32 v) {
#if FORMAT == INT8 || FORMAT == INT8_ROWS
#if HALF
  return fma2(masked_xor(v, 0x00ff00ffu, 0x64806480u), ONES, 0xe480e480u);  // 1024 + 128 + q - 1152
#else
  // 128 + the low seven bits, less 128 or 256.
  return fma2(masked_or(v, 0x00800080u, MAGIC), ONES ^ 0x80008000u, masked_or(v, 0x007f007fu, MAGIC));
#endif
#elif HALF
  return fma2(masked_or(v, 0x80008000u, (v & 0x7f007f00u) >> 1), 0x5c005c00u, 0x80008000u);  // * 2^8
#else
  return fma2(masked_or(v, 0x80008000u, (v & 0x7f007f00u) >> 4), 0x7b807b80u, 0x80008000u);  // * 2^120
#endif
}

// Register i of an operand, of INT4: MIDDLE more than the weights.
__device__ __forceinline__ u32 shifted(u32 w, int i) { return masked_or(w >> (4 * i), 0x000f000fu, MAGIC); }

__device__ __forceinline__ void unpack_shifted(const Slab& slab, int step, const Code&, u32* a) {
#pragma unroll
  for (int i = 0; i < 4; i++) a[i] = shifted(word(slab, step), i);
}

// The operand of step 0 to 3 of a turn.
__device__ __forceinline__ void unpack(const Slab& slab, int step, const Code&, u32* a) {
#if FORMAT == INT4
  const u32 w = word(slab, step);
#pragma unroll
  for (int i = 0; i < 4; i++) a[i] = fma2(shifted(w, i), ONES, MINUS_MIDDLE);
#elif FORMAT == FP8_ROWS && HALF
  const u32 upper = word(slab, step), lower = word(slab, 4 + step);
  a[0] = widen_fp8(upper);
  a[1] = widen_fp8(lower);
  a[2] = widen_fp8(upper >> 16);
  a[3] = widen_fp8(lower >> 16);
#elif BY_ROWS
  const u32 upper = word(slab, step), lower = word(slab, 4 + step);
  const u32 first = FORMAT == INT8_ROWS ? 0x4140u : 0x1404u, second = FORMAT == INT8_ROWS ? 0x4342u : 0x3424u;
  a[0] = widen_pair(__byte_perm(upper, 0, first));
  a[1] = widen_pair(__byte_perm(lower, 0, first));
  a[2] = widen_pair(__byte_perm(upper, 0, second));
  a[3] = widen_pair(__byte_perm(lower, 0, second));
#else
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const u32 w = word(slab, 2 * step + h), other = FORMAT == INT8 ? w >> 8 : w << 8;
    a[2 * h] = widen_pair(FORMAT == INT8 ? w : other);
    a[2 * h + 1] = widen_pair(FORMAT == INT8 ? other : w);
  }
#endif
}

#endif

// What a group of inputs adds to a lane's two rows: the row's number in the low half, the row + 8's in the
// high one. SCALED: 0 for one scale an output, 1 for groups with scales, 2 for groups with offsets and scales.
// CCQ's scales are four bits: the row's, then the row + 8's.
struct Group {
  u32 scales, offsets;
};

#if FORMAT == CCQ
typedef unsigned char Entry;

__device__ __forceinline__ Group group_of(u32 both) {
  return {fma2((both & 15) | (both & 0xf0u) << 12 | MAGIC, ONES, MINUS_BASE), 0};
}
#else
typedef u32 Entry;
#endif

__device__ __forceinline__ Group load_group(const Entry* table, int group) {
#if FORMAT == CCQ
  return group_of(load_once(table + group * 8));
#else
  Group g = {0, 0};
#if SCALED
  g.scales = load_once(table + group * 8 * SCALED);
  if (SCALED == 2) g.offsets = load_once(table + group * 16 + 8);
#endif
  return g;
#endif
}

// The offsets of groups. What remains is to multiply with their scales.
__device__ __forceinline__ void add_offsets(u32* a, const Group& g) {
#if SCALED == 2
  const u32 upper = __byte_perm(g.offsets, 0, 0x1010), lower = __byte_perm(g.offsets, 0, 0x3232);
#pragma unroll
  for (int i = 0; i < 4; i++) a[i] = fma2(a[i], ONES, i % 2 ? lower : upper);
#endif
}

__device__ __forceinline__ void apply_group(u32* a, const Group& g) {
#if SCALED
  add_offsets(a, g);
  const u32 upper = __byte_perm(g.scales, 0, 0x1010), lower = __byte_perm(g.scales, 0, 0x3232);
#pragma unroll
  for (int i = 0; i < 4; i++) a[i] = fma2(a[i], i % 2 ? lower : upper, 0x80008000u);
#endif
}

#ifdef SCALED
// A slab and its scales on their way to shared memory, where lanes find them again: a copy that waits there does not hold
// up what is read from memory to registers meanwhile. Each lane brings what it will read of the slab itself (CCQ: one of two
// lanes for both), others the scales.
__device__ __forceinline__ void bring_slab(u32 to, const unsigned char* slab, int lane) {
#if FORMAT == CCQ
  if (lane % 2 == 0) copy_async(to + lane * 8, slab + lane * 8, true);
#else
#pragma unroll
  for (int p = 0; p < PIECES; p++) copy_async(to + p * 512 + lane * 16, slab + p * 512 + lane * 16, true);
#endif
}

// `entries`: of the slab's first group.
__device__ __forceinline__ void bring_group(u32 to, const unsigned char* entries, int turn, int per_group, int lane) {
  const int group = turn / per_group / (FORMAT == CCQ ? 2 : 1);
  if (lane < GROUP_BYTES / 16) copy_async(to + lane * 16, entries + group * GROUP_BYTES + lane * 16, true);
}

__device__ __forceinline__ Slab slab_at(const unsigned char* at, int lane) {
  Slab slab;
#if FORMAT == CCQ
  slab.piece = *(const uint2*)(at + lane * 8);
#else
#pragma unroll
  for (int p = 0; p < PIECES; p++) slab.piece[p] = *(const uint4*)(at + p * 512 + lane * 16);
#endif
  return slab;
}

__device__ __forceinline__ Group group_at(const unsigned char* at, int turn, int lane) {
#if FORMAT == CCQ
  return group_of(at[turn % 2 * 8 + (lane >> 2)]);
#else
  Group g = {0, 0};
#if SCALED
  g.scales = ((const u32*)at)[lane >> 2];
  if (SCALED == 2) g.offsets = ((const u32*)at)[8 + (lane >> 2)];
#endif
  return g;
#endif
}
#endif
