#include "decode.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace fdcpu {

namespace {
constexpr int64_t kNotAccepted = -1, kNotFinite = -2, kNothingPossible = -3;
}

int64_t count_tokens(const PrepareDecodeOp &op) {
    int64_t rows = op.num_rows;
    while (rows > 0 && op.slots[rows - 1] >= op.num_slots - 1) --rows;
    return rows * op.width;
}

void prepare_decode(const PrepareDecodeOp &op, const Worker &worker) {
    int64_t first, last;
    worker.share(op.num_rows, first, last);
    if (worker.thread == 0) ++*op.turn;
    for (int64_t row = first; row < last; ++row) {
        const int64_t slot = op.slots[row];
        const bool is_row = slot < op.num_slots - 1 && op.num_computed[slot] < op.room[slot];
        const int64_t start = is_row ? op.num_computed[slot] : 0;
        const int32_t *table = op.tables + slot * op.num_blocks;
        for (int64_t j = 0; j < op.width; ++j) {
            const bool feeds = is_row && j <= op.num_drafts[slot];
            const int64_t where = feeds ? start + j : start, at = row * op.width + j;
            op.positions[at] = where;
            op.input_ids[at] = !feeds ? 0 : j ? op.drafts[slot * op.draft_width + j - 1] : op.newest[slot];
            op.slot_mapping[at] =
                feeds ? int64_t(table[where / op.block_size]) * op.block_size + where % op.block_size : -1;
        }
        op.seq_lens[row] = is_row ? int32_t(start + op.width) : 0;
        std::memcpy(op.block_tables + row * op.num_blocks, table, size_t(op.num_blocks) * sizeof(int32_t));
    }
}

void finish_decode(const FinishDecodeOp &op, const Worker &worker) {
    int64_t first, last;
    worker.share(op.num_rows, first, last);
    for (int64_t row = first; row < last; ++row) {
        const int64_t begin = row * op.width, slot = op.slots[row];
        const auto marked = [&](int64_t j) {
            const bool is_broken = op.peaks && !std::isfinite(op.peaks[begin + j]);
            return is_broken ? kNotFinite : op.marked[begin + j];
        };
        const int64_t fed = std::min(op.num_drafts[slot], op.width - 1);
        const int64_t *drafts = op.drafts + slot * op.draft_width;
        int64_t accepted = 0;
        while (accepted < fed && op.drawn[begin + accepted] == drafts[accepted] && marked(accepted + 1) >= 0)
            ++accepted;
        for (int64_t j = 0; j < op.width; ++j) op.results[begin + j] = j <= accepted ? marked(j) : kNotAccepted;
        op.last[row] = begin + accepted;
        if (slot >= op.num_slots - 1) continue;
        op.newest[slot] = op.drawn[begin + accepted];
        op.num_computed[slot] += 1 + accepted;
    }
}

void keep_results(const KeepResultsOp &op, const Worker &worker) {
    int64_t first, last;
    worker.share(op.num_rows, first, last);
    for (int64_t row = first; row < last; ++row) {
        const int64_t slot = op.slots[row];
        if (slot < op.num_slots - 1) op.kept[row * op.num_kept + op.num_computed[slot] % op.num_kept] = op.results[row];
    }
}

void mark_broken(const MarkBrokenOp &op, const Worker &worker) {
    int64_t first, last;
    worker.share(op.num_rows, first, last);
    for (int64_t row = first; row < last; ++row) {
        const bool is_possible = !op.possible || std::isfinite(op.possible[row]);
        op.marked[row] = !std::isfinite(op.peaks[row]) ? kNotFinite : !is_possible ? kNothingPossible : op.drawn[row];
    }
}

int64_t count_selected(const int64_t *index, int64_t num_rows) {
    int64_t count = 1;
    while (count < num_rows && index[count] > index[count - 1]) ++count;
    return count;
}

void select_rows(const SelectRowsOp &op, const Worker &worker) {
    int64_t first, last;
    worker.share(op.num_rows, first, last);
    for (int64_t row = first; row < last; ++row)
        std::memcpy(static_cast<uint8_t *>(op.y) + row * op.row_bytes,
                    static_cast<const uint8_t *>(op.x) + op.index[row] * op.row_stride, size_t(op.row_bytes));
}

size_t routing_scratch(const RoutingOp &op, int num_threads) {
    return size_t(num_threads) * size_t(2 * op.num_experts + 2 * op.num_groups) * sizeof(float);
}

void route(const RoutingOp &op, const Worker &worker) {
    int64_t first, last;
    worker.share(op.num_tokens, first, last);
    float *scores = reinterpret_cast<float *>(worker.scratch) + worker.thread * 2 * (op.num_experts + op.num_groups);
    float *ranking = scores + op.num_experts, *groups = ranking + op.num_experts;
    const int64_t per_group = op.num_experts / op.num_groups;
    for (int64_t t = first; t < last; ++t) {
        const float *logits = op.logits + t * op.num_experts;
        const float peak = *std::max_element(logits, logits + op.num_experts);
        float total = 0;
        for (int64_t e = 0; e < op.num_experts; ++e) {
            scores[e] = op.is_sigmoid ? 1.f / (1.f + std::exp(-logits[e])) : std::exp(logits[e] - peak);
            total += scores[e];
        }
        for (int64_t e = 0; e < op.num_experts; ++e) {
            if (!op.is_sigmoid) scores[e] /= total;
            ranking[e] = scores[e] + (op.bias ? op.bias[e] : 0.f);
        }
        if (op.num_groups > 1) {
            for (int64_t g = 0; g < op.num_groups; ++g) {
                float best = -INFINITY, second = -INFINITY;
                for (int64_t e = g * per_group; e < (g + 1) * per_group; ++e) {
                    if (ranking[e] > best) {
                        second = best;
                        best = ranking[e];
                    } else if (ranking[e] > second) {
                        second = ranking[e];
                    }
                }
                groups[g] = per_group > 1 ? best + second : best;
            }
            float *sorted = groups + op.num_groups;
            std::copy(groups, groups + op.num_groups, sorted);
            std::sort(sorted, sorted + op.num_groups, std::greater<float>());
            const float least = sorted[op.top_k_groups - 1];
            int64_t open = op.top_k_groups;
            for (int64_t g = 0; g < op.num_groups; ++g) {
                const bool is_open = groups[g] >= least && open > 0;
                open -= is_open;
                if (!is_open) std::fill(ranking + g * per_group, ranking + (g + 1) * per_group, -INFINITY);
            }
        }
        float sum = 0;
        for (int64_t j = 0; j < op.top_k; ++j) {
            const int64_t e = std::max_element(ranking, ranking + op.num_experts) - ranking;
            op.ids[t * op.top_k + j] = e;
            op.weights[t * op.top_k + j] = scores[e];
            sum += scores[e];
            ranking[e] = -INFINITY;
        }
        const float floor = op.is_sigmoid ? 1e-20f : 1e-12f;
        const float factor = (op.renormalize ? 1.f / std::max(sum, floor) : 1.f) * op.scaling_factor;
        for (int64_t j = 0; j < op.top_k; ++j) op.weights[t * op.top_k + j] *= factor;
    }
}

}  // namespace fdcpu
