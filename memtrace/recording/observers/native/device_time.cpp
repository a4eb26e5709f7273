#include "device_time.h"

#ifdef MEMTRACE_CUDA
#include <c10/core/Event.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>

#include <deque>
#include <map>
#include <mutex>
#endif

namespace memtrace {

#ifdef MEMTRACE_CUDA

namespace {

// CUDA measures the time between two events as a float in milliseconds, which loses precision with the distance: a base
// event is replaced when it is this old.
constexpr int64_t kMaxBaseAgeNs = 1'000'000'000;

struct TimedCall {
  int64_t op;
  int8_t device;
  c10::Event start, end;
};

// An event on the device whose time on the recording's clock is known.
struct BaseEvent {
  c10::Event event;
  int64_t time_ns;
};

struct DeviceTimes {
  ForkSafeMutex mutex;
  std::map<uint64_t, c10::Event> open;      // by ticket
  std::deque<TimedCall> running;
  std::map<int8_t, BaseEvent> bases;
  uint64_t next_ticket = kNotTimed + 1;
  uint32_t epoch = 0;
};

DeviceTimes& times() {
  static auto* all = new DeviceTimes;   // never destroyed: CUDA may shut down before static objects are destroyed
  return *all;
}

c10::Event new_event() { return c10::Event(c10::DeviceType::CUDA, c10::EventFlag::BACKEND_DEFAULT); }

c10::cuda::CUDAStream stream_of(int8_t device) {
  return c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device - 1));
}

bool is_capturing(const c10::cuda::CUDAStream& stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(stream.stream(), &status);
  if (error != cudaSuccess) (void)cudaGetLastError();   // the program must not find our error
  return error != cudaSuccess || status != cudaStreamCaptureStatusNone;
}

// While any thread captures a CUDA graph, creating, querying and waiting for events would end the capture with an error.
// In the relaxed mode, which is a property of the calling thread, these calls are allowed.
using CaptureModeGuard = c10::cuda::CUDAStreamCaptureModeGuard;
constexpr auto kRelaxed = cudaStreamCaptureModeRelaxed;

// Drops what is left of an earlier recording. Requires the mutex.
void begin_recording(DeviceTimes& all) {
  const uint32_t epoch = recorder().epoch;
  if (all.epoch == epoch) return;
  all.open.clear();
  all.running.clear();
  all.bases.clear();
  all.epoch = epoch;
}

// Creates the base event of the stream's device, once per recording. Requires the mutex.
void create_base(DeviceTimes& all, const c10::cuda::CUDAStream& stream) {
  const auto device = static_cast<int8_t>(stream.device_index() + 1);
  if (all.bases.count(device) != 0) return;
  BaseEvent base{new_event(), 0};
  base.event.record(stream.unwrap());
  base.event.synchronize();
  base.time_ns = recorder().now();
  all.bases.emplace(device, std::move(base));
}

int64_t elapsed_ns(const c10::Event& start, const c10::Event& end) {
  return static_cast<int64_t>(start.elapsedTime(end) * 1e6);
}

void take_first(DeviceTimes& all, DeviceTimeColumns& out) {
  TimedCall& call = all.running.front();
  BaseEvent& base = all.bases.at(call.device);
  const int64_t start = base.time_ns + elapsed_ns(base.event, call.start);
  out.op_id.push_back(call.op);
  out.device.push_back(call.device);
  out.start_ns.push_back(start);
  out.duration_ns.push_back(elapsed_ns(call.start, call.end));
  if (start - base.time_ns > kMaxBaseAgeNs) base = BaseEvent{std::move(call.start), start};
  all.running.pop_front();
}

}  // namespace

bool device_time_supported() { return true; }

uint64_t start_device_time(int8_t device) {
  DeviceTimes& all = times();
  std::lock_guard<ForkSafeMutex> lock(all.mutex);
  try {
    const c10::cuda::CUDAStream stream = stream_of(device);
    if (is_capturing(stream)) return kNotTimed;
    CaptureModeGuard guard(kRelaxed);
    begin_recording(all);
    create_base(all, stream);
    c10::Event start = new_event();
    start.record(stream.unwrap());
    all.open.emplace(all.next_ticket, std::move(start));
    return all.next_ticket++;
  } catch (const c10::Error&) {   // the device failed: the program's own calls report that
    return kNotTimed;
  }
}

void end_device_time(uint64_t ticket, int64_t op, int8_t device) {
  DeviceTimes& all = times();
  std::lock_guard<ForkSafeMutex> lock(all.mutex);
  auto start = all.open.find(ticket);
  if (start == all.open.end()) return;
  try {
    CaptureModeGuard guard(kRelaxed);
    TimedCall call{op, device, std::move(start->second), new_event()};
    all.open.erase(start);
    const c10::cuda::CUDAStream stream = stream_of(device);
    if (is_capturing(stream)) return;
    call.end.record(stream.unwrap());
    all.running.push_back(std::move(call));
  } catch (const c10::Error&) {   // as in start_device_time
  }
}

void take_device_times(DeviceTimeColumns& out) {
  DeviceTimes& all = times();
  std::lock_guard<ForkSafeMutex> lock(all.mutex);
  if (all.running.empty()) return;
  try {
    CaptureModeGuard guard(kRelaxed);
    while (!all.running.empty() && all.epoch == recorder().epoch && all.running.front().end.query()) take_first(all, out);
  } catch (const c10::Error&) {
    all.running.clear();
  }
}

void finish_device_times() {
  DeviceTimes& all = times();
  std::lock_guard<ForkSafeMutex> lock(all.mutex);
  if (all.running.empty()) return;
  try {
    CaptureModeGuard guard(kRelaxed);
    for (const TimedCall& call : all.running) call.end.synchronize();
  } catch (const c10::Error&) {
    all.running.clear();
  }
}

#else

bool device_time_supported() { return false; }
uint64_t start_device_time(int8_t) { return kNotTimed; }
void end_device_time(uint64_t, int64_t, int8_t) {}
void take_device_times(DeviceTimeColumns&) {}
void finish_device_times() {}

#endif

}  // namespace memtrace
