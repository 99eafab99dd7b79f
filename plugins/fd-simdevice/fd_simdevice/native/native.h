// A native kernel of the simulated device for any Paddle operator that has a CPU kernel.
//
// Its signature comes from Paddle's own header. When it is called it allocates the results on the device
// and queues the work; when the work's turn comes on the stream, Paddle's CPU kernel computes on the
// hidden alias of device memory. float16 and bfloat16 are computed in float32 and rounded where the CPU
// has no kernel of their own.
#pragma once

#include <deque>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "paddle/phi/api/all.h"
#include "paddle/phi/backends/context_pool.h"
#include "paddle/phi/backends/custom/custom_context.h"
#include "paddle/phi/core/kernel_registry.h"
#include "sim.h"

namespace sim {

using phi::DataType;
using phi::DenseTensor;

// Which argument's data type chooses the kernel.
enum class Key { kFirst, kSecond, kOutput };

// Tensors of one run of a kernel, in host memory; the widened copies among them.
struct Run {
  DataType narrow = DataType::UNDEFINED;  // what is computed in float32
  std::deque<DenseTensor> tensors;
  std::vector<std::pair<DenseTensor*, DenseTensor*>> to_narrow;  // (wide result, its place)
};

// A device tensor, remembered by address: whoever frees it waits for the stream first.
struct Operand {
  void* base = nullptr;
  size_t bytes = 0;
  phi::DenseTensorMeta meta;
  bool exists = false;

