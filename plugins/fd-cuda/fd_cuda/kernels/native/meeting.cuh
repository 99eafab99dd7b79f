// How decode_attention.cu and quant_attention.cu bring together what the warps of a block, the blocks of a cluster and
// the splits of a row have summed.
#include "attention.cuh"

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

// What lies in the shared memory of block `rank` of the cluster, at the address it has here.
template <class T>
__device__ __forceinline__ T of_block(const T* here, u32 rank) {
#if CLUSTER > 1
  asm volatile("mapa.u64 %0, %0, %1;" : "+l"(here) : "r"(rank));
#endif
  return *here;
}

// END OF INSTRUCTIONS

#define TURN (16 * UNITS)  // tokens that a warp reads at once

// A work item of attention/plan.py for one kv head, and where its splits leave their sums.
struct Item {
  int head, num_kv_heads;
  float *part_acc, *part_best, *part_total;
  int* counters;
  int row, begin, end, split, num_splits, context, first_token, fed;
  const int* table;  // of the row's blocks
};

// False where there is none.
__device__ __forceinline__ bool read_item(Item& item, const int* items, const int* tables, int stride_table) {
  const int* from = items + blockIdx.x * 8;
  const Word4 place = load_past_l1((const u16*)from), of_tokens = load_past_l1((const u16*)(from + 4));
  item.row = place.x[0], item.begin = place.x[1] * TILE, item.split = place.x[3], item.num_splits = of_tokens.x[0];
  item.context = of_tokens.x[1], item.first_token = of_tokens.x[2], item.fed = of_tokens.x[3];
  item.end = min((int)place.x[2] * TILE, item.context);
  item.table = tables + (long long)item.row * stride_table;
  return item.row >= 0;
}

// Lane l: where token l of a turn lies; past the end it is the last one once more.
__device__ __forceinline__ int place_of(const Item& item, int turn, u32 lane) {
  const int token = min(item.begin + turn * TURN + (int)(lane % TURN), item.end - 1);
  const int block = load_past_l1(item.table + token / BLOCK_SIZE);
  return (block * BLOCK_SIZE + token % BLOCK_SIZE) * item.num_kv_heads + item.head;
}

// sums: [WARPS + 1][SIZE] of shared memory. store(e, results): four elements of column e / WIDTH, from e % WIDTH on.
// Loops stay loops: a block goes through most of this once, and instructions have to be fetched.
template <class Store>
__device__ __forceinline__ void bring_together(const State& state, float* sums, const Item& item, u32 rank,
                                               const Store& store) {
  float* block_sums = sums + WARPS * SIZE;
  __shared__ float bests[WARPS][COLUMNS], totals[WARPS][COLUMNS];
  __shared__ float block_best[COLUMNS], block_total[COLUMNS];
  __shared__ int arrived;
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  // Warps of the block.
  leave(state, sums + warp * SIZE, bests[warp], totals[warp], lane);
  __syncthreads();
  const int used = GROUP * item.fed * WIDTH;  // of SIZE
#pragma unroll 1
  for (int e = threadIdx.x * 4; e < used; e += WARPS * 128) {
    const int at = e / WIDTH;
    float best, total, sum[4] = {};
    add_warps(sum, best, total, [&](int w) { return sums + w * SIZE; }, bests, totals, e);
    *(float4*)(block_sums + e) = make_float4(sum[0], sum[1], sum[2], sum[3]);
    if (e % WIDTH == 0) block_best[at] = best, block_total[at] = total;
  }

  // Blocks of the cluster: each adds up its share of the elements.
  __syncthreads();
  arrive(), await();
  const int share = used / CLUSTER, first = rank * share, last = first + share;
  const long long item_part = ((long long)blockIdx.x * item.num_kv_heads + item.head) * COLUMNS;
#pragma unroll 1
  for (int e = first + threadIdx.x * 4; e < last; e += WARPS * 128) {
    const int at = e / WIDTH;
    float bests_of[CLUSTER], best = FLOOR, total = 0.f, sum[4] = {};
#pragma unroll
    for (int b = 0; b < CLUSTER; ++b) best = fmaxf(best, bests_of[b] = of_block(block_best + at, b));
#pragma unroll
    for (int b = 0; b < CLUSTER; ++b) {
      const float weight = power(bests_of[b] - best);
      total += weight * of_block(block_total + at, b);
      add(sum, weight, of_block((const float4*)(block_sums + e), b));
    }
    if (item.num_splits == 1) {
      for (float& value : sum) value /= total;
      store(e, sum);
    } else {
      *(float4*)(item.part_acc + item_part * WIDTH + e) = make_float4(sum[0], sum[1], sum[2], sum[3]);
      // Every share may begin within a column: whoever has its first element here says the same.
      if (e % WIDTH == 0 || e == first) item.part_best[item_part + at] = best, item.part_total[item_part + at] = total;
    }
  }
  arrive();  // what is in this block's own shared memory is of no more use to it

  // Splits of the row: the last block to come with this share adds up.
  if (item.num_splits > 1) {
    __threadfence();
    __syncthreads();
    int* counter = item.counters + (item.row * item.num_kv_heads + item.head) * CLUSTER + rank;
    if (threadIdx.x == 0) {
      arrived = atomicAdd(counter, 1);
      if (arrived == item.num_splits - 1) *counter = 0;  // for the next layer
    }
    __syncthreads();
    if (arrived == item.num_splits - 1) {
      __threadfence();
      const long long stride = (long long)item.num_kv_heads * COLUMNS;
      const long long part = item_part - item.split * stride;
#pragma unroll 1
      for (int e = first + threadIdx.x * 4; e < last; e += WARPS * 128) {
        const int at = e / WIDTH;
        float best = FLOOR, total = 0.f, sum[4] = {};
#pragma unroll 4
        for (int s = 0; s < item.num_splits; ++s) best = fmaxf(best, __ldcg(item.part_best + part + s * stride + at));
#pragma unroll 4
        for (int s = 0; s < item.num_splits; ++s) {
          const float weight = power(__ldcg(item.part_best + part + s * stride + at) - best);
          total += weight * __ldcg(item.part_total + part + s * stride + at);
          add(sum, weight, __ldcg((const float4*)(item.part_acc + (part + s * stride) * WIDTH + e)));
        }
        for (float& value : sum) value /= total;
        store(e, sum);
      }
    }
  }
  await();  // nor to the others: it may go
}
