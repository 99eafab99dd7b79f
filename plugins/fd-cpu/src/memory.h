// Large aligned memory: weights side by side in huge pages where the system has them, scratch of its own.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

namespace fdcpu {

class Mapping;

// Anonymous memory, zeroed, aligned to a cache line.
//
// What is made with `beside` lies in one mapping with others: most matrices are smaller than a huge page, and
// without one the processor looks addresses up more often than it reads. A mapping goes with its last part.
class Pages {
public:
    Pages() = default;
    explicit Pages(size_t num_bytes, bool beside = false);

    uint8_t *data() const { return data_; }
    size_t size() const { return size_; }

private:
    std::shared_ptr<Mapping> mapping_;
    uint8_t *data_ = nullptr;
    size_t size_ = 0;
};

}  // namespace fdcpu
