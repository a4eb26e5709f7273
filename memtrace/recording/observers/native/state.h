// The shared state of the native observer: events, operator calls and spans, the buffer that collects them, and the
// state of each thread. Includes nothing of torch, so that it compiles quickly.
#pragma once

#include <array>
#include <atomic>
#include <bitset>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "clock.h"

namespace memtrace {

// In the order of memtrace.format.schema.EVENT_KINDS. The last four are internal: `label` and `older_segment`
// create no events, `foreign_seen` is the first sight of memory from outside torch, `found` that of a block that was
// allocated during a pause.
enum class EventKind : int8_t {
  alloc, free, read, write, baseline, free_requested, segment_alloc, segment_free, segment_map, segment_unmap,
  oom, snapshot, label, older_segment, foreign_seen, found
};
// For kinds in a column of events.
inline bool is(int8_t kind, EventKind wanted) { return kind == static_cast<int8_t>(wanted); }
inline bool begins_block(int8_t kind) { return is(kind, EventKind::alloc) || is(kind, EventKind::baseline); }
enum class Phase : int8_t { forward, backward, optimizer, other };         // memtrace.format.schema.PHASES
enum class SpanKind : int8_t { step, phase, module, data_wait, range, action, gap };  // memtrace.format.schema.SPAN_KINDS
enum class NameKind : int8_t { op, module, tensor, frame, stack, thread, range };  // memtrace.format.schema.NAME_KINDS

// How the blocks of CUDA devices become known. Until it is decided, accesses to them are not recorded: without their
// frees, every block would seem to live until the end.
enum class CudaSource : int8_t {
  undecided,
  events,     // the events of torch's caching allocator
  history,    // the same events, read afterwards from torch's history: without operators and threads
  storages    // the storages of tensors, for allocators that report no events
};

constexpr int kNone = -1;
constexpr int kGradientCategory = MEMTRACE_GRADIENT_CATEGORY;   // index into memtrace.format.schema.CATEGORIES
constexpr const char* kNoMemory = "there is no memory left for the records";

// Event and OpCall are kept small: an operator-bound program creates half a million of them per second.
struct Event {
  int64_t time_ns;
  uint64_t address;  // oom: free bytes of the device
  int64_t size;
  int64_t op;        // operator call; label: category, baseline, found: allocated size, older_segment: 1 if expandable
  int32_t detail;    // label: name id; otherwise index into `Recorder::stream_pools`, or kNone
  int16_t thread;
  int8_t device;     // 0 = cpu, 1 + i = cuda:i
  EventKind kind : 7;
  bool foreign : 1;  // memory that does not come from a traced allocator (NumPy, shared memory)
};

struct OpCall {
  int64_t op, start_ns, duration_ns;
  int64_t sequence_nr;      // first autograd node that the call created, or the node that it runs in
  uint32_t num_nodes;       // number of autograd nodes that the call created
  uint32_t forward_thread;  // thread to which sequence_nr belongs: every thread counts its own nodes
  int32_t name, module, stack;
  int16_t thread;
  Phase phase;
  bool recompute : 1;
  bool has_accesses : 1;    // false: recorded only so that its backward operators get its module and stack
  bool has_site : 1;        // `module` is that of the generated code which made the call
};

struct Span {
  int64_t start_ns, duration_ns, index;
  int32_t name;
  int16_t thread;
  SpanKind kind;
};

// Stream and memory pool of a CUDA block; both are fixed for the lifetime of the block.
struct StreamPool {
  int64_t stream, pool;
  bool operator==(const StreamPool&) const = default;
};

// The settings of the CUDA allocator that determine block sizes.
struct CudaSettings {
  // roundup_power2_divisions: a count for each power of two from 1 MiB, empty if it is not set; no value: unknown.
  std::optional<std::vector<int64_t>> divisions{std::in_place};
  int64_t max_split_size = kNone;
};

// While a recording attaches to the CUDA allocator, the blocks and segments that exist are read from a snapshot of the
// allocator. What happens on a device before its snapshot is taken is in the snapshot; what happens after is recorded.
struct CudaAttachment {
  bool in_progress = false;
  bool is_resumed = false;         // whether blocks are known already, whose frees count from here on
  std::bitset<128> has_snapshot;   // by device
  size_t position = 0;             // where the content of the snapshot belongs in `Recorder::events`
};

struct OpenRange {
  int32_t name;
  int64_t start_ns;
  bool optimizer, data_wait;
};

// Ids of the Python stacks that a thread met last, by hash.
class StackCache {
 public:
  const int32_t* find(uint64_t hash) const {
    const Entry& entry = entries_[hash % entries_.size()];
    return entry.hash == hash ? &entry.id : nullptr;
  }
  void put(uint64_t hash, int32_t id) { entries_[hash % entries_.size()] = {hash, id}; }

