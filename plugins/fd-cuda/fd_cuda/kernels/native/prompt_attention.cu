// Attention of prompts, heads of WIDTH, 64 or 128: as many blocks as there are multiprocessors take one item after the other,
// some tokens of a row and the query heads of one kv head, which are the rows of one matrix.
//
// One warp feeds: the copy engine brings queries and, STAGES turns of 128 keys ahead, keys and values, those of the next item
// while this one ends. Groups of four warps have 64 rows each. Each asks for the product of its queries with the next keys
// and of its weights with the values before, and makes weights while these run; the groups take turns at asking, so that
// one makes weights while the matrix units work for another. Queries come as the product made them and are normed and
// rotated where they lie.
// Keys and values come from the cache, the step's own too, the diagonal first, BOX of a block at a time. Turns that end before
// the item's WINDOW are left out. The order of a token's sums depends on where it stands alone.

#define BN 128  // keys of a turn
#define PAIRED 0
#include "common.cuh"
#include "wide.cuh"
#include "feed.cuh"

#define KEYS BN
#define PARTS (WIDTH / 64)           // of a head, each 128 bytes wide in shared memory
#define PART_TILE (KEYS * 128)       // bytes: one part of all keys
#define TILE (PARTS * PART_TILE)
#define ROW_GROUPS (THREADS / 128 - 1)
#define ROWS (TOKENS * GROUP)        // of 64 * ROW_GROUPS
#define PART_QUERIES (ROW_GROUPS * 64 * 128)
#define CONSUMERS (ROW_GROUPS * 4)   // warps
#define LANES 8                      // threads that norm and rotate a query of 128, each two pieces of eight numbers
#define OWN_QUERIES 4                // of a thread, one after the other
#define OWN_TOKENS (GROUP % OWN_QUERIES == 0 ? 1 : 2)  // to which they may belong, of groups of several heads
#define LOG2E 1.4426950408889634f
#define HEADROOM 8.f                 // weights begin at two to minus so many: float16 goes on to minus 24
#define SUMS (WIDTH / 2 + 4)         // a thread's: of values, and of ones, which are those of weights
#define ONES_BYTES 2048              // 64 columns for 16 keys

// INSTRUCTIONS: emulated_prompts.h of the tests has C++ in the place of what follows.

// Values are as they lie: rows are what is summed over. 1024 bytes between groups of eight, `step` between 64 columns.
__device__ __forceinline__ u64 descriptor_of_values(u32 address, u32 step) {
  return (u64)((address & 0x3ffff) >> 4) | ((u64)(step >> 4) << 16) | ((u64)(1024 >> 4) << 32) | ((u64)1 << 62);
}

template <int count>
__device__ __forceinline__ void fence_all(float (&d)[count]) {
#pragma unroll
  for (int i = 0; i < count; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// Queries times keys, both 16 numbers of them.
template <int add>
__device__ __forceinline__ void multiply_keys(float* d, u64 queries, u64 keys) {
  asm volatile("wgmma.mma_async.sync.aligned." SIZE "k16.f32." TYPE "." TYPE " " D_LIST ", " BOTH_SHARED ", %66, 1, 1, 0, 0;"
               : D_REGS("+f", d) : "l"(queries), "l"(keys), "n"(add));
}

// Weights of 16 keys times 64 columns of their values.
__device__ __forceinline__ void multiply_values(float* d, const u32* weights, u64 values) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" D32 "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"
               : R32("+f", d, 0) : "r"(weights[0]), "r"(weights[1]), "r"(weights[2]), "r"(weights[3]), "l"(values));
}

// The same of the last ones, and eight columns of ones.
__device__ __forceinline__ void multiply_last(float* d, const u32* weights, u64 values) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n72k16.f32." TYPE "." TYPE " {" D32 ",%32,%33,%34,%35}, {%36,%37,%38,%39},"
               " %40, 1, 1, 1, 1;" : R32("+f", d, 0), R4("+f", d, 32)
               : "r"(weights[0]), "r"(weights[1]), "r"(weights[2]), "r"(weights[3]), "l"(values));
}

