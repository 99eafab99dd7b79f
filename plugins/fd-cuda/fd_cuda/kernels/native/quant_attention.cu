// Decode attention over a paged cache of int8, fp8 or int4 numbers, which has the step's own rows already. Work is cut
// and brought together as in decode_attention.cu; FORMAT: INT8_ROWS, FP8_ROWS or INT4 of quant.cuh, here pairs in bytes.
//
// 16 numbers of a key or a value become two Word4 of activations' dtype, which holds them exactly. Scales of a key (not
// IS_STATIC: float16 [slots, heads]) multiply its scores, and its weights before values are summed; those of a channel
// (IS_STATIC: float32 [heads, WIDTH]) multiply queries before, and results after. What int4 is shifted by stands after
// a key's scale, and is added to its scores and to results; a shift of all keys by channel does not change the softmax.
// Shared memory: NT * (512 + 1024 * (WARPS + 1)) floats, of launch().
#include "meeting.cuh"
#include "quant.cuh"

#define HAS_LOW (FORMAT == INT4)
#define ROW_BYTES (HAS_LOW ? WIDTH / 2 : WIDTH)
#define SHIFTED (HAS_LOW && !IS_STATIC)
#define EACH (HAS_LOW ? 2 : 1)  // numbers of a key that scale it

// INSTRUCTIONS: emulated.h of the tests has C++ in the place of what follows.

__device__ __forceinline__ float low_half(u32 pair) {
  float value;
  asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a;}" : "=f"(value) : "r"(pair));
  return value;
}

__device__ __forceinline__ uint2 load_pair(const unsigned char* at) {
  uint2 v;
  asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at));
  return v;
}

__device__ __forceinline__ u16 load_scale(const u16* at) {
  u16 value;
  asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(value) : "l"(at));
  return value;
}

// END OF INSTRUCTIONS

// The words with 16 numbers of one row.
struct Numbers {
  u32 x[HAS_LOW ? 2 : 4];
};

__device__ __forceinline__ void widen(Word4 (&wide)[2], const Numbers& numbers) {
#if HAS_LOW
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    u32 far[4];  // number j and the one four after it
#pragma unroll
    for (int j = 0; j < 4; ++j) far[j] = fma2(masked_or(numbers.x[i] >> (4 * j), 0x000f000fu, MAGIC), ONES, MINUS_BASE);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      wide[i].x[j] = __byte_perm(far[j % 2 * 2], far[j % 2 * 2 + 1], j < 2 ? 0x5410 : 0x7632);
  }
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 v = numbers.x[i];
    u32* to = wide[i / 2].x + i % 2 * 2;
#if FORMAT == FP8_ROWS && HALF
    to[0] = widen_fp8(v), to[1] = widen_fp8(v >> 16);
#else
    to[0] = widen_pair(__byte_perm(v, 0, FORMAT == INT8_ROWS ? 0x4140 : 0x1404));
    to[1] = widen_pair(__byte_perm(v, 0, FORMAT == INT8_ROWS ? 0x4342 : 0x3424));
#endif
  }
#endif
}

// Numbers `first` to `first` + 16 of a row.
__device__ __forceinline__ Numbers load_numbers(const unsigned char* row, int first) {
#if HAS_LOW
  const uint2 w = load_pair(row + first / 2);
  return {w.x, w.y};
#else
  const Word4 w = load_past_l1((const u16*)(row + first));
  return {w.x[0], w.x[1], w.x[2], w.x[3]};
#endif
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, OCCUPANCY) quant_attention(
    const u16* q, u16* out, const unsigned char* k_cache, const unsigned char* v_cache, const void* k_scales,
    const void* v_scales, const float* v_lows, const int* items, const int* tables, float* part_acc, float* part_best, float* part_total,
    int* counters, float scale, int stride_q, int stride_q_head, int stride_table, int num_kv_heads) {
  extern __shared__ __align__(16) float shared[];
  Word4* queries = (Word4*)shared;
  float* sums = shared + NT * 4 * 32 * 4;  // [WARPS + 1][SIZE]
  let_next_start();
  Item own = {(int)blockIdx.y, num_kv_heads, part_acc, part_best, part_total, counters};
  if (!read_item(own, items, tables, stride_table)) return leave_chain();
  const int head = own.head, begin = own.begin, end = own.end, first_token = own.first_token, fed = own.fed;
  const u32 rank = cluster_rank(), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 group = lane / 4, part = lane % 4;
  const int worker = rank * WARPS + warp, num_workers = CLUSTER * WARPS;
  Numbers key[UNITS][2][2], value[UNITS][4];
  u16 key_scale[UNITS][2][EACH], value_scale[UNITS][2][EACH];
  auto load_keys = [&](int place) {
#pragma unroll
    for (int u = 0; u < UNITS; ++u)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const long long at = __shfl_sync(~0u, place, u * 16 + h * 8 + group);
#pragma unroll
        for (int c = 0; c < 2; ++c) key[u][h][c] = load_numbers(k_cache + at * ROW_BYTES, c * 64 + part * 16);
#pragma unroll
        for (int e = 0; e < EACH; ++e)
          if (!IS_STATIC) key_scale[u][h][e] = load_scale((const u16*)k_scales + at * EACH + e);
      }
  };
  auto load_values = [&](int place) {
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const int token = u * 16 + 2 * part + t % 2 + t / 2 * 8;
        value[u][t] = load_numbers(v_cache + (long long)__shfl_sync(~0u, place, token) * ROW_BYTES, group * 16);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const long long at = __shfl_sync(~0u, place, u * 16 + h * 8 + group);
#pragma unroll
        for (int e = 0; e < EACH; ++e)
          if (!IS_STATIC) value_scale[u][h][e] = load_scale((const u16*)v_scales + at * EACH + e);
      }
    }
  };
  int turn = worker;
  bool works = begin + turn * TURN < end;
  const int first_place = works ? place_of(own, turn, lane) : 0;
  wait_for_previous();  // it may have written what is newest
  if (works) {
    load_keys(first_place);
    load_values(first_place);
  }

  // Warp n makes the queries of columns 8 n to 8 n + 8, and their sums.
  __shared__ float query_sums[COLUMNS];
  if (warp < NT) {
    const int column = warp * 8 + group;
    Word4 query[4] = {};
    if (column < GROUP * fed) {
      const u16* at = q + (long long)(first_token + column / GROUP) * stride_q +
                      (head * GROUP + column % GROUP) * stride_q_head;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int element = c / 2 * 64 + part * 16 + c % 2 * 8;
        query[c] = load4(at + element);
        if (!IS_STATIC) continue;
        const float* scales = (const float*)k_scales + head * WIDTH + element;
#pragma unroll
        for (int j = 0; j < 4; ++j)
          query[c].x[j] = pack(low(query[c].x[j]) * scales[2 * j], high(query[c].x[j]) * scales[2 * j + 1]);
      }
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) queries[(warp * 4 + c) * 32 + lane] = query[c];
#if SHIFTED
    float sum = 0.f;
