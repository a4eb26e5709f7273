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

// CUDA tells the time between two events in a float of milliseconds: the further apart, the coarser.
constexpr int64_t kBaseNs = 1'000'000'000;

struct Timed {
  int64_t op;
  int8_t device;
  c10::Event start, end;
};

// An event of the device whose time on the recording's clock is known.
struct Base {
  c10::Event event;
  int64_t time_ns;
};

struct DeviceTimes {
  std::mutex mutex;
  std::map<uint64_t, c10::Event> open;      // by ticket
  std::deque<Timed> running;
  std::map<int8_t, Base> bases;
  uint64_t next_ticket = kNotTimed + 1;
  uint32_t epoch = 0;
};

DeviceTimes& times() {
  static auto* all = new DeviceTimes;   // never destroyed: CUDA may be gone before static objects are
  return *all;
}

c10::Event new_event() { return c10::Event(c10::DeviceType::CUDA, c10::EventFlag::BACKEND_DEFAULT); }

c10::cuda::CUDAStream stream_of(int8_t device) {
  return c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device - 1));
}

// The clocks of host and device meet once a recording, on an idle stream; call with the mutex held.
void meet(DeviceTimes& all, int8_t device) {
  if (all.bases.count(device) != 0) return;
  Base base{new_event(), 0};
  base.event.record(stream_of(device).unwrap());
  base.event.synchronize();
  base.time_ns = recorder().now();
  all.bases.emplace(device, std::move(base));
}

int64_t between_ns(const c10::Event& start, const c10::Event& end) {
  return static_cast<int64_t>(start.elapsedTime(end) * 1e6);
}

void take_first(DeviceTimes& all, DeviceTimeColumns& out) {
  Timed& timed = all.running.front();
  Base& base = all.bases.at(timed.device);
  const int64_t start = base.time_ns + between_ns(base.event, timed.start);
  out.op_id.push_back(timed.op);
  out.device.push_back(timed.device);
  out.start_ns.push_back(start);
  out.duration_ns.push_back(between_ns(timed.start, timed.end));
  if (start - base.time_ns > kBaseNs) base = Base{std::move(timed.start), start};
  all.running.pop_front();
}

}  // namespace

bool device_time_supported() { return true; }

uint64_t start_device_time(int8_t device) {
  if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) return kNotTimed;
  DeviceTimes& all = times();
  std::lock_guard<std::mutex> lock(all.mutex);
  const uint32_t epoch = recorder().epoch;
  if (all.epoch != epoch) {
    all.open.clear();
    all.running.clear();
    all.bases.clear();
    all.epoch = epoch;
  }
  try {
    meet(all, device);
    c10::Event start = new_event();
    start.record(stream_of(device).unwrap());
    all.open.emplace(all.next_ticket, std::move(start));
    return all.next_ticket++;
  } catch (const c10::Error&) {   // the device is lost: that is for the program's own calls to say
    return kNotTimed;
  }
}

void end_device_time(uint64_t ticket, int64_t op, int8_t device) {
  DeviceTimes& all = times();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto found = all.open.find(ticket);
  if (found == all.open.end()) return;
  Timed timed{op, device, std::move(found->second), new_event()};
  all.open.erase(found);
  try {
    timed.end.record(stream_of(device).unwrap());
  } catch (const c10::Error&) {
    return;
  }
  all.running.push_back(std::move(timed));
}

void take_device_times(DeviceTimeColumns& out) {
  DeviceTimes& all = times();
  std::lock_guard<std::mutex> lock(all.mutex);
  try {
    while (!all.running.empty() && all.epoch == recorder().epoch && all.running.front().end.query()) take_first(all, out);
  } catch (const c10::Error&) {
    all.running.clear();
  }
}

void finish_device_times() {
  DeviceTimes& all = times();
  std::lock_guard<std::mutex> lock(all.mutex);
  try {
    for (const Timed& timed : all.running) timed.end.synchronize();
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
