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
#include "meeting.cuh"
#include "copies.cuh"

extern "C" __global__ void __launch_bounds__(WARPS * 32, OCCUPANCY) decode_attention(
    const u16* q, const u16* k, const u16* v, u16* out,
    u16* k_cache, u16* v_cache, const int* items, const int* tables, const long long* slot_mapping,
    const long long* positions, const float* __restrict__ cos_sin, float* part_acc, float* part_best,
    float* part_total, int* counters, float scale, int stride_q, int stride_k, int stride_v, int stride_q_head,
    int stride_k_head, int stride_v_head, int stride_table, const u16* q_norm, const u16* k_norm, float eps,
    int num_kv_heads, int writes) {
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
  Word4 key[UNITS][2][4], value[UNITS][4][2];
  auto load_keys = [&](int place) {
#pragma unroll
    for (int u = 0; u < UNITS; ++u)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const u16* at = k_cache + (long long)__shfl_sync(~0u, place, u * 16 + h * 8 + group) * WIDTH + part * 8;
#pragma unroll
        for (int c = 0; c < 4; ++c) key[u][h][c] = load_past_l1(at + c * 32);
      }
  };
  auto load_values = [&](int place) {
#pragma unroll
    for (int u = 0; u < UNITS; ++u)
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const int token = u * 16 + 2 * part + t % 2 + t / 2 * 8;
        const u16* at = v_cache + (long long)__shfl_sync(~0u, place, token) * WIDTH;
#pragma unroll
        for (int h = 0; h < 2; ++h) value[u][t][h] = load_past_l1(at + of_run(group, h));
      }
  };
  // One loop, as each of its parts is some hundred instructions that a block has to fetch: loads of the first turn, queries,
  // then turns, each of which asks for the next one's keys and values. `keep` hides from the compiler which turn it is, or
  // else it would write the first one apart.
  State state;
  u32 is_first = 1;
#pragma unroll 1
  for (int turn = worker;; turn += num_workers) {
    keep(is_first);
    const bool goes_on = begin + turn * TURN < end;
    // The table's answer for the next turn takes as long as a load of keys: ask early.
    const int place = goes_on ? place_of(own, turn, lane) : 0;
    float s[UNITS][NT][4];
    if (!is_first) {
#pragma unroll
      for (int u = 0; u < UNITS; ++u) {
        score(s[u], key[u], queries, lane);
        const int token = begin + (turn - num_workers) * TURN + u * 16 + group;
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) s[u][n][i] = token + (i / 2) * 8 < end ? s[u][n][i] * scale : FLOOR * 2.f;
      }
    }
    if (goes_on) load_keys(place);
    keep(is_first);
    if (!is_first) {
      weigh<UNITS>(state, s);
#pragma unroll
      for (int u = 0; u < UNITS; ++u) add_values(state, s[u], value[u]);
    }
    if (goes_on) load_values(place);
    keep(is_first);
    if (is_first) {
      // Warp n makes the queries of columns 8 n to 8 n + 8.
      const int column = warp * 8 + group;
      const bool has_query = warp < NT && column < GROUP * fed;
      Turn query_turn;
      if (has_query) load_turn(query_turn, cos_sin, load_past_l1(positions + first_token + column / GROUP), part);
      const bool owns = own.split == 0 && worker == num_workers - 1;
      if (owns && warp >= NT && group < fed)  // of its own key, then
        load_turn(query_turn, cos_sin, load_past_l1(positions + first_token + group), part);
      Word4 norm[4];  // of its query, or of its own key
      load_norm(norm, warp < NT ? q_norm : k_norm, part);
      wait_for_previous();
      const Tokens tokens = {q, k, v, k_cache, v_cache, slot_mapping, stride_q, stride_k, stride_v, stride_q_head,
                             stride_k_head, stride_v_head, head, num_kv_heads, first_token, fed, writes, eps};
      if (warp < NT) {
        Word4 query[4] = {};
        load_query(query, norm, tokens, column, has_query, part);
        if (has_query) rotate(query, query_turn);
#pragma unroll
        for (int c = 0; c < 4; ++c) queries[(warp * 4 + c) * 32 + lane] = query[c];
      }
      __syncthreads();

      clear(state);
      // The step's own tokens: the worker with the least to do rotates their keys and writes the cache, while
      // what it has asked for is on its way.
      if (owns) {
        Word4 new_key[2][4] = {}, new_value[4][2] = {};
        if (warp < NT) load_norm(norm, k_norm, part);
#pragma unroll
        for (int h = 0; h < OWN_EIGHTS; ++h) {
          const int token = group + 8 * h;
          if (8 * h >= fed) continue;
          load_key(new_key[h], norm, tokens, token, part);
          if (token >= fed) continue;
          Turn key_turn = query_turn;
          if (h > 0 || warp < NT) load_turn(key_turn, cos_sin, positions[first_token + token], part);
          own_key(new_key[h], tokens, token, key_turn, part);
        }
        own_values(new_value, tokens, group, part);
        attend_own(state, new_key, new_value, queries, fed, scale, lane);
      }
    }
    if (!goes_on) break;
    is_first = 0;
  }

  bring_together(state, sums, own, rank, [&](int e, const float (&results)[4]) {
    store_results(out, first_token, head, num_kv_heads, e, results);
  });
}
