// The team, the chosen kernels and their scratch; plans of recorded operations.
#pragma once
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "features.h"
#include "memory.h"
#include "ops.h"

namespace fdcpu {

using Step = std::function<void(const Worker &)>;

// Operations that ran once while recording; replayed by one call, all threads walking through them.
//
// A plan that begins with prepare_decode is recorded for the largest batch. Rows of nobody stand at its
// end, so each replay counts the rows that are somebody's, and every operation leaves the others alone.
// Plans that go on where another one ended share its count.
struct Plan {
    std::vector<Step> steps;
    std::shared_ptr<int64_t> most_rows = std::make_shared<int64_t>(INT64_MAX);
    std::function<int64_t()> count_rows;
};

class Runtime {
public:
    Runtime(int num_threads, const std::vector<int> &cpus, const std::string &isa);

    const Kernels &kernels() const { return kernels_; }
    Isa isa() const { return isa_; }
    int num_threads() const { return team_.size(); }

    // Runs the step now, and keeps it when this thread is recording a plan.
    void submit(Step step, size_t scratch_bytes);
    // The same, and from here on the plan's operations are for so many rows.
    void submit_first(Step step, std::function<int64_t()> count_rows);
    // Calls work(i) for i below count, divided among the threads; never part of a plan.
    void divide(int64_t count, const std::function<void(int64_t)> &work);
    void begin(Plan *plan);
    void end();
    void replay(const Plan &plan);

private:

    Isa isa_;
    const Kernels &kernels_;
    Team team_;
    std::mutex mutex_;
    Pages scratch_;
};

}  // namespace fdcpu
