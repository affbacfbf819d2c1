// The extension fusedaccum._intake: the hooks and the queue of gradients, which
// fusedaccum/autograd/grad_queue.py defines, in Python.
//
// A hook runs in the thread in which the engine computed its gradient, without the GIL. It takes
// the GIL only to tell Python about a new pass, a full bucket, a gradient that does not fit, or one
// that its layer may have added itself. Code that holds the mutex never waits for the GIL.
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

using torch::autograd::variable_list;

// -- whether anybody but autograd holds a fresh gradient ------------------------------------------

// A tensor's Python object holds the tensor, and the tensor holds it as long as anything else holds
// the tensor, too.
bool held_once(const at::TensorBase& x) {
  const auto count = x.use_count();
  return count == 1 || (count == 2 && x.unsafeGetTensorImpl()->pyobj_slot()->has_unique_reference());
}

// As fusedaccum.autograd.grad_queue.exclusive(): one reference to the gradient, one to what it is a
// view of, and only theirs to the storage.
bool exclusive(const at::Tensor& grad) {
  if (!held_once(grad) || !grad.has_storage()) return false;
  const at::Storage& storage = grad.storage();
  // Memory that is not PyTorch's own (NumPy's). On a GPU it may be a CUDA graph's, which is not
  // written again before backward is over.
  if (grad.is_cpu() && !storage.resizable()) return false;
  const auto holders = storage.use_count();
  if (!grad.is_view()) return holders == 1;
  return holders == 2 && held_once(grad._base());
}

// -- the hooks and their queue --------------------------------------------------------------------

using StreamName =
    std::tuple<c10::StreamId, c10::DeviceIndex, int>;  // as torch.cuda.Stream takes it; the last is the device's type

class GradQueue : public std::enable_shared_from_this<GradQueue> {
 public:
  GradQueue(py::weakref collector, bool hold) : collector_(std::move(collector)), hold_(hold) {}

  ~GradQueue() {
    py::gil_scoped_acquire locked;  // a hook, which runs without the GIL, may be the last to release this
    collector_ = py::object();
    places_.clear();
  }

  void hook(py::object slot);
  void unhook(const py::object& slot);
  void fill_at(c10::Device device, int64_t bytes);
  py::list unhooked() const;
  void put(const py::object& slot, const at::Tensor& grad);
  void expect(int task);
  void forget(int task);
  std::vector<at::Tensor> held();
  std::pair<py::list, std::vector<StreamName>> take();

 private:
  friend class Hook;

  struct Place {
    py::object slot;
    at::Tensor parameter;               // undefined once it was unhooked
    const torch::autograd::Node* node;  // which the slot keeps alive
    std::vector<int64_t> shape;
    at::ScalarType dtype;  // of the buffer
    bool intercepted;
    bool shown;             // true if p.grad is the buffer
    std::size_t taken = 0;  // how often take() has met it
  };
  struct Arrival {
    Place* place;
    at::Tensor grad;
  };

  Place& find(const py::object& slot);
  at::Tensor parameter_of(const Place& place);
  void arrived(Place* place, const at::Tensor& parameter, const at::Tensor& grad);
  void queue_up(Place* place, const at::Tensor& grad, bool ours, bool awaited);
  bool expects(int task);
  bool expects_locked(int task) const;
  bool full_locked(c10::Device device) const;
  template <class... Arguments>
  bool tell(const char* method, const Arguments&... arguments);

  py::object collector_;  // a weak reference
  const bool hold_;
  std::deque<Place> places_;  // hooks point at its elements, which stay where they are
  std::mutex mutex_;          // guards what is below
  std::vector<int> tasks_;
  std::vector<Arrival> queue_;
  std::vector<StreamName> streams_;
  std::vector<std::pair<c10::Device, int64_t>> full_at_;  // bytes in the queue
  int64_t bytes_ = 0;
};

class Hook : public torch::autograd::FunctionPreHook {
 public:
  Hook(const std::shared_ptr<GradQueue>& queue, GradQueue::Place* place) : queue_(queue), place_(place) {}

  variable_list operator()(const variable_list& grads) override {
    const std::shared_ptr<GradQueue> queue = queue_.lock();
    const at::Tensor parameter = queue ? queue->parameter_of(*place_) : at::Tensor();
    if (!parameter.defined() || !parameter.requires_grad())
      return grads;  // autograd drops gradients of what was frozen after its forward
    if (!grads[0].defined()) {
      if (place_->shown && parameter.grad().defined()) queue->tell("added_already", place_->slot, grads[0]);
      return grads;
    }
    queue->arrived(place_, parameter, grads[0]);
    return {at::Tensor()};  // leaves p.grad alone
  }

