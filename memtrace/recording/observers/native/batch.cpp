#include "batch.h"

#include <bit>
#include <memory>
#include <string_view>
#include <utility>

namespace memtrace {
namespace {

struct ColumnObject {
  PyObject_HEAD
  BatchColumn* column;
};

PyTypeObject* column_type = nullptr;

int get_buffer(PyObject* self, Py_buffer* view, int flags) {
  const BatchColumn& column = *reinterpret_cast<ColumnObject*>(self)->column;
  return PyBuffer_FillInfo(view, self, const_cast<void*>(column.data), static_cast<Py_ssize_t>(column.num_bytes),
                           /*readonly=*/1, flags);
}

void deallocate(PyObject* self) {
  delete reinterpret_cast<ColumnObject*>(self)->column;
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

template <typename Value, typename IsSet>
std::vector<uint8_t> pack_bits(const std::vector<Value>& values, IsSet&& is_set) {
  std::vector<uint8_t> bits((values.size() + 7) / 8);
  const size_t num_whole = values.size() / 8;
  for (size_t byte = 0; byte < num_whole; ++byte) {
    const Value* eight = values.data() + 8 * byte;
    unsigned packed = 0;
    for (unsigned i = 0; i < 8; ++i) packed |= static_cast<unsigned>(is_set(eight[i])) << i;
    bits[byte] = static_cast<uint8_t>(packed);
  }
  for (size_t i = 8 * num_whole; i < values.size(); ++i)
    bits[num_whole] |= static_cast<uint8_t>(is_set(values[i]) << (i % 8));
  return bits;
}

template <typename Value>
void add(std::vector<BatchColumn>& out, std::string name, std::vector<Value>&& values) {
  out.push_back(make_column(std::move(name), std::move(values)));
}

template <typename Value>
void add_column(std::vector<BatchColumn>& out, std::string_view name, std::vector<Value>& values, ColumnForm form) {
  const std::string key(name);
  if (form == ColumnForm::boolean) {
    add(out, key + ".bits", pack_bits(values, [](Value value) { return value != 0; }));
  } else if (form != ColumnForm::known) {
    std::vector<uint8_t> valid = pack_bits(values, [](Value value) { return value != kNone; });
    size_t num_valid = 0;
    for (const uint8_t byte : valid) num_valid += static_cast<size_t>(std::popcount(byte));
    if (num_valid == 0 && form == ColumnForm::optional) return;
    if (num_valid < values.size()) add(out, key + ".valid", std::move(valid));
  }
  add(out, key, std::move(values));
}

// Columns that nobody filled are left out: they are null.
template <typename Columns>
void add_table(std::vector<BatchColumn>& out, Columns& columns) {
  const size_t num_rows = columns.num_rows();
  if (num_rows == 0) return;
  columns.each([&](std::string_view name, auto& values, ColumnForm form) {
    if (values.size() == num_rows) add_column(out, name, values, form);
  });
}

}  // namespace

std::vector<BatchColumn> batch_columns(Batch&& batch) {
  Tables& tables = batch.tables;
  LiveChanges& changes = batch.changes;
  std::vector<BatchColumn> out;
  add(out, "changes.event_rows", std::move(changes.event_rows));
  add(out, "changes.event_order_ns", std::move(changes.event_order_ns));
  add(out, "changes.op_rows", std::move(changes.op_rows));
  add(out, "changes.level_device", std::move(changes.level_device));
  add(out, "changes.level_time_ns", std::move(changes.level_time_ns));
  add(out, "changes.level_bytes", std::move(changes.level_bytes));
  add_table(out, tables.ops);
  add_table(out, tables.spans);
  add_table(out, tables.labels);
  add_table(out, tables.device_times);
  add_table(out, tables.events);
  return out;
}

PyObject* column_object(BatchColumn&& column) {
  PyObject* object = column_type->tp_alloc(column_type, 0);
  if (object != nullptr) reinterpret_cast<ColumnObject*>(object)->column = new BatchColumn(std::move(column));
  return object;
}

bool put_columns(PyObject* dict, std::vector<BatchColumn>&& columns) {
  for (BatchColumn& column : columns) {
    const std::string name = column.name;
    PyObject* object = column_object(std::move(column));
    if (object == nullptr) return false;
    const bool ok = PyDict_SetItemString(dict, name.c_str(), object) == 0;
    Py_DECREF(object);
    if (!ok) return false;
  }
  return true;
}

bool prepare_column_type() {
  static PyType_Slot slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(deallocate)},
                                {0, nullptr}};
  static PyType_Spec spec = {"memtrace_native.Column", sizeof(ColumnObject), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  column_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return column_type != nullptr;
}

}  // namespace memtrace
