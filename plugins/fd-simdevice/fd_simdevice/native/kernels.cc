// The operators that the simulated device runs itself; all else falls back to the CPU, as on a chip.
#include <cmath>

#include "native.h"
#include "paddle/phi/kernels/activation_kernel.h"
#include "paddle/phi/kernels/arange_kernel.h"
#include "paddle/phi/kernels/arg_min_max_kernel.h"
#include "paddle/phi/kernels/argsort_kernel.h"
#include "paddle/phi/kernels/assign_kernel.h"
#include "paddle/phi/kernels/bitwise_kernel.h"
#include "paddle/phi/kernels/bmm_kernel.h"
#include "paddle/phi/kernels/cast_kernel.h"
#include "paddle/phi/kernels/clip_kernel.h"
#include "paddle/phi/kernels/compare_kernel.h"
#include "paddle/phi/kernels/concat_kernel.h"
#include "paddle/phi/kernels/contiguous_kernel.h"
#include "paddle/phi/kernels/cum_kernel.h"
#include "paddle/phi/kernels/elementwise_add_kernel.h"
#include "paddle/phi/kernels/elementwise_divide_kernel.h"
#include "paddle/phi/kernels/elementwise_kernel.h"
#include "paddle/phi/kernels/elementwise_multiply_kernel.h"
#include "paddle/phi/kernels/elementwise_subtract_kernel.h"
#include "paddle/phi/kernels/embedding_kernel.h"
#include "paddle/phi/kernels/expand_kernel.h"
#include "paddle/phi/kernels/fill_kernel.h"
#include "paddle/phi/kernels/full_kernel.h"
#include "paddle/phi/kernels/gather_kernel.h"
#include "paddle/phi/kernels/index_add_kernel.h"
#include "paddle/phi/kernels/index_elementwise_get_kernel.h"
#include "paddle/phi/kernels/index_select_kernel.h"
#include "paddle/phi/kernels/isfinite_kernel.h"
#include "paddle/phi/kernels/logical_kernel.h"
#include "paddle/phi/kernels/masked_fill_kernel.h"
#include "paddle/phi/kernels/matmul_kernel.h"
#include "paddle/phi/kernels/put_along_axis_kernel.h"
#include "paddle/phi/kernels/reduce_all_kernel.h"
#include "paddle/phi/kernels/reduce_any_kernel.h"
#include "paddle/phi/kernels/reduce_max_kernel.h"
#include "paddle/phi/kernels/reduce_mean_kernel.h"
#include "paddle/phi/kernels/reduce_min_kernel.h"
#include "paddle/phi/kernels/reduce_sum_kernel.h"
#include "paddle/phi/kernels/repeat_interleave_kernel.h"
#include "paddle/phi/kernels/scale_kernel.h"
#include "paddle/phi/kernels/scatter_kernel.h"
#include "paddle/phi/kernels/set_value_kernel.h"
#include "paddle/phi/kernels/softmax_kernel.h"
#include "paddle/phi/kernels/stack_kernel.h"
#include "paddle/phi/kernels/strided_copy_kernel.h"
#include "paddle/phi/kernels/swiglu_kernel.h"
#include "paddle/phi/kernels/take_along_axis_kernel.h"
#include "paddle/phi/kernels/top_k_kernel.h"
#include "paddle/phi/kernels/tril_triu_kernel.h"
#include "paddle/phi/kernels/where_kernel.h"

