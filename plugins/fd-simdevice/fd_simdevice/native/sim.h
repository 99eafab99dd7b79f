// Simulated accelerator behind PaddlePaddle's custom-device C interface: what its parts share.
//
// One file of this library is one device type: its name is read from the file's own name
// (libpaddle-sim-<type>.so), so copies of one build serve any number of types in one process.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "paddle/phi/backends/device_ext.h"

namespace sim {

const std::string& device_type();
// Environment variable SIM_<NAME>_<type>, else SIM_<NAME>, else the fallback.
long setting(const char* name, long fallback);
const char* setting_text(const char* name);

// ---- panel: knobs and counters, one cell each, in a file that tests may map, too -------------------
struct Cell {
  char name[56];
  std::atomic<long> value;
  operator long() const { return value.load(std::memory_order_relaxed); }
  void operator++() { value.fetch_add(1, std::memory_order_relaxed); }
  void operator+=(long more) { value.fetch_add(more, std::memory_order_relaxed); }
};
static_assert(sizeof(Cell) == 64, "the Python side reads cells of 64 bytes");

// Knobs. *_at counts down to the n-th matching call, which then fails once.
#define SIM_KNOBS(X)                                                                              \
  X(delay_us) X(random_delay) X(async) X(late_h2d) X(strict_copy) X(fail_alloc_at) X(fail_copy_at) \
  X(fail_launch_at) X(fail_kernel_at) X(hang_at) X(lost) X(ccl_timeout_ms) X(limit_bytes)
#define SIM_COUNTERS(X)                                                                        \
  X(launches) X(h2d) X(d2h) X(d2d) X(bytes_h2d) X(bytes_d2h) X(allocs) X(frees) X(used_bytes)  \
  X(stream_syncs) X(device_syncs) X(event_syncs) X(event_queries) X(streams) X(ccl_calls)      \
  X(captures) X(graph_launches) X(profiler_calls) X(kernel_errors) X(programs) \
  X(refused_allocs)
struct Panel {
#define SIM_CELL(cell) Cell cell;
  SIM_KNOBS(SIM_CELL) SIM_COUNTERS(SIM_CELL)
#undef SIM_CELL
};
Panel& panel();
// Whether a countdown knob reaches zero with this call.
bool due(Cell& countdown);

// ---- memory ----------------------------------------------------------------------------------------
// What Paddle is given lies in pages nobody may touch; host() is the hidden alias of an address.
void* host(const void* device_pointer);
size_t num_devices();
C_Status memory_allocate(int device, void** out, size_t size);
C_Status memory_deallocate(int device, void* pointer);
void memory_stats(int device, size_t* total, size_t* available);

// ---- streams ---------------------------------------------------------------------------------------
// Queue work on a stream (Paddle hands a C_Stream around as void*). False: the launch itself failed.
bool launch(void* stream, const char* what, std::function<void()> work);
// Everything queued so far on every stream of the device.
C_Status drain_device(int device);
// From inside a task: its stream is broken from now on, as after a fault on a real device.
void break_stream(void* stream);
void queue_task(void* stream, const char* what, std::function<void()> work);

void fill_stream_table(C_DeviceInterface* table);
void fill_collective_table(C_DeviceInterface* table);
// Registers the native kernels; called while the library is loaded.
void register_kernels();

}  // namespace sim
