// Paged attention of rows that feed one token or a few: rotation, cache write, split keys, one kernel.
//
// A cluster of CLUSTER blocks serves one kv head of one split of a row (a work item of attention/plan.py).
// Warps take turns of TURN tokens, each with its own running softmax, and meet at the end: within the
// block in shared memory, within the cluster through each other's, and where a row has several
// splits through global memory, where the last to come adds up in the order of the splits. Keys and values go
// from memory straight to the registers that the matrix instructions want (attention.cuh).
// Shared memory: NT * (512 + 1024 * (WARPS + 1)) floats, of launch().
//
// What is read before wait_for_previous was written by the plan's kernel or earlier, see attention/plan.py;
// those loads go past the L1 cache.
#include "attention.cuh"

#define TURN (16 * UNITS)

// INSTRUCTIONS

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
  const Tokens tokens = {q, k, v, k_cache, v_cache, slot_mapping, stride_q, stride_k, stride_v, stride_q_head,
                         stride_k_head, stride_v_head, head, num_kv_heads, first_token, fed, writes};
  if (warp < NT) {
    Word4 query[4] = {};
    if (has_query) {
      load_query(query, tokens, column, part);
      rotate(query, query_turn);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) queries[(warp * 4 + c) * 32 + lane] = query[c];
  }
  __syncthreads();

  State state;
  clear(state);
  // The step's own tokens: the worker with the least to do rotates their keys and writes the cache, while
  // what it has asked for is on its way.
  if (owns) {
    Word4 new_key[2][4] = {}, new_value[4][2] = {};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int token = group + 8 * h;
      if (token >= fed) continue;
      Turn key_turn = query_turn;
      if (h > 0 || warp < NT) load_turn(key_turn, cos_sin, positions[first_token + token], part);
      own_key(new_key[h], tokens, token, key_turn, part);
    }
    own_values(new_value, tokens, group, part);
    attend_own(state, new_key, new_value, queries, fed, scale, lane);
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
  leave(state, sums + warp * SIZE, bests[warp], totals[warp], lane);
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
