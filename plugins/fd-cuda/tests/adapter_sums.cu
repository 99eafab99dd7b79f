// What the helpers of gemm.cu's blocks find: A x of each block's rows, and B of their adapters.
#include "common.cuh"
#include "adapters.cuh"

void adapter_sums(const u16* x, long long x_stride, const u16* norm, int M, int N, int K, Adapters adapters,
                  const int* true_slots, float* inner, float* added) {
  late = true_slots, slots_of_step = (int*)adapters.slots, rows_of_step = M;
  const int tiles_m = (M + BM - 1) / BM, tile = blockIdx.z / PARTS_OF_K, rank = blockIdx.z % PARTS_OF_K;
  const int width = EPILOGUE == GATED ? N / 2 : N, out = EPILOGUE == GATED ? BN / 2 : BN;
  const Outputs outputs = {tile / tiles_m * out, width, N};
  const int first = tile % tiles_m * BM + rank * ROWS;
  Groups& groups = *(Groups*)shared;
  float* inner_of = (float*)(&groups + 1);
  uint4* b = (uint4*)(inner_of + INNER);
  const bool is_met = serve_adapters(adapters, outputs, x, x_stride, norm, first, M, K, groups, inner_of, b, blockIdx.z);
  __syncthreads();
  if (is_met && threadIdx.x == 0) leave_meeting(adapters.meeting, CLUSTER);
  for (int e = threadIdx.x; e < ROWS * BN; e += HELPERS) {
    bool inside;
    const int row = e / BN, m = first + row, n = outputs.of(e % BN, inside);
    if (!inside || m >= M || groups.slots[m] < 0) continue;
    const int part = EPILOGUE == GATED ? (e % BN >= BN / 2) : part_of(adapters, n);
    float v[4] = {};
    if (e % 4 == 0) {
      add_adapter(v, b, (groups.slots[m] * BN + e % BN) * PIECES_B, inner_of + row * EACH + part * RANK);
      for (int j = 0; j < 4; j++) added[(u64)m * N + n + j] = v[j];
    }
    for (int c = 0; c < RANK; c++) inner[m * EACH + part * RANK + c] = inner_of[row * EACH + part * RANK + c];
  }
}
