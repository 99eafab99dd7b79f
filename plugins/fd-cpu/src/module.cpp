// What Python sees. Tensors come as addresses: the caller has checked shapes, dtypes and contiguity, and
// keeps the memory alive; so torch and paddle tensors and numpy arrays pass alike.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "coded.h"
#include "decode.h"
#include "runtime.h"

namespace nb = nanobind;
using namespace fdcpu;

namespace {

template <class T = void>
T *at(uintptr_t address) {
    return reinterpret_cast<T *>(address);
}

// A step that leaves padding rows alone.
template <class Op>
Step clipped(const char *name, const Op &op, int64_t Op::*rows, void (*run)(const Op &, const Worker &)) {
    return {name, [op, rows, run](const Worker &w) {
                Op mine = op;
                mine.*rows = w.clip(op.*rows);
                run(mine, w);
            }};
}

void set_rows(Runtime &runtime, PackedMatrix &matrix, int64_t count, uintptr_t values, int dtype, int64_t stride) {
    const int64_t size = dtype == int(DType::f32) ? 4 : 2;
    runtime.divide(count, [&](int64_t i) {
        set_row(matrix, i, at<uint8_t>(values) + i * stride * size, DType(dtype));
    });
}

void set_quantized_rows(Runtime &runtime, PackedMatrix &matrix, int64_t count, uintptr_t values, uintptr_t scales,
                        bool in_pairs) {
    const int64_t width = in_pairs ? (matrix.inputs + 1) / 2 : matrix.inputs;
    runtime.divide(count, [&](int64_t i) {
        const float *own = at<float>(scales) + i * matrix.num_groups();
        if (in_pairs)
            set_nibble_row(matrix, i, at<uint8_t>(values) + i * width, own);
        else
            set_quantized_row(matrix, i, at<int8_t>(values) + i * width, own);
    });
}

// Nothing where its exponents spread too widely.
std::optional<std::unique_ptr<PackedMatrix>> code_rows(Runtime &runtime, int64_t count, int64_t width, uintptr_t values,
                                                       int64_t stride, bool gated) {
    nb::gil_scoped_release release;
    auto matrix = code_bf16(at<const uint16_t>(values), count, width, stride, gated,
                            [&](int64_t items, const auto &work) { runtime.divide(items, work); });
    return matrix ? std::optional(std::move(matrix)) : std::nullopt;
}

// Address and bytes of everything a matrix consists of.
std::vector<std::vector<uintptr_t>> memory_of(const PackedMatrix &m) {
    std::vector<std::vector<uintptr_t>> found;
    for (const Pages *pages : {&m.weights, &m.scales, &m.sums, &m.signs, &m.patches})
        if (pages->size()) found.push_back({reinterpret_cast<uintptr_t>(pages->data()), pages->size()});
    return found;
}

void set_tet_at(PackedMatrix &matrix, uintptr_t strands, uintptr_t scales, uintptr_t signs, int64_t rotation) {
    nb::gil_scoped_release release;
    set_tet(matrix, at<uint16_t>(strands), at<float>(scales), at<int8_t>(signs), rotation);
}

void get_rows(const PackedMatrix &matrix, int64_t first, int64_t count, uintptr_t values) {
    nb::gil_scoped_release release;
    for (int64_t i = 0; i < count; ++i) get_row(matrix, first + i, at<float>(values) + i * matrix.inputs);
}

void submit_linear(Runtime &runtime, const PackedMatrix &weight, uintptr_t x, int x_type, int64_t num_rows,
                   int64_t x_stride, uintptr_t norm_weight, float eps, uintptr_t bias, uintptr_t residual, uintptr_t y,
                   int y_type, int64_t y_stride) {
    const LinearOp op{&weight, at(x), DType(x_type), num_rows, x_stride, at(norm_weight), eps, at(bias),
                      at(residual), at(y), DType(y_type), y_stride};
    const auto &kernels = runtime.kernels();
    const char *name = weight.gated ? "gated linear" : y_type != x_type ? "logits" : residual ? "linear + residual"
                       : norm_weight ? "norm + linear" : "linear";
    runtime.submit(clipped(name, op, &LinearOp::num_rows, kernels.linear),
                   kernels.linear_scratch(op, runtime.num_threads()));
}

void submit_add_norm(Runtime &runtime, uintptr_t x, uintptr_t update, uintptr_t total, uintptr_t weight, float eps,
                     uintptr_t y, int type, int64_t num_rows, int64_t width) {
    const NormOp op{at(x), at(update), at(total), at(weight), eps, at(y), DType(type), num_rows, width};
    runtime.submit(clipped("norm", op, &NormOp::num_rows, runtime.kernels().norm),
                   size_t(width * runtime.num_threads()) * sizeof(float));
}

void submit_gate(Runtime &runtime, uintptr_t x, uintptr_t y, int type, int64_t num_rows, int64_t width) {
    const GateOp op{at(x), at(y), DType(type), num_rows, width};
    runtime.submit(clipped("gate", op, &GateOp::num_rows, runtime.kernels().gate), 0);
}

void submit_embedding(Runtime &runtime, uintptr_t ids, uintptr_t table, const PackedMatrix *packed, uintptr_t y,
                      int type, int64_t num_ids, int64_t num_rows, int64_t width) {
    const EmbeddingOp op{at<const int64_t>(ids), at(table), packed, at(y), DType(type), num_ids, num_rows, width};
    runtime.submit(clipped("embedding", op, &EmbeddingOp::num_ids, runtime.kernels().embedding),
                   size_t(width * runtime.num_threads()) * sizeof(float));
}

// Numbers of a list, or addresses, one after another into what they are for.
template <class From>
struct Taking {
    const std::vector<From> &from;
    size_t next = 0;
    template <class To>
    Taking &operator>>(To &to) {
        to = To(from.at(next++));
        return *this;
    }
};

// The shape of attention over one kind of layer; the addresses that change come with each call.
struct AttentionShape {
    AttentionOp op{};
    AttentionShape(const std::vector<int64_t> &sizes, float scale, float softcap) {
        Taking<int64_t>{sizes} >> op.num_heads >> op.num_kv_heads >> op.head_dim >> op.v_head_dim >> op.block_size >>
            op.interleaved >> op.type >> op.is_int8 >> op.window >> op.chunk;
        op.scale = scale;
        op.softcap = softcap;
    }
};

void submit_attention(Runtime &runtime, const AttentionShape &shape, const std::vector<uintptr_t> &addresses,
                      const std::vector<int64_t> &sizes) {
    AttentionOp op = shape.op;
    Taking<uintptr_t>{addresses} >> op.q >> op.k >> op.v >> op.cos_sin >> op.positions >> op.slot_mapping >>
        op.cu_seqlens_q >> op.seq_lens >> op.block_tables >> op.keys >> op.values >> op.y >> op.key_scales >>
        op.value_scales >> op.key_factors >> op.value_factors >> op.sinks;
    Taking<int64_t>{sizes} >> op.q_stride >> op.k_stride >> op.v_stride >> op.num_tokens >> op.num_seqs >>
        op.max_blocks >> op.rotary >> op.rotary_begin;
    const auto &kernels = runtime.kernels();
    const auto run = [op, attend = kernels.attention](const Worker &w) {
        AttentionOp mine = op;
        mine.num_tokens = w.clip(op.num_tokens);
        while (mine.num_seqs > 0 && mine.cu_seqlens_q[mine.num_seqs] > mine.num_tokens) --mine.num_seqs;
        attend(mine, w);
    };
    runtime.submit({"attention", run}, kernels.attention_scratch(op, runtime.num_threads()));
}

// A layer's experts: the matrices belong to Python objects that the caller keeps.
struct Experts { std::vector<const PackedMatrix *> gate_up, down; };

void submit_experts(Runtime &runtime, const Experts &experts, uintptr_t x, uintptr_t ids, uintptr_t weights,
                    uintptr_t y, int type, int64_t num_tokens, int64_t width, int64_t top_k) {
    const ExpertsOp op{experts.gate_up.data(), experts.down.data(), int64_t(experts.down.size()), at(x), at(y),
                       DType(type), num_tokens, width, top_k, at<const int64_t>(ids), at<const float>(weights)};
    const auto &kernels = runtime.kernels();
    runtime.submit(clipped("experts", op, &ExpertsOp::num_tokens, kernels.experts),
                   kernels.experts_scratch(op, runtime.num_threads()));
}

void submit_greedy(Runtime &runtime, uintptr_t logits, int64_t num_rows, int64_t width, uintptr_t ids,
                   uintptr_t peaks) {
    const GreedyOp op{at<const float>(logits), num_rows, width, at<int64_t>(ids), at<float>(peaks)};
    const auto &kernels = runtime.kernels();
    runtime.submit(clipped("greedy", op, &GreedyOp::num_rows, kernels.greedy),
                   kernels.greedy_scratch(op, runtime.num_threads()));
}

void submit_greedy_linear(Runtime &runtime, const PackedMatrix &weight, uintptr_t x, int x_type, int64_t num_rows,
                          int64_t x_stride, uintptr_t bias, uintptr_t ids, uintptr_t peaks) {
    const LinearOp product{&weight, at(x), DType(x_type), num_rows, x_stride, nullptr, 0.f, at(bias),
                           nullptr, nullptr, DType::f32, 0};
    const GreedyLinearOp op{product, at<int64_t>(ids), at<float>(peaks)};
    const auto &kernels = runtime.kernels();
    const auto run = [op, search = kernels.greedy_linear](const Worker &w) {
        GreedyLinearOp mine = op;
        mine.product.num_rows = w.clip(op.product.num_rows);
        search(mine, w);
    };
    runtime.submit({"greedy logits", run}, kernels.greedy_linear_scratch(op, runtime.num_threads()));
}

void submit_head_norm(Runtime &runtime, uintptr_t q, uintptr_t k, uintptr_t q_weight, uintptr_t k_weight, float eps,
                      int type, int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                      int64_t q_stride, int64_t k_stride) {
    const HeadNormOp op{at(q), at(k), at(q_weight), at(k_weight), eps, DType(type), num_tokens,
                        num_heads, num_kv_heads, head_dim, q_stride, k_stride};
    runtime.submit(clipped("head norm", op, &HeadNormOp::num_tokens, runtime.kernels().head_norm), 0);
}

void submit_select_rows(Runtime &runtime, uintptr_t x, uintptr_t index, uintptr_t y, int64_t num_rows,
                        int64_t row_bytes, int64_t row_stride) {
    const SelectRowsOp op{at(x), at<const int64_t>(index), at(y), num_rows, row_bytes, row_stride};
    runtime.narrow_rows([op] { return count_selected(op.index, op.num_rows); });
    runtime.submit(clipped("select rows", op, &SelectRowsOp::num_rows, select_rows), 0);
}

// From here on the operations of the plan are for so many tokens as the sequences have together.
void count_tokens_of(Runtime &runtime, uintptr_t starts, int64_t num_seqs) {
    runtime.count_rows([starts, num_seqs] { return int64_t(at<const int32_t>(starts)[num_seqs]); });
}

void submit_prepare_decode(Runtime &runtime, std::vector<uintptr_t> a, std::vector<int64_t> n) {
    const PrepareDecodeOp op{at<const int64_t>(a[0]), at<const int32_t>(a[1]), at<const int64_t>(a[2]),
                             at<const int64_t>(a[3]), at<const int64_t>(a[4]), at<const int64_t>(a[5]),
                             at<const int64_t>(a.at(6)), at<int64_t>(a.at(7)), at<int64_t>(a.at(8)),
                             at<int64_t>(a.at(9)), at<int32_t>(a.at(10)), at<int32_t>(a.at(11)),
                             at<int64_t>(a.at(12)), n[0], n[1], n[2], n[3], n[4], n[5]};
    runtime.submit_first({"prepare decode", [op](const Worker &w) { prepare_decode(op, w); }},
                         [op] { return count_tokens(op); });
}

void submit_finish_decode(Runtime &runtime, std::vector<uintptr_t> a, std::vector<int64_t> n) {
    const FinishDecodeOp op{at<const int64_t>(a[0]), at<const int64_t>(a[1]), at<const int64_t>(a[2]),
                            at<const float>(a[3]), at<const int64_t>(a[4]), at<const int64_t>(a[5]),
                            at<int64_t>(a.at(6)), at<int64_t>(a.at(7)), at<int64_t>(a.at(8)), at<int64_t>(a.at(9)),
                            n[0], n[1], n[2], n[3]};
    const auto run = [op](const Worker &w) {
        FinishDecodeOp mine = op;
        mine.num_rows = w.clip(op.num_rows * op.width) / op.width;
        // Who drafts does so for padding rows, too.
        if (w.thread == 0)
            for (int64_t row = mine.num_rows; row < op.num_rows; ++row) op.last[row] = row * op.width;
        finish_decode(mine, w);
    };
    runtime.submit({"finish decode", run}, 0);
}

void submit_keep_results(Runtime &runtime, uintptr_t slots, uintptr_t results, uintptr_t num_computed, uintptr_t kept,
                         int64_t num_rows, int64_t num_kept, int64_t num_slots) {
    const KeepResultsOp op{at<const int64_t>(slots), at<const int64_t>(results), at<const int64_t>(num_computed),
                           at<int64_t>(kept), num_rows, num_kept, num_slots};
    runtime.submit(clipped("keep results", op, &KeepResultsOp::num_rows, keep_results), 0);
}

void submit_mark_broken(Runtime &runtime, uintptr_t drawn, uintptr_t peaks, uintptr_t possible, uintptr_t marked,
                        int64_t num_rows) {
    const MarkBrokenOp op{at<const int64_t>(drawn), at<const float>(peaks), at<const float>(possible),
                          at<int64_t>(marked), num_rows};
    runtime.submit(clipped("mark broken", op, &MarkBrokenOp::num_rows, mark_broken), 0);
}

void submit_sample(Runtime &runtime, uintptr_t logits, int64_t num_rows, int64_t width, uintptr_t seeds,
                   uintptr_t positions, uintptr_t ids, uintptr_t is_random, int64_t ahead) {
    const SampleOp op{at<const float>(logits), num_rows, width, at<const int64_t>(seeds),
                      at<const int64_t>(positions), at<int64_t>(ids), at<const int64_t>(is_random), ahead};
    runtime.submit(clipped("sample", op, &SampleOp::num_rows, runtime.kernels().sample),
                   size_t(num_rows * runtime.num_threads() + 2) * 12);
}

void submit_temper(Runtime &runtime, uintptr_t logits, int64_t num_rows, int64_t width, uintptr_t temperatures) {
    const TemperatureOp op{at<float>(logits), num_rows, width, at<const float>(temperatures)};
    runtime.submit(clipped("temperature", op, &TemperatureOp::num_rows, runtime.kernels().temper), 0);
}

void submit_filter(Runtime &runtime, uintptr_t logits, int64_t num_rows, int64_t width, uintptr_t top_k,
                   uintptr_t top_p, uintptr_t min_p) {
    const FilterOp op{at<float>(logits), num_rows, width, at<const int64_t>(top_k), at<const float>(top_p),
                      at<const float>(min_p)};
    const auto &kernels = runtime.kernels();
    runtime.submit(clipped("filter", op, &FilterOp::num_rows, kernels.filter),
                   kernels.filter_scratch(op, runtime.num_threads()));
}

void submit_penalize(Runtime &runtime, uintptr_t logits, int64_t num_rows, int64_t width,
                     std::vector<uintptr_t> factors, uintptr_t counts, int64_t count_bytes, uintptr_t prompt_seen) {
    const PenaltyOp op{at<float>(logits), num_rows, width, at<const float>(factors[0]), at<const float>(factors[1]),
                       at<const float>(factors[2]), at(counts), count_bytes, at<const bool>(prompt_seen)};
    runtime.submit(clipped("penalize", op, &PenaltyOp::num_rows, runtime.kernels().penalize), 0);
}

void submit_mask(Runtime &runtime, uintptr_t logits, int64_t num_rows, int64_t width, uintptr_t bits) {
    const MaskOp op{at<float>(logits), num_rows, width, at<const int32_t>(bits)};
    runtime.submit(clipped("mask", op, &MaskOp::num_rows, runtime.kernels().mask), 0);
}

void submit_log_softmax(Runtime &runtime, uintptr_t logits, int64_t num_rows, int64_t width, uintptr_t y) {
    const LogSoftmaxOp op{at<const float>(logits), num_rows, width, at<float>(y)};
    runtime.submit(clipped("log softmax", op, &LogSoftmaxOp::num_rows, runtime.kernels().log_softmax), 0);
}

void submit_route(Runtime &runtime, uintptr_t logits, uintptr_t bias, uintptr_t ids, uintptr_t weights,
                  int64_t num_tokens, int64_t num_experts, int64_t top_k, int64_t num_groups, int64_t top_k_groups,
                  bool is_sigmoid, bool renormalize, float scaling_factor) {
    const RoutingOp op{at<const float>(logits), at<const float>(bias), at<int64_t>(ids), at<float>(weights), num_tokens,
                       num_experts, top_k, num_groups, top_k_groups, is_sigmoid, renormalize, scaling_factor};
    runtime.submit(clipped("route", op, &RoutingOp::num_tokens, route), routing_scratch(op, runtime.num_threads()));
}

}  // namespace