// The box of queries: 64 numbers of each of GROUP heads of TOKENS tokens.
__device__ __forceinline__ void copy_heads(u32 to, const TensorMap& map, int input, int head, int token, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%2, %3, %4}], [%5];"
               ::"r"(to), "l"(&map), "r"(input), "r"(head), "r"(token), "r"(barrier) : "memory");
}

__device__ __forceinline__ float power(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// All threads of a group of four warps.
__device__ __forceinline__ void meet_group(int group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }

// The groups take turns: one waits until the one before has given it the turn.
__device__ __forceinline__ void await_turn(int group) {
  asm volatile("bar.sync %0, 256;" ::"r"(group + 1 + ROW_GROUPS) : "memory");
}
__device__ __forceinline__ void give_turn(int group) {
  asm volatile("bar.arrive %0, 256;" ::"r"(group + 1 + ROW_GROUPS) : "memory");
}

// END OF INSTRUCTIONS

// Tokens of a row, from `begin` of the `fed` that it feeds on, behind `context` others; for one kv head.
struct Item {
  int row, begin, first, fed, context, head;

  // Of the row's keys, the first that the first token sees, and the turn that ends with the last one's.
  __device__ __forceinline__ int first_seen() const { return WINDOW ? max(context + begin - (WINDOW - 1), 0) : 0; }
  __device__ __forceinline__ int end() const { return (context + min(begin + TOKENS, fed) + KEYS - 1) / KEYS; }
  __device__ __forceinline__ int turns() const { return end() - first_seen() / KEYS; }
};

// Keys of a turn, the last ones first: the first of them, and how many there are from there on.
struct Turn {
  int first, valid;
  int gone;    // so many first ones may be others' by now
  int behind;  // where the item's first token stands, from the first key on
};

__device__ __forceinline__ Turn turn_of(const Item& item, int nth) {
  const int first = (item.end() - 1 - nth) * KEYS;
  return {first, item.context + item.fed - first, WINDOW ? max(item.first_seen() - first, 0) : 0,
          item.context + item.begin - first};
}

// A block's items: of each round of as many as there are blocks one, from the front and from the back in turn, because
// the longest come first. Heads come in passes of `together`, whose keys and values the second-level cache holds while
// their items follow each other; in every other pass rounds go the other way. After the last, one that feeds none.
struct Items {
  const int* tiles;
  int heads, together, count, head, begin, odd;  // count: items of a pass

  __device__ __forceinline__ Item next() {
    while (head < heads) {
      const int id = begin + (odd ? (int)gridDim.x - 1 - (int)blockIdx.x : (int)blockIdx.x), first = head;
      begin += gridDim.x, odd ^= 1;
      if (begin >= count) begin = 0, head += together, odd = head / together & 1;
      if (id >= count) continue;
      const int* tile = tiles + id / together * TILE_WORDS;
      return {tile[0], tile[1], tile[2], tile[3], tile[4], first + id % together};
    }
    return {};
  }
};

struct Barriers {
  u32 full_queries, empty_queries, full_keys, empty_keys, full_values, empty_values;
};

// What one warp does.
__device__ __forceinline__ void feed(const TensorMap& q, const TensorMap& k_cache, const TensorMap& v_cache, Items items,
                                     const int* tables, int stride_table, const Barriers& at, u32 queries, u32 keys,
                                     u32 values, int lane) {
  Place place = {0, 1};  // the phase before the first one counts as ended
  u32 round = 1;
  for (Item item = items.next(), following; item.fed; item = following) {
    following = items.next();  // long before it is looked at
    const int turns = item.turns();
    const int* table = tables + (u64)item.row * stride_table;
    const int last = item.context + item.fed - 1;
    // Each lane knows where one box of a turn begins; of the next one, long before it is asked for.
    const auto slot_of = [&](int nth) {
      if (nth >= turns || lane >= KEYS / BOX) return 0;
      const int position = min(turn_of(item, nth).first + lane * BOX, last / BOX * BOX);
      return table[position / BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE;
    };
    int next = slot_of(0);
    for (int nth = 0; nth < turns; nth++, advance<STAGES>(place)) {
      const int slot = next;
      next = slot_of(nth + 1);
#pragma unroll
      for (int of_values = 0; of_values < 2; of_values++) {
        if (of_values && nth == 0 && lane == 0) {  // the memory of keys is free before that of queries
          await_phase(at.empty_queries, round);
          expect(at.full_queries, ROWS * WIDTH * 2);
#pragma unroll
          for (int part = 0; part < PARTS; part++)
            copy_heads(queries + part * PART_QUERIES, q, part * 64, item.head * GROUP, item.first + item.begin,
                       at.full_queries);
        }
        const u32 full = (of_values ? at.full_values : at.full_keys) + 8 * place.stage;
        const u32 to = (of_values ? values : keys) + place.stage * TILE;
        if (lane == 0) {
          await_phase((of_values ? at.empty_values : at.empty_keys) + 8 * place.stage, place.parity);
          expect(full, TILE);
        }
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
          const int input = item.head * WIDTH + part * 64;
#pragma unroll
          for (int box = 0; box < KEYS / BOX; box++) {
            const int first = __shfl_sync(~0u, slot, box);
            const u32 place_of_box = to + part * PART_TILE + box * BOX * 128;
            if (lane == 0) copy_box(place_of_box, of_values ? v_cache : k_cache, input, first, full);
          }
        }
      }
    }
    round ^= 1;
  }
}

// What becomes of queries before they meet keys.
struct Rotation {
  const long long* positions;
  const float* cos_sin;
  const u16* norm;
  float eps;
};

// What a thread needs for its queries of an item.
struct Angles {
  float cos[OWN_TOKENS][8], sin[OWN_TOKENS][8];
};

// Of a query's pieces, one of a thread's two, which are partners where halves are rotated.
__device__ __forceinline__ int piece_of(int lane, int half) {
  constexpr int rotated = ROTARY / 16;
  return lane < rotated ? lane + half * rotated : lane + rotated + half * (LANES - rotated);
}

__device__ __forceinline__ int own_query(int thread) { return thread / LANES * OWN_QUERIES; }

__device__ __forceinline__ void load_four(float* to, const float* from) {
  const float4 x = *(const float4*)from;
  to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
}

__device__ __forceinline__ void load_angles(Angles& angles, const Rotation& rotation, const Item& item, int thread) {
  const int lane = thread % LANES, first = item.begin + own_query(thread) / GROUP;
#pragma unroll
  for (int t = 0; t < OWN_TOKENS; t++) {
    if (lane >= ROTARY / 16) {
#pragma unroll
      for (int i = 0; i < 8; i++) angles.cos[t][i] = 1.f, angles.sin[t][i] = 0.f;
      continue;
    }
    const u64 position = rotation.positions[item.first + min(first + t, item.fed - 1)];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float* at = rotation.cos_sin + position * ROTARY +
                        (INTERLEAVED ? piece_of(lane, half) * 4 : lane * 8 + half * 4);
      load_four(angles.cos[t] + half * 4, at);
      load_four(angles.sin[t] + half * 4, at + ROTARY / 2);
    }
  }
}

