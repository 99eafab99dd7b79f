// A device behind torch's PrivateUse1: memory that the host cannot read, a limit, honest out-of-memory,
// copies to the host that arrive late, events, a lost device. Operations run at once, on the processor.
#include <ATen/ATen.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
// No address of a process has this bit: touching device memory on the host ends the process.
constexpr uintptr_t kDeviceBit = uintptr_t{1} << 62;
constexpr size_t kAlignment = 64;
constexpr int kPollsUntilDone = 2;  // an event is never done when first asked
constexpr int kMostDevices = 8;

int64_t setting(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? std::atoll(text) : otherwise;
}

struct LateCopy {  // a snapshot of device memory on its way to the host
  at::Tensor target, values;
};

struct State {
  std::recursive_mutex lock;
  int64_t count = setting("SIM_DEVICES", 2), limit = setting("SIM_MEM_MB", 1024) << 20;
  int64_t used[kMostDevices] = {};
  int64_t late_copies = 0;
  bool is_lost = false;
  std::map<std::string, int64_t> operations;
  std::vector<LateCopy> late;
};

State& state() {  // never destroyed: tensors may outlive everything else
  static auto* it = new State;
  return *it;
}

thread_local c10::DeviceIndex current = 0;

void check_alive() {
  TORCH_CHECK(!state().is_lost, "simulated device: the device is lost");
}

void deliver() {
  std::vector<LateCopy> arrived;
  {
    std::lock_guard guard(state().lock);
    arrived.swap(state().late);
  }
  const c10::InferenceMode anything_may_be_written;
  for (auto& copy : arrived) copy.target.copy_(copy.values);
}

// -- memory --------------------------------------------------------------------------------------

void* on_host(const void* pointer) {
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(pointer) & ~kDeviceBit);
}

struct Block {
  void* memory;
  size_t size;
  int device;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  {
    std::lock_guard guard(state().lock);
    state().used[block->device] -= block->size;
  }
  std::free(block->memory);
  delete block;
}

struct SimAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    check_alive();
    const c10::Device device(kType, current);
    if (!size) return {nullptr, device};
    {
      std::lock_guard guard(state().lock);
      auto& used = state().used[current];
      TORCH_CHECK_WITH(OutOfMemoryError, size <= size_t(state().limit - used),
                       "simulated device ", int(current), ": out of memory: ", size, " bytes wanted, ",
                       state().limit - used, " of ", state().limit, " free");
      used += size;
    }
    void* memory = std::aligned_alloc(kAlignment, (size + kAlignment - 1) / kAlignment * kAlignment);
    TORCH_CHECK_WITH(OutOfMemoryError, memory, "out of memory");
    auto* shown = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(memory) | kDeviceBit);
    return {shown, new Block{memory, size, current}, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, size_t size) const override {
    std::memcpy(on_host(target), on_host(source), size);
  }
};

SimAllocator allocator;
REGISTER_ALLOCATOR(kType, &allocator);

// -- devices, streams, events -----------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device getDevice() const override { return {kType, current}; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < deviceCount(), "simulated device: no device ", device.index());
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return state().count; }
  c10::Stream getStream(c10::Device device) const override {
    const auto index = device.index() < 0 ? current : device.index();
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kType, index));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  bool queryStream(const c10::Stream&) const override { return state().late.empty(); }
  void synchronizeStream(const c10::Stream&) const override { synchronizeDevice(current); }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    check_alive();
    deliver();
  }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    check_alive();
    if (!*event) *event = new int;
    *static_cast<int*>(*event) = kPollsUntilDone;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void* event) const override {
    check_alive();
    if (!event) return true;
    auto& polls = *static_cast<int*>(event);
    if (polls > 0 && --polls > 0) return false;
    deliver();
    return true;
  }
  void synchronizeEvent(void*) const override { synchronizeDevice(current); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<int*>(event);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return state().count > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return state().count; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    Guard().setDevice({kType, device});
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto fresh = allocator.allocate(size);
    std::memcpy(on_host(fresh.get()), on_host(storage.data()), std::min(size, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

// -- tensors -------------------------------------------------------------------------------------

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device.value_or(c10::Device(kType)));
  return at::detail::empty_strided_generic(size, stride, &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(c10::Device(kType)));
  return at::detail::empty_generic(size, &allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

bool is_ours(const at::Tensor& x) { return x.defined() && x.device().type() == kType; }

// The same memory as a tensor of the processor's.
at::Tensor beside(const at::Tensor& x) {
  if (!is_ours(x)) return x;
  auto options = x.options().device(at::kCPU);
  if (!x.storage().data()) return at::empty_strided(x.sizes(), x.strides(), options);
  return at::from_blob(on_host(x.data_ptr()), x.sizes(), x.strides(), options);
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  check_alive();
  if (non_blocking && is_ours(source) && !is_ours(target) && source.numel()) {
    std::lock_guard guard(state().lock);
    state().late.push_back({target, beside(source).clone()});
    ++state().late_copies;
    return target;
  }
  deliver();
  beside(target).copy_(beside(source));
  return target;
}

// Of the memory of `ours` what `x`, a view made on the processor, sees of it.
at::Tensor view_like(const at::Tensor& ours, const at::Tensor& x) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(ours.storage()), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), x.dtype());
  const auto* start = static_cast<const char*>(on_host(ours.storage().data()));
  const auto bytes = static_cast<const char*>(x.data_ptr()) - start;
  view.unsafeGetTensorImpl()->set_sizes_and_strides(x.sizes(), x.strides(), bytes / x.itemsize());
  return view;
}

