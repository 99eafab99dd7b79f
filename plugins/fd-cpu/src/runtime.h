// The team, the chosen kernels and their scratch; plans of recorded operations.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "features.h"
#include "memory.h"
#include "ops.h"

namespace fdcpu {

using Step = std::function<void(const Worker &)>;

// Operations that ran once while recording; replayed by one call, all threads walking through them.
struct Plan {
    std::vector<Step> steps;
};

class Runtime {
public:
    Runtime(int num_threads, const std::vector<int> &cpus, const std::string &isa);

    const Kernels &kernels() const { return kernels_; }
    Isa isa() const { return isa_; }
    int num_threads() const { return team_.size(); }

    // Runs the step now, and keeps it when a plan is being recorded.
    void submit(Step step, size_t scratch_bytes);
    void begin(Plan *plan);
    void end();
    void replay(const Plan &plan);

private:
    Worker worker(int thread) { return Worker{team_, thread, scratch_.data()}; }

    Isa isa_;
    const Kernels &kernels_;
    Team team_;
    Pages scratch_;
    Plan *recording_ = nullptr;
};

}  // namespace fdcpu