 private:
  struct Entry {
    uint64_t hash = 0;
    int32_t id = kNone;
  };
  std::array<Entry, 4096> entries_;
};

struct ThreadState {
  uint32_t epoch = 0;                                    // number of the window that this state belongs to
  uint32_t recording = 0;                                // number of the recording that the index belongs to
  int16_t index = 0;
  int64_t current_op = kNone;
  int64_t op_start_ns = kNone;                           // of the current operator; the writer reads it: use atomic_ref
  int64_t op_allocated_bytes = 0;
  bool op_freed = false;                                 // whether the current operator freed a block
  std::vector<uint64_t> op_blocks;                       // live blocks allocated by the current operator
  std::vector<std::pair<int32_t, int64_t>> modules;      // name id and start of each module call
  std::vector<OpenRange> ranges;
  int backward_calls = 0, optimizer_ranges = 0, wait_ranges = 0;
  int64_t first_node = INT64_MAX;                        // first autograd node recorded within the call that is seen through
  bool is_autograd_worker = false;                       // whether this is a thread of the autograd engine
  size_t modules_outside = 0;                            // depth of module calls at the start of backward or optimizer
  int64_t forward_start = kNone, forward_end = kNone;    // start, and end so far, of the current forward phase
  std::unique_ptr<StackCache> stacks;
};

struct Options {
  bool accesses = true;
  bool stacks = true;
  int64_t stack_min_bytes = 0;
  size_t collect_records = 1 << 14;  // number of records that the writer collects at a time
  size_t wake_records = 1 << 16;     // number of records at which the writer is woken
  size_t limit_records = 1 << 18;    // number of records at which a training thread waits for the writer
  int64_t device_time_min_bytes = kNone;   // kNone: no device times
};

// A mutex that the thread which forks holds while it forks, so that a child finds what the mutex guards intact. A thread
// may take a ForkSafeMutex while it holds an outer one, but not the other way round.
class ForkSafeMutex {
 public:
  enum class Order { outer, inner };
  explicit ForkSafeMutex(Order order = Order::outer);
  void lock() { mutex_.lock(); }
  bool try_lock() { return mutex_.try_lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  std::mutex mutex_;
};

// Interned names of one recording. Every drain takes the new names. Without memory for a name its id is kNone.
class Names {
 public:
  int32_t id(NameKind kind, std::string_view text) noexcept;
  int32_t add_stack(std::vector<int32_t> frames) noexcept;
  struct Row {
    int32_t id;
    NameKind kind;
    std::string text;
    std::vector<int32_t> frames;
  };
  std::vector<Row> take_new();
  void clear();

 private:
  ForkSafeMutex mutex_{ForkSafeMutex::Order::inner};
  std::unordered_map<std::string, int32_t> ids_;
  std::vector<Row> new_rows_;
  int32_t next_ = 0;
};

// Taken several times per operator and held for tens of nanoseconds; half the cost of a std::mutex.
class SpinLock {
 public:
  void lock() {
    for (int tries = 0; is_locked_.exchange(true, std::memory_order_acquire); ++tries)
      if (tries > 64) std::this_thread::yield();
  }
  void unlock() { is_locked_.store(false, std::memory_order_release); }

