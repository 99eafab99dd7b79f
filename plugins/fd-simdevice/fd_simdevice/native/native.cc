// What every native kernel shares: opening tensors on the host side, widening, launching.
#include "native.h"

#include <stdio.h>

#include <mutex>
#include <set>

namespace sim {
namespace {

using Half = phi::dtype::float16;
using Bfloat16 = phi::dtype::bfloat16;

bool is_narrow(DataType type) { return type == DataType::FLOAT16 || type == DataType::BFLOAT16; }

template <class From, class To>
void convert(const DenseTensor& from, DenseTensor* to) {
  const From* source = from.data<From>();
  To* target = to->data<To>();
  for (int64_t i = 0; i < from.numel(); ++i) target[i] = static_cast<To>(static_cast<float>(source[i]));
}

DenseTensor* make_wide(const DenseTensor& like, Run& run) {
  auto* pool = phi::DeviceContextPool::Instance().Get(phi::CPUPlace());
  run.tensors.emplace_back();
  DenseTensor* wide = &run.tensors.back();
  wide->Resize(like.dims());
  pool->Alloc(wide, DataType::FLOAT32);
  return wide;
}

}  // namespace

DenseTensor* open_input(const Operand& operand, Run& run) {
  DenseTensor* x = operand.open(run);
  if (run.narrow == DataType::UNDEFINED || x->dtype() != run.narrow) return x;
  DenseTensor* wide = make_wide(*x, run);
  if (run.narrow == DataType::FLOAT16) convert<Half, float>(*x, wide);
  else convert<Bfloat16, float>(*x, wide);
  return wide;
}

DenseTensor* open_output(const Operand& operand, Run& run) {
  DenseTensor* out = operand.open(run);
  if (run.narrow == DataType::UNDEFINED || out->dtype() != run.narrow) return out;
  DenseTensor* wide = make_wide(*out, run);
  run.to_narrow.emplace_back(wide, out);
  return wide;
}

void round_results(Run& run) {
  for (auto& [wide, out] : run.to_narrow) {
    if (run.narrow == DataType::FLOAT16) convert<float, Half>(*wide, out);
    else convert<float, Bfloat16>(*wide, out);
  }
}

Operand allocate(const phi::CustomContext& ctx, DenseTensor* out, DataType key) {
  ctx.Alloc(out, out->dtype() == DataType::UNDEFINED ? key : out->dtype());
  return Operand(*out);
}

const phi::Kernel& cpu_kernel(const char* name, DataType key, DataType* narrow) {
  auto& factory = phi::KernelFactory::Instance();
  phi::KernelKey own(phi::Backend::CPU, phi::DataLayout::ALL_LAYOUT, key);
  if (is_narrow(key) && !factory.HasKernel(name, own)) {
    *narrow = key;
    own = phi::KernelKey(phi::Backend::CPU, phi::DataLayout::ALL_LAYOUT, DataType::FLOAT32);
  }
  return factory.SelectKernelOrThrowError(name, own).kernel;
}

std::vector<DataType> possible_types(const char* name) {
  std::vector<DataType> found;
  auto has = [&](DataType type) {
    return phi::KernelFactory::Instance().HasKernel(
        name, phi::KernelKey(phi::Backend::CPU, phi::DataLayout::ALL_LAYOUT, type));
  };
  for (DataType type : {DataType::BOOL, DataType::UINT8, DataType::INT8, DataType::INT16, DataType::INT32,
                        DataType::INT64, DataType::FLOAT32, DataType::FLOAT64, DataType::FLOAT16,
                        DataType::BFLOAT16, DataType::FLOAT8_E4M3FN, DataType::FLOAT8_E5M2})
    if (has(type) || (is_narrow(type) && has(DataType::FLOAT32))) found.push_back(type);
  if (found.empty()) fprintf(stderr, "[sim] Paddle has no CPU kernel %s\n", name);
  return found;
}

void note_program(const std::string& key) {
  static std::mutex lock;
  static auto* seen = new std::set<std::string>;
  std::lock_guard<std::mutex> guard(lock);
  if (!seen->insert(key).second) return;
  ++panel().programs;
  if (setting("LOG_PROGRAMS", 0)) fprintf(stderr, "[sim] program %s\n", key.c_str());
}

void launch_kernel(const phi::CustomContext& ctx, const char* name, std::function<void()> work) {
  void* stream = ctx.stream();
  bool launched = launch(stream, name, [=] {
    try {
      work();
    } catch (const std::exception& error) {
      ++panel().kernel_errors;
      fprintf(stderr, "[sim] kernel %s failed: %s\n", name, error.what());
      break_stream(stream);
    }
  });
  if (!launched) PADDLE_THROW(common::errors::External("simulated device: launch of %s failed", name));
}

}  // namespace sim
