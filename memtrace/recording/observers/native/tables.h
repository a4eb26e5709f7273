// From what was collected to the columns of the trace's tables.
#pragma once

#include <deque>

#include "state.h"

namespace memtrace {

struct EventColumns {
  std::vector<int64_t> time_ns, block, size, address, op, stream;
  std::vector<int16_t> thread;
  std::vector<int8_t> kind, device;

  void reserve(size_t rows) {
    for (auto* column : {&time_ns, &block, &size, &address, &op, &stream}) column->reserve(rows);
    thread.reserve(rows);
    for (auto* column : {&kind, &device}) column->reserve(rows);
  }
};

struct OpColumns {
  std::vector<int64_t> op, start_ns, duration_ns, sequence_nr;
  std::vector<int32_t> name, module, stack;
  std::vector<int16_t> thread;
  std::vector<int8_t> phase, recompute;

  void reserve(size_t rows) {
    for (auto* column : {&op, &start_ns, &duration_ns, &sequence_nr}) column->reserve(rows);
    for (auto* column : {&name, &module, &stack}) column->reserve(rows);
    thread.reserve(rows);
    for (auto* column : {&phase, &recompute}) column->reserve(rows);
  }
};

struct SpanColumns {
  std::vector<int64_t> start_ns, duration_ns, index;
  std::vector<int32_t> name;
  std::vector<int16_t> thread;
  std::vector<int8_t> kind;
};

struct LabelColumns {
  std::vector<int64_t> block;
  std::vector<int32_t> name;
  std::vector<int8_t> category;
};

struct Tables {
  EventColumns events;
  OpColumns ops;
  SpanColumns spans;
  LabelColumns labels;
};

// Gives blocks their identity and backward operators the module and stack of their forward operators.
// Used by one thread at a time, in the order in which things happened.
class Resolver {
 public:
  void add(const std::vector<Event>& events, std::vector<int64_t> streams, Tables& out);
  void add(const std::vector<OpCall>& ops, Tables& out);
  void add(const std::vector<Span>& spans, Tables& out);
  int64_t num_blocks() const { return next_block_; }

 private:
  struct Live {
    int64_t block, size;
    int8_t device;
    bool foreign;
    uint16_t labels;   // a bit for each category already told
  };
  struct Forward {
    int64_t sequence_nr, sequence_end;
    int32_t module, stack;
  };
  void row(const Event& event, EventKind kind, int64_t block, int8_t device, int64_t size, EventColumns& out);
  Live& begin(const Event& event, EventKind kind, EventColumns& out);
  void end(const Event& event, Tables& out);
  const Forward* forward_of(const OpCall& call) const;

  std::unordered_map<uint64_t, Live> live_;
  std::unordered_map<uint64_t, std::deque<Forward>> forward_;
  std::vector<int64_t> streams_;
  int64_t next_block_ = 0;
};

}  // namespace memtrace
