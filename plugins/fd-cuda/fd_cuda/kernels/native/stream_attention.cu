// Paged attention of batches that fill the GPU, one token a row or a few: rotation, cache write, attention.
//
// All tiles of all rows and kv heads stand in one line (row, head, tile), of which each block takes an equal
// share, so that all multiprocessors end together, or, where rows are about as long, one row and head. A share is a few segments, each a part
// of one row's keys for one head. Warps take chunks of CHUNK tokens in turn. Each has a ring of its own in
// shared memory, which it fills STAGES - 1 chunks ahead, over the ends of segments too, and from which it
// alone reads: between the ends of segments nobody waits for anybody but memory. A row of several blocks is
// added up by the last to come, in the order of the blocks.
// Shared memory: 2 NT 512 floats of queries, and WARPS * STAGES * CHUNK * 256 16-bit numbers.
//
// What is read before wait_for_previous was written by the plan's kernel or earlier, see attention/plan.py.
#include "attention.cuh"
#include "copies.cuh"

#define CHUNK (16 * UNITS)
#define STAGE (CHUNK * 2 * WIDTH)
#define EACH (SIZE / (WARPS * 128))  // fours of results that a thread has
static_assert(CHUNK * 2 * 2 >= COLUMNS * 4, "sums of a warp take the place of one stage");

// Where the 16 bytes `i` of a token lie, so that what a warp reads at once is in different banks.
__device__ __forceinline__ int of_key(int token, int i) { return token * WIDTH + (i ^ (token & 1) << 2) * 8; }
__device__ __forceinline__ int of_value(int token, int i) { return (CHUNK + token) * WIDTH + (i ^ (token & 6)) * 8; }

// The line of tiles, and how it is shared out.
struct Line {
  const int* rows;  // of each: its first tile (of one head), tiles, cached tokens, first token, tokens fed
  int num_kv_heads, total, num_blocks;  // total: 0 where a block has all tiles of one row and head

  __device__ __forceinline__ int block_of(int tile) const {
    return total == 0 ? blockIdx.x : (int)(((long long)(tile + 1) * num_blocks - 1) / total);
  }
};

// A segment of the share that ends at `last`.
struct Segment {
  int row, at, first_tile, num_tiles, cached, first_token, fed;  // at: in the line
  int head, begin, end, unit, length;  // tokens; where row and head begin in the line; tiles of this segment

  __device__ __forceinline__ void load(const Line& line) {
    const Word4 some = load_past_l1((const u16*)(line.rows + row * 8));
    first_tile = some.x[0], num_tiles = some.x[1], cached = some.x[2], first_token = some.x[3];
    fed = load_past_l1(line.rows + row * 8 + 4);
  }

