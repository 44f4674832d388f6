// A device for tests on a machine that has none: its memory is the host's, its kernels are torch's CPU kernels.
//
// Built with -DFAKE_CUDA it is torch's "cuda", else a device "fake" of the kind that torch keeps for others' (PrivateUse1).
// It is as late as it may be, in the same way each time, with no thread and no clock:
//
// - Order. Streams, events and the host each have a vector clock. An operation that reads or writes memory which another
//   stream uses, without having waited for it, raises "race". Memory that is freed while another stream uses it, and is
//   then given out again, is such a case unless record_stream was called.
// - Host. What a non-blocking copy brings to the host is NaN (0xFF) there until the host waits for it; what such a copy
//   takes from the host is read only when a kernel needs it or the host waits. Freed memory is NaN.
// - Counts. Each thing that makes the host wait is counted, and can be forbidden.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <vector>

#ifdef FAKE_CUDA
#include <ATen/detail/CUDAHooksInterface.h>
#define KEY CUDA
using HooksInterface = at::CUDAHooksInterface;
#else
#include <ATen/detail/PrivateUse1HooksInterface.h>
#define KEY PrivateUse1
using HooksInterface = at::PrivateUse1HooksInterface;
#endif

namespace {
constexpr auto kType = c10::DeviceType::KEY;
constexpr auto kKeys = c10::DispatchKeySet(c10::DispatchKey::KEY);
constexpr int kDevices = 2;

std::recursive_mutex g_mutex;
#define LOCKED std::lock_guard<std::recursive_mutex> locked(g_mutex)

enum Count { ITEM, TO_HOST, TO_HOST_LATER, TO_DEVICE, TO_DEVICE_LATER, WAIT_STREAM, WAIT_EVENT, WAIT_DEVICE, KERNELS, RACES, COUNTS };
int64_t g_counts[COUNTS] = {};
int64_t g_no_waits = 0;  // the host may not wait

thread_local int t_device = 0;
thread_local int64_t t_stream[kDevices] = {};
thread_local bool t_in_kernel = false;

void count(Count what, bool waits = false) {
  LOCKED;
  if (t_in_kernel) return;
  ++g_counts[what];
  TORCH_CHECK(!(waits && g_no_waits), "fake device: the host waits for the device, which is forbidden here");
}
int index_of(c10::Device device) { return device.index() < 0 ? t_device : device.index(); }

struct OnDevice {  // allocations within are of this device
  int before = t_device;
  explicit OnDevice(int device) { t_device = device; }
  ~OnDevice() { t_device = before; }
};

// ---- order
using StreamKey = std::pair<int, int64_t>;
using Clock = std::map<StreamKey, uint64_t>;
struct Late { uint64_t position; void* block; std::function<void()> copy; };  // block: what a copy to the device fills
struct Queue { Clock clock; std::list<Late> late; };
std::map<StreamKey, Queue>& queues() { static auto* all = new std::map<StreamKey, Queue>(); return *all; }
thread_local Clock t_host;  // what this thread of the host has waited for

void join(Clock& clock, const Clock& other) { for (auto& [stream, position] : other) clock[stream] = std::max(clock[stream], position); }
StreamKey current(int device) { return {device, t_stream[device]}; }
uint64_t next(StreamKey stream) {  // the position of a new operation
  auto& queue = queues()[stream];
  join(queue.clock, t_host);
  return ++queue.clock[stream];
}
void host_waits(const Clock& clock) {
  for (auto& [stream, position] : clock) {
    auto& late = queues()[stream].late;
    while (!late.empty() && late.front().position <= position) { late.front().copy(); late.pop_front(); }
  }
  join(t_host, clock);
}
bool has_arrived(const Clock& clock) {
  for (auto& [stream, position] : clock) {
    auto& late = queues()[stream].late;
    if (!late.empty() && late.front().position <= position) return false;
  }
  return true;
}
void fill(void* block, bool drop = false) {  // do the late copies to it, or forget them
  for (auto& [_, queue] : queues())
    for (auto late = queue.late.begin(); late != queue.late.end();)
      if (late->block == block) { if (!drop) late->copy(); late = queue.late.erase(late); } else ++late;
}

// ---- memory
struct Block { size_t size; int device; int64_t stream; Clock written, read, recorded; };
std::map<void*, Block>& blocks() { static auto* all = new std::map<void*, Block>(); return *all; }
std::vector<std::pair<void*, Block>>& spare() { static auto* all = new std::vector<std::pair<void*, Block>>(); return *all; }
c10::CachingDeviceAllocator::DeviceStats g_stats[kDevices];

void check_order(const Clock& uses, StreamKey stream, const char* what) {
  auto& known = queues()[stream].clock;
  for (auto& [other, position] : uses) {
    if (other == stream || known[other] >= position) continue;
    ++g_counts[RACES];
    TORCH_CHECK(false, "fake device: race: stream ", stream.second, " of device ", stream.first, " uses memory that stream ",
                other.second, " of device ", other.first, " still ", what, ", and has not waited for it");
  }
}
void use(void* data, StreamKey stream, bool writes) {
  auto found = blocks().find(data);
  if (found == blocks().end()) return;
  auto& block = found->second;
  check_order(block.written, stream, "writes");
  if (writes) check_order(block.read, stream, "reads");
  fill(data);
  const auto position = queues()[stream].clock[stream];
  if (writes) { block.written = {{stream, position}}; block.read.clear(); } else block.read[stream] = position;
}

void release(void* data) {
  LOCKED;
  auto found = blocks().find(data);
  if (found == blocks().end()) return;
  auto block = std::move(found->second);
  blocks().erase(found);
  fill(data, /*drop=*/true);
  std::memset(data, 0xFF, block.size);
  for (auto& [stream, _] : block.recorded) { block.written.erase(stream); block.read.erase(stream); }  // the allocator waits
  block.recorded.clear();
  g_stats[block.device].allocated_bytes[0].decrease(block.size);
  g_stats[block.device].active_bytes[0].decrease(block.size);
  spare().emplace_back(data, std::move(block));
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    LOCKED;
    void* data = nullptr;
    const int device = t_device;
    if (bytes) {
      const size_t size = (bytes + 511) / 512 * 512;
      auto& stats = g_stats[device];
      const bool fits = size < (size_t(1) << 40);
      if (!fits) ++stats.num_ooms;
      TORCH_CHECK_WITH(OutOfMemoryError, fits, "fake device: out of memory. Tried to allocate ", size, " bytes");
      const auto stream = t_stream[device];
      auto again = std::find_if(spare().begin(), spare().end(), [&](auto& each) {
        return each.second.size == size && each.second.device == device && each.second.stream == stream;
      });
      if (again != spare().end()) {
        data = again->first;
        blocks()[data] = std::move(again->second);  // with its uses by other streams
        spare().erase(again);
      } else {
        data = std::aligned_alloc(512, size);
        std::memset(data, 0xFF, size);
        blocks()[data] = {size, device, stream, {}, {}, {}};
        stats.reserved_bytes[0].increase(size);
      }
      stats.allocated_bytes[0].increase(size);
      stats.active_bytes[0].increase(size);
    }
    return {data, data, &release, c10::Device(kType, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    LOCKED;
    for (auto& [data, block] : spare()) { g_stats[block.device].reserved_bytes[0].decrease(block.size); std::free(data); }
    spare().clear();
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    LOCKED;
    auto found = blocks().find(data.get());
    if (found != blocks().end()) found->second.recorded[{stream.device_index(), stream.id()}] = 0;
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override { return g_stats[device]; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    g_stats[device].allocated_bytes[0].reset_peak();
    g_stats[device].reserved_bytes[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override { return {size_t(1) << 30, size_t(2) << 30}; }
};
Allocator g_allocator;

std::map<char*, size_t>& pinned() { static auto* all = new std::map<char*, size_t>(); return *all; }
void unpin(void* data) { LOCKED; pinned().erase((char*)data); std::free(data); }
bool is_pinned(const void* data) {
  LOCKED;
  auto after = pinned().upper_bound((char*)data);
  if (after == pinned().begin()) return false;
  --after;
  return (const char*)data < after->first + after->second;
}
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = std::aligned_alloc(512, bytes / 512 * 512 + 512);
    LOCKED;
    pinned()[(char*)data] = std::max<size_t>(bytes, 1);
    return {data, data, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
PinnedAllocator g_pinned;

// ---- random numbers
struct Generator final : c10::GeneratorImpl {
  at::Generator inner = at::detail::createCPUGenerator(67280421310721ULL);
  explicit Generator(int device) : GeneratorImpl(c10::Device(kType, device), kKeys) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  GeneratorImpl* clone_impl() const override { auto* copy = new Generator(device_.index()); copy->inner = inner.clone(); return copy; }
};
at::Generator& default_generator(int device) {
  static auto* all = new std::vector<at::Generator>{at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return (*all)[device < 0 ? t_device : device];
}

// ---- what torch asks of a device
void resize_bytes(const c10::Storage& storage, size_t bytes) {
  auto fresh = g_allocator.allocate(bytes);
  if (storage.data() && bytes) std::memcpy(fresh.get(), storage.data(), std::min(bytes, storage.nbytes()));
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}
struct Hooks final : HooksInterface {
#ifdef FAKE_CUDA
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
#else
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override { resize_bytes(storage, bytes); }
#endif
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return at::make_generator<Generator>(device < 0 ? t_device : device); }
  at::Device getDeviceFromPtr(void*) const override { return {kType, 0}; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &g_pinned; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return t_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { t_device = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return std::exchange(t_device, device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return std::exchange(t_device, device < 0 ? t_device : device); }
};

struct Event { Clock clock; std::chrono::steady_clock::time_point at; int asked = 0; };
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static StreamKey key(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }
  static c10::Stream stream(int device, int64_t id) { return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), id); }
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override { return {kType, (c10::DeviceIndex)std::exchange(t_device, index_of(device))}; }
  c10::Device getDevice() const override { return {kType, (c10::DeviceIndex)t_device}; }
  void setDevice(c10::Device device) const override { t_device = index_of(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { t_device = index_of(device); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Stream getStream(c10::Device device) const override { return stream(index_of(device), t_stream[index_of(device)]); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(index_of(device), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    LOCKED;
    static int64_t last = 0;
    return stream(index_of(device), ++last);
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    auto before = getStream(to.device());
    t_stream[to.device_index()] = to.id();
    return before;
  }
  bool queryStream(const c10::Stream& of) const override { LOCKED; return has_arrived(queues()[key(of)].clock); }
  void synchronizeStream(const c10::Stream& of) const override { count(WAIT_STREAM, true); LOCKED; host_waits(queues()[key(of)].clock); }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    count(WAIT_DEVICE, true);
    LOCKED;
    Clock all;
    for (auto& [stream, queue] : queues()) if (stream.first == device) join(all, queue.clock);
    host_waits(all);
  }
  void record(void** event, const c10::Stream& in, c10::DeviceIndex, c10::EventFlag) const override {
    LOCKED;
    if (!*event) *event = new Event();
    next(key(in));
    *static_cast<Event*>(*event) = {queues()[key(in)].clock, std::chrono::steady_clock::now()};
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void block(void* event, const c10::Stream& on) const override {
    LOCKED;
    if (event) join(queues()[key(on)].clock, static_cast<Event*>(event)->clock);
  }
  bool queryEvent(void* given) const override {  // the device is done at the third question, at the latest
    LOCKED;
    auto* event = static_cast<Event*>(given);
    if (event && !has_arrived(event->clock) && ++event->asked < 3) return false;
    if (event) host_waits(event->clock);
    return true;
  }
  void synchronizeEvent(void* event) const override { count(WAIT_EVENT); LOCKED; if (event) host_waits(static_cast<Event*>(event)->clock); }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(static_cast<Event*>(to)->at - static_cast<Event*>(from)->at).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override { g_allocator.recordStream(data, stream); }
};

// ---- operators
bool is_here(const at::Tensor& tensor) { return tensor.device().type() == kType; }
at::Tensor as_cpu(const at::Tensor& tensor) {  // the same memory
  if (!is_here(tensor)) return tensor;
  c10::Storage storage(c10::Storage::use_byte_size_t{}, tensor.storage().nbytes(),
                       c10::DataPtr(const_cast<void*>(tensor.storage().data()), c10::Device(c10::kCPU)), nullptr, false);
  auto out = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) out._set_conj(true);
  if (tensor.is_neg()) out._set_neg(true);
  return out;
}
void use(const at::Tensor& tensor, StreamKey stream, bool writes) {
  if (tensor.defined() && is_here(tensor) && tensor.has_storage()) use(const_cast<void*>(tensor.storage().data()), stream, writes);
}

c10::ScalarType checked(std::optional<c10::ScalarType> dtype) {
  return dtype.value_or(c10::get_default_dtype_as_scalartype());
}
at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>, std::optional<c10::Device> device,
                 std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  OnDevice on(device ? index_of(*device) : t_device);
  return at::detail::empty_generic(size, &g_allocator, kKeys, checked(dtype), format);
}
at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                         std::optional<c10::Device> device, std::optional<bool>) {
  OnDevice on(device ? index_of(*device) : t_device);
  return at::detail::empty_strided_generic(size, stride, &g_allocator, kKeys, checked(dtype));
}
const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  const size_t need = (impl->storage_offset() + impl->numel()) * impl->itemsize();
  OnDevice on(index_of(self.device()));
  if (self.storage().nbytes() < need) resize_bytes(self.storage(), need);
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  if (t_in_kernel) { as_cpu(dst).copy_(as_cpu(self)); return dst; }
  const bool down = !is_here(dst), up = !is_here(self);
  const auto stream = current(index_of(up ? dst.device() : self.device()));
  const void* host = up ? self.storage().data() : dst.storage().data();
  const bool later = (up || down) && non_blocking && is_pinned(host) && self.dtype() == dst.dtype() &&
                     self.sizes() == dst.sizes() && self.is_contiguous() && dst.is_contiguous();
  // a copy from the host waits, too, unless it may go on from a buffer between
  const bool waits = !later && (down || (up && !non_blocking));
  count(down ? (later ? TO_HOST_LATER : TO_HOST) : up ? (later ? TO_DEVICE_LATER : TO_DEVICE) : KERNELS, waits);
  LOCKED;
  const auto position = next(stream);
  if (!up && !down && self.device() != dst.device()) {  // torch lets the streams of both devices wait for each other
    const auto other = current(index_of(dst.device()));
    next(other);
    join(queues()[stream].clock, queues()[other].clock);
    join(queues()[other].clock, queues()[stream].clock);
  }
  use(self, stream, false);
  use(dst, stream, true);
  if (later) {
    auto storage = up ? self.storage() : dst.storage();  // the host's side stays, as with torch's allocator of pinned memory
    void* to = dst.mutable_data_ptr();
    const char* from = (const char*)self.const_data_ptr();
    const size_t bytes = self.nbytes();
    auto& late = queues()[stream].late;
    if (up) {
      late.push_back({position, const_cast<void*>(dst.storage().data()), [storage, to, from, bytes] { std::memcpy(to, from, bytes); }});
    } else {
      std::vector<char> read(from, from + bytes);
      std::memset(to, 0xFF, bytes);
      late.push_back({position, nullptr, [storage, to, read] { std::memcpy(to, read.data(), read.size()); }});
    }
    return dst;
  }
  if (up || down) host_waits(queues()[stream].clock);
  as_cpu(dst).copy_(as_cpu(self));
  return dst;
}
at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  if (dst.sizes() != self.sizes()) { if (is_here(dst)) resize_(dst, self.sizes(), std::nullopt); else dst.resize_(self.sizes()); }
  return copy_from(self, dst, false);
}
at::Tensor& copy_(at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  copy_from(src.sizes() == self.sizes() ? src : src.expand(self.sizes()), self, non_blocking);
  return self;
}
at::Scalar item(const at::Tensor& self) {
  if (t_in_kernel) return as_cpu(self).item();
  count(ITEM, true);
  LOCKED;
  const auto stream = current(index_of(self.device()));
  next(stream);
  use(self, stream, false);
  host_waits(queues()[stream].clock);
  return as_cpu(self).item();
}
void record_stream(at::Tensor& self, c10::Stream stream) { g_allocator.recordStream(self.storage().data_ptr(), stream); }

template <typename F> void each_tensor(const c10::IValue& value, F work) {
  if (value.isTensor()) work(value.toTensor());
  else if (value.isTensorList()) for (const at::Tensor& tensor : value.toTensorVector()) work(tensor);
  else if (value.isList()) for (const c10::IValue& item : value.toListRef()) each_tensor(item, work);
}

void kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t inputs = schema.arguments().size(), first = stack->size() - inputs;
  int device = -1;
  for (size_t n = 0; n < inputs; ++n) {
    auto& value = (*stack)[first + n];
    each_tensor(value, [&](const at::Tensor& tensor) { if (device < 0 && tensor.defined() && is_here(tensor)) device = index_of(tensor.device()); });
    if (device < 0 && value.isDevice() && value.toDevice().type() == kType) device = index_of(value.toDevice());
  }
  OnDevice on(device < 0 ? t_device : device);
  const auto stream = current(t_device);
  const bool nested = t_in_kernel;
  if (!nested) {
    LOCKED;
    ++g_counts[KERNELS];
    next(stream);
    for (size_t n = 0; n < inputs; ++n) {
      auto* alias = schema.arguments()[n].alias_info();
      each_tensor((*stack)[first + n], [&](const at::Tensor& tensor) { use(tensor, stream, alias && alias->isWrite()); });
    }
  }
  struct InKernel { bool before = std::exchange(t_in_kernel, true); ~InKernel() { t_in_kernel = before; } };
  auto run = [&] { InKernel in; at::native::cpu_fallback(op, stack); };
  if (!op.hasTag(at::Tag::nondeterministic_seeded)) {
    run();
  } else {  // it draws from the CPU's generator: lend it the device's state, or that of the generator it is given
    at::Generator generator = default_generator(t_device);
    for (size_t n = 0; n < inputs; ++n) {
      auto& value = (*stack)[first + n];
      if (!value.isGenerator()) continue;
      generator = value.toGenerator();
      TORCH_CHECK(generator.device().type() == kType, "Expected a generator of the device, but found one of ", generator.device());
      value = c10::IValue();
    }
    auto host = at::detail::getDefaultCPUGenerator();
    auto kept = host.get_state();
    host.set_state(generator.get_state());
    run();
    generator.set_state(host.get_state());
    host.set_state(kept);
  }
  if (nested) return;
  LOCKED;
  for (size_t n = stack->size() - schema.returns().size(); n < stack->size(); ++n)
    each_tensor((*stack)[n], [&](const at::Tensor& tensor) { if (!schema.returns()[0].alias_info()) use(tensor, stream, true); });
}

TORCH_LIBRARY_IMPL(_, KEY, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&kernel>()); }
TORCH_LIBRARY_IMPL(aten, KEY, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize_);
  m.impl("copy_", &copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_.source_Storage", &at::native::set_);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("record_stream", &record_stream);
}

// ---- what the tests ask of it
at::Tensor counts() {
  LOCKED;
  at::Tensor out = at::detail::empty_cpu({COUNTS}, at::kLong);
  std::memcpy(out.mutable_data_ptr(), g_counts, sizeof(g_counts));
  std::memset(g_counts, 0, sizeof(g_counts));
  return out;
}
void option(c10::string_view name, int64_t value) {
  TORCH_CHECK(name == "no_waits");
  g_no_waits = value;
}
at::Tensor rng_state(int64_t device) { return default_generator(device).get_state(); }
void set_rng_state(const at::Tensor& state, int64_t device) { default_generator(device).set_state(state); }
void seed(int64_t seed, int64_t device) { default_generator(device).set_current_seed(uint64_t(seed)); }
TORCH_LIBRARY(fake_device, m) {
  m.def("counts() -> Tensor", &counts);
  m.def("option(str name, int value) -> ()", &option);
  m.def("rng_state(int device) -> Tensor", &rng_state);
  m.def("set_rng_state(Tensor state, int device) -> ()", &set_rng_state);
  m.def("seed(int seed, int device) -> ()", &seed);
}

struct Registered {
  Registered() {
    c10::impl::registerDeviceGuard(kType, new Guard());
    c10::SetAllocator(kType, &g_allocator);
#ifndef FAKE_CUDA
    at::RegisterPrivateUse1HooksInterface(new Hooks());
#endif
  }
} g_registered;
#ifdef FAKE_CUDA
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
using CUDAHooks = Hooks;  // torch looks for this name
REGISTER_CUDA_HOOKS(CUDAHooks);
#endif
}  // namespace