  Operand() = default;
  explicit Operand(const DenseTensor& tensor) : meta(tensor.meta()), exists(true) {
    if (tensor.Holder()) {
      base = host(tensor.Holder()->ptr());
      bytes = tensor.Holder()->size();
    }
  }
  DenseTensor* open(Run& run) const {
    auto holder = std::make_shared<phi::Allocation>(base, bytes, phi::CPUPlace());
    run.tensors.emplace_back(holder, meta);
    return &run.tensors.back();
  }
};

DenseTensor* open_input(const Operand& operand, Run& run);
DenseTensor* open_output(const Operand& operand, Run& run);
void round_results(Run& run);
// Memory on the device for a result, if it has none yet; the operand to reach it later.
Operand allocate(const phi::CustomContext& ctx, DenseTensor* out, DataType key);
const phi::Kernel& cpu_kernel(const char* name, DataType key, DataType* narrow);
std::vector<DataType> possible_types(const char* name);
void launch_kernel(const phi::CustomContext& ctx, const char* name, std::function<void()> work);

// ---- arguments: remembered at the call, opened when the work runs -----------------------------------
template <class Arg>
struct Bind {  // numbers, lists, scalars: by value
  using Stored = std::decay_t<Arg>;
  static Stored store(const phi::CustomContext&, Arg arg, DataType) { return arg; }
  static Stored& open(Stored& stored, Run&) { return stored; }
};
template <>
struct Bind<const DenseTensor&> {
  using Stored = Operand;
  static Stored store(const phi::CustomContext&, const DenseTensor& x, DataType) { return Operand(x); }
  static const DenseTensor& open(Stored& stored, Run& run) { return *open_input(stored, run); }
};
template <>
struct Bind<const paddle::optional<DenseTensor>&> {
  using Stored = Operand;
  static Stored store(const phi::CustomContext&, const paddle::optional<DenseTensor>& x, DataType) {
    return x ? Operand(*x) : Operand();
  }
  static paddle::optional<DenseTensor> open(Stored& stored, Run& run) {
    if (!stored.exists) return paddle::none;
    return paddle::optional<DenseTensor>(*open_input(stored, run));
  }
};
template <>
struct Bind<const std::vector<const DenseTensor*>&> {
  using Stored = std::vector<Operand>;
  static Stored store(const phi::CustomContext&, const std::vector<const DenseTensor*>& all, DataType) {
    Stored stored;
    for (auto* x : all) stored.emplace_back(*x);
    return stored;
  }
  static std::vector<const DenseTensor*> open(Stored& stored, Run& run) {
    std::vector<const DenseTensor*> all;
    for (auto& operand : stored) all.push_back(open_input(operand, run));
    return all;
  }
};
template <>
struct Bind<DenseTensor*> {
  using Stored = Operand;
  static Stored store(const phi::CustomContext& ctx, DenseTensor* out, DataType key) {
    return out ? allocate(ctx, out, key) : Operand();
  }
  static DenseTensor* open(Stored& stored, Run& run) {
    return stored.exists ? open_output(stored, run) : nullptr;
  }
};

// ---- which data type the kernel is chosen by --------------------------------------------------------
inline void collect(const DenseTensor& x, std::vector<DataType>* in, std::vector<DataType>*) {
  in->push_back(x.dtype());
}
inline void collect(const std::vector<const DenseTensor*>& all, std::vector<DataType>* in, std::vector<DataType>*) {
  if (!all.empty()) in->push_back(all[0]->dtype());
}
inline void collect(DenseTensor* x, std::vector<DataType>*, std::vector<DataType>* out) {
  if (x) out->push_back(x->dtype());
}
template <class Other>
void collect(const Other&, std::vector<DataType>*, std::vector<DataType>*) {}

// ---- what a device that compiles for every shape would compile for ----------------------------------
inline void describe(const DenseTensor& x, std::string* key) {
  *key += '|' + std::to_string((int)x.dtype());
  for (int i = 0; i < x.dims().size(); ++i) *key += ',' + std::to_string(x.dims()[i]);
}
inline void describe(const paddle::optional<DenseTensor>& x, std::string* key) {
  if (x) describe(*x, key);
}
inline void describe(const std::vector<const DenseTensor*>& all, std::string* key) {
  for (auto* x : all) describe(*x, key);
}
inline void describe(DenseTensor* x, std::string* key) {
  if (x) describe(*x, key);
}
template <class Other>
void describe(const Other&, std::string*) {}
// Counts it in panel().programs when it was not seen before.
void note_program(const std::string& key);

template <class Signature, class Op>
struct Native;

template <class... Args, class Op>
struct Native<void (*)(const phi::CustomContext&, Args...), Op> {
  static void run(const phi::CustomContext& ctx, Args... args) {
    std::vector<DataType> in, out;
    (collect(args, &in, &out), ...);
    DataType key = Op::kKey == Key::kOutput ? out[0] : in[Op::kKey == Key::kSecond ? 1 : 0];
    std::string program = Op::kName;
    (describe(args, &program), ...);
    note_program(program);
    DataType narrow = DataType::UNDEFINED;
    const phi::Kernel& kernel = cpu_kernel(Op::kName, key, &narrow);
    auto call = kernel.GetVariadicKernelFn<void (*)(const phi::DeviceContext&, Args...)>();
    auto stored = std::make_shared<std::tuple<typename Bind<Args>::Stored...>>(
        Bind<Args>::store(ctx, std::forward<Args>(args), key)...);
    launch_kernel(ctx, Op::kName, [=] {
      Run run;
      run.narrow = narrow;
      auto* cpu = phi::DeviceContextPool::Instance().Get(phi::CPUPlace());
      std::apply([&](auto&... s) { call(*cpu, Bind<Args>::open(s, run)...); }, *stored);
      round_results(run);
    });
  }

  Native() {
    for (DataType type : possible_types(Op::kName))
      phi::KernelRegistrar(
          phi::RegType::OUTER, Op::kName, device_type().c_str(), phi::DataLayout::ALL_LAYOUT, type,
          phi::KernelArgsParseFunctor<decltype(&run)>::Parse, [](const phi::KernelKey&, phi::Kernel*) {},
          [](phi::KernelContext*) { PADDLE_THROW(common::errors::Unimplemented("static graphs")); },
          (void*)&run);
  }
};

// One line per operator: its name, the function template that Paddle's header declares, the Key.
#define SIM_KERNEL(op, function, key) SIM_KERNEL_AS(op, key, phi::function<float, phi::CustomContext>)
#define SIM_KERNEL_AS(op, key, ...)                                 \
  struct Op_##op {                                                  \
    static constexpr const char* kName = #op;                       \
    static constexpr Key kKey = Key::key;                           \
  };                                                                \
  static Native<decltype(&__VA_ARGS__), Op_##op> native_##op;

}  // namespace sim
