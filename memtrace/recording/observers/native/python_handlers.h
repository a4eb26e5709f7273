#pragma once

namespace memtrace {

// Python handlers of operators (`__torch_dispatch__` of modes and tensor subclasses) run with all modes excluded. While a
// recording runs, the operators that they call are recorded.
void see_operators_of_python_handlers(bool on);
// False if this version of torch calls Python in a way that was unknown when this was written.
bool sees_operators_of_python_handlers();

}  // namespace memtrace