NB_MODULE(_native, m) {
    nb::set_leak_warnings(false);  // whoever never closes an engine ends with one
    m.doc() = "Kernels of fd-cpu; see fd_cpu/kernels.py for the checked interface.";
    m.def("available_isas", [] {
        std::vector<std::string> names;
        for (Isa isa : available_isas()) names.emplace_back(name_of(isa));
        return names;
    });
    nb::class_<PackedMatrix>(m, "PackedMatrix")
        .def_ro("outputs", &PackedMatrix::outputs)
        .def_ro("inputs", &PackedMatrix::inputs)
        .def_ro("gated", &PackedMatrix::gated)
        .def_ro("group", &PackedMatrix::group)
        .def_prop_ro("num_groups", &PackedMatrix::num_groups)
        .def_prop_ro("num_bytes", &PackedMatrix::num_bytes)
        .def_prop_ro("kind", [](const PackedMatrix &matrix) { return int(matrix.kind); })
        .def_ro("num_patches", &PackedMatrix::num_patches)
        .def_prop_ro("has_sound_patches", &has_sound_patches)
        .def_rw("rotation", &PackedMatrix::rotation)
        .def_prop_ro("memory", &memory_of)
        .def("get_rows", &get_rows);
    m.def("make_packed",
          [](int kind, int64_t outputs, int64_t inputs, int64_t group, bool gated) {
              return make_packed(WeightKind(kind), outputs, inputs, group, gated);
          });
    m.def("make_coded", &make_coded);
    m.def("set_tet", &set_tet_at);
    nb::class_<Plan>(m, "Plan")
        .def(nb::init<>())
        .def("__len__", [](const Plan &plan) { return plan.steps.size(); })
        .def("follow", [](Plan &plan, const Plan &before) { plan.most_rows = before.most_rows; });
    nb::class_<AttentionShape>(m, "AttentionShape").def(nb::init<const std::vector<int64_t> &, float, float>());
    nb::class_<Runtime> of_runtime(m, "Runtime");
    of_runtime.def(nb::init<int, const std::vector<int> &, const std::string &>())
        .def_prop_ro("isa", [](const Runtime &runtime) { return std::string(name_of(runtime.isa())); })
        .def_prop_ro("num_threads", &Runtime::num_threads)
        .def("begin", &Runtime::begin, nb::keep_alive<1, 2>())
        .def("end", &Runtime::end)
        .def("replay", &Runtime::replay, nb::arg("plans"), nb::arg("times"),
             nb::call_guard<nb::gil_scoped_release>())
        .def("stay_away", &Runtime::stay_away)
        .def("begin_profile", &Runtime::begin_profile)
        .def("times", [](Runtime &runtime) {
            nb::dict found;
            for (const auto &[name, time] : runtime.times())
                found[name.c_str()] = nb::make_tuple(time.calls, time.seconds);
            return found;
        })
        .def("code_rows", &code_rows)
        .def("count_tokens", &count_tokens_of)
        .def("embedding", &submit_embedding, nb::arg("ids"), nb::arg("table"), nb::arg("packed").none(), nb::arg("y"),
             nb::arg("type"), nb::arg("num_ids"), nb::arg("num_rows"), nb::arg("width"),
             nb::call_guard<nb::gil_scoped_release>());
    // What computes does so without Python's lock.
    const auto define = [&](const char *name, auto function) {
        of_runtime.def(name, function, nb::call_guard<nb::gil_scoped_release>());
    };
    define("set_rows", &set_rows);
    define("set_quantized_rows", &set_quantized_rows);
    define("linear", &submit_linear);
    define("add_norm", &submit_add_norm);
    define("gate", &submit_gate);
    define("attention", &submit_attention);
    define("experts", &submit_experts);
    define("greedy", &submit_greedy);
    define("greedy_linear", &submit_greedy_linear);
    define("head_norm", &submit_head_norm);
    define("select_rows", &submit_select_rows);
    define("prepare_decode", &submit_prepare_decode);
    define("finish_decode", &submit_finish_decode);
    define("keep_results", &submit_keep_results);
    define("mark_broken", &submit_mark_broken);
    define("route", &submit_route);
    define("sample", &submit_sample);
    define("temper", &submit_temper);
    define("filter", &submit_filter);
    define("penalize", &submit_penalize);
    define("mask", &submit_mask);
    define("log_softmax", &submit_log_softmax);
    nb::class_<Experts>(m, "Experts").def("__init__", [](Experts *self, const std::vector<PackedMatrix *> &gate_up, const std::vector<PackedMatrix *> &down) {
        new (self) Experts{{gate_up.begin(), gate_up.end()}, {down.begin(), down.end()}};
    });
}