// A thread's queries, where they lie. All are loaded before the first is stored, so that none waits for another.
__device__ __forceinline__ void rotate(unsigned char* queries, const Angles& angles, const Rotation& rotation, int thread) {
  const auto place_of = [&](int i, int half) {
    const int row = own_query(thread) + i, piece = piece_of(thread % LANES, half);
    return (uint4*)(queries + piece / 8 * PART_QUERIES + row * 128 + (((piece ^ row) & 7) << 4));
  };
  uint4 pieces[OWN_QUERIES][2];
#pragma unroll
  for (int i = 0; i < OWN_QUERIES * 2; i++) pieces[i / 2][i % 2] = *place_of(i / 2, i % 2);
#if NORMS
  uint4 norms[2];
#pragma unroll
  for (int half = 0; half < 2; half++) norms[half] = *(const uint4*)(rotation.norm + piece_of(thread % LANES, half) * 8);
  float squares[OWN_QUERIES] = {};
#pragma unroll
  for (int i = 0; i < OWN_QUERIES * 2; i++) {
    const uint4 x = pieces[i / 2][i % 2];
    const u32 pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int w = 0; w < 4; w++)
      squares[i / 2] = fmaf(low(pairs[w]), low(pairs[w]), fmaf(high(pairs[w]), high(pairs[w]), squares[i / 2]));
  }
