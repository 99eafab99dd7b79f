// What the kernels of decode attention share: how rows lie in registers, rotation, the running softmax.
// Heads of 128 in 16 bits. COLUMNS are the heads of a group times the row's tokens: scores^T = K Q^T,
// result^T = V^T P^T, so nothing is padded for groups of 8. Which of a row's elements a thread loads is
// chosen for 16 bytes a load, and as sums do not mind their order, Q is loaded in the same one.
#include "common.cuh"

#define WIDTH 128
#define COLUMNS (8 * NT)
#define SIZE (COLUMNS * WIDTH)
#define OWN_EIGHTS (COLUMNS / GROUP > 8 ? 2 : 1)  // of tokens that a row feeds
#define FLOOR -1e30f

struct Word4 {
  u32 x[4];
};

// INSTRUCTIONS: emulated.h of the tests has C++ in the place of what follows.

// A warp takes half of each key's lines with one load and the other half with the next.
__device__ __forceinline__ Word4 load_past_l1(const u16* at) {
  Word4 w;
  asm volatile("ld.global.cg.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w.x[0]), "=r"(w.x[1]), "=r"(w.x[2]), "=r"(w.x[3])
               : "l"(at));
  return w;
}

__device__ __forceinline__ int load_past_l1(const int* at) {
  int value;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(value) : "l"(at));
  return value;
}

__device__ __forceinline__ long long load_past_l1(const long long* at) {
  long long value;
  asm volatile("ld.global.cg.u64 %0, [%1];" : "=l"(value) : "l"(at));
  return value;
}

__device__ __forceinline__ u32 transposed(u32 x) {
  u32 y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

__device__ __forceinline__ float power(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// END OF INSTRUCTIONS

__device__ __forceinline__ Word4 load4(const u16* at) {
  const uint4 w = *(const uint4*)at;
  return Word4{{w.x, w.y, w.z, w.w}};
}

__device__ __forceinline__ void store4(u16* at, const Word4& w) {
  *(uint4*)at = make_uint4(w.x[0], w.x[1], w.x[2], w.x[3]);
}

// cos and sin of one position, for the 32 elements of a row that a thread holds: see rotate.
struct Turn {
  float cos[16], sin[16];
};

__device__ __forceinline__ void load_turn(Turn& t, const float* cos_sin, long long position, u32 part) {
#if ROTARY
  const float* table = cos_sin + position * WIDTH;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#if INTERLEAVED
    const float* at = table + i * 16 + part * 4;
#else
    const float* at = table + (i / 2) * 32 + part * 8 + (i % 2) * 4;
#endif
    const float4 c = *(const float4*)at, s = *(const float4*)(at + WIDTH / 2);
    t.cos[4 * i] = c.x, t.cos[4 * i + 1] = c.y, t.cos[4 * i + 2] = c.z, t.cos[4 * i + 3] = c.w;
    t.sin[4 * i] = s.x, t.sin[4 * i + 1] = s.y, t.sin[4 * i + 2] = s.z, t.sin[4 * i + 3] = s.w;
  }
#endif
}

// row[c]: elements c * 32 + part * 8 to + 8. Both partners of the rotation are the thread's own.
__device__ __forceinline__ void rotate(Word4 (&row)[4], const Turn& t) {
#if ROTARY
#if INTERLEAVED
#pragma unroll
  for (int c = 0; c < 4; ++c)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float a = low(row[c].x[j]), b = high(row[c].x[j]);
      const float cos = t.cos[4 * c + j], sin = t.sin[4 * c + j];
      row[c].x[j] = pack(a * cos - b * sin, b * cos + a * sin);
    }
#else
#pragma unroll
  for (int c = 0; c < 2; ++c)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const u32 first = row[c].x[j], second = row[c + 2].x[j];
      const float c0 = t.cos[8 * c + 2 * j], c1 = t.cos[8 * c + 2 * j + 1];
      const float s0 = t.sin[8 * c + 2 * j], s1 = t.sin[8 * c + 2 * j + 1];
      row[c].x[j] = pack(low(first) * c0 - low(second) * s0, high(first) * c1 - high(second) * s1);
      row[c + 2].x[j] = pack(low(second) * c0 + low(first) * s0, high(second) * c1 + high(first) * s1);
    }
#endif
#endif
}

// Of a value, a thread holds two runs of 8 elements, here the first of run h: the 8 groups of a warp
// then read 128 bytes side by side with each instruction.
__device__ __forceinline__ int of_run(u32 group, int h) {
#ifdef FORMAT  // an element is a byte
  return group * 16 + h * 8;
#else
  return h * (WIDTH / 2) + group * 8;
#endif
}

// The running softmax of one warp. Thread: columns 8 n + 2 part and + 1; of the result's rows, those of
// of_run: acc[n][4 h + j] are elements 2 j and 2 j + 1 of run h.
struct State {
  float best[NT][2], total[NT][2], acc[NT][8][4];
};

