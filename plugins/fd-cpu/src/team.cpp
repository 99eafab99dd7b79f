#include "team.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>

namespace fdcpu {

namespace {

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

constexpr int kSpinsBeforeYield = 4000;
// How long a thread without work keeps looking before it sleeps: longer than the host's part of a
// decode step, so that a running engine does not pay for waking up.
constexpr auto kLinger = std::chrono::milliseconds(2);

void pin(pthread_t thread, int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(thread, sizeof set, &set);
}

}  // namespace

void Barrier::wait() {
    if (size_ == 1) return;
    const unsigned phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
        arrived_.store(0, std::memory_order_relaxed);
        phase_.store(phase + 1, std::memory_order_release);
        return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) {
        if (spins < kSpinsBeforeYield)
            relax();
        else
            std::this_thread::yield();
    }
}

Team::Team(int size, const std::vector<int> &cpus) : size_(size), cpus_(cpus), barrier_(size) {
    for (int thread = 1; thread < size; ++thread) {
        threads_.emplace_back([this, thread] { loop(thread); });
        if (size_t(thread) < cpus.size()) pin(threads_.back().native_handle(), cpus[thread]);
    }
}

Team::~Team() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_.store(true);
        round_.fetch_add(1);
    }
    wake_.notify_all();
    for (auto &thread : threads_) thread.join();
}

void Team::run(const std::function<void(int)> &work) {
    std::lock_guard<std::mutex> turn(turn_);
    if (size_ == 1) {
        work(0);
        return;
    }
    make_way();
    work_ = &work;
    round_.fetch_add(1, std::memory_order_seq_cst);
    if (sleeping_.load(std::memory_order_seq_cst)) {
        std::lock_guard<std::mutex> lock(mutex_);
        wake_.notify_all();
    }
    work(0);
    barrier_.wait();
}

void Team::make_way() const {
    if (cpus_.empty()) return;
    const auto last = cpus_.begin() + std::min<size_t>(size_, cpus_.size());
    if (std::find(cpus_.begin() + 1, last, sched_getcpu()) == last) return;
    cpu_set_t before;
    if (pthread_getaffinity_np(pthread_self(), sizeof before, &before)) return;
    pin(pthread_self(), cpus_[0]);
    pthread_setaffinity_np(pthread_self(), sizeof before, &before);
}

void Team::loop(int thread) {
    unsigned seen = 0;
    for (;;) {
        const auto began = std::chrono::steady_clock::now();
        int spins = 0;
        while (round_.load(std::memory_order_acquire) == seen) {
            relax();
            if (++spins % 256) continue;
            std::this_thread::yield();
            if (std::chrono::steady_clock::now() - began < kLinger) continue;
            std::unique_lock<std::mutex> lock(mutex_);
            sleeping_.fetch_add(1, std::memory_order_seq_cst);
            wake_.wait(lock, [&] { return round_.load(std::memory_order_seq_cst) != seen; });
            sleeping_.fetch_sub(1);
        }
        seen = round_.load(std::memory_order_acquire);
        if (stop_.load()) return;
        (*work_)(thread);
        barrier_.wait();
    }
}

}  // namespace fdcpu
