// Converts recorded events, calls and spans to the columns of the trace's tables.
#pragma once

#include <deque>
#include <map>

#include "columns.h"
#include "state.h"

namespace memtrace {

// events_columns, ops_columns, ...: one vector per column of the tables in memtrace/format/schema.py. The header is
// generated when the observer is built. A column that is left empty is null in every row.
// Until there is an event of a CUDA device the columns allocated_size, stream, pool and device_free stay empty:
// allocated_size is size then, the others are null.
struct EventColumns : events_columns {
  bool has_cuda = false;
  void begin_cuda();   // fills these columns for the rows so far
};
using OpColumns = ops_columns;
using SpanColumns = spans_columns;
using LabelColumns = labels_columns;
using DeviceTimeColumns = device_times_columns;

struct Tables {
  EventColumns events;
  OpColumns ops;
  SpanColumns spans;
  LabelColumns labels;
  DeviceTimeColumns device_times;
};

// Computes the sizes of CUDA blocks, which the allocator's events do not contain. In the pool of large blocks, free
// blocks are larger than 1 MiB and free neighbours are merged, so a smaller gap after a block belongs to that block.
class CudaBlockSizes {
 public:
  void set_settings(const CudaSettings& settings) { settings_ = settings; }
  void add_segment(int8_t device, uint64_t address, int64_t size) { segments_[{device, address}] = size; }
  void remove_segment(int8_t device, uint64_t address) { segments_.erase({device, address}); }
  // Part of an expandable segment is mapped or unmapped; what is unmapped can be any part of what was mapped at once.
  void map(int8_t device, uint64_t begin, uint64_t end);
  void unmap(int8_t device, uint64_t begin, uint64_t end);
  // The size of a block that is allocated now; kNone if it is unknown.
  int64_t allocate(int8_t device, uint64_t address, int64_t requested);
  void add_block(int8_t device, uint64_t address) { live_[{device, address}] = true; }
  void free(int8_t device, uint64_t address) { live_.erase({device, address}); }

 private:
  using Key = std::pair<int8_t, uint64_t>;
  bool is_mapped(int8_t device, uint64_t address) const;

  std::map<Key, bool> live_;
  std::map<Key, int64_t> segments_;      // sizes; without expandable segments
  std::map<Key, uint64_t> mapped_ends_;  // mapped parts of expandable segments: disjoint and not adjacent
  CudaSettings settings_;
};

// Assigns block ids, and gives backward operators the module and stack of their forward operators.
// Must be used by one thread at a time, with records in the order of time.
class Resolver {
 public:
  void add(const std::vector<Event>& events, std::vector<StreamPool> stream_pools, Tables& out);
  void add(const std::vector<OpCall>& ops, Tables& out);
  void add(const std::vector<Span>& spans, Tables& out);
  void set_settings(const CudaSettings& settings) { cuda_sizes_.set_settings(settings); }
  std::unordered_set<uint64_t> cuda_blocks() const;   // the addresses of the live blocks

 private:
  struct Live {
    int64_t block, size, allocated_size;
    int8_t device;
    bool foreign;
    uint16_t labels;   // one bit for each category that was recorded
  };
  struct Forward {
    int64_t sequence_nr, sequence_end;
    int32_t module, stack;
  };
  void add_row(const Event& event, EventKind kind, const Live& block, EventColumns& out);
  void add_segment_event(const Event& event, EventColumns& out);
  int64_t allocated_size(const Event& event, EventKind kind);
  Live& begin_block(const Event& event, EventKind kind, EventColumns& out);
  void end_block(const Event& event, Tables& out);
  const Forward* forward_of(const OpCall& call) const;

  std::unordered_map<uint64_t, Live> live_;
  std::unordered_map<uint64_t, std::deque<Forward>> forward_;
  std::vector<StreamPool> stream_pools_;
  CudaBlockSizes cuda_sizes_;
  int64_t next_block_ = 0;
};

}  // namespace memtrace