// Any operation: on the processor, over the same memory. What it makes is moved to the device.
void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  check_alive();
  const auto& schema = op.schema();
  const auto first = stack->size() - schema.arguments().size();
  std::vector<at::IValue> given(stack->begin() + first, stack->end());
  c10::Device device(kType, current);
  auto moved = [&](const at::Tensor& x) {
    if (is_ours(x)) device = x.device();
    return beside(x);
  };
  for (size_t i = 0; i < given.size(); ++i) {
    auto& value = (*stack)[first + i];
    if (value.isTensor()) {
      value = moved(value.toTensor());
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (auto& x : list) x = moved(x);
      value = c10::List<at::Tensor>(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (std::optional<at::Tensor> x : value.toOptionalTensorList())
        list.push_back(x ? std::optional<at::Tensor>(moved(*x)) : std::nullopt);
      value = list;
    } else if (value.isDevice() && value.toDevice().type() == kType) {
      device = value.toDevice();
      value = c10::Device(at::kCPU);
    }
  }
  std::vector<at::IValue> lent(stack->begin() + first, stack->end());
  {
    std::lock_guard guard(state().lock);
    ++state().operations[schema.name()];
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  auto returned = [&](const at::Tensor& x) {
    if (!x.defined() || is_ours(x)) return x;
    for (size_t i = 0; i < given.size(); ++i) {
      if (!lent[i].isTensor() || !given[i].isTensor() || !is_ours(given[i].toTensor())) continue;
      auto ours = given[i].toTensor();
      if (lent[i].toTensor().is_same(x)) {  // an argument that it wrote to
        if (ours.sizes() == x.sizes()) return ours;
        ours.resize_(x.sizes());
        beside(ours).copy_(x);
        return ours;
      }
      if (x.numel() && x.is_alias_of(lent[i].toTensor())) return view_like(ours, x);
    }
    auto ours = at::empty_strided(x.sizes(), x.strides(), x.options().device(device));
    if (x.numel()) beside(ours).copy_(x);
    return ours;
  };
  for (auto at = stack->size() - schema.returns().size(); at < stack->size(); ++at) {
    auto& value = (*stack)[at];
    if (value.isTensor()) {
      value = returned(value.toTensor());
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (auto& x : list) x = returned(x);
      value = c10::List<at::Tensor>(list);
    }
  }
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", &at::native::resize_);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
}

// What the device's Python module asks for.
TORCH_LIBRARY(fd_simdevice, m) {
  m.def("count() -> int", [] { return state().count; });
  m.def("free(int device) -> int", [](int64_t device) { return state().limit - state().used[device]; });
  m.def("total() -> int", [] { return state().limit; });
  m.def("current() -> int", [] { return int64_t(current); });
  m.def("use(int device) -> ()", [](int64_t device) { Guard().setDevice(c10::Device(kType, device)); });
  m.def("late_copies() -> int", [] { return state().late_copies; });
  m.def("lose(bool lost) -> ()", [](bool lost) { state().is_lost = lost; });
  m.def("operations() -> Dict(str, int)", [] {
    c10::Dict<std::string, int64_t> counts;
    for (const auto& [name, count] : state().operations) counts.insert(name, count);
    return counts;
  });
}

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace
