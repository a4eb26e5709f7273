#include "state.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

namespace memtrace {

int32_t Names::id(NameKind kind, std::string_view text) {
  std::string key(1, static_cast<char>('0' + static_cast<int>(kind)));
  key.append(text);
  std::lock_guard<std::mutex> lock(mutex_);
  auto [entry, is_new] = ids_.try_emplace(std::move(key), next_);
  if (is_new) new_rows_.push_back({next_++, kind, std::string(text), {}});
  return entry->second;
}

int32_t Names::add_stack(std::vector<int32_t> frames) {
  std::lock_guard<std::mutex> lock(mutex_);
  new_rows_.push_back({next_, NameKind::stack, {}, std::move(frames)});
  return next_++;
}

std::vector<Names::Row> Names::take_new() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(new_rows_, {});
}

void Names::clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  ids_.clear();
  new_rows_.clear();
  next_ = 0;
}

namespace {

void before_fork() { recorder().mutex.lock(); }
void after_fork_in_parent() { recorder().mutex.unlock(); }
// A forked child, such as a DataLoader worker, has no writer thread, so it must not record.
void after_fork_in_child() {
  recorder().active = false;
  recorder().mutex.unlock();
}

}  // namespace

Recorder* const the_recorder = [] {
  pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
  return new Recorder;
}();

// Leaked on purpose, a few hundred bytes per thread: blocks are still freed while a thread's local storage is destroyed.
thread_local ThreadState* thread_state_or_null = nullptr;

void Recorder::notify_writer_if_due() {
  if (writer_notified || events.size() + ops.size() < options.wake_records) return;
  writer_notified = true;
  wake_writer.notify_one();
}

void Recorder::add(const Event& event) {
  Lock lock(mutex);
  if (!active) return;
  events.push_back(event);
  notify_writer_if_due();
}

void Recorder::add(const Span& span) {
  Lock lock(mutex);
  if (!active) return;
  spans.push_back(span);
}

ThreadState& reset_thread_state() {
  Recorder& r = recorder();
  ThreadState*& state = thread_state_or_null;
  if (state == nullptr) state = new ThreadState;
  *state = ThreadState{};
  state->epoch = r.epoch.load(std::memory_order_relaxed);
  char name[16] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  Lock lock(r.mutex);
  state->index = static_cast<int16_t>(std::min<size_t>(r.threads.size(), INT16_MAX));
  r.threads.push_back(state);
  r.names.id(NameKind::thread, std::to_string(state->index) + "\t" + name);
  state->is_autograd_worker = std::string_view(name).rfind("pt_autograd", 0) == 0;
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
