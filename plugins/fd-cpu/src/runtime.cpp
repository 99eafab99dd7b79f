#include "runtime.h"

#include <chrono>
#include <stdexcept>
#include <utility>

namespace fdcpu {

namespace {

const Kernels &kernels_of(Isa isa) {
    switch (isa) {
        case Isa::scalar: return scalar::kernels;
        case Isa::avx2: return avx2::kernels;
        case Isa::avx512_vnni: return avx512_vnni::kernels;
        case Isa::avx512: return avx512::kernels;
#ifdef FDCPU_EMULATED
        case Isa::emulated: return emulated::kernels;
        case Isa::emulated_vnni: return emulated_vnni::kernels;
#endif
        default: return amx::kernels;
    }
}

// Plans are captured by a thread, so that others can compute meanwhile.
thread_local Plan *recording = nullptr;

}  // namespace

Runtime::Runtime(int num_threads, const std::vector<int> &cpus, const std::string &isa)
    : isa_(choose_isa(isa)), kernels_(kernels_of(isa_)), team_(num_threads, cpus) {}

void Runtime::submit(Step step, size_t scratch_bytes) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (scratch_bytes > scratch_.size()) scratch_ = Pages(scratch_bytes * 5 / 4);
        const int64_t most_rows = recording ? *recording->most_rows : INT64_MAX;
        team_.run(1, [&](int64_t, int rank, int crew) {
            run(step, Worker{team_, rank, crew, scratch_.data(), most_rows});
        });
    }
    if (!recording) return;
    step.most_rows = recording->most_rows;
    recording->steps.push_back(std::move(step));
}

void Runtime::count_rows(std::function<int64_t()> count) {
    if (recording && recording->steps.empty()) narrow_rows(std::move(count));
}

void Runtime::narrow_rows(std::function<int64_t()> count) {
    if (!recording) return;
    recording->most_rows = std::make_shared<int64_t>(count());
    recording->counts.emplace_back(recording->most_rows, std::move(count));
}

void Runtime::submit_first(Step step, std::function<int64_t()> count) {
    count_rows(std::move(count));
    submit(std::move(step), 0);
}

void Runtime::divide(int64_t count, const std::function<void(int64_t)> &work) {
    std::lock_guard<std::mutex> lock(mutex_);
    team_.run(1, [&](int64_t, int rank, int crew) {
        int64_t first, last;
        Worker{team_, rank, crew, nullptr}.share(count, first, last);
        for (int64_t i = first; i < last; ++i) work(i);
    });
}

void Runtime::begin(Plan *plan) {
    if (recording) throw std::logic_error("this thread is recording a plan already");
    recording = plan;
}

void Runtime::end() { recording = nullptr; }

void Runtime::replay(const std::vector<const Plan *> &plans, int64_t times) {
    std::lock_guard<std::mutex> lock(mutex_);
    in_order_.clear();
    for (const Plan *plan : plans) {
        for (const auto &[most_rows, count] : plan->counts) *most_rows = count();
        for (const Step &step : plan->steps) in_order_.push_back(&step);
    }
    const int64_t count = int64_t(in_order_.size());
    team_.run(count * times, [&](int64_t i, int rank, int crew) {
        const Step &step = *in_order_[i % count];
        run(step, Worker{team_, rank, crew, scratch_.data(), *step.most_rows});
    });
}

void Runtime::run(const Step &step, const Worker &worker) {
    if (!is_profiling_) return step.run(worker);
    const auto began = std::chrono::steady_clock::now();
    step.run(worker);
    worker.barrier();
    if (worker.thread) return;
    Time &time = times_[step.name];
    ++time.calls;
    time.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

void Runtime::begin_profile() {
    std::lock_guard<std::mutex> lock(mutex_);
    is_profiling_ = true;
}

std::map<std::string, Runtime::Time> Runtime::times() {
    std::lock_guard<std::mutex> lock(mutex_);
    is_profiling_ = false;
    return std::move(times_);
}

}  // namespace fdcpu
