// One persistent team of threads that walk through the same work together; barriers part its phases.
//
// Whoever is missing is not waited for. A thread whose processor runs something else, a server beside the engine
// for example, would stop all others for as long as that takes. So operations are done by a crew: the caller's
// thread and those that answered its call. A crew of everybody stays together to the end; a smaller one calls
// again after every operation.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace fdcpu {

// A phase barrier that spins for a while and then yields: phases are microseconds long, but another
// process may own the core of the thread that is missing.
class Barrier {
public:
    // Returns when `size` threads have called it.
    void wait(int size);
    // 0, 1, 2 and so on, to whoever asks, since all were at the barrier.
    int64_t turn() { return turns_.fetch_add(1, std::memory_order_relaxed); }

private:
    std::atomic<int> arrived_{0};
    std::atomic<unsigned> phase_{0};
    alignas(64) std::atomic<int64_t> turns_{0};
};

class Team {
public:
    // Does the rank-th of `crew` parts of an operation.
    using Work = std::function<void(int64_t operation, int rank, int crew)>;

    // The caller of run() is of rank 0; size - 1 threads are made. `cpus`: where each of these is pinned,
    // empty: nowhere.
    Team(int size, const std::vector<int> &cpus);
    ~Team();

    // Operations 0 to count - 1, one after the other. Calls from several threads take turns.
    void run(int64_t count, const Work &work);
    // Parts phases of an operation.
    void barrier(int crew) { barrier_.wait(crew); }
    // What a thread of the crew takes next of what they have divided into turns; every phase begins with 0.
    int64_t turn() { return barrier_.turn(); }
    int size() const { return size_; }
    // For tests: whether threads leave calls unanswered from now on.
    void stay_away(bool is_away) { is_away_.store(is_away); }

private:
    using Duration = std::chrono::steady_clock::duration;

    // What the caller and one thread tell each other; numbers are those of calls.
    struct alignas(64) Seat {
        std::atomic<unsigned> answered{0};
        std::atomic<unsigned> taken{0};  // into the crew
        int rank = 0;
    };

    // Who answers within `patience` is the crew from the next operation on; its size.
    int call(int64_t next, Duration patience);
    void wake();
    void loop(int thread);
    // Moves the caller off a processor where one of the threads is pinned.
    void make_way() const;

    const int size_;
    const std::vector<int> cpus_;
    Barrier barrier_;
    std::mutex turn_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::atomic<unsigned> call_{0};
    std::atomic<int> sleeping_{0};
    std::atomic<bool> stop_{false}, is_away_{false};
    // Written before a seat is taken, read after that.
    const Work *work_ = nullptr;
    int64_t count_ = 0, next_ = 0;
    int crew_ = 1;
    std::vector<Seat> seats_;
    std::vector<std::thread> threads_;
};

}  // namespace fdcpu
