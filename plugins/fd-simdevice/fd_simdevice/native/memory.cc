// Device memory: an arena per device, mapped twice. Paddle gets addresses without any access rights, so
// that a host that touches device memory dies at once; kernels use the readable alias.
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "sim.h"

namespace sim {
namespace {

constexpr size_t kAlign = 256;
constexpr size_t kMostPoisoned = 1 << 20;

struct Arena {
  char* device = nullptr;
  char* alias = nullptr;
  size_t total = 0, used = 0;
  std::map<size_t, size_t> free_spans;  // offset -> length
  std::map<size_t, size_t> taken;
  std::mutex lock;

  explicit Arena(size_t bytes) : total(bytes) {
    int file = memfd_create("simulated_device", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, total)) abort();
    alias = (char*)mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    device = setting("PROTECT", 1) ? (char*)mmap(nullptr, total, PROT_NONE, MAP_SHARED, file, 0) : alias;
    close(file);
    if (alias == MAP_FAILED || device == MAP_FAILED) abort();
    free_spans[0] = total;
  }
};

std::vector<std::unique_ptr<Arena>>& arenas() {
  static auto* made = [] {
    auto* all = new std::vector<std::unique_ptr<Arena>>;
    for (long i = 0; i < setting("DEVICES", 2); ++i)
      all->push_back(std::make_unique<Arena>((size_t)setting("MEM_MB", 1024) << 20));
    return all;
  }();
  return *made;
}

}  // namespace

size_t num_devices() { return arenas().size(); }

void* host(const void* pointer) {
  for (auto& arena : arenas())
    if ((char*)pointer >= arena->device && (char*)pointer < arena->device + arena->total)
      return arena->alias + ((char*)pointer - arena->device);
  return (void*)pointer;
}

C_Status memory_allocate(int device, void** out, size_t size) {
  ++panel().allocs;
  if (panel().lost) return C_INTERNAL_ERROR;
  if (due(panel().fail_alloc_at)) return C_FAILED;
  Arena& arena = *arenas()[device];
  std::lock_guard<std::mutex> guard(arena.lock);
  size = std::max<size_t>(kAlign, (size + kAlign - 1) & ~(kAlign - 1));
  // As if somebody else had taken the rest of the memory meanwhile.
  long most = panel().limit_bytes;
  if (most && panel().used_bytes + (long)size > most) {
    ++panel().refused_allocs;
    return C_FAILED;
  }
  for (auto it = arena.free_spans.begin(); it != arena.free_spans.end(); ++it) {
    if (it->second < size) continue;
    size_t offset = it->first, rest = it->second - size;
    arena.free_spans.erase(it);
    if (rest) arena.free_spans[offset + size] = rest;
    arena.taken[offset] = size;
    arena.used += size;
    panel().used_bytes += size;
    // Never zeroed, so that a read of memory nobody wrote shows.
    memset(arena.alias + offset, 0xA5, std::min(size, kMostPoisoned));
    *out = arena.device + offset;
    return C_SUCCESS;
  }
  return C_FAILED;
}

C_Status memory_deallocate(int device, void* pointer) {
  ++panel().frees;
  drain_device(device);  // as freeing does on real devices: queued work may still use it
  Arena& arena = *arenas()[device];
  std::lock_guard<std::mutex> guard(arena.lock);
  auto found = arena.taken.find((char*)pointer - arena.device);
  if (found == arena.taken.end()) return C_ERROR;
  size_t offset = found->first, size = found->second;
  arena.taken.erase(found);
  arena.used -= size;
  panel().used_bytes += -(long)size;
  auto next = arena.free_spans.lower_bound(offset);
  if (next != arena.free_spans.end() && offset + size == next->first) {
    size += next->second;
    next = arena.free_spans.erase(next);
  }
  if (next != arena.free_spans.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += size;
      return C_SUCCESS;
    }
  }
  arena.free_spans[offset] = size;
  return C_SUCCESS;
}

void memory_stats(int device, size_t* total, size_t* available) {
  Arena& arena = *arenas()[device];
  std::lock_guard<std::mutex> guard(arena.lock);
  *total = arena.total;
  *available = arena.total - arena.used;
}

}  // namespace sim
