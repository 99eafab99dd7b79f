// Streams, events and graphs. A stream is a queue with a thread of its own; what is launched runs later,
// after a delay that may be random, and a graph is the list of tasks that were queued meanwhile.
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "sim.h"

namespace sim {
namespace {

struct Task {
  const char* what;
  std::function<void()> work;
  bool must_run = false;  // even on a broken stream: somebody waits for it
};
struct Graph {
  std::vector<Task> tasks;
};

struct Event {
  std::mutex lock;
  std::condition_variable changed;
  long recorded = 0, reached = 0;

  long mark() {
    std::lock_guard<std::mutex> guard(lock);
    return ++recorded;
  }
  void reach(long mark) {
    std::lock_guard<std::mutex> guard(lock);
    if (mark > reached) reached = mark;
    changed.notify_all();
  }
  void wait(long mark) {
    std::unique_lock<std::mutex> guard(lock);
    changed.wait(guard, [&] { return reached >= mark; });
  }
  bool is_done() {
    std::lock_guard<std::mutex> guard(lock);
    return reached >= recorded;
  }
};
using SharedEvent = std::shared_ptr<Event>;  // queued tasks may outlive what Paddle holds

struct Stream {
  int device;
  std::mutex lock;
  std::condition_variable changed;
  std::deque<Task> queue;
  bool busy = false, stop = false;
  std::atomic<bool> broken{false}, is_invalid{false}, is_hung{false};
  std::unique_ptr<Graph> capturing;
  std::minstd_rand random;
  std::thread worker;

  explicit Stream(int id) : device(id), random(1 + (unsigned)(long)panel().streams), worker([this] { run(); }) {}

  void run() {
    for (;;) {
      Task task;
      {
        std::unique_lock<std::mutex> guard(lock);
        changed.wait(guard, [&] { return stop || !queue.empty(); });
        if (queue.empty()) return;
        task = std::move(queue.front());
        queue.pop_front();
        busy = true;
      }
      if (due(panel().hang_at)) {
        is_hung = true;
        for (;;) pause();
      }
      if (long delay = panel().delay_us) {
        if (panel().random_delay) delay = random() % (delay + 1);
        std::this_thread::sleep_for(std::chrono::microseconds(delay));
      }
      if (due(panel().fail_kernel_at)) broken = true;  // and stays so, as on real devices
      if ((!broken && !panel().lost) || task.must_run) task.work();
      task.work = nullptr;
      {
        std::lock_guard<std::mutex> guard(lock);
        busy = false;
        changed.notify_all();
      }
    }
  }

  void push(Task task) {
    if (capturing) {
      capturing->tasks.push_back(std::move(task));
      return;
    }
    std::unique_lock<std::mutex> guard(lock);
    queue.push_back(std::move(task));
    changed.notify_all();
    if (!panel().async) changed.wait(guard, [&] { return queue.empty() && !busy; });
  }