#pragma unroll
  for (int step = 1; step < LANES; step *= 2)
#pragma unroll
    for (int i = 0; i < OWN_QUERIES; i++) squares[i] += __shfl_xor_sync(~0u, squares[i], step);
#endif
#pragma unroll
  for (int i = 0; i < OWN_QUERIES; i++) {
    const int row = own_query(thread) + i;
    const int token = OWN_QUERIES % GROUP == 0 ? i / GROUP : row / GROUP - own_query(thread) / GROUP;
    float x[2][8];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint4 words = pieces[i][half];
      const u32 pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int w = 0; w < 4; w++) x[half][w * 2] = low(pairs[w]), x[half][w * 2 + 1] = high(pairs[w]);
#if NORMS
      const float factor = rsqrtf(squares[i] / WIDTH + rotation.eps);
      const u32 norm[4] = {norms[half].x, norms[half].y, norms[half].z, norms[half].w};
#pragma unroll
      for (int w = 0; w < 4; w++) {
        float* pair = x[half] + w * 2;
        const u32 rounded = pack(pair[0] * factor * low(norm[w]), pair[1] * factor * high(norm[w]));
        pair[0] = low(rounded), pair[1] = high(rounded);
      }
#endif
    }
#pragma unroll
    for (int e = 0; e < 8; e++) {
      float cos = angles.cos[0][e], sin = angles.sin[0][e];
#pragma unroll
      for (int t = 1; t < OWN_TOKENS; t++)
        if (token == t) cos = angles.cos[t][e], sin = angles.sin[t][e];
      float& first = INTERLEAVED ? x[e / 4][e % 4 * 2] : x[0][e];
      float& second = INTERLEAVED ? x[e / 4][e % 4 * 2 + 1] : x[1][e];
      const float was = first;
      first = was * cos - second * sin;
      second = second * cos + was * sin;
    }
#pragma unroll
    for (int half = 0; half < 2; half++)
      *place_of(i, half) = make_uint4(pack(x[half][0], x[half][1]), pack(x[half][2], x[half][3]),
                                      pack(x[half][4], x[half][5]), pack(x[half][6], x[half][7]));
  }
}

// A thread's rows, two of 64. A weight is two to the power of what a product is above `zero`, which lies HEADROOM over the
// largest product when it was set. It is set again when a product reaches it: mostly nothing that was summed up fades.
struct Softmax {
  float zero[2];
  bool unseen[2];  // no key so far

