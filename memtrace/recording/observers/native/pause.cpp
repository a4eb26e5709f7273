// During a pause torch runs as if there were no recording: no dispatcher mode, no wrapped allocator. What stays are the
// deleters of the blocks that are known, so that a block whose address is used again is not taken for the new one.
#include "pause.h"

#include <exception>

#include "dispatch.h"
#include "marks.h"
#include "python_handlers.h"
#include "state.h"

namespace memtrace {

// pause(): called on the thread that is recorded
PyObject* pause(PyObject*, PyObject*) {
  Recorder& r = recorder();
  enable_thread(false);
  if (!r.active) Py_RETURN_NONE;
  record_or_give_up([&] {
    ThreadState& thread = thread_state();
    end_forward(thread);
    while (!thread.ranges.empty()) exit_range(thread);   // a pause often begins within an optimizer's range
  });
  record_collections();
  {
    Lock lock(r.mutex);
    r.cuda_blocks.clear();
    r.knows_cuda_blocks = false;
    r.was_paused = true;
    r.paused = true;
    r.active = false;
  }
  install_cpu_allocator(false);
  see_operators_of_python_handlers(false);
  r.wake_writer_now();   // it takes what the window has left, and lists the CUDA blocks
  Py_RETURN_NONE;
}

// resume(): called on the thread that is recorded; other threads follow at their first allocation
PyObject* resume(PyObject*, PyObject*) {
  Recorder& r = recorder();
  if (r.active || !r.paused) Py_RETURN_NONE;
  try {
    install_cpu_allocator(true);
  } catch (const std::exception& error) {
    return fail(error.what());
  }
  see_operators_of_python_handlers(true);
  r.prepare_buffers();
  r.epoch++;   // what threads were doing is not known any more
  thread_state();
  {
    Lock lock(r.mutex);
    r.active = true;
    r.paused = false;
  }
  enable_thread(true);
  Py_RETURN_NONE;
}

void record_known_cuda_free(uint64_t address, int8_t device) {
  Recorder& r = recorder();
  Lock lock(r.mutex);
  if (r.knows_cuda_blocks && r.cuda_blocks.erase(address) == 0) return;
  // Of size 0: the free of a block that is not known is ignored.
  r.push(Event{r.now(), address, 0, kNone, kNone, kNone, device, EventKind::free, false});
  r.notify_writer_if_due();
}

}  // namespace memtrace