 private:
  std::atomic<bool> is_locked_{false};
};

using Lock = std::lock_guard<SpinLock>;

struct Recorder {
  std::atomic<bool> active{false};         // whether events are recorded
  std::atomic<bool> paused{false};         // whether the recording goes on, and records frees of known blocks only
  std::atomic<const char*> failure{nullptr};   // why the recording ended by itself
  std::atomic<uint32_t> recording{0};      // number of the recording, whose names have ids of their own
  std::atomic<uint32_t> epoch{0};          // number of the window, across recordings; older thread state is stale
  std::atomic<int64_t> next_op{0};
  std::atomic<CudaSource> cuda_source{CudaSource::undecided};
  Options options;
  Clock clock;
  Names names;

  std::condition_variable_any wake_writer, buffer_taken;
  SpinLock mutex;                          // guards everything below
  bool writer_notified = false;            // whether the writer was woken since the last drain
  bool must_wake = false;                  // whether `wake` was called since the writer last waited
  std::vector<StreamPool> stream_pools;    // CUDA streams and pools seen so far
  CudaSettings cuda_settings;
  CudaAttachment cuda_attachment;
  std::vector<Event> events;
  std::vector<OpCall> ops;
  std::vector<Span> spans;
  std::vector<Event> spare_events;         // drained buffers, whose memory the system does not have to provide again
  std::vector<OpCall> spare_ops;
  std::vector<ThreadState*> threads;
  bool was_paused = false;                 // whether blocks that are first listed were allocated during a pause
  bool knows_cuda_blocks = false;          // whether `cuda_blocks` is known; only during a pause
  std::unordered_set<uint64_t> cuda_blocks;   // CUDA blocks whose frees are recorded during the pause

  bool runs() const { return active.load(std::memory_order_relaxed) || paused.load(std::memory_order_relaxed); }
  int64_t now() const { return clock.now(); }
  void add(const Event& event) noexcept;   // locks the mutex
  void add(const Span& span) noexcept;
  void push(const Event& event) noexcept;  // requires the mutex
  void push(const OpCall& call) noexcept;
  void push(const Span& span) noexcept;
  void notify_writer_if_due() {            // requires the mutex
    if (!writer_notified && events.size() + ops.size() >= options.wake_records) [[unlikely]] notify_writer();
  }
  void prepare_buffers();                  // locks the mutex; before records come
  void wake_writer_now();                  // locks the mutex
  void give_up(const char* reason) noexcept;   // ends the recording; the program goes on

 private:
  void notify_writer();
};

extern Recorder* const the_recorder;   // never destroyed: blocks can be freed after the recording
inline Recorder& recorder() { return *the_recorder; }

extern constinit thread_local ThreadState* thread_state_or_null;
ThreadState& reset_thread_state();
// The state of the calling thread; reset for every recording.
inline ThreadState& thread_state() {
  ThreadState* state = thread_state_or_null;
  const bool is_current = state != nullptr && state->epoch == recorder().epoch.load(std::memory_order_relaxed);
  return is_current ? *state : reset_thread_state();
}

inline bool has_thread_state() {
  const ThreadState* state = thread_state_or_null;
  return state != nullptr && state->epoch == recorder().epoch.load(std::memory_order_relaxed);
}

// The index of the calling thread; kNone if it has no state yet, such as memtrace's own threads.
int16_t thread_index_or_none();

// Runs `work`, which records something. If that fails (no memory for it), the recording ends and the program goes on.
template <typename Work>
void record_or_give_up(Work&& work) noexcept {
  try {
    work();
  } catch (const std::bad_alloc&) {
    recorder().give_up(kNoMemory);
  } catch (...) {
    recorder().give_up("the native observer failed");
  }
}

Phase current_phase(const ThreadState& thread);
void end_forward(ThreadState& thread);
void wait_for_writer();        // back pressure; call it without holding a lock

// The hooks that are enabled for a recording and disabled after it.
void install_dispatch_mode();               // throws std::runtime_error if another library uses the dispatch key
// Without its typed kernels every operator takes the boxed fallback, and what is recorded is the same.
void use_typed_kernels(bool on);
void enable_thread(bool on);
bool thread_enabled();
void install_cpu_allocator(bool on);        // throws std::runtime_error if the allocator cannot be wrapped
bool cuda_supported();
// The name id of the Python stack of the calling thread, or kNone. Pass may_wait = false if the caller may hold a lock:
// it must not wait for the GIL then.
int32_t python_stack(bool may_wait);
void release_stacks();

}  // namespace memtrace