// Scores of 16 keys; key[h][c]: elements of key group + 8 h.
__device__ __forceinline__ void score(float (&s)[NT][4], const Word4 (&key)[2][4], const Word4* queries, u32 lane) {
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.f;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const Word4 b = queries[(n * 4 + c) * 32 + lane];
#pragma unroll
      for (int j = 0; j < 4; j += 2)
        multiply(s[n], key[0][c].x[j], key[1][c].x[j], key[0][c].x[j + 1], key[1][c].x[j + 1], b.x[j], b.x[j + 1]);
    }
  }
}

// Weights of the scores of `COUNT` times 16 keys, in place; fades what was summed before.
template <int COUNT>
__device__ __forceinline__ void weigh(State& state, float (&s)[COUNT][NT][4]) {
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      float best = state.best[n][side];
#pragma unroll
      for (int u = 0; u < COUNT; ++u) best = fmaxf(best, fmaxf(s[u][n][side], s[u][n][side + 2]));
#pragma unroll
      for (int step = 4; step < 32; step *= 2) best = fmaxf(best, __shfl_xor_sync(~0u, best, step));
      const float fade = power(state.best[n][side] - best);
      float total = state.total[n][side] * fade;
#pragma unroll
      for (int u = 0; u < COUNT; ++u) {
        total += s[u][n][side] = power(s[u][n][side] - best);
        total += s[u][n][side + 2] = power(s[u][n][side + 2] - best);
      }
      state.best[n][side] = best, state.total[n][side] = total;
#pragma unroll
      for (int i = 0; i < 8; ++i) state.acc[n][i][side] *= fade, state.acc[n][i][side + 2] *= fade;
    }
}

// Adds 16 weighted values; value[t][h]: run h of value 2 part + t % 2 + 8 (t / 2).
__device__ __forceinline__ void add_values(State& state, const float (&s)[NT][4], const Word4 (&value)[4][2]) {
  u32 b[NT][2];
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    b[n][0] = transposed(pack(s[n][0], s[n][1]));
    b[n][1] = transposed(pack(s[n][2], s[n][3]));
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const u32 w0 = value[0][i / 4].x[i % 4], w1 = value[1][i / 4].x[i % 4];
    const u32 w2 = value[2][i / 4].x[i % 4], w3 = value[3][i / 4].x[i % 4];
    const u32 a0 = __byte_perm(w0, w1, 0x5410), a1 = __byte_perm(w0, w1, 0x7632);
    const u32 a2 = __byte_perm(w2, w3, 0x5410), a3 = __byte_perm(w2, w3, 0x7632);
#pragma unroll
    for (int n = 0; n < NT; ++n) multiply(state.acc[n][i], a0, a1, a2, a3, b[n][0], b[n][1]);
  }
}

// A row's tokens of this step, and where they go, for one kv head.
struct Tokens {
  const u16 *q, *k, *v;
  u16 *k_cache, *v_cache;
  const long long* slot_mapping;
  int stride_q, stride_k, stride_v, stride_q_head, stride_k_head, stride_v_head;
  int head, num_kv_heads, first, fed, writes;
  float eps;  // of the norms of heads
};

__device__ __forceinline__ void load_row(Word4 (&row)[4], const u16* at, u32 part) {
#pragma unroll
  for (int c = 0; c < 4; ++c) row[c] = load4(at + part * 8 + c * 32);
}

// Weights of the norm of a thread's elements.
__device__ __forceinline__ void load_norm(Word4 (&norm)[4], const u16* weights, u32 part) {
#if NORMS
  load_row(norm, weights, part);
#endif
}

// Over its root mean square, times the weights; four threads hold a row. Of the whole warp.
__device__ __forceinline__ void normalize(Word4 (&row)[4], const Word4 (&norm)[4], float eps) {
#if NORMS
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const u32 pair = row[i / 4].x[i % 4];
    sum += low(pair) * low(pair) + high(pair) * high(pair);
  }
  sum += __shfl_xor_sync(~0u, sum, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  const float factor = rsqrtf(sum / WIDTH + eps);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const u32 pair = row[i / 4].x[i % 4], weights = norm[i / 4].x[i % 4];
    row[i / 4].x[i % 4] = pack(low(pair) * factor * low(weights), high(pair) * factor * high(weights));
  }
#endif
}

// Of the whole warp; zeros where there is no such query.
__device__ __forceinline__ void load_query(Word4 (&query)[4], const Word4 (&norm)[4], const Tokens& of, int column,
                                           bool is_there, u32 part) {
  if (is_there)
    load_row(query, of.q + (long long)(of.first + column / GROUP) * of.stride_q +
                        (of.head * GROUP + column % GROUP) * of.stride_q_head, part);
  normalize(query, norm, of.eps);
}

