#include "state.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

namespace memtrace {

int32_t Names::id(NameKind kind, std::string_view text) noexcept {
  int32_t id = kNone;
  record_or_give_up([&] {
    std::string key(1, static_cast<char>('0' + static_cast<int>(kind)));
    key.append(text);
    std::lock_guard<ForkSafeMutex> lock(mutex_);
    auto known = ids_.find(key);
    if (known == ids_.end()) {
      new_rows_.push_back({next_, kind, std::string(text), {}});   // first: an id without a row must not exist
      known = ids_.emplace(std::move(key), next_++).first;
    }
    id = known->second;
  });
  return id;
}

int32_t Names::add_stack(std::vector<int32_t> frames) noexcept {
  int32_t id = kNone;
  record_or_give_up([&] {
    std::lock_guard<ForkSafeMutex> lock(mutex_);
    new_rows_.push_back({next_, NameKind::stack, {}, std::move(frames)});
    id = next_++;
  });
  return id;
}

std::vector<Names::Row> Names::take_new() {
  std::lock_guard<ForkSafeMutex> lock(mutex_);
  return std::exchange(new_rows_, {});
}

void Names::clear() {
  std::lock_guard<ForkSafeMutex> lock(mutex_);
  ids_.clear();
  new_rows_.clear();
  next_ = 0;
}

namespace {

struct ForkSafeMutexes {
  std::vector<ForkSafeMutex*> outer, inner;
};

ForkSafeMutexes& fork_safe_mutexes() {
  static auto* all = new ForkSafeMutexes;
  return *all;
}

void before_fork() {
  for (ForkSafeMutex* mutex : fork_safe_mutexes().outer) mutex->lock();
  recorder().mutex.lock();
  for (ForkSafeMutex* mutex : fork_safe_mutexes().inner) mutex->lock();
}

void after_fork_in_parent() {
  for (ForkSafeMutex* mutex : fork_safe_mutexes().inner) mutex->unlock();
  recorder().mutex.unlock();
  for (ForkSafeMutex* mutex : fork_safe_mutexes().outer) mutex->unlock();
}

// A forked child, such as a DataLoader worker, has no writer thread, so it must not record.
void after_fork_in_child() {
  Recorder& r = recorder();
  r.active = r.paused = false;
  // Threads of the parent may have held the locks inside these; nobody waits for them in the child.
  new (&r.wake_writer) std::condition_variable_any;
  new (&r.buffer_taken) std::condition_variable_any;
  after_fork_in_parent();
}

// Makes room for records and writes to it, so that the first records need not wait for the system to provide the pages.
template <typename Record>
void make_room(std::vector<Record>& records, size_t count) {
  const size_t num_records = records.size();
  if (records.capacity() >= count) return;
  records.resize(count);
  records.resize(num_records);
}

// Fetches the memory of records that follow soon. The writer's processor used it last, and where a store has to wait for
// it, the next lock waits for the store.
template <typename Record>
void prefetch_after(const std::vector<Record>& records) {
  constexpr size_t distance = 384 / sizeof(Record);
  __builtin_prefetch(records.data() + records.size() + distance, 1);
}

}  // namespace

ForkSafeMutex::ForkSafeMutex(Order order) {
  (order == Order::outer ? fork_safe_mutexes().outer : fork_safe_mutexes().inner).push_back(this);
}

Recorder* const the_recorder = [] {
  auto* created = new Recorder;
  pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
  return created;
}();

// Leaked on purpose, a few hundred bytes per thread: blocks are still freed while a thread's local storage is destroyed.
constinit thread_local ThreadState* thread_state_or_null = nullptr;

void Recorder::notify_writer() {
  writer_notified = true;
  wake_writer.notify_one();
}

void Recorder::prepare_buffers() {
  Lock lock(mutex);
  try {
    // Twice what the writer takes at a time, because it comes late at times.
    for (std::vector<Event>* buffer : {&events, &spare_events}) make_room(*buffer, 2 * options.collect_records);
    for (std::vector<OpCall>* buffer : {&ops, &spare_ops}) make_room(*buffer, options.collect_records);
  } catch (const std::bad_alloc&) {
    // They grow, then.
  }
}

void Recorder::wake_writer_now() {
  Lock lock(mutex);
  must_wake = true;
  wake_writer.notify_all();
}

void Recorder::add(const Event& event) noexcept {
  Lock lock(mutex);
  if (!runs()) return;
  push(event);
  notify_writer_if_due();
}

void Recorder::add(const Span& span) noexcept {
  Lock lock(mutex);
  if (!runs()) return;
  push(span);
}

void Recorder::push(const Event& event) noexcept {
  record_or_give_up([&] { events.push_back(event); });
  prefetch_after(events);
}
void Recorder::push(const OpCall& call) noexcept {
  record_or_give_up([&] { ops.push_back(call); });
  prefetch_after(ops);
}
void Recorder::push(const Span& span) noexcept {
  record_or_give_up([&] { spans.push_back(span); });
}

void Recorder::give_up(const char* reason) noexcept {
  const char* none = nullptr;
  failure.compare_exchange_strong(none, reason);
  active = paused = false;
  wake_writer.notify_all();
  buffer_taken.notify_all();
}

int16_t thread_index_or_none() {
  return has_thread_state() ? thread_state_or_null->index : kNone;
}

ThreadState& reset_thread_state() {
  Recorder& r = recorder();
  ThreadState*& state = thread_state_or_null;
  if (state == nullptr) state = new ThreadState;
  const ThreadState previous{.recording = state->recording, .index = state->index};
  *state = ThreadState{};
  state->epoch = r.epoch.load(std::memory_order_relaxed);
  state->recording = r.recording.load(std::memory_order_relaxed);
  char name[16] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  state->is_autograd_worker = std::string_view(name).rfind("pt_autograd", 0) == 0;
  if (previous.recording == state->recording) {   // the recording was paused in between
    state->index = previous.index;
    return *state;
  }
  Lock lock(r.mutex);
  state->index = static_cast<int16_t>(std::min<size_t>(r.threads.size(), INT16_MAX));
  r.threads.push_back(state);
  r.names.id(NameKind::thread, std::to_string(state->index) + "\t" + name);
  return *state;
}

Phase current_phase(const ThreadState& thread) {
  const bool in_module = thread.modules.size() > thread.modules_outside;
  if (thread.backward_calls > 0 || thread.is_autograd_worker) return Phase::backward;
  if (thread.optimizer_ranges > 0 && !in_module) return Phase::optimizer;
  return in_module ? Phase::forward : Phase::other;
}

void end_forward(ThreadState& thread) {
  if (thread.forward_start == kNone) return;
  Recorder& r = recorder();
  r.add(Span{thread.forward_start, thread.forward_end - thread.forward_start, kNone,
             r.names.id(NameKind::range, "forward"), thread.index, SpanKind::phase});
  thread.forward_start = kNone;
}

}  // namespace memtrace