 private:
  const std::weak_ptr<GradQueue> queue_;  // the node holds the hook
  GradQueue::Place* const place_;
};

void GradQueue::hook(py::object slot) {
  const auto parameter = slot.attr("param").cast<at::Tensor>();
  const auto dtype = slot.attr("dtype").cast<at::ScalarType>();
  const bool intercepted = py::cast<bool>(slot.attr("intercepted"));
  const bool shown = slot.attr("holder").is(slot.attr("param"));
  const auto node = torch::autograd::impl::grad_accumulator(parameter);
  places_.push_back({std::move(slot), parameter, node.get(), parameter.sizes().vec(), dtype, intercepted, shown});
  node->add_pre_hook(std::make_unique<Hook>(shared_from_this(), &places_.back()));
}

void GradQueue::unhook(const py::object& slot) {
  Place& place = find(slot);
  // The hook, which its node may keep for long, points at the place: that keeps neither of these.
  at::Tensor parameter;
  {
    const std::lock_guard<std::mutex> locked(mutex_);
    parameter = std::move(place.parameter);
  }
  place.slot = py::none();
}

void GradQueue::fill_at(c10::Device device, int64_t bytes) {
  const std::lock_guard<std::mutex> locked(mutex_);
  const auto known =
      std::find_if(full_at_.begin(), full_at_.end(), [&](const auto& entry) { return entry.first == device; });
  if (known == full_at_.end()) {
    full_at_.emplace_back(device, bytes);
  } else {
    known->second = bytes;
  }
}

bool GradQueue::full_locked(c10::Device device) const {
  return std::any_of(full_at_.begin(), full_at_.end(),
                     [&](const auto& entry) { return entry.first == device && bytes_ >= entry.second; });
}

GradQueue::Place& GradQueue::find(const py::object& slot) {
  const auto found =
      std::find_if(places_.begin(), places_.end(), [&](const Place& known) { return known.slot.is(slot); });
  if (found == places_.end()) throw py::key_error("this slot has no hook");
  return *found;
}

at::Tensor GradQueue::parameter_of(const Place& place) {
  const std::lock_guard<std::mutex> locked(mutex_);
  return place.parameter;
}

py::list GradQueue::unhooked() const {
  py::list slots;
  for (const Place& place : places_) {
    if (!place.parameter.defined()) continue;
    const bool same = torch::autograd::impl::try_get_grad_accumulator(place.parameter).get() == place.node;
    if (!same && place.parameter.requires_grad()) slots.append(place.slot);
  }
  return slots;
}

void GradQueue::expect(int task) {
  const std::lock_guard<std::mutex> locked(mutex_);
  tasks_.push_back(task);
}

void GradQueue::forget(int task) {
  const std::lock_guard<std::mutex> locked(mutex_);
  tasks_.erase(std::remove(tasks_.begin(), tasks_.end(), task), tasks_.end());
}

bool GradQueue::expects(int task) {
  const std::lock_guard<std::mutex> locked(mutex_);
  return expects_locked(task);
}

bool GradQueue::expects_locked(int task) const { return std::find(tasks_.begin(), tasks_.end(), task) != tasks_.end(); }

// Returns whether the answer is true.
template <class... Arguments>
bool GradQueue::tell(const char* method, const Arguments&... arguments) {
  const py::gil_scoped_acquire locked;
  const py::object collector = collector_();
  if (collector.is_none()) return false;
  try {
    return collector.attr(method)(arguments...).is(py::handle(Py_True));
  } catch (py::error_already_set& error) {
    error.restore();
    python_error carried;  // by the engine, to the thread that called backward()
    carried.persist();
    throw carried;
  }
}

void GradQueue::arrived(Place* place, const at::Tensor& parameter, const at::Tensor& grad) {
  const at::ScalarType dtype = grad.scalar_type();
  const bool fits = !at::GradMode::is_enabled() && grad.layout() == at::kStrided && grad.sizes() == place->shape &&
                    (dtype == parameter.scalar_type() || dtype == place->dtype);
  if (!fits) tell("refuse_unfit", place->slot, grad);
  // Hooks that run next look for the accumulated gradient in p.grad.
  const bool awaited = place->shown && torch::autograd::impl::post_acc_grad_hooks(parameter) != nullptr;
  queue_up(place, grad, exclusive(grad), awaited);
}

