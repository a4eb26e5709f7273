// What a batch changes in the live set: the few rows that still matter after the whole batch, found in one pass without
// the interpreter lock. Training threads and the writer would hand that lock to each other at every NumPy call.
#pragma once

#include "tables.h"

namespace memtrace {

struct LiveChanges {
  // Rows of events, ascending: beginnings of blocks that live on, frees of older blocks, the first read of such blocks in
  // each phase, what is no event of a block, and the last row. With each the largest time so far.
  std::vector<int32_t> event_rows;
  std::vector<int64_t> event_order_ns;
  std::vector<int32_t> op_rows;   // the operator calls that rows like these refer to, those of earlier batches included
  // The live bytes of each device minus those before the batch, as points in the order of time: the highest level from a
  // time on, until the next point. The last point of a device is exact.
  std::vector<int8_t> level_device;
  std::vector<int64_t> level_time_ns, level_bytes;
};

// The rows that the writer takes at once.
struct Batch {
  Tables tables;
  LiveChanges changes;
};

class LiveChangesFinder {
 public:
  // Throws std::bad_alloc. Batches must come in their order.
  LiveChanges find(const Tables& batch);

 private:
  std::unordered_set<int64_t> running_ops_;   // operator calls that rows so far refer to, and whose own row is to come
};

}  // namespace memtrace
