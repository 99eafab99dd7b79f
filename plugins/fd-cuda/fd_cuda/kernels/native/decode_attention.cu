// Paged attention of rows that feed one token or a few: rotation, cache write, split keys, one kernel.
//
// A cluster of CLUSTER blocks serves one kv head of one split of a row (a work item of attention/plan.py).
// Warps take turns of TURN tokens, each with its own running softmax, and meet at the end: within the
// block in shared memory, within the cluster through each other's, and where a row has several
// splits through global memory, where the last to come adds up in the order of the splits. The heads of
// a group times the row's tokens are the N columns of both products, so nothing is padded for groups
// of 8: scores^T = K Q^T, result^T = V^T P^T. Keys and values go from memory straight to the registers that
// the matrix instructions want: which of a row's elements a thread loads is chosen for 16 bytes a load,
// and as sums do not mind their order, Q is loaded in the same one.
// Shared memory: NT * (512 + 1024 * (WARPS + 1)) floats, of launch().
//
// What is read before wait_for_previous was written by the plan's kernel or earlier, see attention/plan.py;
// those loads go past the L1 cache.
#include "common.cuh"

#define WIDTH 128
#define WARPS 4
#define TURN (16 * UNITS)
#define COLUMNS (8 * NT)
#define SIZE (COLUMNS * WIDTH)
#define FLOOR -1e30f

struct Word4 {
  u32 x[4];
};

// INSTRUCTIONS: emulated.h of the tests has C++ in the place of what follows.

__device__ __forceinline__ Word4 load_past_l1(const u16* at) {
  Word4 w;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
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

__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, "
               "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
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

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank = 0;
#if CLUSTER > 1
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}

__device__ __forceinline__ void arrive() {
#if CLUSTER > 1
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}

