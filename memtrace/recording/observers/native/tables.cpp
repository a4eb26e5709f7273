#include "tables.h"

#include <algorithm>
#include <bit>

namespace memtrace {
namespace {

// Number of autograd nodes that are kept for their backward operators: larger than any graph seen so far, at most 4 MB.
constexpr size_t kMaxForwardCalls = 1 << 17;

// Rules of the CUDA caching allocator, in bytes. build.py defines them from memtrace/allocator/rules.py, their only home.
constexpr int64_t kRounding = MEMTRACE_MIN_BLOCK_BYTES;
constexpr int64_t kSmall = MEMTRACE_SMALL_REQUEST_BYTES;
constexpr int kMiBWidth = 21;   // bits of 1 MiB, the first power of two that has divisions of its own
static_assert(kSmall == MEMTRACE_MAX_SLACK_BYTES, "allocate() uses one constant for both");

bool is_whole_segment(EventKind kind) { return kind == EventKind::segment_alloc || kind == EventKind::older_segment; }
bool is_segment_event(EventKind kind) {
  return (kind >= EventKind::segment_alloc && kind <= EventKind::snapshot) || kind == EventKind::older_segment;
}

// The bytes that a request counts for: round_size of memtrace/allocator/rules.py.
int64_t round_request(int64_t requested, const std::vector<int64_t>& divisions) {
  int64_t step = kRounding;
  if (!divisions.empty() && requested >= kRounding) {
    const int width = std::bit_width(static_cast<uint64_t>(requested));
    const int64_t count = divisions[std::min(static_cast<size_t>(std::max(width - kMiBWidth, 0)), divisions.size() - 1)];
    if (count > 1 && (requested - 1) / kRounding >= count)
      step = (int64_t{1} << (width - 1)) >> (std::bit_width(static_cast<uint64_t>(count)) - 1);
  }
  return std::max<int64_t>((requested + step - 1) / step, 1) * step;
}

// Makes room for more rows in the columns that are filled, by less than doubling: a part's columns are large.
template <typename Columns>
void make_room(Columns& columns, size_t num_more) {
  const size_t num_rows = columns.num_rows(), wanted = num_rows + num_more;
  columns.each([&](const char*, auto& column, ColumnForm) {
    const bool is_filled = num_rows > 0 && column.size() == num_rows;
    if (is_filled && column.capacity() < wanted) column.reserve(std::max(wanted, num_rows + num_rows / 4));
  });
}

}  // namespace

void EventColumns::begin_cuda() {
  has_cuda = true;
  allocated_size = size;   // torch's CPU allocator allocates exactly the requested size
  stream.assign(size.size(), kNone);
  pool.assign(size.size(), kNone);
  device_free.assign(size.size(), kNone);
}

void CudaBlockSizes::map(int8_t device, uint64_t begin, uint64_t end) {
  auto part = mapped_ends_.upper_bound({device, begin});
  if (part != mapped_ends_.begin()) {
    const auto before = std::prev(part);
    if (before->first.first == device && before->second >= begin) {
      begin = before->first.second;
      end = std::max(end, before->second);
      mapped_ends_.erase(before);
    }
  }
  while (part != mapped_ends_.end() && part->first.first == device && part->first.second <= end) {
    end = std::max(end, part->second);
    part = mapped_ends_.erase(part);
  }
  mapped_ends_[{device, begin}] = end;
}

void CudaBlockSizes::unmap(int8_t device, uint64_t begin, uint64_t end) {
  auto part = mapped_ends_.upper_bound({device, begin});
  if (part != mapped_ends_.begin()) --part;
  while (part != mapped_ends_.end() && (part->first < Key{device, end})) {
    const auto [part_key, part_end] = *part;
    if (part_key.first != device || part_end <= begin) {
      ++part;
      continue;
    }
    part = mapped_ends_.erase(part);
    if (part_key.second < begin) mapped_ends_[part_key] = begin;
    if (part_end > end) mapped_ends_[{device, end}] = part_end;
  }
}

bool CudaBlockSizes::is_mapped(int8_t device, uint64_t address) const {
  auto part = mapped_ends_.upper_bound({device, address});
  if (part == mapped_ends_.begin()) return false;
  --part;
  return part->first.first == device && address < part->second;
}

int64_t CudaBlockSizes::allocate(int8_t device, uint64_t address, int64_t requested) {
  const auto block = live_.insert_or_assign({device, address}, true).first;
  if (!settings_.divisions) return kNone;
  const int64_t rounded = round_request(requested, *settings_.divisions);
  if (rounded <= kSmall || is_mapped(device, address)) return rounded;
  auto segment = segments_.upper_bound({device, address});
  if (segment == segments_.begin()) return kNone;
  --segment;
  const auto& [key, size] = *segment;
  const uint64_t segment_end = key.second + static_cast<uint64_t>(size);
  if (key.first != device || address >= segment_end) return kNone;
  const auto next = std::next(block);
  const bool has_neighbour = next != live_.end() && next->first.first == device && next->first.second < segment_end;
  const uint64_t limit = has_neighbour ? next->first.second : segment_end;
  const auto gap = static_cast<int64_t>(limit - address) - rounded;
  const bool never_split = settings_.max_split_size > 0 && rounded >= settings_.max_split_size;
  return gap > 0 && (gap <= kSmall || never_split) ? rounded + gap : rounded;
}

std::unordered_set<uint64_t> Resolver::cuda_blocks() const {
  std::unordered_set<uint64_t> addresses;
  for (const auto& [address, block] : live_)
    if (block.device > 0) addresses.insert(address);
  return addresses;
}

void Resolver::add_row(const Event& event, EventKind kind, const Live& block, EventColumns& out) {
  const bool is_access = kind == EventKind::read || kind == EventKind::write;
  const bool is_oom = kind == EventKind::oom;
  const bool has_stream = event.kind != EventKind::label && event.detail != kNone;
  const StreamPool location = has_stream ? stream_pools_[static_cast<size_t>(event.detail)] : StreamPool{kNone, kNone};
  if (block.device > 0 && !out.has_cuda) out.begin_cuda();
  out.time_ns.push_back(event.time_ns);
  out.kind.push_back(static_cast<int8_t>(kind));
  out.device.push_back(block.device);
  out.block_id.push_back(block.block);
  out.size.push_back(is_access ? kNone : block.size);
  out.address.push_back(is_access || is_oom || event.address == 0 ? kNone : static_cast<int64_t>(event.address));
  const bool has_op = kind != EventKind::baseline && event.kind != EventKind::label && event.kind != EventKind::found;
  out.op_id.push_back(has_op ? event.op : kNone);
  out.thread.push_back(event.thread);
  if (!out.has_cuda) return;
  out.allocated_size.push_back(is_access ? kNone : block.allocated_size);
  out.stream.push_back(location.stream);
  out.pool.push_back(location.pool);
  out.device_free.push_back(is_oom ? static_cast<int64_t>(event.address) : kNone);
}

int64_t Resolver::allocated_size(const Event& event, EventKind kind) {
  if (event.device == 0) return event.size;   // torch's CPU allocator allocates exactly the requested size
  const bool is_listed = event.kind == EventKind::baseline || event.kind == EventKind::found;
  if (kind == EventKind::alloc && !is_listed) return cuda_sizes_.allocate(event.device, event.address, event.size);
  cuda_sizes_.add_block(event.device, event.address);
  return is_listed ? event.op : kNone;
}

Resolver::Live& Resolver::begin_block(const Event& event, EventKind kind, EventColumns& out) {
  auto [entry, is_new] = live_.try_emplace(event.address);
  if (!is_new) add_row(event, EventKind::free, entry->second, out);
  entry->second = Live{next_block_++, event.size, allocated_size(event, kind), event.device, event.foreign, 0};
  add_row(event, kind, entry->second, out);
  return entry->second;
}

void Resolver::end_block(const Event& event, Tables& out) {
  auto entry = live_.find(event.address);
  if (entry == live_.end()) {
    if (event.size == 0) return;   // older than the recording and of unknown size
    begin_block(event, EventKind::baseline, out.events);
    entry = live_.find(event.address);
  }
  if (event.foreign && !entry->second.foreign) return;   // the address belongs to a new block by now
  add_row(event, EventKind::free, entry->second, out.events);
  if (entry->second.device > 0) cuda_sizes_.free(entry->second.device, event.address);
  live_.erase(entry);
}

void Resolver::add_segment_event(const Event& event, EventColumns& out) {
  const uint64_t end = event.address + static_cast<uint64_t>(event.size);
  const bool is_expandable_and_older = event.kind == EventKind::older_segment && event.op == 1;
  if (event.kind == EventKind::segment_map || is_expandable_and_older) {
    cuda_sizes_.map(event.device, event.address, end);
  } else if (is_whole_segment(event.kind)) {
    cuda_sizes_.add_segment(event.device, event.address, event.size);
  } else if (event.kind == EventKind::segment_free) {
    cuda_sizes_.remove_segment(event.device, event.address);
  } else if (event.kind == EventKind::segment_unmap) {
    cuda_sizes_.unmap(event.device, event.address, end);
  }
  if (event.kind == EventKind::older_segment) return;
  add_row(event, event.kind, Live{kNone, event.size, kNone, event.device, false, 0}, out);
}

void Resolver::add(const std::vector<Event>& events, std::vector<StreamPool> stream_pools, Tables& out) {
  stream_pools_ = std::move(stream_pools);
  make_room(out.events, events.size());
  for (const Event& event : events) {
    if (event.kind == EventKind::free) {
      end_block(event, out);
      continue;
    }
    if (event.kind == EventKind::alloc) {
      begin_block(event, EventKind::alloc, out.events);
      continue;
    }
    if (is_segment_event(event.kind)) {
      add_segment_event(event, out.events);
      continue;
    }
    auto entry = live_.find(event.address);
    if (event.kind == EventKind::foreign_seen || event.kind == EventKind::found) {
      if (entry == live_.end()) begin_block(event, EventKind::alloc, out.events);
      continue;
    }
    if (entry == live_.end()) {
      if (event.size == 0) continue;
      // The allocation of NumPy memory or shared memory is not seen: it counts as allocated at the first access.
      const bool is_alloc = event.foreign && event.kind != EventKind::baseline;
      begin_block(event, is_alloc ? EventKind::alloc : EventKind::baseline, out.events);
      entry = live_.find(event.address);
    }
    Live& block = entry->second;
    if (event.kind == EventKind::label) {
      const auto bit = static_cast<uint16_t>(1u << event.op);
      if (block.labels & bit) continue;
      block.labels |= bit;
      out.labels.block_id.push_back(block.block);
      out.labels.category.push_back(static_cast<int8_t>(event.op));
      out.labels.name.push_back(event.detail);
    } else if (event.kind != EventKind::baseline) {
      add_row(event, event.kind, block, out.events);
    }
  }
}

const Resolver::Forward* Resolver::forward_of(const OpCall& call) const {
  auto thread = forward_.find(call.forward_thread);
  if (thread == forward_.end()) return nullptr;
  const std::deque<Forward>& calls = thread->second;
  auto after = std::upper_bound(calls.begin(), calls.end(), call.sequence_nr,
                                [](int64_t number, const Forward& forward) { return number < forward.sequence_nr; });
  if (after == calls.begin()) return nullptr;
  const Forward& forward = *(after - 1);
  return call.sequence_nr < forward.sequence_end ? &forward : nullptr;
}

void Resolver::add(const std::vector<OpCall>& ops, Tables& out) {
  OpColumns& columns = out.ops;
  make_room(columns, ops.size());
  for (const OpCall& call : ops) {
    int32_t module = call.module, stack = call.stack;
    if (call.num_nodes > 0) {
      std::deque<Forward>& calls = forward_[call.forward_thread];
      const Forward forward{call.sequence_nr, call.sequence_nr + call.num_nodes, call.module, call.stack};
      // Calls are recorded when they end, so a call that is seen through follows those within it.
      auto place = calls.end();
      while (place != calls.begin() && (place - 1)->sequence_nr > forward.sequence_nr) --place;
      calls.insert(place, forward);
      if (calls.size() > kMaxForwardCalls) calls.pop_front();
    } else if (call.phase == Phase::backward && !call.recompute && call.sequence_nr >= 0) {
      if (const Forward* forward = forward_of(call)) {
        if (!call.has_site) module = forward->module;
        if (stack == kNone) stack = forward->stack;
      }
    }
    if (!call.has_accesses) continue;
    columns.op_id.push_back(call.op);
    columns.name.push_back(call.name);
    columns.start_ns.push_back(call.start_ns);
    columns.duration_ns.push_back(call.duration_ns);
    columns.thread.push_back(call.thread);
    columns.module.push_back(module);
    columns.phase.push_back(static_cast<int8_t>(call.phase));
    columns.stack.push_back(stack);
    columns.sequence_nr.push_back(call.sequence_nr >= 0 ? call.sequence_nr : kNone);
    columns.recompute.push_back(call.recompute);
  }
}

void Resolver::add(const std::vector<Span>& spans, Tables& out) {
  for (const Span& span : spans) {
    out.spans.kind.push_back(static_cast<int8_t>(span.kind));
    out.spans.name.push_back(span.name);
    out.spans.start_ns.push_back(span.start_ns);
    out.spans.duration_ns.push_back(span.duration_ns);
    out.spans.thread.push_back(span.thread);
    out.spans.index.push_back(span.index);
  }
}

}  // namespace memtrace
