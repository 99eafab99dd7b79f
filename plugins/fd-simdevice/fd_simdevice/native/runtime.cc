// The table Paddle reads: devices, memory and copies. Streams and collectives fill their own part.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <memory>
#include <mutex>
#include <vector>

#include "sim.h"

namespace sim {
namespace {

thread_local int current = 0;

// SIM_VISIBLE_ENV names the variable that the vendor's own runtime would read.
const std::vector<size_t>& visible() {
  static auto* made = [] {
    auto* ids = new std::vector<size_t>;
    const char* name = setting_text("VISIBLE_ENV");
    const char* list = getenv(name ? name : "SIM_VISIBLE_DEVICES");
    if (!list) {
      for (size_t i = 0; i < num_devices(); ++i) ids->push_back(i);
      return ids;
    }
    for (const char* at = list; *at; at += strspn(at, ", ")) {
      char* end;
      long id = strtol(at, &end, 10);
      if (end == at) break;
      if (id >= 0 && (size_t)id < num_devices()) ids->push_back(id);
      at = end;
    }
    return ids;
  }();
  return *made;
}

C_Status nothing() { return C_SUCCESS; }
C_Status accept(const C_Device) { return C_SUCCESS; }
C_Status set_device(const C_Device device) {
  current = device->id;
  return panel().lost ? C_INTERNAL_ERROR : C_SUCCESS;
}
C_Status get_device(const C_Device device) {
  device->id = current;
  return C_SUCCESS;
}
C_Status get_count(size_t* count) {
  *count = visible().size();
  return C_SUCCESS;
}
C_Status get_list(size_t* list) {
  for (size_t id : visible()) *list++ = id;
  return C_SUCCESS;
}

C_Status allocate(const C_Device device, void** out, size_t size) { return memory_allocate(device->id, out, size); }
C_Status deallocate(const C_Device device, void* pointer, size_t) { return memory_deallocate(device->id, pointer); }
C_Status host_allocate(const C_Device, void** out, size_t size) {
  *out = aligned_alloc(64, (size + 63) & ~63ul);
  return *out ? C_SUCCESS : C_FAILED;
}
C_Status host_deallocate(const C_Device, void* pointer, size_t) {
  free(pointer);
  return C_SUCCESS;
}
C_Status memory_set(const C_Device, void* pointer, unsigned char value, size_t size) {
  memset(host(pointer), value, size);
  return C_SUCCESS;
}
C_Status stats(const C_Device device, size_t* total, size_t* available) {
  memory_stats(device->id, total, available);
  return C_SUCCESS;
}

// ---- copies ----------------------------------------------------------------------------------------
C_Status copy_now(Cell& counter, const C_Device device, void* to, const void* from, size_t size) {
  ++counter;
  // As a legacy default stream does. A strict device would not wait, and Paddle leaves a gap there.
  if (!panel().strict_copy && drain_device(device->id) != C_SUCCESS) return C_INTERNAL_ERROR;
  if (panel().lost || due(panel().fail_copy_at)) return C_INTERNAL_ERROR;
  memcpy(to, from, size);
  return C_SUCCESS;
}
C_Status copy_later(Cell& counter, C_Stream stream, void* to, const void* from, size_t size, bool pageable) {
  ++counter;
  if (panel().lost || due(panel().fail_copy_at)) return C_INTERNAL_ERROR;
  if (pageable && !panel().late_h2d) {  // staged before the call returns, as drivers do
    auto staged = std::make_shared<std::string>((const char*)from, size);
    queue_task(stream, "copy", [=] { memcpy(to, staged->data(), size); });
  } else {
    queue_task(stream, "copy", [=] { memcpy(to, from, size); });
  }
  return C_SUCCESS;
}

C_Status copy_h2d(const C_Device device, void* to, const void* from, size_t size) {
  panel().bytes_h2d += size;
  return copy_now(panel().h2d, device, host(to), from, size);
}
C_Status copy_d2h(const C_Device device, void* to, const void* from, size_t size) {
  panel().bytes_d2h += size;
  return copy_now(panel().d2h, device, to, host(from), size);
}
C_Status copy_d2d(const C_Device device, void* to, const void* from, size_t size) {
  return copy_now(panel().d2d, device, host(to), host(from), size);
}
C_Status copy_p2p(const C_Device device, const C_Device, void* to, const void* from, size_t size) {
  return copy_now(panel().d2d, device, host(to), host(from), size);
}
C_Status acopy_h2d(const C_Device, C_Stream stream, void* to, const void* from, size_t size) {
  panel().bytes_h2d += size;
  return copy_later(panel().h2d, stream, host(to), from, size, true);
}
C_Status acopy_d2h(const C_Device, C_Stream stream, void* to, const void* from, size_t size) {
  panel().bytes_d2h += size;
  return copy_later(panel().d2h, stream, to, host(from), size, false);
}
C_Status acopy_d2d(const C_Device, C_Stream stream, void* to, const void* from, size_t size) {
  return copy_later(panel().d2d, stream, host(to), host(from), size, false);
}
C_Status acopy_p2p(const C_Device, const C_Device, C_Stream stream, void* to, const void* from, size_t size) {
  return copy_later(panel().d2d, stream, host(to), host(from), size, false);
}

// ---- facts, profiler, handles ----------------------------------------------------------------------
C_Status min_chunk(const C_Device, size_t* size) {
  *size = 256;
  return C_SUCCESS;
}
C_Status one(const C_Device, size_t* value) {
  *value = 1;
  return C_SUCCESS;
}
C_Status yes(const C_Device, bool* value) {
  *value = true;
  return C_SUCCESS;
}
C_Status profiler_init(C_Profiler, void** data) {
  ++panel().profiler_calls;
  *data = nullptr;
  return C_SUCCESS;
}
C_Status profiler_step(C_Profiler, void*) {
  ++panel().profiler_calls;
  return C_SUCCESS;
}
C_Status profiler_collect(C_Profiler, uint64_t, void*) {
  ++panel().profiler_calls;
  return C_SUCCESS;
}
// A capture begins by asking for these handles, so placeholders must exist.
int token;
C_Status blas_init(const C_Device, C_BLASHandle* handle, C_Stream) {
  *handle = (C_BLASHandle)&token;
  return C_SUCCESS;
}
C_Status blas_destroy(const C_Device, C_BLASHandle) { return C_SUCCESS; }
C_Status blas_math_mode(const C_Device, C_BLASHandle, int) { return C_SUCCESS; }
C_Status blaslt_init(const C_Device, C_BLASLtHandle* handle) {
  *handle = (C_BLASLtHandle)&token;
  return C_SUCCESS;
}
C_Status blaslt_destroy(const C_Device, C_BLASLtHandle) { return C_SUCCESS; }

void fill_device_table(C_DeviceInterface* table) {
  table->initialize = nothing;
  table->finalize = nothing;
  table->init_device = accept;
  table->deinit_device = accept;
  table->set_device = set_device;
  table->get_device = get_device;
  table->get_device_count = get_count;
  table->get_device_list = get_list;
  table->device_memory_allocate = allocate;
  table->device_memory_deallocate = deallocate;
  table->device_memory_set = memory_set;
  table->device_memory_stats = stats;
  table->device_min_chunk_size = min_chunk;
  table->host_memory_allocate = host_allocate;
  table->host_memory_deallocate = host_deallocate;
  table->memory_copy_h2d = copy_h2d;
  table->memory_copy_d2h = copy_d2h;
  table->memory_copy_d2d = copy_d2d;
  table->memory_copy_p2p = copy_p2p;
  table->async_memory_copy_h2d = acopy_h2d;
  table->async_memory_copy_d2h = acopy_d2h;
  table->async_memory_copy_d2d = acopy_d2d;
  table->async_memory_copy_p2p = acopy_p2p;
  table->get_compute_capability = one;
  table->get_runtime_version = one;
  table->get_driver_version = one;
  table->is_float16_supported = yes;
  table->is_bfloat16_supported = yes;
  table->profiler_initialize = profiler_init;
  table->profiler_finalize = profiler_step;
  table->profiler_prepare_tracing = profiler_step;
  table->profiler_start_tracing = profiler_step;
  table->profiler_stop_tracing = profiler_step;
  table->profiler_collect_trace_data = profiler_collect;
  table->init_blas_handle = blas_init;
  table->destroy_blas_handle = blas_destroy;
  table->blas_set_math_mode = blas_math_mode;
  table->init_blaslt_handle = blaslt_init;
  table->destroy_blaslt_handle = blaslt_destroy;
}

}  // namespace
}  // namespace sim

extern "C" __attribute__((visibility("default"))) void InitPlugin(CustomRuntimeParams* params) {
  PADDLE_CUSTOM_RUNTIME_CHECK_VERSION(params);
  params->device_type = (char*)sim::device_type().c_str();
  params->sub_device_type = (char*)"simulated";
  sim::panel();
  sim::fill_device_table(params->interface);
  sim::fill_stream_table(params->interface);
  sim::fill_collective_table(params->interface);
}