  C_Status drain() {
    if (capturing) {  // waiting inside a capture is an error, as on real devices
      is_invalid = true;
      return C_ERROR;
    }
    std::unique_lock<std::mutex> guard(lock);
    changed.wait(guard, [&] { return queue.empty() && !busy; });
    return broken || panel().lost ? C_INTERNAL_ERROR : C_SUCCESS;
  }
};

std::mutex streams_lock;
std::set<Stream*> all_streams;

Stream* as_stream(const void* stream) { return (Stream*)stream; }
SharedEvent& as_event(C_Event event) { return *(SharedEvent*)event; }

C_Status create_stream(const C_Device device, C_Stream* out) {
  ++panel().streams;
  auto* stream = new Stream(device->id);
  std::lock_guard<std::mutex> guard(streams_lock);
  all_streams.insert(stream);
  *out = (C_Stream)stream;
  return C_SUCCESS;
}
C_Status destroy_stream(const C_Device, C_Stream handle) {
  auto* stream = as_stream(handle);
  {
    std::lock_guard<std::mutex> guard(streams_lock);
    all_streams.erase(stream);
  }
  {
    std::lock_guard<std::mutex> guard(stream->lock);
    stream->stop = true;
    stream->changed.notify_all();
  }
  if (stream->is_hung) {  // nobody can end that thread; the process must be able to
    stream->worker.detach();
    return C_SUCCESS;
  }
  stream->worker.join();
  delete stream;
  return C_SUCCESS;
}
C_Status query_stream(const C_Device, C_Stream handle) {
  auto* stream = as_stream(handle);
  std::lock_guard<std::mutex> guard(stream->lock);
  return stream->queue.empty() && !stream->busy ? C_SUCCESS : C_FAILED;
}
C_Status add_callback(const C_Device device, C_Stream stream, C_Callback callback, void* data) {
  auto call = [=] {
    C_Status status = C_SUCCESS;
    callback(device, stream, data, &status);
  };
  as_stream(stream)->push({"callback", call, true});
  return C_SUCCESS;
}
C_Status synchronize_stream(const C_Device, C_Stream stream) {
  ++panel().stream_syncs;
  return as_stream(stream)->drain();
}
C_Status synchronize_device(const C_Device device) {
  ++panel().device_syncs;
  return drain_device(device->id);
}

C_Status create_event(const C_Device, C_Event* out) {
  *out = (C_Event) new SharedEvent(std::make_shared<Event>());
  return C_SUCCESS;
}
C_Status destroy_event(const C_Device, C_Event event) {
  delete (SharedEvent*)event;
  return C_SUCCESS;
}
C_Status record_event(const C_Device, C_Stream stream, C_Event handle) {
  SharedEvent event = as_event(handle);
  long mark = event->mark();
  as_stream(stream)->push({"event", [=] { event->reach(mark); }, true});
  return C_SUCCESS;
}
C_Status query_event(const C_Device, C_Event event) {
  ++panel().event_queries;
  return as_event(event)->is_done() ? C_SUCCESS : C_FAILED;
}
C_Status synchronize_event(const C_Device, C_Event handle) {
  ++panel().event_syncs;
  SharedEvent event = as_event(handle);
  event->wait(event->recorded);
  return panel().lost ? C_INTERNAL_ERROR : C_SUCCESS;
}
C_Status stream_wait_event(const C_Device, C_Stream stream, C_Event handle) {
  SharedEvent event = as_event(handle);
  long mark = event->recorded;
  as_stream(stream)->push({"wait", [=] { event->wait(mark); }, true});
  return C_SUCCESS;
}

// ---- graphs ----------------------------------------------------------------------------------------
C_Status begin_capture(const C_Device, C_Stream stream, C_StreamCaptureMode) {
  ++panel().captures;
  as_stream(stream)->is_invalid = false;
  as_stream(stream)->capturing = std::make_unique<Graph>();
  return C_SUCCESS;
}
C_Status end_capture(const C_Device, C_Stream stream, C_CudaGraph* out) {
  *out = (C_CudaGraph)as_stream(stream)->capturing.release();
  return as_stream(stream)->is_invalid ? C_ERROR : C_SUCCESS;
}
C_Status instantiate(C_GraphExec* out, C_CudaGraph* graph, void**, char*, size_t) {
  *out = (C_GraphExec) new Graph(*(Graph*)*graph);
  return C_SUCCESS;
}
C_Status graph_launch(const C_Device, C_GraphExec graph, C_Stream stream) {
  ++panel().graph_launches;
  if (panel().lost || due(panel().fail_launch_at)) return C_INTERNAL_ERROR;
  for (auto& task : ((Graph*)graph)->tasks) as_stream(stream)->push(task);
  return C_SUCCESS;
}
C_Status graph_destroy(C_CudaGraph graph) {
  delete (Graph*)graph;
  return C_SUCCESS;
}
C_Status exec_destroy(C_GraphExec graph) {
  delete (Graph*)graph;
  return C_SUCCESS;
}
C_Status graph_nodes(C_CudaGraph graph, C_CudaGraphNode*, size_t* count) {
  *count = ((Graph*)graph)->tasks.size();
  return C_SUCCESS;
}
C_Status capture_info(const C_Device, C_Stream stream, C_StreamCaptureStatus* status, unsigned long long* id,
                      C_CudaGraph*, C_CudaGraphNode*, void**, size_t*) {
  *status = as_stream(stream)->capturing ? C_StreamCaptureStatusActive : C_StreamCaptureStatusNone;
  if (id) *id = panel().captures;
  return C_SUCCESS;
}
C_Status exchange_mode(C_StreamCaptureMode*) { return C_SUCCESS; }

}  // namespace

C_Status drain_device(int device) {
  std::vector<Stream*> mine;
  {
    std::lock_guard<std::mutex> guard(streams_lock);
    for (auto* stream : all_streams)
      if (stream->device == device) mine.push_back(stream);
  }
  C_Status status = panel().lost ? C_INTERNAL_ERROR : C_SUCCESS;
  for (auto* stream : mine)
    if (stream->drain() != C_SUCCESS) status = C_INTERNAL_ERROR;
  return status;
}

bool launch(void* stream, const char* what, std::function<void()> work) {
  ++panel().launches;
  if (panel().lost || due(panel().fail_launch_at)) return false;
  as_stream(stream)->push({what, std::move(work)});
  return true;
}

void queue_task(void* stream, const char* what, std::function<void()> work) {
  as_stream(stream)->push({what, std::move(work)});
}

void break_stream(void* stream) { as_stream(stream)->broken = true; }

void fill_stream_table(C_DeviceInterface* table) {
  table->create_stream = create_stream;
  table->destroy_stream = destroy_stream;
  table->query_stream = query_stream;
  table->stream_add_callback = add_callback;
  table->synchronize_stream = synchronize_stream;
  table->synchronize_device = synchronize_device;
  table->create_event = create_event;
  table->destroy_event = destroy_event;
  table->record_event = record_event;
  table->query_event = query_event;
  table->synchronize_event = synchronize_event;
  table->stream_wait_event = stream_wait_event;
  table->cuda_stream_begin_capture = begin_capture;
  table->cuda_stream_end_captrue = end_capture;  // spelled so in the header
  table->cuda_graph_instantiate = instantiate;
  table->cuda_graph_launch = graph_launch;
  table->cuda_graph_destroy = graph_destroy;
  table->cuda_graph_exec_destroy = exec_destroy;
  table->cuda_graph_get_nodes = graph_nodes;
  table->cuda_stream_capture_info = capture_info;
  table->cuda_thread_exchange_stream_capthure_mode = exchange_mode;
}

}  // namespace sim
