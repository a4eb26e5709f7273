// The batch that the writer gets: Python objects that own the columns, so that nothing is copied.
#pragma once

#include <Python.h>

#include "live_changes.h"

namespace memtrace {

// A column, or the validity bitmap of one: memory and what keeps it alive.
struct BatchColumn {
  std::string name;
  std::shared_ptr<const void> owner;
  const void* data;
  size_t num_bytes;
};

// Returns the columns under "table.column", the bitmaps of nullable ones with nulls under "table.column.valid", and those
// of booleans under "table.column.bits", least significant bit first. Columns of nothing but nulls are left out. What the
// batch changes in the live set is under "changes.column". Needs no interpreter lock. Throws std::bad_alloc.
std::vector<BatchColumn> batch_columns(Batch&& batch);

// Adds the columns to a dictionary as objects with the buffer protocol; false after a Python error.
bool put_columns(PyObject* dict, std::vector<BatchColumn>&& columns);

// Prepares the type of these objects; false after a Python error.
bool prepare_column_type();

}  // namespace memtrace
