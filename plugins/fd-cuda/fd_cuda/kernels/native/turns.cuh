// How a warp of decode_attention.cu comes by the keys and values of its turns. STAGES == 0: from memory straight to the
// registers that the matrix instructions want, one turn ahead. Otherwise through a ring of STAGES turns in shared
// memory, which the warp fills STAGES - 1 turns ahead and from which it alone reads: it waits for nobody but memory.
#include "meeting.cuh"

// INSTRUCTIONS

// 16 bytes to shared memory, past L1; zeros where they are not `real`.
__device__ __forceinline__ void copy_ahead(u16* to, const u16* from, bool real) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from),
               "r"(real ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void close_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// All but the newest `COUNT` groups of this thread have come.
template <int COUNT>
__device__ __forceinline__ void wait_for_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(COUNT) : "memory");
}

// END OF INSTRUCTIONS

// Turns `turn`, `turn` + `step` and so on of an item. Each: begin(), keys(), have_keys(), values(), end().
struct Turns {
  const u16 *k_cache, *v_cache;
  const Item& item;
  int turn, step;
  u32 lane;
  u16* ring;  // of this warp

  __device__ __forceinline__ bool is_there(int which) const { return item.begin + which * TURN < item.end; }
  __device__ __forceinline__ bool more() const { return is_there(turn); }
  __device__ __forceinline__ int first_token() const { return item.begin + turn * TURN; }

#if STAGES == 0
  long long place;  // of the turn that is asked for next
  Word4 key[UNITS][2][4], value[UNITS][4][2];

  __device__ __forceinline__ void ask_for_keys() {
#pragma unroll
    for (int u = 0; u < UNITS; ++u)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const u16* at = k_cache + __shfl_sync(~0u, place, u * 16 + h * 8 + lane / 4) * WIDTH + lane % 4 * 8;
#pragma unroll
        for (int c = 0; c < 4; ++c) key[u][h][c] = load_past_l1(at + c * 32);
      }
  }
  __device__ __forceinline__ void ask_for_values() {
#pragma unroll
    for (int u = 0; u < UNITS; ++u)
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const int token = u * 16 + 2 * (lane % 4) + t % 2 + t / 2 * 8;
        const u16* at = v_cache + __shfl_sync(~0u, place, token) * WIDTH;
#pragma unroll
        for (int h = 0; h < 2; ++h) value[u][t][h] = load_past_l1(at + of_run(lane / 4, h));
      }
  }

  __device__ __forceinline__ void start() {
    if (!more()) return;
    place = place_of(item, turn, lane);
    ask_for_keys(), ask_for_values();
  }
  // The table's answer for the next turn takes as long as a load of keys: it is asked for early.
  __device__ __forceinline__ void begin() { place = is_there(turn + step) ? place_of(item, turn + step, lane) : 0; }
  __device__ __forceinline__ const Word4 (&keys(int u))[2][4] { return key[u]; }
  __device__ __forceinline__ void have_keys() {
    if (is_there(turn + step)) ask_for_keys();
  }
  __device__ __forceinline__ const Word4 (&values(int u))[4][2] { return value[u]; }
  __device__ __forceinline__ void end() {
    turn += step;
    if (more()) ask_for_values();
  }
#else
  long long place;  // of the turn that is asked for next
  int asked, now;   // that turn; the stage that is read
  Word4 key[2][4], value[4][2];

  // Where the 16 bytes `i` of a token lie, so that what a warp reads at once is in different banks.
  static __device__ __forceinline__ int of_key(int token, int i) { return token * WIDTH + (i ^ (token & 1) << 2) * 8; }
  static __device__ __forceinline__ int of_value(int token, int i) {
    return (TURN + token) * WIDTH + (i ^ (token & 6)) * 8;
  }
  __device__ __forceinline__ const u16* stage() const { return ring + now * TURN * 2 * WIDTH; }

  __device__ __forceinline__ void ask(int stage) {
    if (is_there(asked)) {
      u16* to = ring + stage * TURN * 2 * WIDTH;
      const int count = item.end - item.begin - asked * TURN, i = lane % 16;
#pragma unroll
      for (int pair = 0; pair < TURN / 2; ++pair) {
        const int token = pair * 2 + lane / 16;
        const long long from = __shfl_sync(~0u, place, token) * WIDTH + i * 8;
        copy_ahead(to + of_key(token, i), k_cache + from, token < count);
        copy_ahead(to + of_value(token, i), v_cache + from, token < count);
      }
      asked += step;
      if (is_there(asked)) place = place_of(item, asked, lane);
    }
    close_group();
  }

  __device__ __forceinline__ void start() {
    asked = turn, now = STAGES - 1;
    if (more()) place = place_of(item, asked, lane);
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) ask(stage);
  }
  // The stage that was read last is free once all lanes have come here.
  __device__ __forceinline__ void begin() {
    wait_for_groups<STAGES - 2>();
    __syncwarp();
    ask(now);
    now = now == STAGES - 1 ? 0 : now + 1;
  }
  __device__ __forceinline__ const Word4 (&keys(int u))[2][4] {
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int c = 0; c < 4; ++c) key[h][c] = load4(stage() + of_key(u * 16 + h * 8 + lane / 4, c * 4 + lane % 4));
    return key;
  }
  __device__ __forceinline__ void have_keys() {}
  __device__ __forceinline__ const Word4 (&values(int u))[4][2] {
#pragma unroll
    for (int t = 0; t < 4; ++t)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        value[t][h] = load4(stage() + of_value(u * 16 + 2 * (lane % 4) + t % 2 + t / 2 * 8, h * 8 + lane / 4));
    return value;
  }
  __device__ __forceinline__ void end() { turn += step; }
#endif
};
