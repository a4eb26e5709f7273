#pragma once

namespace memtrace {

// Python handlers of operators (`__torch_dispatch__` of modes and tensor subclasses) run with all modes excluded. While a
// recording runs, the operators that they call are recorded. Does nothing if this torch is unknown.
void see_operators_of_python_handlers(bool on);

}  // namespace memtrace
