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
// How long a call waits for answers: one that looks for calls, or yields meanwhile, has the time to answer, and so
// has, where somebody sleeps, one that has to be woken.
constexpr auto kPatience = std::chrono::microseconds(3);
constexpr auto kPatienceAtFirst = std::chrono::microseconds(20);
constexpr auto kPatienceWithSleepers = std::chrono::microseconds(200);

void pin(pthread_t thread, int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(thread, sizeof set, &set);
}

}  // namespace

void Barrier::wait(int size) {
    const unsigned phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
        arrived_.store(0, std::memory_order_relaxed);
        turns_.store(0, std::memory_order_relaxed);
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

Team::Team(int size, const std::vector<int> &cpus) : size_(size), cpus_(cpus), seats_(size) {
    for (int thread = 1; thread < size; ++thread) {
        threads_.emplace_back([this, thread] { loop(thread); });
        if (size_t(thread) < cpus.size()) pin(threads_.back().native_handle(), cpus[thread]);
    }
}

Team::~Team() {
    stop_.store(true);
    call_.fetch_add(1);
    wake();
    for (auto &thread : threads_) thread.join();
}

void Team::run(int64_t count, const Work &work) {
    std::lock_guard<std::mutex> turn(turn_);
    if (size_ > 1) make_way();
    work_ = &work;
    count_ = count;
    int crew = 1;
    for (int64_t i = 0; i < count; ++i) {
        if (crew < size_) crew = call(i, i ? kPatience : kPatienceAtFirst);
        work(i, 0, crew);
        barrier_.wait(crew);
    }
}

int Team::call(int64_t next, Duration patience) {
    const unsigned number = call_.fetch_add(1, std::memory_order_seq_cst) + 1;
    if (sleeping_.load(std::memory_order_seq_cst)) {
        wake();
        patience = kPatienceWithSleepers;
    }
    const auto count_answers = [&] {
        int crew = 1;
        for (int thread = 1; thread < size_; ++thread) {
            Seat &seat = seats_[thread];
            seat.rank = seat.answered.load(std::memory_order_acquire) == number ? crew++ : 0;
        }
        return crew;
    };
    int crew = count_answers();
    for (const auto began = std::chrono::steady_clock::now();
         crew < size_ && std::chrono::steady_clock::now() - began < patience; crew = count_answers())
        relax();
    crew_ = crew;
    next_ = next;
    for (Seat &seat : seats_)
        if (seat.rank) seat.taken.store(number, std::memory_order_seq_cst);
    // One that went to sleep since its answer, because this thread was away itself.
    if (sleeping_.load(std::memory_order_seq_cst)) wake();
    return crew;
}

void Team::wake() {
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
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
    Seat &seat = seats_[thread];
    unsigned heard = 0, done = 0;  // the last calls that it answered, and was taken by
    const auto is_called = [&] { return call_.load(std::memory_order_seq_cst) != heard; };
    const auto is_taken = [&] { return seat.taken.load(std::memory_order_seq_cst) != done; };
    for (;;) {
        const auto began = std::chrono::steady_clock::now();
        for (int spins = 1; !is_called() && !is_taken(); ++spins) {
            relax();
            if (spins % 256) continue;
            std::this_thread::yield();
            if (std::chrono::steady_clock::now() - began < kLinger) continue;
            std::unique_lock<std::mutex> lock(mutex_);
            sleeping_.fetch_add(1, std::memory_order_seq_cst);
            wake_.wait(lock, [&] { return is_called() || is_taken(); });
            sleeping_.fetch_sub(1);
        }
        const unsigned number = call_.load(std::memory_order_seq_cst);
        if (stop_.load()) return;  // read after the number: the last call is answered by nobody
        if (!is_taken()) {
            heard = number;
            if (!is_away_.load()) seat.answered.store(heard, std::memory_order_release);
            continue;
        }
        done = seat.taken.load(std::memory_order_acquire);
        // The next call writes these, when the last operation is over.
        const Work &work = *work_;
        const int64_t count = count_;
        const int crew = crew_, rank = seat.rank;
        int64_t i = next_;
        do {
            work(i, rank, crew);
            barrier_.wait(crew);
        } while (++i < count && crew == size_);
    }
}

}  // namespace fdcpu
