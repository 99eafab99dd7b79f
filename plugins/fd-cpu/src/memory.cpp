#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <mutex>
#include <new>

namespace fdcpu {

namespace {
constexpr size_t kHugePage = size_t(2) << 20, kSharedMapping = size_t(256) << 20, kAlignment = 64;

size_t round_up(size_t value, size_t step) { return (value + step - 1) / step * step; }
}  // namespace

class Mapping {
public:
    explicit Mapping(size_t num_bytes) : left_(round_up(num_bytes, kHugePage)), mapped_(left_ + kHugePage) {
        base_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (base_ == MAP_FAILED) throw std::bad_alloc();
        next_ = reinterpret_cast<uint8_t *>(round_up(reinterpret_cast<uintptr_t>(base_), kHugePage));
        madvise(next_, left_, MADV_HUGEPAGE);  // a wish, no more
    }
    ~Mapping() { munmap(base_, mapped_); }
    Mapping(const Mapping &) = delete;
    Mapping &operator=(const Mapping &) = delete;

    // Memory that nobody had before; null where there is not enough.
    uint8_t *take(size_t num_bytes) {
        const size_t whole = round_up(num_bytes, kAlignment);
        if (whole > left_) return nullptr;
        left_ -= whole;
        next_ += whole;
        return next_ - whole;
    }

private:
    size_t left_;
    const size_t mapped_;
    void *base_;
    uint8_t *next_;
};

Pages::Pages(size_t num_bytes, bool beside) : size_(num_bytes) {
    if (num_bytes == 0) return;
    if (!beside) {
        mapping_ = std::make_shared<Mapping>(num_bytes);
        data_ = mapping_->take(num_bytes);
        return;
    }
    static std::mutex mutex;
    static std::weak_ptr<Mapping> newest;
    std::lock_guard<std::mutex> lock(mutex);
    mapping_ = newest.lock();
    if (mapping_) data_ = mapping_->take(num_bytes);
    if (data_) return;
    mapping_ = std::make_shared<Mapping>(std::max(num_bytes + kAlignment, kSharedMapping));
    data_ = mapping_->take(num_bytes);
    newest = mapping_;
}

}  // namespace fdcpu
