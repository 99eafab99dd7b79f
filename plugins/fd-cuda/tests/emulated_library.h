// What the emulated GPU takes from the standard library. emulation.py compiles it once for all kernels: reading it takes
// longer than any of them.
#pragma once
#include <ucontext.h>

#include <barrier>
#include <cmath>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>
