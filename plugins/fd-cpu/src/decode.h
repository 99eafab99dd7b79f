// Small operations around a decode step, expert routing, and copies: integers and a few floats, so one version
// serves every instruction set. Meanings: fastdeploy_core/contracts/ops.py.
#pragma once
#include "ops.h"

namespace fdcpu {

struct PrepareDecodeOp {
    const int64_t *slots;
    const int32_t *tables;
    const int64_t *num_computed, *newest, *drafts, *num_drafts, *room;
    int64_t *input_ids, *positions, *slot_mapping;
    int32_t *seq_lens, *block_tables;
    int64_t *turn;
    int64_t num_rows, width, num_slots, num_blocks, draft_width, block_size;
};

struct FinishDecodeOp {
    const int64_t *slots, *drawn, *marked;
    const float *peaks;  // may be null
    const int64_t *drafts, *num_drafts;
    int64_t *num_computed, *newest, *results, *last;
    int64_t num_rows, width, num_slots, draft_width;
};

struct KeepResultsOp {
    const int64_t *slots, *results, *num_computed;
    int64_t *kept;  // [num_rows, num_kept]
    int64_t num_rows, num_kept, num_slots;
};

struct MarkBrokenOp {
    const int64_t *drawn;
    const float *peaks, *possible;  // possible may be null
    int64_t *marked;
    int64_t num_rows;
};

struct SelectRowsOp {
    const void *x;  // [.., row_bytes], row_stride apart
    const int64_t *index;
    void *y;
    int64_t num_rows, row_bytes, row_stride;
};

struct RoutingOp {
    const float *logits, *bias;  // [num_tokens, num_experts]; [num_experts] or null
    int64_t *ids;
    float *weights;
    int64_t num_tokens, num_experts, top_k, num_groups, top_k_groups;
    bool is_sigmoid, renormalize;
    float scaling_factor;
};

void prepare_decode(const PrepareDecodeOp &op, const Worker &worker);
// Tokens up to the last row that is somebody's.
int64_t count_tokens(const PrepareDecodeOp &op);
void finish_decode(const FinishDecodeOp &op, const Worker &worker);
void keep_results(const KeepResultsOp &op, const Worker &worker);
void mark_broken(const MarkBrokenOp &op, const Worker &worker);
// Rows that are somebody's: an index grows as long as they are.
int64_t count_selected(const int64_t *index, int64_t num_rows);
void select_rows(const SelectRowsOp &op, const Worker &worker);
void route(const RoutingOp &op, const Worker &worker);
size_t routing_scratch(const RoutingOp &op, int num_threads);

}  // namespace fdcpu
