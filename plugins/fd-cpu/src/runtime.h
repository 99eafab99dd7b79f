// The team, the chosen kernels and their scratch; plans of captured operations.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "features.h"
#include "memory.h"
#include "ops.h"

namespace fdcpu {

using RowCount = std::shared_ptr<int64_t>;

// What one operation does, what it is called in a profile, and in a plan for how many rows.
struct Step {
    const char *name;
    std::function<void(const Worker &)> run;
    RowCount most_rows;
};

// Operations that ran once during capture; replayed by one call, all threads walking through them.
//
// A plan that counts its rows is captured for the largest batch, or the longest prompts. Padding rows stand
// at its end, so each replay counts the rows that are somebody's, and every operation leaves the others alone.
// Where some of the rows are selected, operations from there on go by their number.
// Plans that go on where another one ended share its last count.
struct Plan {
    std::vector<Step> steps;
    RowCount most_rows = std::make_shared<int64_t>(INT64_MAX);  // of the operations to come
    std::vector<std::pair<RowCount, std::function<int64_t()>>> counts;  // taken before each replay
};

class Runtime {
public:
    Runtime(int num_threads, const std::vector<int> &cpus, const std::string &isa);

    const Kernels &kernels() const { return kernels_; }
    Isa isa() const { return isa_; }
    int num_threads() const { return team_.size(); }

    // Runs the step now, and keeps it when this thread is recording a plan.
    void submit(Step step, size_t scratch_bytes);
    // When this thread's plan is empty yet: its operations are for so many rows, counted at each replay.
    void count_rows(std::function<int64_t()> count);
    // Those that are submitted from here on are.
    void narrow_rows(std::function<int64_t()> count);
    // count_rows, then submit.
    void submit_first(Step step, std::function<int64_t()> count);
    // Calls work(i) for i below count, divided among the threads; never part of a plan.
    void divide(int64_t count, const std::function<void(int64_t)> &work);
    void begin(Plan *plan);
    void end();
    // All of the plans, one after the other, so many times.
    void replay(const std::vector<const Plan *> &plans, int64_t times);
    // See Team.
    void stay_away(bool is_away) { team_.stay_away(is_away); }

    // From now on every operation is timed, until times() is called.
    void begin_profile();
    struct Time {
        int64_t calls = 0;
        double seconds = 0;
    };
    std::map<std::string, Time> times();

private:
    void run(const Step &step, const Worker &worker);

    Isa isa_;
    const Kernels &kernels_;
    Team team_;
    std::mutex mutex_;
    Pages scratch_;
    std::vector<const Step *> in_order_;  // of the replay at hand
    bool is_profiling_ = false;
    std::map<std::string, Time> times_;
};

}  // namespace fdcpu