  // Products to what they are above zero. `await`: until `sum` holds what was summed up before the turn, not the first one.
  template <bool is_first, class Await>
  __device__ __forceinline__ void level(float* scores, float scale, float* sum, Await await) {
    u32 signs = ~0u;
#pragma unroll
    for (int i = 0; i < KEYS / 2; i += 2) {
#pragma unroll
      for (int e = i; e < i + 2; e++) scores[e] = fmaf(scores[e], scale, -zero[i / 2 % 2]);
      signs &= __float_as_uint(scores[i]) & __float_as_uint(scores[i + 1]);
    }
    if (!is_first) {
      if (!__any_sync(~0u, (int)signs >= 0 || unseen[0] || unseen[1])) return;
      await();
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float high = LOWEST;
#pragma unroll
      for (int i = 0; i < KEYS / 8; i++) high = fmaxf(high, fmaxf(scores[i * 4 + r * 2], scores[i * 4 + r * 2 + 1]));
      high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
      high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
      if (high == LOWEST || (high < 0.f && !unseen[r])) continue;
      const float up = high + HEADROOM, fade = unseen[r] ? 0.f : power(-up);
      unseen[r] = false;
      zero[r] += up;
#pragma unroll
      for (int i = 0; i < KEYS / 2; i++)
        if (i / 2 % 2 == r) scores[i] -= up;
#pragma unroll
      for (int i = 0; i < SUMS; i++)
        if (!is_first && i / 2 % 2 == r) sum[i] *= fade;
    }
  }
};

// Keys that a thread's rows do not see.
__device__ __forceinline__ void mask(float* scores, const Turn& turn, int row, int lane) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int own = turn.behind + (row + r * 8) / GROUP - (lane & 3) * 2;
#pragma unroll
    for (int i = 0; i < KEYS / 8; i++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int key = i * 8 + e;
        if (key > own || (WINDOW && key <= own - WINDOW)) scores[i * 4 + r * 2 + e] = LOWEST;
      }
  }
}

// Values before the row's and after its last key may be anything, NaN too, and have no weight.
__device__ __forceinline__ void clear_values(unsigned char* values, const Turn& turn, int group, int thread) {
  constexpr int chunks = WIDTH / 8;
  const int kept = max(min(turn.valid, KEYS) - turn.gone, 0);
  for (int at = thread % 128; at < (KEYS - kept) * chunks; at += 128) {
    const int nth = at / chunks, chunk = at % chunks, row = nth < turn.gone ? nth : nth + kept;
    *(uint4*)(values + chunk / 8 * PART_TILE + row * 128 + chunk % 8 * 16) = make_uint4(0, 0, 0, 0);
  }
  show_to_copies();
  meet_group(group);
}

__device__ __forceinline__ void ask_for_scores(float* scores, u32 queries, u32 keys) {
  const u64 a = descriptor(queries), b = descriptor(keys);
  multiply_keys<0>(scores, a, b);
#pragma unroll
  for (int s = 1; s < WIDTH / 16; s++) {
    const int at = s % 4 * 2;  // 32 bytes a step, in units of 16
    multiply_keys<1>(scores, a + s / 4 * (PART_QUERIES / 16) + at, b + s / 4 * (PART_TILE / 16) + at);
  }
}

// `ones` is how many bytes these lie behind the values.
__device__ __forceinline__ void ask_for_sums(float* sum, const u32 (*weights)[4], u32 values, u32 ones) {
  constexpr int last = PARTS - 1, step = 16 * 128 / 16;
  const u64 first = descriptor_of_values(values, 0);
  const u64 second = descriptor_of_values(values + last * PART_TILE, ones - last * PART_TILE);
#pragma unroll
  for (int s = 0; s < KEYS / 16; s++) {
    if (last) multiply_values(sum, weights[s], first + s * step);
    multiply_last(sum + last * 32, weights[s], second + s * step - ((u64)(s * step) << 16));  // the same ones every time
  }
}

// In place first: ptxas finds no registers for what goes straight into weights.
__device__ __forceinline__ void make_weights(u32 (*weights)[4], float* above) {
#pragma unroll
  for (int i = 0; i < KEYS / 2; i++) above[i] = power(above[i]);
#pragma unroll
  for (int s = 0; s < KEYS / 16; s++)
#pragma unroll
    for (int i = 0; i < 4; i++) weights[s][i] = pack(above[s * 8 + i * 2], above[s * 8 + i * 2 + 1]);
}