void GradQueue::put(const py::object& slot, const at::Tensor& grad) {
  Place& place = find(slot);
  const py::gil_scoped_release unlocked;
  queue_up(&place, grad, true, false);
}

// A copy. PyTorch 2.13's clone() of a DTensor adds up what the ranks hold parts of, in the dtype
// that it has.
at::Tensor copied(const at::Tensor& grad) {
  return grad.unsafeGetTensorImpl()->is_python_dispatch() ? grad.mul(1) : grad.clone();
}

void GradQueue::queue_up(Place* place, const at::Tensor& grad, bool ours, bool awaited) {
  if ((place->intercepted || !ours) && tell("added_already", place->slot, grad)) return;
  const int task = torch::autograd::get_current_graph_task_id();
  if (!expects(task)) tell("enter", task);
  at::Tensor kept = ours || !hold_ ? grad : copied(grad);
  const auto bytes = static_cast<int64_t>(grad.nbytes());
  bool full = false;
  {
    const std::lock_guard<std::mutex> locked(mutex_);
    if (!expects_locked(task)) return;  // another thread has found it broken off since, and dropped what it had queued
    queue_.push_back({place, std::move(kept)});
    bytes_ += bytes;
    if (grad.is_cuda()) {
      const c10::Stream stream = c10::impl::VirtualGuardImpl(grad.device().type()).getStream(grad.device());
      const StreamName name{stream.id(), stream.device_index(), static_cast<int>(stream.device_type())};
      if (std::find(streams_.begin(), streams_.end(), name) == streams_.end()) streams_.push_back(name);
    }
    full = !hold_ && (full_locked(grad.device()) || awaited || !ours);
  }
  if (full) tell("release");
}

std::vector<at::Tensor> GradQueue::held() {
  const std::lock_guard<std::mutex> locked(mutex_);
  std::vector<at::Tensor> grads;
  for (const Arrival& arrival : queue_) grads.push_back(arrival.grad);
  return grads;
}

std::pair<py::list, std::vector<StreamName>> GradQueue::take() {
  std::vector<Arrival> queue;
  std::vector<StreamName> streams;
  {
    const std::lock_guard<std::mutex> locked(mutex_);
    queue.swap(queue_);
    streams.swap(streams_);
    bytes_ = 0;
  }
  py::list batches;
  for (Arrival& arrival : queue) {
    if (arrival.place->slot.is_none()) continue;  // unhooked since: nobody steps it
    const std::size_t number = arrival.place->taken++;
    if (number == batches.size()) batches.append(py::make_tuple(py::list(), py::list()));
    const py::tuple batch = batches[number];
    py::list(batch[0]).append(arrival.place->slot);
    py::list(batch[1]).append(py::cast(std::move(arrival.grad)));
  }
  for (const Arrival& arrival : queue) arrival.place->taken = 0;
  return {std::move(batches), std::move(streams)};
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::class_<GradQueue, std::shared_ptr<GradQueue>>(m, "GradQueue", "fusedaccum.autograd.grad_queue.GradQueue, in C++")
      .def(py::init<py::weakref, bool>(), py::arg("collector"), py::arg("hold"))
      .def("hook", &GradQueue::hook, py::arg("slot"), "Queue the gradients of this slot's parameter from now on")
      .def("unhook", &GradQueue::unhook, py::arg("slot"),
           "From now on the gradients of this slot's parameter go their ordinary way")
      .def("fill_at", &GradQueue::fill_at, py::arg("device"), py::arg("bytes"),
           "A gradient on this device that brings the queue to so many bytes fills the bucket")
      .def("unhooked", &GradQueue::unhooked, "Slots of trainable parameters that PyTorch has given new nodes since")
      .def("put", &GradQueue::put, py::arg("slot"), py::arg("grad"),
           "Queue a gradient that did not come through a hook, and that nobody else is going to write to")
      .def("expect", &GradQueue::expect, py::arg("task"), "Gradients of this graph task need not be announced")
      .def("forget", &GradQueue::forget, py::arg("task"), "This graph task is over")
      .def("held", &GradQueue::held, "The gradients in the queue")
      .def("take", &GradQueue::take,
           "Empty the queue: batches of (slots, gradients) with no slot twice, and the CUDA streams they came on");
}