__device__ __forceinline__ void await() {
#if CLUSTER > 1
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// A float in the shared memory of block `rank` of the cluster, at the address it has here.
__device__ __forceinline__ float of_block(const float* here, u32 rank) {
#if CLUSTER > 1
  u32 at = (u32)__cvta_generic_to_shared(here);
  float value;
  asm volatile("{.reg .b32 there; mapa.shared::cluster.u32 there, %1, %2; ld.shared::cluster.f32 %0, [there];}"
               : "=f"(value)
               : "r"(at), "r"(rank)
               : "memory");
  return value;
#else
  return *here;
#endif
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
__device__ __forceinline__ int of_run(u32 group, int h) { return h * (WIDTH / 2) + group * 8; }

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

extern "C" __global__ void __launch_bounds__(WARPS * 32, OCCUPANCY) decode_attention(
    const u16* q, const u16* k, const u16* v, u16* out,
    u16* k_cache, u16* v_cache, const int* items, const int* tables, const long long* slot_mapping,
    const long long* positions, const float* __restrict__ cos_sin, float* part_acc, float* part_best,
    float* part_total, int* counters, float scale, int stride_q, int stride_k, int stride_v, int stride_q_head,
    int stride_k_head, int stride_v_head, int stride_table, int num_kv_heads, int writes) {
  extern __shared__ __align__(16) float shared[];
  Word4* queries = (Word4*)shared;
  float* sums = shared + NT * 4 * 32 * 4;  // [WARPS][SIZE]
  float* block_sums = sums + WARPS * SIZE;
  __shared__ float bests[WARPS][COLUMNS], totals[WARPS][COLUMNS];
  __shared__ float block_best[COLUMNS], block_total[COLUMNS];
  __shared__ int arrived;
  let_next_start();
  const int* item = items + blockIdx.x * 8;
  const Word4 place_in_row = load_past_l1((const u16*)item), of_tokens = load_past_l1((const u16*)(item + 4));
  const int row = place_in_row.x[0], tile_begin = place_in_row.x[1], tile_end = place_in_row.x[2];
  if (row < 0) return;
  const int split = place_in_row.x[3], num_splits = of_tokens.x[0];
  const int context = of_tokens.x[1], first_token = of_tokens.x[2], fed = of_tokens.x[3];
  const int head = blockIdx.y;
  const u32 rank = cluster_rank(), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 group = lane / 4, part = lane % 4;
  const int worker = rank * WARPS + warp, num_workers = CLUSTER * WARPS;
  const int begin = tile_begin * TILE, end = min(tile_end * TILE, context);
  const int* table = tables + (long long)row * stride_table;

  // Lane l looks up where token l of a turn lies; past the end it is the last one once more.
  auto place_of = [&](int turn) {
    const int token = min(begin + turn * TURN + (int)(lane % TURN), end - 1);
    const int block = load_past_l1(table + token / BLOCK_SIZE);
    return ((long long)block * BLOCK_SIZE + token % BLOCK_SIZE) * num_kv_heads + head;
  };
  Word4 key[UNITS][2][4], value[UNITS][4][2];
  auto load_keys = [&](long long place) {
#pragma unroll
    for (int u = 0; u < UNITS; ++u)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const u16* at = k_cache + __shfl_sync(~0u, place, u * 16 + h * 8 + group) * WIDTH + part * 8;
#pragma unroll
        for (int c = 0; c < 4; ++c) key[u][h][c] = load_past_l1(at + c * 32);
      }
  };
  auto load_values = [&](long long place) {
#pragma unroll
    for (int u = 0; u < UNITS; ++u)
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const int token = u * 16 + 2 * part + t % 2 + t / 2 * 8;
        const u16* at = v_cache + __shfl_sync(~0u, place, token) * WIDTH;
#pragma unroll
        for (int h = 0; h < 2; ++h) value[u][t][h] = load_past_l1(at + of_run(group, h));
      }
  };
  int turn = worker;
  bool works = begin + turn * TURN < end;
  if (works) {
    const long long place = place_of(turn);
    load_keys(place);
    load_values(place);
  }

  // Warp n makes the queries of columns 8 n to 8 n + 8.
  const int column = warp * 8 + group;
  const bool has_query = warp < NT && column < GROUP * fed;
  Turn query_turn;
  if (has_query) load_turn(query_turn, cos_sin, load_past_l1(positions + first_token + column / GROUP), part);
  const bool owns = split == 0 && worker == num_workers - 1;
  if (owns && warp >= NT && group < fed)  // of its own key, then
    load_turn(query_turn, cos_sin, load_past_l1(positions + first_token + group), part);
  wait_for_previous();
  if (warp < NT) {
    Word4 query[4] = {};
    if (has_query) {
      const u16* at = q + (long long)(first_token + column / GROUP) * stride_q +
                      (head * GROUP + column % GROUP) * stride_q_head + part * 8;
#pragma unroll
      for (int c = 0; c < 4; ++c) query[c] = load4(at + c * 32);
      rotate(query, query_turn);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) queries[(warp * 4 + c) * 32 + lane] = query[c];
  }
  __syncthreads();

  State state;
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    state.best[n][0] = state.best[n][1] = FLOOR, state.total[n][0] = state.total[n][1] = 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) state.acc[n][i][0] = state.acc[n][i][1] = state.acc[n][i][2] = state.acc[n][i][3] = 0.f;
  }
  // The step's own tokens: the worker with the least to do rotates their keys and writes the cache, while
  // what it has asked for is on its way.
  if (owns) {
    Word4 own_key[2][4] = {}, own_value[4][2] = {};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int token = group + 8 * h;
      if (token >= fed) continue;
      Turn key_turn = query_turn;
      if (h > 0 || warp < NT) load_turn(key_turn, cos_sin, positions[first_token + token], part);
      const u16* at = k + (long long)(first_token + token) * stride_k + head * stride_k_head + part * 8;
#pragma unroll
      for (int c = 0; c < 4; ++c) own_key[h][c] = load4(at + c * 32);
      rotate(own_key[h], key_turn);
      const long long slot = writes ? slot_mapping[first_token + token] : -1;
      if (slot < 0) continue;
#pragma unroll
      for (int c = 0; c < 4; ++c)
        store4(k_cache + (slot * num_kv_heads + head) * WIDTH + part * 8 + c * 32, own_key[h][c]);
    }
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const int token = 2 * part + t % 2 + t / 2 * 8;
      if (token >= fed) continue;
      const u16* at = v + (long long)(first_token + token) * stride_v + head * stride_v_head;
#pragma unroll
      for (int h = 0; h < 2; ++h) own_value[t][h] = load4(at + of_run(group, h));
      const long long slot = writes ? slot_mapping[first_token + token] : -1;
      if (slot < 0) continue;
#pragma unroll
      for (int h = 0; h < 2; ++h)
        store4(v_cache + (slot * num_kv_heads + head) * WIDTH + of_run(group, h), own_value[t][h]);
    }
    float s[1][NT][4];
    score(s[0], own_key, queries, lane);
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = group + i / 2 * 8, of_query = (8 * n + 2 * (int)part + i % 2) / GROUP;
        s[0][n][i] = token < fed && token <= of_query ? s[0][n][i] * scale : FLOOR * 2.f;
      }
    weigh<1>(state, s);
    add_values(state, s[0], own_value);
  }

  while (works) {
    // The table's answer for the next turn takes as long as a load of keys: ask early.
    const bool goes_on = begin + (turn + num_workers) * TURN < end;
    const long long next_place = goes_on ? place_of(turn + num_workers) : 0;
    float s[UNITS][NT][4];
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      score(s[u], key[u], queries, lane);
      const int token = begin + turn * TURN + u * 16 + group;
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[u][n][i] = token + (i / 2) * 8 < end ? s[u][n][i] * scale : FLOOR * 2.f;
    }
    turn += num_workers, works = goes_on;
    if (works) load_keys(next_place);
    weigh<UNITS>(state, s);
