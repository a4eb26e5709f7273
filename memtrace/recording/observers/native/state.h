// The shared state of the native observer: what one event, operator call and span are, the buffer they
// are collected in, and what is known of each thread. Light on purpose: only the standard library.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <vector>

namespace memtrace {

// The order is that of memtrace.format.schema.EVENT_KINDS; `label` and `older_segment` never leave the observer as events.
enum class EventKind : int8_t {
  alloc, free, read, write, baseline, free_requested, segment_alloc, segment_free, segment_map, segment_unmap,
  oom, snapshot, label, older_segment
};
enum class Phase : int8_t { forward, backward, optimizer, other };         // memtrace.format.schema.PHASES
enum class SpanKind : int8_t { step, phase, module, data_wait, range, action };  // memtrace.format.schema.SPAN_KINDS
enum class NameKind : int8_t { op, module, tensor, frame, stack, thread, range };  // memtrace.format.schema.NAME_KINDS

constexpr int kNone = -1;

// Both are kept small: an operator-bound program makes half a million of them a second.
struct Event {
  int64_t time_ns;
  uint64_t address;  // of an oom: what the device had free
  int64_t size;
  int64_t op;        // the call; of a label its category, of a baseline its allocated size, of an older segment
                     // whether it is expandable
  int32_t detail;    // of a label its name; else the index of its place in `Recorder::places`, or kNone
  int16_t thread;
  int8_t device;     // 0 = cpu, 1 + i = cuda:i
  EventKind kind : 7;
  bool foreign : 1;  // memory that no traced allocator gave out (NumPy, shared memory)
};

struct OpCall {
  int64_t op, start_ns, duration_ns;
  int64_t sequence_nr;      // of the first node it made, or of the one it runs in
  uint32_t num_nodes;       // how many it made
  uint32_t forward_thread;  // whose numbers sequence_nr counts
  int32_t name, module, stack;
  int16_t thread;
  Phase phase;
  bool recompute : 1;
  bool touched_blocks : 1;  // false: kept only so that its backward operator finds its module
};

struct Span {
  int64_t start_ns, duration_ns, index;
  int32_t name;
  int16_t thread;
  SpanKind kind;
};

// Where CUDA's allocator put a block: a block never leaves its stream and its pool.
struct Place {
  int64_t stream, pool;
  bool operator==(const Place&) const = default;
};

// What of the CUDA allocator's settings decides how long a block is.
struct CudaSettings {
  bool rounds_to_512 = true;       // false: roundup_power2_divisions is set
  int64_t max_split_size = kNone;
};

struct OpenRange {
  int32_t name;
  int64_t start_ns;
  bool optimizer, data_wait;
};

struct ThreadState {
  uint32_t epoch = 0;                                    // the recording it belongs to
  int16_t index = 0;
  int64_t current_op = kNone;
  int64_t op_allocated_bytes = 0;
  std::vector<uint64_t> op_blocks;                       // live blocks allocated by the current operator
  std::vector<std::pair<int32_t, int64_t>> modules;      // name, start
  std::vector<OpenRange> ranges;
  int backward_calls = 0, optimizer_ranges = 0, wait_ranges = 0;
  bool autograd_worker = false;                          // a thread of the autograd engine
  size_t modules_outside = 0;                            // module depth at which backward or the optimizer began
  int64_t forward_start = kNone, forward_end = kNone;    // the forward phase that is running
};

struct Options {
  bool accesses = true;
  bool stacks = true;
  int64_t stack_min_bytes = 0;
  size_t wake_records = 1 << 16;    // the writer is woken at this many records
  size_t limit_records = 1 << 19;   // a training thread waits for the writer at this many
  int64_t device_time_min_bytes = kNone;   // kNone: no device times
};

// Interned names of one recording; the writer takes the new ones with every drain.
class Names {
 public:
  int32_t id(NameKind kind, std::string_view text);
  int32_t add_stack(std::vector<int32_t> frames);
  struct Row {
    int32_t id;
    NameKind kind;
    std::string text;
    std::vector<int32_t> frames;
  };
  std::vector<Row> take_new();
  void clear();

 private:
  std::mutex mutex_;
  std::unordered_map<std::string, int32_t> ids_;
  std::vector<Row> new_rows_;
  int32_t next_ = 0;
};

// Held for tens of nanoseconds, several times an operator: half the price of a std::mutex.
class SpinLock {
 public:
  void lock() {
    for (int tries = 0; held_.exchange(true, std::memory_order_acquire); ++tries)
      if (tries > 64) std::this_thread::yield();
  }
  void unlock() { held_.store(false, std::memory_order_release); }

 private:
  std::atomic<bool> held_{false};
};

using Lock = std::lock_guard<SpinLock>;

struct Recorder {
  std::atomic<bool> active{false};
  std::atomic<bool> overrun{false};        // the writer did not keep up: recording ended itself
  std::atomic<uint32_t> epoch{0};          // counts recordings: what a thread kept of an older one is stale
  std::atomic<int64_t> next_op{0};
  Options options;
  std::chrono::steady_clock::time_point t0;
  Names names;

  std::condition_variable_any wake_writer, buffer_taken;
  SpinLock mutex;                          // guards all below
  bool writer_told = false;                // that there is much to write
  std::vector<Place> places;               // CUDA streams and pools seen
  CudaSettings cuda_settings;
  std::vector<Event> events;
  std::vector<OpCall> ops;
  std::vector<Span> spans;
  std::vector<Event> spare_events;         // buffers that were drained: fresh memory would cost page faults
  std::vector<OpCall> spare_ops;
  std::vector<ThreadState*> threads;

  int64_t now() const {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - t0).count();
  }
  void add(const Event& event);            // takes the mutex
  void add(const Span& span);
  void notify_if_due();                    // call with the mutex held
};

extern Recorder* const the_recorder;   // never destroyed: blocks outlive every recording
inline Recorder& recorder() { return *the_recorder; }

extern thread_local ThreadState* thread_state_or_null;
ThreadState& fresh_thread_state();
// Of the calling thread, fresh for every recording.
inline ThreadState& thread_state() {
  ThreadState* state = thread_state_or_null;
  const bool current = state != nullptr && state->epoch == recorder().epoch.load(std::memory_order_relaxed);
  return current ? *state : fresh_thread_state();
}

Phase current_phase(const ThreadState& thread);
void end_forward(ThreadState& thread);
void wait_for_writer();        // back pressure; called where no lock is held

// The pieces that are switched on for a recording and off after it.
void install_dispatch_mode();               // throws std::runtime_error when another mode holds the key
void enable_thread(bool on);
bool thread_enabled();
void install_cpu_allocator(bool on);        // throws std::runtime_error when the allocator cannot be wrapped
void release_foreign();
bool cuda_supported();
void attach_cuda_allocator();
// names.id of the calling thread's Python stack, or kNone. Where a lock may be held it must not wait for the GIL.
int32_t python_stack(bool may_wait);
void release_stacks();

}  // namespace memtrace