#pragma unroll
    for (int c = 0; c < 4; ++c)
#pragma unroll
      for (int j = 0; j < 4; ++j) sum += low(query[c].x[j]) + high(query[c].x[j]);
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (part == 0) query_sums[column] = sum;
#endif
  }
  __syncthreads();

  State state;
  clear(state);
  [[maybe_unused]] float lift[NT][2] = {};  // what results are shifted by, of the keys of this thread
  while (works) {
    // The table's answer for the next turn takes as long as a load of keys: ask early.
    const bool goes_on = begin + (turn + num_workers) * TURN < end;
    const int next_place = goes_on ? place_of(own, turn + num_workers, lane) : 0;
    float s[UNITS][NT][4], of_value[UNITS][2];
    [[maybe_unused]] float shift[UNITS][2], best[NT][2];
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      Word4 wide[2][4];
      float factor[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        widen(*(Word4(*)[2])wide[h], key[u][h][0]);
        widen(*(Word4(*)[2])(wide[h] + 2), key[u][h][1]);
        factor[h] = IS_STATIC ? scale : scale * low_half(key_scale[u][h][0]);
        of_value[u][h] = IS_STATIC ? 1.f : low_half(value_scale[u][h][0]);
        shift[u][h] = SHIFTED ? low_half(value_scale[u][h][EACH - 1]) : 0.f;
      }
      score(s[u], wide, queries, lane);
      const int token = begin + turn * TURN + u * 16 + group;
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int last = min(end - 1, own.context - fed + (8 * n + 2 * (int)part + i % 2) / GROUP);
          float one = s[u][n][i] * factor[i / 2];
          if (SHIFTED) one += query_sums[8 * n + 2 * part + i % 2] * scale * low_half(key_scale[u][i / 2][EACH - 1]);
          s[u][n][i] = token + i / 2 * 8 <= last ? one : FLOOR * 2.f;
          best[n][i % 2] = state.best[n][i % 2];
        }
    }
    turn += num_workers, works = goes_on;
    if (works) load_keys(next_place);
    weigh<UNITS>(state, s);
#if SHIFTED
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        lift[n][side] *= power(best[n][side] - state.best[n][side]);
#pragma unroll
        for (int u = 0; u < UNITS; ++u)
          lift[n][side] += s[u][n][side] * shift[u][0] + s[u][n][side + 2] * shift[u][1];
      }
#endif
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      Word4 wide[4][2];
#pragma unroll
      for (int t = 0; t < 4; ++t) widen(wide[t], value[u][t]);
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[u][n][i] *= of_value[u][i / 2];
      add_values(state, s[u], wide);
    }
    if (works) load_values(next_place);
  }
#if SHIFTED
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      float sum = lift[n][side];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
#pragma unroll
      for (int i = 0; i < 8; ++i) state.acc[n][i][side] += sum, state.acc[n][i][side + 2] += sum;
    }
#endif

  bring_together(state, sums, own, rank, [&](int e, float (&results)[4]) {
    const int channel = head * WIDTH + e % WIDTH;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (IS_STATIC) results[i] *= ((const float*)v_scales)[channel + i];
      if (IS_STATIC && HAS_LOW) results[i] += v_lows[channel + i];
      if (own.context == 0) results[i] = 0.f;  // a row that stands in
    }
    store_results(out, first_token, head, num_kv_heads, e, results);
  });
}
