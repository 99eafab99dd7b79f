// Everything of one instruction-set level: CMakeLists.txt compiles this once for each, with its FDCPU_LEVEL (0 scalar,
// 1 AVX2, 2 AVX512 with VNNI, 3 with BF16, too), FDCPU_TILES (0 none, 1 AMX, 2 emulated) and FDCPU_NAMESPACE.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#include "ops.h"
#ifdef FDCPU_EMULATED_LEVEL
#include "emulated_instructions.h"
#endif
#include "simd.h"
#if FDCPU_TILES
#include "tiles.h"
#endif

#include "rows.inl"
#include "tet.inl"
#include "coded.inl"
#include "activations.inl"
#if FDCPU_TILES
#include "tiled.inl"
#endif
#include "register_tiles.inl"
#include "linear.inl"
#include "greedy.inl"
#include "attention_int8.inl"
#include "attention.inl"
#include "attention_softmax.inl"
#include "attention_write.inl"
#include "attention_tiled.inl"
#include "attention_items.inl"
#include "moe.inl"
#include "sampling.inl"

namespace fdcpu::FDCPU_NAMESPACE {

const Kernels kernels = {linear,  linear_scratch,  norm,   gate,     embedding, attention, attention_scratch,
                         experts, experts_scratch, greedy, greedy_scratch, greedy_linear, greedy_linear_scratch, head_norm,
                         sample,  temper, filter,          filter_scratch, penalize, mask, log_softmax};

}  // namespace fdcpu::FDCPU_NAMESPACE
