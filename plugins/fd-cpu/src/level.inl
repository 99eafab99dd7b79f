// Everything of one instruction-set level. A level's .cpp sets FDCPU_LEVEL and FDCPU_NAMESPACE first.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "ops.h"
#include "simd.h"

#include "rows.inl"
#include "linear.inl"
#include "attention.inl"
#include "moe.inl"
#include "sampling.inl"

namespace fdcpu::FDCPU_NAMESPACE {

const Kernels kernels = {linear,  linear_scratch,  norm,   gate,     embedding, attention, attention_scratch,
                         experts, experts_scratch, greedy, head_norm,
                         sample,  filter,          filter_scratch, penalize, mask, log_softmax};

}  // namespace fdcpu::FDCPU_NAMESPACE