#pragma unroll
    for (int u = 0; u < UNITS; ++u) add_values(state, s[u], value[u]);
    if (works) load_values(next_place);
  }

  // Warps of the block.
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int at = 8 * n + 2 * part + side;
      float total = state.total[n][side];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) total += __shfl_xor_sync(~0u, total, step);
      if (group == 0) bests[warp][at] = state.best[n][side], totals[warp][at] = total;
#pragma unroll
      for (int i = 0; i < 8; i += 2)
        *(float4*)(sums + warp * SIZE + at * WIDTH + of_run(group, i / 4) + i % 4 * 2) = make_float4(state.acc[n][i][side], state.acc[n][i][side + 2],
                                             state.acc[n][i + 1][side], state.acc[n][i + 1][side + 2]);
    }
  __syncthreads();
  const int used = GROUP * fed * WIDTH;  // of SIZE
  for (int e = threadIdx.x; e < used; e += WARPS * 32) {
    const int at = e / WIDTH;
    float best = bests[0][at], total = 0.f, sum = 0.f;
#pragma unroll
    for (int w = 1; w < WARPS; ++w) best = fmaxf(best, bests[w][at]);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const float weight = power(bests[w][at] - best);
      total += weight * totals[w][at], sum += weight * sums[w * SIZE + e];
    }
    block_sums[e] = sum;
    if (e % WIDTH == 0) block_best[at] = best, block_total[at] = total;
  }

  // Blocks of the cluster: each adds up its share of the elements.
  __syncthreads();
  arrive(), await();
  const int share = (used + CLUSTER - 1) / CLUSTER, last = min(used, (int)(rank + 1) * share);
  const long long item_part = ((long long)blockIdx.x * num_kv_heads + head) * COLUMNS;
  auto store_result = [&](int e, float result) {
    const int at = e / WIDTH;
    const long long token = first_token + at / GROUP;
    out[((token * num_kv_heads + head) * GROUP + at % GROUP) * WIDTH + e % WIDTH] = narrow(result);
  };
  for (int e = rank * share + threadIdx.x; e < last; e += WARPS * 32) {
    const int at = e / WIDTH;
    float bests_of[CLUSTER], best = FLOOR, total = 0.f, sum = 0.f;
#pragma unroll
    for (int b = 0; b < CLUSTER; ++b) best = fmaxf(best, bests_of[b] = of_block(block_best + at, b));
#pragma unroll
    for (int b = 0; b < CLUSTER; ++b) {
      const float weight = power(bests_of[b] - best);
      total += weight * of_block(block_total + at, b), sum += weight * of_block(block_sums + e, b);
    }
    if (num_splits == 1) {
      store_result(e, sum / total);
    } else {
      part_acc[item_part * WIDTH + e] = sum;
      // Every share may begin within a column: whoever has its first element here says the same.
      if (e % WIDTH == 0 || e == (int)rank * share) part_best[item_part + at] = best, part_total[item_part + at] = total;
    }
  }
  arrive();  // what is in this block's own shared memory is of no more use to it

  // Splits of the row: the last block to come with this share adds up.
  if (num_splits > 1) {
    __threadfence();
    __syncthreads();
    int* counter = counters + (row * num_kv_heads + head) * CLUSTER + rank;
    if (threadIdx.x == 0) {
      arrived = atomicAdd(counter, 1);
      if (arrived == num_splits - 1) *counter = 0;  // for the next layer
    }
    __syncthreads();
    if (arrived == num_splits - 1) {
      __threadfence();
      const long long stride = (long long)num_kv_heads * COLUMNS;
      const long long first = item_part - split * stride;
      for (int e = rank * share + threadIdx.x; e < last; e += WARPS * 32) {
        const int at = e / WIDTH;
        float best = FLOOR, total = 0.f, sum = 0.f;
#pragma unroll 8
        for (int s = 0; s < num_splits; ++s) best = fmaxf(best, __ldcg(part_best + first + s * stride + at));
#pragma unroll 8
        for (int s = 0; s < num_splits; ++s) {
          const float weight = power(__ldcg(part_best + first + s * stride + at) - best);
          total += weight * __ldcg(part_total + first + s * stride + at);
          sum += weight * __ldcg(part_acc + (first + s * stride) * WIDTH + e);
        }
        store_result(e, sum / total);
      }
    }
  }
  await();  // nor to the others: it may go
}
