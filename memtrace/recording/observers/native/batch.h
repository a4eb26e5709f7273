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

template <typename Value>
BatchColumn make_column(std::string name, std::vector<Value>&& values) {
  auto owner = std::make_shared<std::vector<Value>>(std::move(values));
  const void* data = owner->data();
  const size_t num_bytes = owner->size() * sizeof(Value);
  return {std::move(name), std::move(owner), data, num_bytes};
}

// Returns the columns under "table.column", the bitmaps of nullable ones with nulls under "table.column.valid", and those
// of booleans under "table.column.bits", least significant bit first. Columns of nothing but nulls are left out. What the
// batch changes in the live set is under "changes.column". Needs no interpreter lock. Throws std::bad_alloc.
std::vector<BatchColumn> batch_columns(Batch&& batch);

// Returns an object with the buffer protocol; null after a Python error. Throws std::bad_alloc.
PyObject* column_object(BatchColumn&& column);
// Adds the columns to a dictionary as such objects; false after a Python error.
bool put_columns(PyObject* dict, std::vector<BatchColumn>&& columns);

// Prepares the type of these objects; false after a Python error.
bool prepare_column_type();

}  // namespace memtrace
