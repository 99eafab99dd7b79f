#include "runtime.h"

#include <stdexcept>

namespace fdcpu {

namespace {

const Kernels &kernels_of(Isa isa) {
    switch (isa) {
        case Isa::scalar: return scalar::kernels;
        case Isa::avx2: return avx2::kernels;
        default: return avx512::kernels;
    }
}

}  // namespace

Runtime::Runtime(int num_threads, const std::vector<int> &cpus, const std::string &isa)
    : isa_(choose_isa(isa)), kernels_(kernels_of(isa_)), team_(num_threads, cpus) {}

void Runtime::submit(Step step, size_t scratch_bytes) {
    if (scratch_bytes > scratch_.size()) scratch_ = Pages(scratch_bytes * 5 / 4);
    team_.run([&](int thread) { step(worker(thread)); });
    if (recording_) recording_->steps.push_back(std::move(step));
}

void Runtime::begin(Plan *plan) {
    if (recording_) throw std::logic_error("a plan is being recorded already");
    recording_ = plan;
}

void Runtime::end() { recording_ = nullptr; }

void Runtime::replay(const Plan &plan) {
    team_.run([&](int thread) {
        const Worker mine = worker(thread);
        for (const Step &step : plan.steps) {
            step(mine);
            mine.barrier();
        }
    });
}

}  // namespace fdcpu