  // Of what lies at `at`, which is at or after this row.
  __device__ __forceinline__ void enter(const Line& line, int last) {
    while (at >= (first_tile + num_tiles) * line.num_kv_heads) ++row, load(line);
    head = (at - first_tile * line.num_kv_heads) / num_tiles;
    unit = first_tile * line.num_kv_heads + head * num_tiles;
    const int tile = at - unit;
    length = min(num_tiles - tile, last - at);
    begin = tile * TILE, end = min((tile + length) * TILE, cached);
  }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, OCCUPANCY) stream_attention(
    const u16* q, const u16* k, const u16* v, u16* out,
    u16* k_cache, u16* v_cache, const int* items, const int* tables, const long long* slot_mapping,
    const float* __restrict__ cos_sin, float* part_acc, float* part_best,
    float* part_total, int* counters, float scale, int stride_q, int stride_k, int stride_v, int stride_q_head,
    int stride_k_head, int stride_v_head, int stride_table, const u16* q_norm, const u16* k_norm, float eps,
    int num_kv_heads, int num_blocks, int writes) {
  extern __shared__ __align__(16) float shared[];
  __shared__ float bests[WARPS][COLUMNS], totals[WARPS][COLUMNS];
  __shared__ const float* sums[WARPS];
  __shared__ int arrived;
  let_next_start();
  const Word4 share = load_past_l1((const u16*)(items + blockIdx.x * 8));
  const int last = share.x[2];
  Segment now;
  now.row = share.x[0], now.at = share.x[1];
  if (now.at >= last) return leave_chain();
  const Line line = {items + num_blocks * 8, num_kv_heads, (int)share.x[3], num_blocks};
  const int warp = threadIdx.x / 32;
  const u32 lane = threadIdx.x % 32, group = lane / 4, part = lane % 4;
  u16* ring = (u16*)((Word4*)shared + 2 * NT * 4 * 32) + warp * STAGES * STAGE;
  now.load(line), now.enter(line, last);

  // What is asked for ahead: lane l knows where token l of the next chunk lies.
  Segment ahead = now;
  int chunk = warp, place = 0;
  bool more = true;
  auto look_up = [&]() {
    while (ahead.begin + chunk * CHUNK >= ahead.end) {
      ahead.at += ahead.length, chunk = warp;
      more = ahead.at < last;
      if (!more) return;
      ahead.enter(line, last);
    }
    const int token = min(ahead.begin + chunk * CHUNK + (int)(lane % CHUNK), ahead.end - 1);
    const int block = load_past_l1(tables + (long long)ahead.row * stride_table + token / BLOCK_SIZE);
    place = (block * BLOCK_SIZE + token % BLOCK_SIZE) * num_kv_heads + ahead.head;
  };
  auto ask = [&](int stage) {
    if (more) {
      const u32 to = shared_address(ring + stage * STAGE);
      const int count = ahead.end - ahead.begin - chunk * CHUNK, i = lane % 16;
#pragma unroll
      for (int pair = 0; pair < CHUNK / 2; ++pair) {
        const int token = pair * 2 + lane / 16;
        const long long from = (long long)__shfl_sync(~0u, place, token) * WIDTH + i * 8;
        copy_async(to + of_key(token, i) * 2, k_cache + from, token < count);
        copy_async(to + of_value(token, i) * 2, v_cache + from, token < count);
      }
      chunk += WARPS;
      look_up();
    }
    commit();
  };
  look_up();
#pragma unroll 1
  for (int stage = 0; stage < STAGES - 1; ++stage) ask(stage);
  int free_stage = STAGES - 1;  // nothing is asked for into it, nobody reads it
  wait_for_previous();

  for (int parity = 0;; parity ^= 1) {
    const Tokens tokens = {q, k, v, k_cache, v_cache, slot_mapping, stride_q, stride_k, stride_v, stride_q_head,
                           stride_k_head, stride_v_head, now.head, num_kv_heads, now.first_token, now.fed, writes, eps};
    Word4* queries = (Word4*)shared + parity * NT * 4 * 32;
    if (warp < NT) {
      Word4 query[4] = {}, norm[4];
      load_norm(norm, q_norm, part);
      const int column = warp * 8 + group;
      const bool has_query = column < GROUP * now.fed;
      load_query(query, norm, tokens, column, has_query, part);
      if (has_query) {
        Turn turn;
        load_turn(turn, cos_sin, now.cached + column / GROUP, part);
        rotate(query, turn);
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) queries[(warp * 4 + c) * 32 + lane] = query[c];
    }
    // The step's own tokens belong to whoever has the row's first.
    const bool owns = now.at == now.unit && warp == WARPS - 1;
    Word4 new_key[2][4] = {}, new_value[4][2] = {};
    if (owns) {
      Word4 norm[4];
      load_norm(norm, k_norm, part);
#pragma unroll
      for (int h = 0; h < OWN_EIGHTS; ++h) {
        const int token = group + 8 * h;
        if (8 * h >= now.fed) continue;
        load_key(new_key[h], norm, tokens, token, part);
        if (token >= now.fed) continue;
        Turn turn;
        load_turn(turn, cos_sin, now.cached + token, part);
        own_key(new_key[h], tokens, token, turn, part);
      }
      own_values(new_value, tokens, group, part);
    }
    __syncthreads();  // queries are there, and all have read what the segment before had left

    State state;
    clear(state);
    if (owns) attend_own(state, new_key, new_value, queries, now.fed, scale, lane);
    for (int first = now.begin + warp * CHUNK; first < now.end; first += WARPS * CHUNK) {
      await_own_copies<STAGES - 2>();
      __syncwarp();
      ask(free_stage);
      free_stage = free_stage == STAGES - 1 ? 0 : free_stage + 1;
      const u16* from = ring + free_stage * STAGE;
      float s[UNITS][NT][4];
#pragma unroll
      for (int u = 0; u < UNITS; ++u) {
        Word4 key[2][4];
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int c = 0; c < 4; ++c) key[h][c] = load4(from + of_key(u * 16 + h * 8 + group, c * 4 + part));
        score(s[u], key, queries, lane);
        const int token = first + u * 16 + group;
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) s[u][n][i] = token + i / 2 * 8 < now.end ? s[u][n][i] * scale : FLOOR * 2.f;
      }
      weigh<UNITS>(state, s);
#pragma unroll
      for (int u = 0; u < UNITS; ++u) {
        Word4 value[4][2];
#pragma unroll
        for (int t = 0; t < 4; ++t)
#pragma unroll
          for (int h = 0; h < 2; ++h)
            value[t][h] = load4(from + of_value(u * 16 + 2 * part + t % 2 + t / 2 * 8, h * 8 + group));
        add_values(state, s[u], value);
      }
    }

    float* own_sums = (float*)(ring + free_stage * STAGE);
    __syncwarp();  // all lanes have read what was there
    leave(state, own_sums, bests[warp], totals[warp], lane);
    if (lane == 0) sums[warp] = own_sums;
    __syncthreads();
    const int begins_in = line.block_of(now.unit), ends_in = line.block_of(now.unit + now.num_tiles - 1);
    auto store = [&](int e, float (&results)[4], float total) {
      for (float& result : results) result /= total;
      store_results(out, now.first_token, now.head, num_kv_heads, e, results);
    };
    // Of each block at most two segments are part of a row: one that begins it, and one that does not.
    const long long slot = blockIdx.x * 2 + (now.at == now.unit);
    const int used = GROUP * now.fed * WIDTH;  // of SIZE
