#include "tables.h"

#include <algorithm>

namespace memtrace {
namespace {

// Nodes of a forward pass whose backward is still to come: more than any graph seen, and 4 MB at most.
constexpr size_t kForwardKept = 1 << 17;

bool about_segment(EventKind kind) { return kind >= EventKind::segment_alloc && kind <= EventKind::snapshot; }

}  // namespace

void Resolver::row(const Event& event, EventKind kind, int64_t block, int8_t device, int64_t size, EventColumns& out) {
  const bool access = kind == EventKind::read || kind == EventKind::write;
  out.time_ns.push_back(event.time_ns);
  out.kind.push_back(static_cast<int8_t>(kind));
  out.device.push_back(device);
  out.block.push_back(block);
  out.size.push_back(access ? kNone : size);
  out.address.push_back(access || event.address == 0 ? kNone : static_cast<int64_t>(event.address));
  out.op.push_back(kind == EventKind::baseline ? kNone : event.op);
  out.stream.push_back(event.kind == EventKind::label || event.detail == kNone ? kNone : streams_[static_cast<size_t>(event.detail)]);
  out.thread.push_back(event.thread);
}

Resolver::Live& Resolver::begin(const Event& event, EventKind kind, EventColumns& out) {
  auto [found, fresh] = live_.try_emplace(event.address);
  if (!fresh) row(event, EventKind::free, found->second.block, found->second.device, found->second.size, out);
  found->second = Live{next_block_++, event.size, event.device, event.foreign, 0};
  row(event, kind, found->second.block, event.device, event.size, out);
  return found->second;
}

void Resolver::end(const Event& event, Tables& out) {
  auto found = live_.find(event.address);
  if (found == live_.end()) {
    if (event.size == 0) return;   // older than the recording, and its size was never learned
    begin(event, EventKind::baseline, out.events);
    found = live_.find(event.address);
  }
  if (event.foreign && !found->second.foreign) return;   // the address has a new owner since
  row(event, EventKind::free, found->second.block, found->second.device, found->second.size, out.events);
  live_.erase(found);
}

void Resolver::add(const std::vector<Event>& events, std::vector<int64_t> streams, Tables& out) {
  streams_ = std::move(streams);
  out.events.reserve(events.size() + events.size() / 16);
  for (const Event& event : events) {
    if (event.kind == EventKind::free) {
      end(event, out);
      continue;
    }
    if (event.kind == EventKind::alloc) {
      begin(event, EventKind::alloc, out.events);
      continue;
    }
    if (about_segment(event.kind)) {
      row(event, event.kind, kNone, event.device, event.size, out.events);
      continue;
    }
    auto found = live_.find(event.address);
    if (found == live_.end()) {
      if (event.size == 0) continue;
      // NumPy's and shared memory begins, for us, when it is first seen.
      begin(event, event.foreign && event.kind != EventKind::baseline ? EventKind::alloc : EventKind::baseline, out.events);
      found = live_.find(event.address);
    }
    Live& block = found->second;
    if (event.kind == EventKind::label) {
      const auto bit = static_cast<uint16_t>(1u << event.op);
      if (block.labels & bit) continue;
      block.labels |= bit;
      out.labels.block.push_back(block.block);
      out.labels.category.push_back(static_cast<int8_t>(event.op));
      out.labels.name.push_back(event.detail);
    } else if (event.kind != EventKind::baseline) {
      row(event, event.kind, block.block, block.device, block.size, out.events);
    }
  }
}

const Resolver::Forward* Resolver::forward_of(const OpCall& call) const {
  auto thread = forward_.find(call.forward_thread);
  if (thread == forward_.end()) return nullptr;
  const std::deque<Forward>& made = thread->second;
  auto after = std::upper_bound(made.begin(), made.end(), call.sequence_nr,
                                [](int64_t number, const Forward& forward) { return number < forward.sequence_nr; });
  if (after == made.begin()) return nullptr;
  const Forward& forward = *(after - 1);
  return call.sequence_nr < forward.sequence_end ? &forward : nullptr;
}

void Resolver::add(const std::vector<OpCall>& ops, Tables& out) {
  OpColumns& columns = out.ops;
  columns.reserve(ops.size());
  for (const OpCall& call : ops) {
    int32_t module = call.module, stack = call.stack;
    if (call.num_nodes > 0) {
      std::deque<Forward>& made = forward_[call.forward_thread];
      made.push_back({call.sequence_nr, call.sequence_nr + call.num_nodes, call.module, call.stack});
      if (made.size() > kForwardKept) made.pop_front();
    } else if (call.phase == Phase::backward && !call.recompute && call.sequence_nr >= 0) {
      if (const Forward* forward = forward_of(call)) {
        module = forward->module;
        if (stack == kNone) stack = forward->stack;
      }
    }
    if (!call.touched_blocks) continue;
    columns.op.push_back(call.op);
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
