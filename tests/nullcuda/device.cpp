#include "device.h"

#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <map>
#include <mutex>

namespace nullcuda {
namespace {

constexpr size_t kSpace = size_t{1} << 40;        // addresses of one device
constexpr uintptr_t kFirstSpace = 0x7c0000000000;  // where NVIDIA's driver has them too

size_t bytes(const char* text, size_t otherwise) {
  if (text == nullptr || *text == 0) return otherwise;
  char* end;
  double value = strtod(text, &end);
  if (strncasecmp(end, "KiB", 3) == 0) value *= 1 << 10;
  if (strncasecmp(end, "MiB", 3) == 0) value *= 1 << 20;
  if (strncasecmp(end, "GiB", 3) == 0) value *= 1 << 30;
  return static_cast<size_t>(value);
}

int64_t number(const char* name, int64_t otherwise) {
  const char* text = getenv(name);
  return text != nullptr && *text != 0 ? atoll(text) : otherwise;
}

Settings read_settings() {
  Settings s;
  s.devices = static_cast<int>(std::clamp<int64_t>(number("NULLCUDA_DEVICES", s.devices), 0, kMaxDevices));
  s.memory = bytes(getenv("NULLCUDA_MEMORY"), s.memory);
  s.context_bytes = bytes(getenv("NULLCUDA_CONTEXT"), s.context_bytes);
  s.kernel_ns = number("NULLCUDA_KERNEL_NS", s.kernel_ns);
  s.event_queries = static_cast<int>(number("NULLCUDA_EVENT_QUERIES", s.event_queries));
  s.strict_capture = number("NULLCUDA_STRICT_CAPTURE", 1) != 0;
  s.log = number("NULLCUDA_LOG", 0) != 0;
  const char* order = getenv("NULLCUDA_ADDRESSES");
  if (order != nullptr && strcmp(order, "highest") == 0) s.addresses = Settings::highest;
  if (order != nullptr && strcmp(order, "fresh") == 0) s.addresses = Settings::fresh;
  return s;
}

struct Allocation {
  size_t size;
  bool reserved;   // addresses only: cuMemAddressReserve
};
struct Piece {
  int device;
  size_t size;
  int references;
};
struct Mapping {
  size_t size;
  uint64_t piece;
};

struct Device {
  bool in_use = false;
  size_t capacity = 0, used = 0;
  uintptr_t begin = 0;
  std::map<uintptr_t, size_t> holes;
  std::map<uintptr_t, Allocation> allocations;
  Stream default_stream{};
  std::vector<Stream*> streams;
};

struct Model {
  std::mutex mutex;
  bool is_initialised = false, is_forked = false;
  Device devices[kMaxDevices];
  std::map<uintptr_t, size_t> host;                  // page-locked
  std::map<uint64_t, Piece> pieces;
  std::map<uintptr_t, Mapping> mappings;
  std::vector<Capture*> captures;
  uint64_t next_piece = 1, next_capture = 1;
  int64_t waited_until_ns = 0;                       // somebody waited: events up to then are complete, asked or not
};

Model& model() {
  static auto* instance = new Model;   // never destroyed: blocks are freed after static objects are
  return *instance;
}
using Guard = std::lock_guard<std::mutex>;

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

// Call without the lock.
void sleep_until(int64_t when_ns) {
  for (;;) {
    const int64_t left = when_ns - now_ns();
    if (left <= 0) break;
    const timespec t{left / 1'000'000'000, left % 1'000'000'000};
    nanosleep(&t, nullptr);
  }
  Guard guard(model().mutex);
  model().waited_until_ns = std::max(model().waited_until_ns, when_ns);
}

size_t rounded(size_t size) { return (size + kPage - 1) / kPage * kPage; }

void in_child() {
  Model& m = model();
  new (&m.mutex) std::mutex;   // its holder may be a thread that the child does not have
  m.is_forked = m.is_initialised;
}

// Call with the lock held.
void begin_use(Device& device, int index) {
  if (device.in_use) return;
  Model& m = model();
  if (!m.is_initialised) {
    m.is_initialised = true;
    pthread_atfork(nullptr, nullptr, in_child);
  }
  device.in_use = true;
  device.capacity = settings().memory;
  device.used = settings().context_bytes;
  void* hint = reinterpret_cast<void*>(kFirstSpace + static_cast<uintptr_t>(index) * kSpace);
  void* got = mmap(hint, kSpace + kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (got == MAP_FAILED) {
    fprintf(stderr, "nullcuda: no address space for a device\n");
    abort();
  }
  device.begin = (reinterpret_cast<uintptr_t>(got) + kPage - 1) / kPage * kPage;
  device.holes[device.begin] = kSpace;
  device.default_stream.device = index;
  device.streams.push_back(&device.default_stream);
}

// Addresses for `size` bytes (whole pages) of a device; call with the lock held.
uintptr_t take_addresses(Device& device, size_t size) {
  auto take = [&](std::map<uintptr_t, size_t>::iterator hole, bool at_end) {
    const auto [start, length] = *hole;
    device.holes.erase(hole);
    const uintptr_t address = at_end ? start + length - size : start;
    if (length > size) device.holes[at_end ? start : start + size] = length - size;
    return address;
  };
  if (settings().addresses == Settings::highest) {
    for (auto hole = device.holes.end(); hole != device.holes.begin();)
      if ((--hole)->second >= size) return take(hole, true);
  } else {
    for (auto hole = device.holes.begin(); hole != device.holes.end(); ++hole)
      if (hole->second >= size) return take(hole, false);
  }
  return 0;
}

void give_addresses(Device& device, uintptr_t address, size_t size) {
  if (settings().addresses == Settings::fresh) return;
  auto after = device.holes.lower_bound(address);
  if (after != device.holes.end() && after->first == address + size) {
    size += after->second;
    after = device.holes.erase(after);
  }
  if (after != device.holes.begin()) {
    auto before = std::prev(after);
    if (before->first + before->second == address) {
      before->second += size;
      return;
    }
  }
  device.holes[address] = size;
}

// Ends the process where the host refuses what the device needs: the first access would crash, without a reason.
void require(bool has_succeeded, const char* call) {
  if (has_succeeded) return;
  fprintf(stderr, "nullcuda: the host has no memory or mappings left (%s: %s)\n", call, strerror(errno));
  abort();
}

void open_pages(uintptr_t address, size_t size) {
  require(mprotect(reinterpret_cast<void*>(address), size, PROT_READ | PROT_WRITE) == 0, "mprotect");
}

void close_pages(uintptr_t address, size_t size) {   // a later access is a segmentation fault
  constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  require(mmap(reinterpret_cast<void*>(address), size, PROT_NONE, flags, -1, 0) != MAP_FAILED, "mmap");
}

Device* owner_of(uintptr_t address) {
  for (Device& device : model().devices)
    if (device.in_use && address >= device.begin && address < device.begin + kSpace) return &device;
  return nullptr;
}

uint64_t this_thread() { return static_cast<uint64_t>(pthread_self()); }

// Call with the lock held.
Result check_unsafe() {
  const int mode = thread_capture_mode();
  if (!settings().strict_capture || mode == 2) return Result::ok;
  bool forbidden = false;
  for (Capture* capture : model().captures) {
    const bool mine = capture->thread == this_thread() && capture->mode != 2;
    const bool others = capture->thread != this_thread() && capture->mode == 0 && mode == 0;
    if (mine || others) capture->invalidated = forbidden = true;
  }
  return forbidden ? Result::capture_unsafe : Result::ok;
}

Node* add_node(Stream* stream, int64_t duration_ns, std::function<void()> work) {
  Graph* graph = stream->capture->graph;
  graph->nodes.push_back(std::make_unique<Node>(Node{std::move(work), duration_ns, stream->last}));
  stream->last = {graph->nodes.back().get()};
  return stream->last[0];
}

void occupy(Stream* stream, int64_t duration_ns) {
  stream->busy_until_ns = std::max(stream->busy_until_ns, now_ns()) + duration_ns;
}

}  // namespace

const Settings& settings() {
  static const Settings read = read_settings();
  return read;
}

int visible_devices() {
  static const int count = [] {
    const char* visible = getenv("CUDA_VISIBLE_DEVICES");
    if (visible == nullptr) return settings().devices;
    int n = 0;
    for (const char* at = visible; *at != 0;) {
      char* end;
      const long index = strtol(at, &end, 10);
      if (end == at || index < 0 || index >= settings().devices) break;
      ++n;
      at = *end == ',' ? end + 1 : end;
      if (*end != ',' && *end != 0) break;
    }
    return std::min(n, settings().devices);
  }();
  return count;
}

void log_line(const char* format, ...) {
  if (!settings().log) return;
  char line[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  fprintf(stderr, "nullcuda: %s\n", line);
}

Result ready(int device) {
  Model& m = model();
  Guard guard(m.mutex);
  if (m.is_forked) return Result::forked;
  if (device < 0 || device >= visible_devices()) return Result::invalid_device;
  begin_use(m.devices[device], device);
  return Result::ok;
}

bool has_context(int device) {
  Guard guard(model().mutex);
  return device >= 0 && device < kMaxDevices && model().devices[device].in_use;
}

bool is_forked() { return model().is_forked; }

int& current_device() {
  thread_local int device = 0;
  return device;
}

// ---- memory --------------------------------------------------------------------------------------------------------

Result allocate(int device, size_t size, void** pointer, bool in_order) {
  if (Result r = ready(device); r != Result::ok) return r;
  if (size == 0) return *pointer = nullptr, Result::ok;
  Guard guard(model().mutex);
  if (Result r = in_order ? Result::ok : check_unsafe(); r != Result::ok) return r;
  Device& d = model().devices[device];
  const size_t room = rounded(size);
  if (room > d.capacity - std::min(d.used, d.capacity)) return Result::out_of_memory;
  const uintptr_t address = take_addresses(d, room);
  if (address == 0) return Result::out_of_memory;
  open_pages(address, room);
  d.used += room;
  d.allocations[address] = {room, false};
  *pointer = reinterpret_cast<void*>(address);
  log_line("malloc %zu bytes at %p on device %d", size, *pointer, device);
  return Result::ok;
}

Result release(void* pointer, bool in_order) {
  if (pointer == nullptr) return Result::ok;
  int64_t until = 0;
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  {
    Guard guard(model().mutex);
    if (model().is_forked) return Result::forked;
    if (Result r = in_order ? Result::ok : check_unsafe(); r != Result::ok) return r;
    Device* d = owner_of(address);
    if (d == nullptr) return Result::invalid_value;
    auto found = d->allocations.find(address);
    if (found == d->allocations.end() || found->second.reserved) return Result::invalid_value;
    if (!in_order)
      for (Stream* stream : d->streams) until = std::max(until, stream->busy_until_ns);
  }
  sleep_until(until);   // a free waits for the device
  Guard guard(model().mutex);
  Device* d = owner_of(address);
  auto found = d->allocations.find(address);
  if (found == d->allocations.end()) return Result::invalid_value;
  const size_t size = found->second.size;
  d->allocations.erase(found);
  close_pages(address, size);
  give_addresses(*d, address, size);
  d->used -= size;
  log_line("free %zu bytes at %p", size, pointer);
  return Result::ok;
}

void memory_info(int device, size_t* free, size_t* total) {
  Guard guard(model().mutex);
  const Device& d = model().devices[device];
  *total = d.capacity;
  *free = d.capacity - std::min(d.used, d.capacity);
}

Result allocate_host(size_t size, void** pointer) {
  Guard guard(model().mutex);
  if (model().is_forked) return Result::forked;
  if (Result r = check_unsafe(); r != Result::ok) return r;
  const size_t room = std::max<size_t>((size + 4095) / 4096 * 4096, 4096);
  void* got = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (got == MAP_FAILED) return Result::out_of_memory;
  model().host[reinterpret_cast<uintptr_t>(got)] = room;
  *pointer = got;
  return Result::ok;
}

Result release_host(void* pointer) {
  Guard guard(model().mutex);
  if (pointer == nullptr || model().is_forked) return Result::ok;
  auto found = model().host.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == model().host.end()) return Result::invalid_value;
  munmap(pointer, found->second);
  model().host.erase(found);
  return Result::ok;
}

Kind kind_of(const void* pointer, int* device, uintptr_t* base, size_t* size) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  Guard guard(model().mutex);
  if (Device* d = owner_of(address)) {
    auto after = d->allocations.upper_bound(address);
    if (after == d->allocations.begin()) return Kind::unregistered;
    --after;
    if (address >= after->first + after->second.size) return Kind::unregistered;
    *device = static_cast<int>(d - model().devices);
    *base = after->first;
    *size = after->second.size;
    return Kind::device;
  }
  auto after = model().host.upper_bound(address);
  if (after == model().host.begin() || address >= std::prev(after)->first + std::prev(after)->second)
    return Kind::unregistered;
  --after;
  *device = current_device();
  *base = after->first;
  *size = after->second;
  return Kind::host;
}

Result reserve(size_t size, uintptr_t* address) {
  const int device = current_device();
  if (Result r = ready(device); r != Result::ok) return r;
  if (size == 0 || size % kPage != 0) return Result::invalid_value;
  Guard guard(model().mutex);
  Device& d = model().devices[device];
  *address = take_addresses(d, size);
  if (*address == 0) return Result::out_of_memory;
  d.allocations[*address] = {size, true};
  return Result::ok;
}

Result unreserve(uintptr_t address, size_t size) {
  Guard guard(model().mutex);
  Device* d = owner_of(address);
  if (d == nullptr) return Result::invalid_value;
  auto found = d->allocations.find(address);
  if (found == d->allocations.end() || !found->second.reserved || found->second.size != size) return Result::invalid_value;
  auto mapped = model().mappings.lower_bound(address);
  if (mapped != model().mappings.end() && mapped->first < address + size) return Result::illegal_state;
  d->allocations.erase(found);
  give_addresses(*d, address, size);
  return Result::ok;
}

Result make_piece(int device, size_t size, uint64_t* piece) {
  if (Result r = ready(device); r != Result::ok) return r;
  if (size == 0 || size % kPage != 0) return Result::invalid_value;
  Guard guard(model().mutex);
  Device& d = model().devices[device];
  if (size > d.capacity - std::min(d.used, d.capacity)) return Result::out_of_memory;
  d.used += size;
  *piece = model().next_piece++;
  model().pieces[*piece] = {device, size, 1};
  return Result::ok;
}

namespace {
void drop_reference(uint64_t id) {
  auto found = model().pieces.find(id);
  if (--found->second.references > 0) return;
  model().devices[found->second.device].used -= found->second.size;
  model().pieces.erase(found);
}
}  // namespace

Result drop_piece(uint64_t piece) {
  Guard guard(model().mutex);
  if (model().pieces.count(piece) == 0) return Result::invalid_value;
  drop_reference(piece);
  return Result::ok;
}

Result map_piece(uintptr_t address, size_t size, uint64_t piece) {
  Guard guard(model().mutex);
  auto found = model().pieces.find(piece);
  Device* d = owner_of(address);
  if (found == model().pieces.end() || d == nullptr || found->second.size != size) return Result::invalid_value;
  auto range = d->allocations.upper_bound(address);
  if (range == d->allocations.begin()) return Result::invalid_value;
  --range;
  if (!range->second.reserved || address + size > range->first + range->second.size) return Result::invalid_value;
  auto mapped = model().mappings.lower_bound(address);
  if (mapped != model().mappings.end() && mapped->first < address + size) return Result::illegal_state;
  model().mappings[address] = {size, piece};
  ++found->second.references;
  return Result::ok;
}

Result unmap(uintptr_t address, size_t size) {
  Guard guard(model().mutex);
  auto mapped = model().mappings.lower_bound(address);
  if (mapped == model().mappings.end() || mapped->first != address) return Result::invalid_value;
  while (mapped != model().mappings.end() && mapped->first < address + size) {
    if (mapped->first + mapped->second.size > address + size) return Result::invalid_value;
    close_pages(mapped->first, mapped->second.size);
    drop_reference(mapped->second.piece);
    mapped = model().mappings.erase(mapped);
  }
  return Result::ok;
}

Result allow_access(uintptr_t address, size_t size) {
  Guard guard(model().mutex);
  for (uintptr_t at = address; at < address + size;) {
    auto mapped = model().mappings.find(at);
    if (mapped == model().mappings.end()) return Result::invalid_value;
    at += mapped->second.size;
  }
  open_pages(address, size);
  return Result::ok;
}

Result piece_at(uintptr_t address, uint64_t* piece) {
  Guard guard(model().mutex);
  auto mapped = model().mappings.upper_bound(address);
  if (mapped == model().mappings.begin()) return Result::invalid_value;
  --mapped;
  if (address >= mapped->first + mapped->second.size) return Result::invalid_value;
  *piece = mapped->second.piece;
  ++model().pieces[*piece].references;
  return Result::ok;
}

Result piece_device(uint64_t piece, int* device) {
  Guard guard(model().mutex);
  auto found = model().pieces.find(piece);
  if (found == model().pieces.end()) return Result::invalid_value;
  *device = found->second.device;
  return Result::ok;
}

// ---- streams and time ----------------------------------------------------------------------------------------------

Stream* stream_of(void* handle) {
  if (reinterpret_cast<uintptr_t>(handle) > 2) return static_cast<Stream*>(handle);
  const int device = current_device();
  if (ready(device) != Result::ok) return nullptr;
  return &model().devices[device].default_stream;
}

Stream* new_stream(int priority, unsigned flags) {
  const int device = current_device();
  if (ready(device) != Result::ok) return nullptr;
  Guard guard(model().mutex);
  auto* stream = new Stream{device, priority, flags, 0, nullptr, {}};
  model().devices[device].streams.push_back(stream);
  return stream;
}

Result drop_stream(Stream* stream) {
  Guard guard(model().mutex);
  auto& streams = model().devices[stream->device].streams;
  auto found = std::find(streams.begin(), streams.end(), stream);
  if (found == streams.end() || found == streams.begin()) return Result::invalid_handle;
  streams.erase(found);
  delete stream;
  return Result::ok;
}

Result enqueue(Stream* stream, int64_t duration_ns, std::function<void()> work) {
  if (stream == nullptr) return is_forked() ? Result::forked : Result::invalid_handle;
  {
    Guard guard(model().mutex);
    if (stream->capture != nullptr) {
      if (stream->capture->invalidated) return Result::capture_invalidated;
      add_node(stream, duration_ns, std::move(work));
      return Result::ok;
    }
    occupy(stream, duration_ns);
  }
  if (work) work();
  return Result::ok;
}

Result wait_for_stream(Stream* stream) {
  if (stream == nullptr) return is_forked() ? Result::forked : Result::invalid_handle;
  int64_t until;
  {
    Guard guard(model().mutex);
    if (stream->capture != nullptr) return stream->capture->invalidated = true, Result::capture_unsafe;
    if (Result r = check_unsafe(); r != Result::ok) return r;
    until = stream->busy_until_ns;
  }
  sleep_until(until);
  return Result::ok;
}

Result query_stream(Stream* stream) {
  if (stream == nullptr) return is_forked() ? Result::forked : Result::invalid_handle;
  Guard guard(model().mutex);
  if (stream->capture != nullptr) return stream->capture->invalidated = true, Result::capture_unsafe;
  if (Result r = check_unsafe(); r != Result::ok) return r;
  return stream->busy_until_ns <= now_ns() ? Result::ok : Result::not_ready;
}

Result wait_for_device(int device) {
  if (Result r = ready(device); r != Result::ok) return r;
  int64_t until = 0;
  {
    Guard guard(model().mutex);
    if (Result r = check_unsafe(); r != Result::ok) return r;
    until = now_ns();
    for (Stream* stream : model().devices[device].streams) until = std::max(until, stream->busy_until_ns);
  }
  sleep_until(until);
  return Result::ok;
}

Result record(Event* event, Stream* stream) {
  if (stream == nullptr) return is_forked() ? Result::forked : Result::invalid_handle;
  Guard guard(model().mutex);
  event->recorded = true;
  event->captured_in = 0;
  event->queries_left = settings().event_queries;
  if (stream->capture != nullptr) {
    event->captured_in = stream->capture->id;
    event->last = stream->last;
  } else {
    event->time_ns = std::max(stream->busy_until_ns, now_ns());
  }
  return Result::ok;
}

Result wait_on_device(Stream* stream, Event* event) {
  if (stream == nullptr) return is_forked() ? Result::forked : Result::invalid_handle;
  Guard guard(model().mutex);
  if (event->captured_in != 0) {
    for (Capture* capture : model().captures) {
      if (capture->id != event->captured_in) continue;
      if (stream->capture != nullptr && stream->capture != capture) return capture->invalidated = true, Result::unmatched;
      stream->capture = capture;
      stream->last.insert(stream->last.end(), event->last.begin(), event->last.end());
      return Result::ok;
    }
    return Result::captured_event;
  }
  if (stream->capture != nullptr) {
    if (!event->recorded) return Result::ok;
    return stream->capture->invalidated = true, Result::capture_isolation;
  }
  if (event->recorded) stream->busy_until_ns = std::max(stream->busy_until_ns, event->time_ns);
  return Result::ok;
}

Result query(Event* event) {
  Guard guard(model().mutex);
  if (model().is_forked) return Result::forked;
  if (event->captured_in != 0) return Result::captured_event;
  if (Result r = check_unsafe(); r != Result::ok) return r;
  if (!event->recorded) return Result::ok;
  if (event->queries_left > 0 && event->time_ns > model().waited_until_ns) return --event->queries_left, Result::not_ready;
  return event->time_ns <= now_ns() ? Result::ok : Result::not_ready;
}

Result wait_for_event(Event* event) {
  int64_t until;
  {
    Guard guard(model().mutex);
    if (model().is_forked) return Result::forked;
    if (event->captured_in != 0) return Result::captured_event;
    if (Result r = check_unsafe(); r != Result::ok) return r;
    until = event->recorded ? event->time_ns : 0;
  }
  sleep_until(until);
  return Result::ok;
}

Result elapsed_ms(Event* start, Event* end, float* ms) {
  Guard guard(model().mutex);
  if (!start->timed || !end->timed || !start->recorded || !end->recorded) return Result::invalid_handle;
  if (start->captured_in != 0 || end->captured_in != 0) return Result::captured_event;
  const int64_t now = now_ns();
  if (start->time_ns > now || end->time_ns > now) return Result::not_ready;
  *ms = static_cast<float>(static_cast<double>(end->time_ns - start->time_ns) * 1e-6);
  return Result::ok;
}

// ---- capture and graphs --------------------------------------------------------------------------------------------

int& thread_capture_mode() {
  thread_local int mode = 0;   // cudaStreamCaptureModeGlobal
  return mode;
}

Result potentially_unsafe() {
  Guard guard(model().mutex);
  return check_unsafe();
}

Result begin_capture(Stream* stream, int mode) {
  if (stream == nullptr || stream == &model().devices[stream->device].default_stream) return Result::capture_unsafe;
  Guard guard(model().mutex);
  if (stream->capture != nullptr) return Result::illegal_state;
  auto* capture = new Capture{model().next_capture++, stream, this_thread(), mode, false, new Graph};
  model().captures.push_back(capture);
  stream->capture = capture;
  stream->last.clear();
  return Result::ok;
}

Result end_capture(Stream* stream, Graph** graph) {
  *graph = nullptr;
  if (stream == nullptr || stream->capture == nullptr || stream->capture->origin != stream) return Result::illegal_state;
  Guard guard(model().mutex);
  Capture* capture = stream->capture;
  if (capture->mode != 2 && capture->thread != this_thread()) return Result::capture_wrong_thread;
  for (Device& device : model().devices)
    for (Stream* other : device.streams)
      if (other->capture == capture) {
        other->capture = nullptr;
        other->last.clear();
      }
  auto& captures = model().captures;
  captures.erase(std::find(captures.begin(), captures.end(), capture));
  const bool invalidated = capture->invalidated;
  if (invalidated)
    delete capture->graph;
  else
    *graph = capture->graph;
  delete capture;
  return invalidated ? Result::capture_invalidated : Result::ok;
}

Result launch(const std::vector<Node*>& nodes, Stream* stream) {
  if (stream == nullptr) return is_forked() ? Result::forked : Result::invalid_handle;
  for (Node* node : nodes)
    if (Result r = enqueue(stream, node->duration_ns, node->work); r != Result::ok) return r;
  return Result::ok;
}

}  // namespace nullcuda

// What a test may ask of the device, or change, while it runs (ctypes.CDLL("libcuda.so.1")).
extern "C" {
NULLCUDA_API size_t nullcuda_used(int device) {
  nullcuda::Guard guard(nullcuda::model().mutex);
  return nullcuda::model().devices[device].used;
}
// As if another process took memory of the device or gave it back.
NULLCUDA_API void nullcuda_take(int device, int64_t size) {
  nullcuda::ready(device);
  nullcuda::Guard guard(nullcuda::model().mutex);
  nullcuda::model().devices[device].used += static_cast<size_t>(size);
}
}