// Each of four neighbouring lanes has a word of each of four pieces; after it, the words of one piece.
__device__ __forceinline__ uint4 gathered(u32 (&words)[4], int lane) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (i & step) continue;
      const bool is_upper = lane & step;
      const u32 other = __shfl_xor_sync(~0u, is_upper ? words[i] : words[i + step], step);
      (is_upper ? words[i] : words[i + step]) = other;
    }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// A thread's rows of the result.
__device__ __forceinline__ void store(u16* out, const Item& item, int heads, const float* sinks, const Softmax& rows,
                                      const float* sum, int row, int lane) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float total = sum[WIDTH / 2 + r * 2];
    const int own = row + r * 8, token = item.begin + own / GROUP;
#if SINKS
    total += power(sinks[item.head * GROUP + own % GROUP] * LOG2E - rows.zero[r]);
#endif
    const float part = 1.f / total;
    const u64 nth = ((u64)(item.first + token) * heads + item.head) * GROUP + own % GROUP;
    const bool is_inside = own < ROWS && token < item.fed;
#pragma unroll
    for (int piece = 0; piece < WIDTH / 8; piece += 4) {
      u32 words[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float* own_sum = sum + (piece + i) * 4 + r * 2;
        words[i] = pack(own_sum[0] * part, own_sum[1] * part);
      }
      const uint4 together = gathered(words, lane);
      if (is_inside) *(uint4*)(out + nth * WIDTH + (piece + (lane & 3)) * 8) = together;
    }
  }
}

