// The operations that every instruction set implements, as plain records: pointers and sizes.
//
// Each function is called by all threads of a crew with the same record; `Worker` says which part is
// whose, and parts phases. Rows of activations are contiguous unless a stride (in elements) is given.
// Nothing here allocates: scratch comes with the worker, sized by the *_scratch functions.
#pragma once
#include <algorithm>
#include <cstdint>

#include "packed.h"
#include "team.h"

namespace fdcpu {

struct Worker {
    Team &team;
    int thread, crew;  // this one of so many: see Team
    uint8_t *scratch;  // shared by all threads of one operation
    int64_t most_rows = INT64_MAX;  // of tokens that count: see Plan

    int64_t clip(int64_t num_rows) const { return num_rows < most_rows ? num_rows : most_rows; }
    void barrier() const { team.barrier(crew); }
    int64_t turn() const { return team.turn(); }
    // This thread's share of `count` items.
    void share(int64_t count, int64_t &first, int64_t &last) const {
        first = count * thread / crew;
        last = count * (thread + 1) / crew;
    }
};

// The part-th of `parts` shares of `count` items, in whole steps but for the last one.
inline void share_steps(int64_t count, int64_t step, int part, int parts, int64_t &first, int64_t &last) {
    const int64_t steps = (count + step - 1) / step;
    first = std::min(count, steps * part / parts * step);
    last = std::min(count, steps * (part + 1) / parts * step);
}

// y = W norm(x) + bias (+ residual), or silu(gate) * up of a gated matrix.
struct LinearOp {
    const PackedMatrix *weight;
    const void *x;
    DType x_type;
    int64_t num_rows, x_stride;
    const void *norm_weight;  // null: x as it is; else rms_norm with x's type
    float eps;
    const void *bias;  // null: none; of y's type
    const void *residual;  // null: none; laid out and typed like y, may be y
    void *y;
    DType y_type;
    int64_t y_stride;
};

// y = rms_norm(x + update), total = x + update. Without update (null) y = rms_norm(x).
struct NormOp {
    const void *x, *update;
    void *total;
    const void *weight;
    float eps;
    void *y;
    DType type;
    int64_t num_rows, width;
};

// silu(gate) * up of rows [2 * width].
struct GateOp {
    const void *x;
    void *y;
    DType type;
    int64_t num_rows, width;
};

struct EmbeddingOp {
    const int64_t *ids;
    const void *table;            // [rows, width], or
    const PackedMatrix *packed;   // the lm head's own matrix
    void *y;
    DType type;
    int64_t num_ids, num_rows, width;
};

// Rotation of the first `rotary` dimensions, and the write into the cache; then attention over it.
// Cache of one layer: keys [block, kv head, head_dim, block_size], values [block, kv head, block_size,
// head_dim], of bfloat16 in pairs (attention.inl): a register of keys holds sixteen tokens, one of values
// sixteen dimensions. Of
// latent attention (one kv head) only rows [block, block_size, head_dim] are kept: `keys`, with `values`
// null; the first v_head_dim of a row are its values.
//
// Numbers of int8 lie in the layout of what they are widened to, which is op.type. Their scales are float16
// [block, kv head, block_size], of each token's key and value, or come for each channel, [kv head, dim].
struct AttentionOp {
    const void *q, *k, *v;
    DType type;
    int64_t q_stride, k_stride, v_stride;  // between tokens
    int64_t num_tokens, num_seqs, num_heads, num_kv_heads, head_dim, v_head_dim, block_size, max_blocks;
    float scale, softcap;    // logits become softcap * tanh(logit / softcap); 0: as they are
    int64_t window, chunk;   // keys that a query sees: so many, or those of its chunk; 0: all
    const float *sinks;      // [num_heads]; null: none
    const float *cos_sin;  // [positions, rotary]; null: nothing is rotated
    int64_t rotary, rotary_begin;  // dimensions [begin, begin + rotary) of a head are rotated
    bool interleaved;
    const int64_t *positions;     // [num_tokens]
    const int64_t *slot_mapping;  // [num_tokens]; -1: no write
    const int32_t *cu_seqlens_q;  // [num_seqs + 1]
    const int32_t *seq_lens;      // [num_seqs]
    const int32_t *block_tables;  // [num_seqs, max_blocks]
    void *keys, *values;
    bool is_int8;  // the cache; else it holds op.type
    uint16_t *key_scales, *value_scales;
    const float *key_factors, *value_factors;
    void *y;  // [num_tokens, num_heads * v_head_dim]
};

// Sum over a token's experts of weight * down(silu(gate) * up). Ids below 0 are no expert.
struct ExpertsOp {
    const PackedMatrix *const *gate_up;  // [num_experts], gated
    const PackedMatrix *const *down;     // [num_experts]
    int64_t num_experts;
    const void *x;  // [num_tokens, width]
    void *y;        // likewise
    DType type;
    int64_t num_tokens, width, top_k;
    const int64_t *topk_ids;    // [num_tokens, top_k]
    const float *topk_weights;  // likewise
};

// The likeliest token of each row and its logit; NaN counts as the largest, the smallest id wins.
struct GreedyOp {
    const float *logits;  // [num_rows, width]
    int64_t num_rows, width;
    int64_t *ids;
    float *peaks;
};

// The same of a product with a head; its y is not written.
struct GreedyLinearOp {
    LinearOp product;
    int64_t *ids;
    float *peaks;
};

// Each head of q and of k normalised in place.
struct HeadNormOp {
    void *q, *k;
    const void *q_weight, *k_weight;
    float eps;
    DType type;
    int64_t num_tokens, num_heads, num_kv_heads, head_dim, q_stride, k_stride;
};

// Float32 logits [num_rows, width]; changed in place where they are not const.
struct SampleOp {
    const float *logits;
    int64_t num_rows, width;
    const int64_t *seeds, *positions;
    int64_t *ids;
    const int64_t *is_random;  // null: all rows are; 0: its id stays as it is
    int64_t ahead;             // the token stands so far after its position
};

// Each row divided by its temperature, in place.
struct TemperatureOp {
    float *logits;
    int64_t num_rows, width;
    const float *temperatures;
};

struct FilterOp {
    float *logits;
    int64_t num_rows, width;
    const int64_t *top_k;
    const float *top_p, *min_p;
};

struct PenaltyOp {
    float *logits;
    int64_t num_rows, width;
    const float *presence, *frequency, *repetition;
    const void *counts;  // integers of count_bytes
    int64_t count_bytes;
    const bool *prompt_seen;
};

struct MaskOp {
    float *logits;
    int64_t num_rows, width;
    const int32_t *bits;
};

struct LogSoftmaxOp {
    const float *logits;
    int64_t num_rows, width;
    float *y;
};

struct Kernels {
    void (*linear)(const LinearOp &, const Worker &);
    size_t (*linear_scratch)(const LinearOp &, int num_threads);
    void (*norm)(const NormOp &, const Worker &);
    void (*gate)(const GateOp &, const Worker &);
    void (*embedding)(const EmbeddingOp &, const Worker &);
    void (*attention)(const AttentionOp &, const Worker &);
    size_t (*attention_scratch)(const AttentionOp &, int num_threads);
    void (*experts)(const ExpertsOp &, const Worker &);
    size_t (*experts_scratch)(const ExpertsOp &, int num_threads);
    void (*greedy)(const GreedyOp &, const Worker &);
    size_t (*greedy_scratch)(const GreedyOp &, int num_threads);
    void (*greedy_linear)(const GreedyLinearOp &, const Worker &);
    size_t (*greedy_linear_scratch)(const GreedyLinearOp &, int num_threads);
    void (*head_norm)(const HeadNormOp &, const Worker &);
    void (*sample)(const SampleOp &, const Worker &);
    void (*temper)(const TemperatureOp &, const Worker &);
    void (*filter)(const FilterOp &, const Worker &);
    size_t (*filter_scratch)(const FilterOp &, int num_threads);
    void (*penalize)(const PenaltyOp &, const Worker &);
    void (*mask)(const MaskOp &, const Worker &);
    void (*log_softmax)(const LogSoftmaxOp &, const Worker &);
};

namespace scalar { extern const Kernels kernels; }
namespace avx2 { extern const Kernels kernels; }
namespace avx512_vnni { extern const Kernels kernels; }
namespace avx512 { extern const Kernels kernels; }
namespace amx { extern const Kernels kernels; }
// Their instructions in plain C++, for tests: of AMX, which has those of AVX512, too, and of AVX512 without BF16.
namespace emulated { extern const Kernels kernels; }
namespace emulated_vnni { extern const Kernels kernels; }

}  // namespace fdcpu
