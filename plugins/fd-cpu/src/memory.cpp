#include "memory.h"

#include <sys/mman.h>

#include <new>

namespace fdcpu {

namespace {
constexpr size_t kHugePage = size_t(2) << 20;
}

Pages::Pages(size_t num_bytes) : size_(num_bytes) {
    const bool huge = num_bytes >= kHugePage;
    mapped_ = num_bytes + (huge ? kHugePage : 0);
    if (mapped_ == 0) return;
    base_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) {
        base_ = nullptr;
        throw std::bad_alloc();
    }
    auto address = reinterpret_cast<uintptr_t>(base_);
    if (huge) {
        address = (address + kHugePage - 1) & ~(kHugePage - 1);
        madvise(reinterpret_cast<void *>(address), num_bytes, MADV_HUGEPAGE);  // a wish, no more
    }
    data_ = reinterpret_cast<uint8_t *>(address);
}

Pages::~Pages() {
    if (base_) munmap(base_, mapped_);
}

}  // namespace fdcpu
