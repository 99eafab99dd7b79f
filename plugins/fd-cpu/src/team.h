// One persistent team of threads. All of them walk through the same work; barriers part its phases.
#pragma once
#include <atomic>
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
    explicit Barrier(int size) : size_(size) {}
    void wait();

private:
    const int size_;
    std::atomic<int> arrived_{0};
    std::atomic<unsigned> phase_{0};
};

class Team {
public:
    // The caller of run() is thread 0; size - 1 threads are made. `cpus`: where each of these is pinned,
    // empty: nowhere.
    Team(int size, const std::vector<int> &cpus);
    ~Team();

    // Every thread calls work(thread). Returns when all have. Calls from several threads take turns.
    void run(const std::function<void(int)> &work);
    void barrier() { barrier_.wait(); }
    int size() const { return size_; }

private:
    void loop(int thread);
    // Moves the caller off a processor where one of the threads is pinned.
    void make_way() const;

    const int size_;
    const std::vector<int> cpus_;
    Barrier barrier_;
    std::mutex turn_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::atomic<unsigned> round_{0};
    std::atomic<int> sleeping_{0};
    std::atomic<bool> stop_{false};
    const std::function<void(int)> *work_ = nullptr;
    std::vector<std::thread> threads_;
};

}  // namespace fdcpu