namespace sim {
namespace {

double scalar_at(const DenseTensor& x) {
  const void* data = host(x.data());
  return x.dtype() == DataType::INT64 ? *(const int64_t*)data : x.dtype() == DataType::INT32 ? *(const int32_t*)data
       : x.dtype() == DataType::FLOAT64 ? *(const double*)data : *(const float*)data;
}

// Its result's size depends on values, so no CPU kernel can be queued for it. Bounds are on the host.
template <typename T>
void arange_tensor(const phi::CustomContext& ctx, const DenseTensor& start, const DenseTensor& end,
                   const DenseTensor& step, DenseTensor* out) {
  if (start.place().GetType() != phi::AllocationType::CPU) drain_device(ctx.GetPlace().GetDeviceId());
  double first = scalar_at(start), by = scalar_at(step);
  int64_t count = std::max<int64_t>(0, std::ceil((scalar_at(end) - first) / by));
  out->Resize(phi::make_ddim({count}));
  note_program("arange_tensor," + std::to_string(count));
  T* target = (T*)host(ctx.Alloc<T>(out));
  launch_kernel(ctx, "arange_tensor", [=] {
    for (int64_t i = 0; i < count; ++i) target[i] = T(first + by * i);
  });
}

template <typename T>
void register_arange(DataType type) {
  phi::KernelRegistrar(
      phi::RegType::OUTER, "arange_tensor", device_type().c_str(), phi::DataLayout::ALL_LAYOUT, type,
      phi::KernelArgsParseFunctor<decltype(&arange_tensor<T>)>::Parse,
      [](const phi::KernelKey&, phi::Kernel* kernel) {
        for (int i = 0; i < 3; ++i) kernel->InputAt(i).SetBackend(phi::Backend::ALL_BACKEND);
      },
      [](phi::KernelContext*) { PADDLE_THROW(common::errors::Unimplemented("static graphs")); },
      (void*)&arange_tensor<T>);
}

const bool arange_is_registered = [] {
  register_arange<int32_t>(DataType::INT32);
  register_arange<int64_t>(DataType::INT64);
  register_arange<float>(DataType::FLOAT32);
  return true;
}();

}  // namespace

// Moving data
SIM_KERNEL(contiguous, ContiguousKernel, kFirst)
SIM_KERNEL(strided_copy, StridedCopyKernel, kFirst)
SIM_KERNEL_AS(assign, kFirst, phi::AssignKernel<phi::CustomContext>)
SIM_KERNEL(cast, CastKernel, kFirst)
SIM_KERNEL(concat, ConcatKernel, kFirst)
SIM_KERNEL(stack, StackKernel, kFirst)
SIM_KERNEL(expand, ExpandKernel, kFirst)
SIM_KERNEL(repeat_interleave, RepeatInterleaveKernel, kFirst)
SIM_KERNEL(gather, GatherKernel, kFirst)
SIM_KERNEL(index_select, IndexSelectKernel, kFirst)
SIM_KERNEL(index_elementwise_get, IndexElementwiseGetKernel, kFirst)
SIM_KERNEL(take_along_axis, TakeAlongAxisKernel, kFirst)
SIM_KERNEL(embedding, EmbeddingKernel, kSecond)
SIM_KERNEL(scatter, ScatterKernel, kFirst)
SIM_KERNEL(index_add, IndexAddKernel, kFirst)
SIM_KERNEL(put_along_axis, PutAlongAxisKernel, kFirst)
SIM_KERNEL(masked_fill, MaskedFillKernel, kFirst)
SIM_KERNEL(where, WhereKernel, kSecond)
SIM_KERNEL(set_value, SetValueKernel, kFirst)
SIM_KERNEL(set_value_with_tensor, SetTensorValueKernel, kFirst)
SIM_KERNEL(tril, TrilKernel, kFirst)
SIM_KERNEL(triu, TriuKernel, kFirst)
// Making data
SIM_KERNEL(full, FullKernel, kOutput)
SIM_KERNEL(full_like, FullLikeKernel, kOutput)
SIM_KERNEL(fill, FillKernel, kFirst)
SIM_KERNEL(arange, ArangeKernel, kOutput)
// Products
SIM_KERNEL(matmul, MatmulKernel, kFirst)
SIM_KERNEL(bmm, BmmKernel, kFirst)
// Two operands
SIM_KERNEL(add, AddKernel, kFirst)
SIM_KERNEL(subtract, SubtractKernel, kFirst)
SIM_KERNEL(multiply, MultiplyKernel, kFirst)
SIM_KERNEL(divide, DivideKernel, kFirst)
SIM_KERNEL(maximum, MaximumKernel, kFirst)
SIM_KERNEL(minimum, MinimumKernel, kFirst)
SIM_KERNEL(remainder, RemainderKernel, kFirst)
SIM_KERNEL(floor_divide, FloorDivideKernel, kFirst)
SIM_KERNEL(elementwise_pow, ElementwisePowKernel, kFirst)
SIM_KERNEL(equal, EqualKernel, kFirst)
SIM_KERNEL(not_equal, NotEqualKernel, kFirst)
SIM_KERNEL(less_than, LessThanKernel, kFirst)
SIM_KERNEL(less_equal, LessEqualKernel, kFirst)
SIM_KERNEL(greater_than, GreaterThanKernel, kFirst)
SIM_KERNEL(greater_equal, GreaterEqualKernel, kFirst)
SIM_KERNEL(logical_and, LogicalAndKernel, kFirst)
SIM_KERNEL(logical_or, LogicalOrKernel, kFirst)
SIM_KERNEL(logical_not, LogicalNotKernel, kFirst)
SIM_KERNEL(bitwise_and, BitwiseAndKernel, kFirst)
SIM_KERNEL(bitwise_or, BitwiseOrKernel, kFirst)
SIM_KERNEL(bitwise_xor, BitwiseXorKernel, kFirst)
SIM_KERNEL(bitwise_not, BitwiseNotKernel, kFirst)
SIM_KERNEL(bitwise_left_shift, BitwiseLeftShiftKernel, kFirst)
SIM_KERNEL(bitwise_right_shift, BitwiseRightShiftKernel, kFirst)
// One operand
SIM_KERNEL(scale, ScaleKernel, kFirst)
SIM_KERNEL(clip, ClipKernel, kFirst)
SIM_KERNEL(exp, ExpKernel, kFirst)
SIM_KERNEL(log, LogKernel, kFirst)
SIM_KERNEL(log1p, Log1pKernel, kFirst)
SIM_KERNEL(sqrt, SqrtKernel, kFirst)
SIM_KERNEL(rsqrt, RsqrtKernel, kFirst)
SIM_KERNEL(sin, SinKernel, kFirst)
SIM_KERNEL(cos, CosKernel, kFirst)
SIM_KERNEL(sigmoid, SigmoidKernel, kFirst)
SIM_KERNEL(silu, SiluKernel, kFirst)
SIM_KERNEL(swiglu, SwiGLUKernel, kFirst)
SIM_KERNEL(isnan, IsnanKernel, kFirst)
SIM_KERNEL(isfinite, IsfiniteKernel, kFirst)
// Along dimensions
SIM_KERNEL(softmax, SoftmaxKernel, kFirst)
SIM_KERNEL(mean, MeanKernel, kFirst)
SIM_KERNEL(sum, SumKernel, kFirst)
SIM_KERNEL(max, MaxKernel, kFirst)
SIM_KERNEL(min, MinKernel, kFirst)
SIM_KERNEL(any, AnyKernel, kFirst)
SIM_KERNEL(all, AllKernel, kFirst)
SIM_KERNEL(argmax, ArgMaxKernel, kFirst)
SIM_KERNEL(argsort, ArgsortKernel, kFirst)
SIM_KERNEL(topk, TopkKernel, kFirst)
SIM_KERNEL(cumsum, CumsumKernel, kFirst)

}  // namespace sim