// What a group of four warps does.
__device__ __forceinline__ void attend(Items items, const Rotation& rotation, u16* out, const float* sinks, float scale,
                                       const Barriers& at, u32 queries, u32 keys, u32 values, unsigned char* queries_there,
                                       unsigned char* values_there, int thread) {
  const int lane = thread & 31, group = __shfl_sync(~0u, thread / 128, 0);
  const int row = thread / 32 * 16 + (lane >> 2);  // and eight after it
  const u32 own_queries = queries + group * 64 * 128;
  Place key = {0, 0}, value = {0, 0};
  u32 round = 0;
  const int next_group = group == ROW_GROUPS - 1 ? 0 : group + 1;
  if (next_group == 0) give_turn(0);
  Angles angles;
  Item item = items.next();
  if ((ROTARY || NORMS) && item.fed) load_angles(angles, rotation, item, thread);
  for (Item following; item.fed; item = following) {
    following = items.next();
    const int turns = item.turns();
    Softmax rows = {{0.f, 0.f}, {true, true}};
    float scores[KEYS / 2], sum[SUMS];
    u32 weights[KEYS / 16][4];
#pragma unroll
    for (int i = 0; i < SUMS; i++) sum[i] = 0.f;
    const auto await_values = [&](int nth) {
      await_phase(at.full_values + 8 * value.stage, value.parity);
      const Turn turn = turn_of(item, nth);
      if (turn.valid < KEYS || turn.gone) clear_values(values_there + value.stage * TILE, turn, group, thread);
    };
    const auto leave_values = [&] {
      fence_all(sum);
      if (lane == 0) arrive_at(at.empty_values + 8 * value.stage);
      advance<STAGES>(value);
    };
    const auto ask_for_values = [&] {
      ask_for_sums(sum, weights, values + value.stage * TILE, (STAGES - value.stage) * TILE);
    };
    const auto leave_keys = [&](int nth) {
      fence_all(scores);
      if (lane == 0) {
        arrive_at(at.empty_keys + 8 * key.stage);
        if (nth == turns - 1) arrive_at(at.empty_queries);
      }
      advance<STAGES>(key);
      const Turn turn = turn_of(item, nth);
      if (turn.behind < KEYS - 1 || (WINDOW && turn.behind + TOKENS > WINDOW)) mask(scores, turn, row, lane);
    };

    await_phase(at.full_queries, round);
    round ^= 1;
    if (ROTARY || NORMS) {
      rotate(queries_there, angles, rotation, thread);
      show_to_copies();
      meet_group(group);
    }
    await_phase(at.full_keys + 8 * key.stage, key.parity);
    await_turn(group);
    begin_products();
    ask_for_scores(scores, own_queries, keys + key.stage * TILE);
    end_products();
    give_turn(next_group);
    await_products<0>();
    leave_keys(0);
    rows.level<true>(scores, scale, sum, [] {});
    make_weights(weights, scores);
    for (int nth = 1; nth < turns; nth++) {
      await_values(nth - 1);
      await_phase(at.full_keys + 8 * key.stage, key.parity);
      await_turn(group);
      fence_all(sum);
      begin_products();
      ask_for_scores(scores, own_queries, keys + key.stage * TILE);
      end_products();
      ask_for_values();
      end_products();
      give_turn(next_group);
      await_products<1>();
      leave_keys(nth);
      rows.level<false>(scores, scale, sum, [&] {
        await_products<0>();
        fence_all(sum);
      });
      await_products<0>();
      leave_values();
      make_weights(weights, scores);
    }
    await_values(turns - 1);
    fence_all(sum);
    begin_products();
    ask_for_values();
    end_products();
    if ((ROTARY || NORMS) && following.fed) load_angles(angles, rotation, following, thread);
    await_products<0>();
    leave_values();
    store(out, item, items.heads, sinks, rows, sum, row, lane);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
prompt_attention(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k_cache,
                 const __grid_constant__ TensorMap v_cache, const long long* __restrict__ positions,
                 const float* __restrict__ cos_sin, const u16* __restrict__ norm, float eps, const int* __restrict__ tiles,
                 const int* __restrict__ tables, const float* __restrict__ sinks, u16* out, float scale, int stride_table,
                 int heads, int together) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const int thread = threadIdx.x, warp = __shfl_sync(~0u, thread / 32, 0);
  const u32 start = shared_address(memory), queries = (start + 1023) & ~1023u;
  const u32 keys = queries + PARTS * PART_QUERIES, values = keys + STAGES * TILE,
            ones = values + STAGES * TILE, bars = ones + ONES_BYTES;
  const u32 rings = bars + 16;  // of keys and of values, full and empty
  const Barriers at = {bars, bars + 8, rings, rings + 8 * STAGES, rings + 16 * STAGES, rings + 24 * STAGES};
  if (thread == 0) {
    make_barrier(at.full_queries, 1);
    make_barrier(at.empty_queries, CONSUMERS);
#pragma unroll
    for (int s = 0; s < STAGES; s++) {
      make_barrier(at.full_keys + 8 * s, 1);
      make_barrier(at.empty_keys + 8 * s, CONSUMERS);
      make_barrier(at.full_values + 8 * s, 1);
      make_barrier(at.empty_values + 8 * s, CONSUMERS);
    }
    publish_barriers();
  }
  // Rows of queries that no item fills are zeros: other numbers would move their `zero` every turn.
  for (int i = thread; i < PARTS * PART_QUERIES / 4; i += THREADS) ((u32*)(memory + (queries - start)))[i] = 0;
  for (int i = thread; i < ONES_BYTES / 4; i += THREADS) ((u32*)(memory + (ones - start)))[i] = pack(1.f, 1.f);
  show_to_copies();
  __syncthreads();
  let_next_start();
  wait_for_previous();
  const Items items = {tiles, heads, together, tiles[5] * together, 0, 0, 0};
  if (warp >= CONSUMERS) {
    give_registers<THREADS == 384 ? 40 : 32>();
    if (warp == CONSUMERS)
      feed(q, k_cache, v_cache, items, tables, stride_table, at, queries, keys, values, thread & 31);
    return;
  }
  take_registers<THREADS == 384 ? 232 : 160>();
  attend(items, {positions, cos_sin, norm, eps}, out, sinks, scale, at, queries, keys, values, memory + (queries - start),
         memory + (values - start), thread);
}
