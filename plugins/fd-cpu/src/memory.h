// Large aligned memory: weights in huge pages where the system has them, scratch that only grows.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>

namespace fdcpu {

// Anonymous memory, zeroed, aligned to 2 MiB when it is that large; given back by the destructor.
class Pages {
public:
    Pages() = default;
    explicit Pages(size_t num_bytes);
    ~Pages();
    Pages(Pages &&other) noexcept { *this = std::move(other); }
    Pages &operator=(Pages &&other) noexcept {
        std::swap(base_, other.base_);
        std::swap(mapped_, other.mapped_);
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        return *this;
    }
    Pages(const Pages &) = delete;
    Pages &operator=(const Pages &) = delete;

    uint8_t *data() const { return data_; }
    size_t size() const { return size_; }

private:
    void *base_ = nullptr;
    size_t mapped_ = 0;
    uint8_t *data_ = nullptr;
    size_t size_ = 0;
};

}  // namespace fdcpu
