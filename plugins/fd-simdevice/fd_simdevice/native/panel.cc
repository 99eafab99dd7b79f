// The library's own name, its settings, and the panel of knobs and counters.
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "sim.h"

namespace sim {
namespace {

std::string own_type() {
  Dl_info info;
  if (!dladdr((void*)&own_type, &info) || !info.dli_fname) return "sim";
  std::string file = info.dli_fname;
  const std::string before = "libpaddle-sim-", after = ".so";
  size_t start = file.rfind(before), end = file.rfind(after);
  if (start == std::string::npos || end == std::string::npos) return "sim";
  start += before.size();
  return file.substr(start, end - start);
}

// SIM_PANEL names a folder: the panel then is <folder>/<type>, and another process may turn the knobs.
void* panel_memory(size_t size) {
  int file = -1;
  const char* folder = setting_text("PANEL");
  if (folder) {
    std::string path = std::string(folder) + "/" + device_type();
    file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, size)) {
      fprintf(stderr, "[sim] cannot open panel %s\n", path.c_str());
      abort();
    }
  }
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | (file < 0 ? MAP_ANONYMOUS : 0),
                      file, 0);
  if (file >= 0) close(file);
  if (memory == MAP_FAILED) abort();
  return memory;
}

// What the environment says counts; else what another process or an earlier one left in the panel.
void set_knob(Cell& cell, const char* name, long otherwise, bool is_fresh) {
  if (is_fresh || setting_text(name)) cell.value = setting(name, otherwise);
}

Panel* make_panel() {
  auto* made = (Panel*)panel_memory(sizeof(Panel));
  bool is_fresh = !made->delay_us.name[0];
#define SIM_NAME(cell) strcpy(made->cell.name, #cell);
  SIM_KNOBS(SIM_NAME) SIM_COUNTERS(SIM_NAME)
#undef SIM_NAME
  set_knob(made->delay_us, "DELAY_US", 0, is_fresh);
  set_knob(made->random_delay, "RANDOM_DELAY", 1, is_fresh);
  set_knob(made->async, "ASYNC", 1, is_fresh);
  set_knob(made->late_h2d, "LATE_H2D", 0, is_fresh);
  set_knob(made->strict_copy, "STRICT_COPY", 0, is_fresh);
  set_knob(made->ccl_timeout_ms, "CCL_TIMEOUT_MS", 30000, is_fresh);
  return made;
}

}  // namespace

const std::string& device_type() {
  static const std::string* type = new std::string(own_type());
  return *type;
}

const char* setting_text(const char* name) {
  std::string key = std::string("SIM_") + name;
  const char* text = getenv((key + "_" + device_type()).c_str());
  if (!text || !*text) text = getenv(key.c_str());
  return text && *text ? text : nullptr;
}

long setting(const char* name, long fallback) {
  const char* text = setting_text(name);
  return text ? atol(text) : fallback;
}

Panel& panel() {
  static Panel* made = make_panel();
  return *made;
}

bool due(Cell& countdown) {
  long now = countdown.value.load();
  while (now > 0)
    if (countdown.value.compare_exchange_weak(now, now - 1)) return now == 1;
  return false;
}

}  // namespace sim

// For a test in the same process; others map the panel's file.
extern "C" __attribute__((visibility("default"))) void* sim_panel(size_t* size) {
  *size = sizeof(sim::Panel);
  return &sim::panel();
}
