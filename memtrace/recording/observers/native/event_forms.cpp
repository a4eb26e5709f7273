#include "event_forms.h"   // first: it includes Python.h

#include <algorithm>
#include <optional>
#include <span>
#include <utility>

#include "batch.h"
#include "state.h"

namespace memtrace {
namespace {

// A buffer of the caller, released at the end of the scope.
class Buffer {
 public:
  ~Buffer() { PyBuffer_Release(&view); }
  template <typename Value>
  std::span<const Value> as() const {
    return {static_cast<const Value*>(view.buf), static_cast<size_t>(view.len) / sizeof(Value)};
  }
  Py_buffer view{};
};

struct EventValues {
  std::span<const int8_t> kind;
  std::span<const int64_t> time_ns, block_id;
  std::span<const uint8_t> block_is_known;
  std::span<const int64_t> address;
  std::span<const uint8_t> address_is_known;
};

struct Keyframe {
  std::span<const int64_t> block_id, address;
};

std::vector<int64_t> elapsed(std::span<const int64_t> time_ns) {
  std::vector<int64_t> out(time_ns.size());
  int64_t before = 0;
  for (size_t row = 0; row < out.size(); ++row) out[row] = time_ns[row] - std::exchange(before, time_ns[row]);
  return out;
}

std::optional<std::vector<int32_t>> references(const EventValues& events, int64_t newest_before) {
  std::vector<int32_t> out(events.block_id.size());
  int64_t newest = newest_before;
  for (size_t row = 0; row < out.size(); ++row) {
    if (!events.block_is_known[row]) continue;
    const int64_t block = events.block_id[row];
    if (block < 0 || block >= INT32_MAX || block > newest + 1) return std::nullopt;   // not numbered in their order
    if (block == newest + 1) newest = block;   // reference 0
    else out[row] = static_cast<int32_t>(block > newest_before ? newest - block + 1 : -1 - block);
  }
  if (out.empty() || newest >= INT32_MAX) return std::nullopt;
  return out;
}

// Any address but this one can be known, -1 included. In a keyframe, -1 is an unknown address.
constexpr int64_t kUnknownAddress = INT64_MIN;

// Addresses at which blocks began. Blocks that begin in one part have consecutive ids.
class FirstAddresses {
 public:
  FirstAddresses(const EventValues& events, const Keyframe& keyframe) {
    for (size_t row = 0; row < keyframe.block_id.size(); ++row) {
      const int64_t address = keyframe.address[row];
      if (keyframe.block_id[row] >= 0) older_[keyframe.block_id[row]] = address == -1 ? kUnknownAddress : address;
    }
    int64_t last = kNone;
    for (size_t row = 0; row < events.kind.size(); ++row) {
      if (!begins(events, row)) continue;
      first_ = std::min(first_, events.block_id[row]);
      last = std::max(last, events.block_id[row]);
    }
    const bool is_dense = last != kNone && static_cast<size_t>(last - first_) < kSparse * events.kind.size();
    if (is_dense) in_part_.assign(static_cast<size_t>(last - first_ + 1), std::nullopt);
    for (size_t row = 0; row < events.kind.size(); ++row) {
      if (!begins(events, row)) continue;
      const int64_t block = events.block_id[row];
      const int64_t address = events.address_is_known[row] ? events.address[row] : kUnknownAddress;
      if (is_dense) in_part_[static_cast<size_t>(block - first_)] = address;
      else older_[block] = address;
    }
  }
  int64_t find(int64_t block) const {
    if (block >= first_ && block - first_ < static_cast<int64_t>(in_part_.size())) {
      const std::optional<int64_t>& address = in_part_[static_cast<size_t>(block - first_)];
      if (address) return *address;
    }
    const auto known = older_.find(block);
    return known == older_.end() ? kUnknownAddress : known->second;
  }

 private:
  static constexpr size_t kSparse = 16;   // a table over a range of ids has at most this many entries for each row
  static bool begins(const EventValues& events, size_t row) {
    return begins_block(events.kind[row]) && events.block_id[row] >= 0;
  }

  int64_t first_ = INT64_MAX;
  std::vector<std::optional<int64_t>> in_part_;
  std::unordered_map<int64_t, int64_t> older_;
};

std::optional<std::vector<uint8_t>> stored_addresses(const EventValues& events, const Keyframe& keyframe) {
  std::vector<uint8_t> out(events.address_is_known.begin(), events.address_is_known.end());
  const FirstAddresses first_addresses(events, keyframe);
  for (size_t row = 0; row < out.size(); ++row) {
    if (!is(events.kind[row], EventKind::free)) continue;
    const int64_t first = first_addresses.find(events.block_id[row]);
    if (first == kUnknownAddress) continue;
    if (!events.address_is_known[row]) return std::nullopt;   // only the beginning of the block has an address
    if (first == events.address[row]) out[row] = 0;
  }
  return out;
}

template <typename Value>
PyObject* column_or_none(std::optional<std::vector<Value>>&& values) {
  if (!values) Py_RETURN_NONE;
  return column_object(make_column({}, std::move(*values)));
}

}  // namespace

PyObject* event_forms(PyObject*, PyObject* arguments) {
  Buffer kind, time_ns, block_id, block_is_known, address, address_is_known, keyframe_block_id, keyframe_address;
  long long newest_block = 0;
  if (!PyArg_ParseTuple(arguments, "y*y*y*y*y*y*Ly*y*", &kind.view, &time_ns.view, &block_id.view, &block_is_known.view,
                        &address.view, &address_is_known.view, &newest_block, &keyframe_block_id.view,
                        &keyframe_address.view))
    return nullptr;
  const EventValues events{kind.as<int8_t>(),    time_ns.as<int64_t>(), block_id.as<int64_t>(), block_is_known.as<uint8_t>(),
                           address.as<int64_t>(), address_is_known.as<uint8_t>()};
  const Keyframe keyframe{keyframe_block_id.as<int64_t>(), keyframe_address.as<int64_t>()};
  const size_t num_rows = events.kind.size();
  if (events.block_id.size() != num_rows || events.block_is_known.size() != num_rows || events.address.size() != num_rows ||
      events.address_is_known.size() != num_rows || keyframe.block_id.size() != keyframe.address.size()) {
    PyErr_SetString(PyExc_ValueError, "columns of different lengths");
    return nullptr;
  }
  std::optional<std::vector<int64_t>> elapsed_ns;
  std::optional<std::vector<int32_t>> block_reference;
  std::optional<std::vector<uint8_t>> address_is_stored;
  bool has_memory = true;
  Py_BEGIN_ALLOW_THREADS {
    try {
      if (!events.time_ns.empty()) elapsed_ns = elapsed(events.time_ns);
      block_reference = references(events, newest_block);
      address_is_stored = stored_addresses(events, keyframe);
    } catch (const std::bad_alloc&) {
      has_memory = false;
    }
  }
  Py_END_ALLOW_THREADS
  if (!has_memory) return PyErr_NoMemory();
  return Py_BuildValue("(NNN)", column_or_none(std::move(elapsed_ns)), column_or_none(std::move(block_reference)),
                       column_or_none(std::move(address_is_stored)));
}

}  // namespace memtrace
