// The stored forms of columns of events (memtrace/format/stored.py), in one pass without the interpreter lock.
#pragma once

#include <Python.h>

namespace memtrace {

// event_forms(kind, time_ns, block_id, block_is_known, address, address_is_known, newest_block, keyframe_block_id,
// keyframe_address) -> (elapsed_ns, block_reference, address_is_stored), the arguments and results of find_event_forms as
// objects with the buffer protocol: int8 kinds, int64 numbers, int32 references, bytes of 0 and 1. An empty time_ns is None.
PyObject* event_forms(PyObject*, PyObject* arguments);

}  // namespace memtrace