#pragma unroll 1
    for (int e = threadIdx.x * 4; e < used; e += WARPS * 128) {
      const int at = e / WIDTH;
      float best, total, results[4] = {};
      add_warps(results, best, total, [&](int w) { return sums[w]; }, bests, totals, e);
      if (begins_in == ends_in) {
        store(e, results, total);
      } else {
        *(float4*)(part_acc + slot * SIZE + e) = make_float4(results[0], results[1], results[2], results[3]);
        if (e % WIDTH == 0) part_best[slot * COLUMNS + at] = best, part_total[slot * COLUMNS + at] = total;
      }
    }
    if (begins_in != ends_in) {
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) {
        int* counter = counters + now.row * num_kv_heads + now.head;
        arrived = atomicAdd(counter, 1);
        if (arrived == ends_in - begins_in) *counter = 0;  // for the next layer
      }
      __syncthreads();
      if (arrived == ends_in - begins_in) {
        __threadfence();
        // Of one block after the other all elements of a thread at once: their loads wait for memory together.
        float best[EACH], total[EACH], results[EACH][4] = {};
#pragma unroll
        for (int i = 0; i < EACH; ++i) best[i] = FLOOR, total[i] = 0.f;
#pragma unroll 1
        for (int b = begins_in; b <= ends_in; ++b) {
          const int of = b * 2 + (b == begins_in);
#pragma unroll
          for (int i = 0; i < EACH; ++i) {
            const int e = (threadIdx.x + i * WARPS * 32) * 4, at = e / WIDTH;
            if (e >= used) continue;
            const float its = __ldcg(part_best + of * COLUMNS + at), larger = fmaxf(best[i], its);
            const float fade = power(best[i] - larger), weight = power(its - larger);
            best[i] = larger, total[i] = total[i] * fade + weight * __ldcg(part_total + of * COLUMNS + at);
            for (float& result : results[i]) result *= fade;
            add(results[i], weight, __ldcg((const float4*)(part_acc + of * SIZE + e)));
          }
        }
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
          const int e = (threadIdx.x + i * WARPS * 32) * 4;
          if (e < used) store(e, results[i], total[i]);
        }
      }
    }
    now.at += now.length;
    if (now.at >= last) return;
    now.enter(line, last);
  }
}
