#include "live_changes.h"

#include <algorithm>

namespace memtrace {
namespace {

// Calls that are waited for. Those of CUDA events that arrive late never come, so there is a limit.
constexpr size_t kMaxRunningOps = 1 << 16;
constexpr size_t kMaxLevels = 2048;   // points of a device in a batch
constexpr size_t kSparse = 16;        // a table over a range of ids has at most this many entries for each id

// The rows of a column of ids that are mostly consecutive.
class RowIndex {
 public:
  explicit RowIndex(const std::vector<int64_t>& ids) {
    if (ids.empty()) return;
    const int64_t last = *std::max_element(ids.begin(), ids.end());
    const auto range = static_cast<int64_t>(kSparse * ids.size());
    first_ = std::max(*std::min_element(ids.begin(), ids.end()), last - range);
    rows_.assign(static_cast<size_t>(last - first_ + 1), kNone);
    for (size_t row = 0; row < ids.size(); ++row) {
      if (ids[row] >= first_) rows_[static_cast<size_t>(ids[row] - first_)] = static_cast<int32_t>(row);
      else earlier_[ids[row]] = static_cast<int32_t>(row);
    }
  }
  int32_t find(int64_t id) const {
    if (id >= first_ && id - first_ < static_cast<int64_t>(rows_.size())) return rows_[static_cast<size_t>(id - first_)];
    const auto row = earlier_.find(id);
    return row == earlier_.end() ? kNone : row->second;
  }

 private:
  int64_t first_ = 0;
  std::vector<int32_t> rows_;
  std::unordered_map<int64_t, int32_t> earlier_;
};

// The blocks of a batch: which of them it frees, and in which phases it reads them. Those that begin in the batch have
// consecutive ids, in the order of its rows.
class Blocks {
 public:
  explicit Blocks(const EventColumns& events) {
    const auto first = std::find_if(events.kind.begin(), events.kind.end(), begins_block);
    if (first != events.kind.end()) {
      const auto last = std::find_if(events.kind.rbegin(), events.kind.rend(), begins_block);
      first_ = events.block_id[static_cast<size_t>(first - events.kind.begin())];
      is_freed_.resize(static_cast<size_t>(events.block_id[static_cast<size_t>(events.kind.rend() - last) - 1] - first_ + 1));
    }
    phases_read_.resize(is_freed_.size());
    for (size_t row = 0; row < events.num_rows(); ++row) {
      if (!is(events.kind[row], EventKind::free)) continue;
      const int64_t block = events.block_id[row];
      if (is_older(block)) older_freed_.insert(block);
      else is_freed_[place(block)] = true;
    }
  }
  bool is_older(int64_t block) const { return block < first_; }
  bool lives_on(int64_t block) const { return is_older(block) ? older_freed_.count(block) == 0 : !is_freed_[place(block)]; }
  // Whether the block was not read in the phase before; `phase` is a bit.
  bool is_first_read(int64_t block, uint8_t phase) {
    uint8_t& read = is_older(block) ? older_read_[block] : phases_read_[place(block)];
    const bool is_first = (read & phase) == 0;
    read |= phase;
    return is_first;
  }

 private:
  size_t place(int64_t block) const { return static_cast<size_t>(block - first_); }

  int64_t first_ = INT64_MAX;   // block that begins_block in the batch
  std::vector<uint8_t> is_freed_;
  std::vector<uint8_t> phases_read_;
  std::unordered_set<int64_t> older_freed_;
  std::unordered_map<int64_t, uint8_t> older_read_;
};

// How much a row changes the live bytes of its device.
inline int64_t change_of(const EventColumns& events, size_t row) {
  const bool grows = begins_block(events.kind[row]);
  if (!grows && !is(events.kind[row], EventKind::free)) return 0;
  const int64_t size = std::max<int64_t>(events.size[row], 0);
  return grows ? size : -size;
}

// The points of one device.
class Level {
 public:
  void count() { ++num_changes_; }
  void change(int64_t bytes, int64_t time_ns, int8_t device, LiveChanges& out) {
    if (group_size_ == 0)
      for (group_size_ = 1; num_changes_ / group_size_ > kMaxLevels;) group_size_ *= 2;
    level_ += bytes;
    const bool is_last = ++num_seen_ == num_changes_;
    if (num_in_group_ > 0 && !is_last) {
      out.level_bytes[point_] = std::max(out.level_bytes[point_], level_);
    } else {
      point_ = out.level_bytes.size();
      out.level_device.push_back(device);
      out.level_time_ns.push_back(time_ns);
      out.level_bytes.push_back(level_);
    }
    num_in_group_ = (num_in_group_ + 1) % group_size_;
  }

 private:
  size_t num_changes_ = 0, num_seen_ = 0, group_size_ = 0, num_in_group_ = 0, point_ = 0;
  int64_t level_ = 0;
};

}  // namespace

LiveChanges LiveChangesFinder::find(const Tables& batch) {
  LiveChanges out;
  const EventColumns& events = batch.events;
  const OpColumns& ops = batch.ops;
  const RowIndex row_of_op(ops.op_id);
  std::vector<bool> is_wanted(ops.num_rows());
  Blocks blocks(events);
  std::vector<Level> levels(INT8_MAX + 1);
  for (size_t row = 0; row < events.num_rows(); ++row)
    if (change_of(events, row) != 0) levels[static_cast<size_t>(events.device[row])].count();

  // Whether a read can be the first of a block in its phase. A call that is still running has no phase yet.
  const auto matters = [&](int64_t block, int32_t op_row) {
    if (op_row == kNone) return true;
    const auto phase = static_cast<Phase>(ops.phase[static_cast<size_t>(op_row)]);
    if (phase == Phase::backward && ops.recompute[static_cast<size_t>(op_row)]) return false;
    return (phase == Phase::forward || phase == Phase::backward) &&
           blocks.is_first_read(block, phase == Phase::forward ? 1 : 2);
  };
  const auto is_kept = [&](size_t row, int32_t op_row) {
    const int8_t kind = events.kind[row];
    const int64_t block = events.block_id[row];
    if (begins_block(kind)) return blocks.lives_on(block);
    if (is(kind, EventKind::free)) return blocks.is_older(block);
    if (is(kind, EventKind::read)) return blocks.lives_on(block) && matters(block, op_row);
    return !is(kind, EventKind::write);
  };

  int64_t order_ns = INT64_MIN;
  for (size_t row = 0; row < events.num_rows(); ++row) {
    order_ns = std::max(order_ns, events.time_ns[row]);
    const int64_t change = change_of(events, row);
    if (change != 0) levels[static_cast<size_t>(events.device[row])].change(change, order_ns, events.device[row], out);
    const int64_t op = events.op_id[row];
    const int32_t op_row = op == kNone ? kNone : row_of_op.find(op);
    if (!is_kept(row, op_row) && row + 1 < events.num_rows()) continue;
    out.event_rows.push_back(static_cast<int32_t>(row));
    out.event_order_ns.push_back(order_ns);
    if (op_row != kNone) is_wanted[static_cast<size_t>(op_row)] = true;
    else if (op != kNone && running_ops_.size() < kMaxRunningOps) running_ops_.insert(op);
  }
  for (size_t row = 0; row < ops.num_rows(); ++row)
    if (running_ops_.erase(ops.op_id[row]) > 0 || is_wanted[row]) out.op_rows.push_back(static_cast<int32_t>(row));
  return out;
}

}  // namespace memtrace