// A key of the step, as load_query.
__device__ __forceinline__ void load_key(Word4 (&key)[4], const Word4 (&norm)[4], const Tokens& of, int token, u32 part) {
  if (token < of.fed)
    load_row(key, of.k + (long long)(of.first + token) * of.stride_k + of.head * of.stride_k_head, part);
  normalize(key, norm, of.eps);
}

// Rotated, and written to the cache.
__device__ __forceinline__ void own_key(Word4 (&key)[4], const Tokens& of, int token, const Turn& turn, u32 part) {
  rotate(key, turn);
  const long long slot = of.writes ? of.slot_mapping[of.first + token] : -1;
  if (slot < 0) return;
#pragma unroll
  for (int c = 0; c < 4; ++c)
    store4(of.k_cache + (slot * of.num_kv_heads + of.head) * WIDTH + part * 8 + c * 32, key[c]);
}

// The step's values, as add_values takes them; written to the cache.
__device__ __forceinline__ void own_values(Word4 (&value)[4][2], const Tokens& of, u32 group, u32 part) {
#pragma unroll
  for (int t = 0; t < 2 * OWN_EIGHTS; ++t) {
    const int token = 2 * part + t % 2 + t / 2 * 8;
    if (token >= of.fed) continue;
    const u16* at = of.v + (long long)(of.first + token) * of.stride_v + of.head * of.stride_v_head;
#pragma unroll
    for (int h = 0; h < 2; ++h) value[t][h] = load4(at + of_run(group, h));
    const long long slot = of.writes ? of.slot_mapping[of.first + token] : -1;
    if (slot < 0) continue;
#pragma unroll
    for (int h = 0; h < 2; ++h)
      store4(of.v_cache + (slot * of.num_kv_heads + of.head) * WIDTH + of_run(group, h), value[t][h]);
  }
}

// The step's tokens see those of their row that are not after them.
__device__ __forceinline__ void attend_own(State& state, const Word4 (&key)[2][4], const Word4 (&value)[4][2],
                                           const Word4* queries, int fed, float scale, u32 lane) {
  float s[1][NT][4];
  score(s[0], key, queries, lane);
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = lane / 4 + i / 2 * 8, of_query = (8 * n + 2 * (int)(lane % 4) + i % 2) / GROUP;
      s[0][n][i] = token < fed && token <= of_query ? s[0][n][i] * scale : FLOOR * 2.f;
    }
  weigh<1>(state, s);
  add_values(state, s[0], value);
}

__device__ __forceinline__ void clear(State& state) {
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    state.best[n][0] = state.best[n][1] = FLOOR, state.total[n][0] = state.total[n][1] = 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) state.acc[n][i][0] = state.acc[n][i][1] = state.acc[n][i][2] = state.acc[n][i][3] = 0.f;
  }
}

// What one warp has summed, to shared memory: sums[SIZE], best and total of each column.
__device__ __forceinline__ void leave(const State& state, float* sums, float* bests, float* totals, u32 lane) {
  const u32 group = lane / 4, part = lane % 4;
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int at = 8 * n + 2 * part + side;
      float total = state.total[n][side];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) total += __shfl_xor_sync(~0u, total, step);
      if (group == 0) bests[at] = state.best[n][side], totals[at] = total;
#pragma unroll
      for (int i = 0; i < 8; i += 2)
        *(float4*)(sums + at * WIDTH + of_run(group, i / 4) + i % 4 * 2) =
            make_float4(state.acc[n][i][side], state.acc[n][i][side + 2], state.acc[n][i + 1][side],
                        state.acc[n][i + 1][side + 2]);
    }
}

__device__ __forceinline__ void add(float (&sum)[4], float weight, const float4& v) {
  sum[0] += weight * v.x, sum[1] += weight * v.y, sum[2] += weight * v.z, sum[3] += weight * v.w;
}

// Four elements from e on of what the warps of a block have summed, by the largest score of their column.
template <class Sums>
__device__ __forceinline__ void add_warps(float (&sum)[4], float& best, float& total, const Sums& sums_of,
                                          const float (&bests)[WARPS][COLUMNS], const float (&totals)[WARPS][COLUMNS], int e) {
  const int at = e / WIDTH;
  best = bests[0][at], total = 0.f;
#pragma unroll
  for (int w = 1; w < WARPS; ++w) best = fmaxf(best, bests[w][at]);
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    const float weight = power(bests[w][at] - best);
    total += weight * totals[w][at];
    add(sum, weight, *(const float4*)(sums_of(w) + e));
  }
}

// Four results of the row's columns, from e on.
__device__ __forceinline__ void store_results(u16* out, int first_token, int head, int num_kv_heads, int e, const float (&x)[4]) {
  const int at = e / WIDTH;
  const long long token = first_token + at / GROUP;
  u16* to = out + ((token * num_kv_heads + head) * GROUP + at % GROUP) * WIDTH + e % WIDTH;
  *(uint2*)to = make_uint2(pack(x[0], x[1]), pack(x[2], x[3]));
}
