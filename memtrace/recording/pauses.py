"""Pauses a recording between the steps that are recorded, and lists the live blocks where it goes on.

A pause is an end of the recording in all but the trace: hooks, dispatcher mode and allocator are removed, and only the
optimizer hook that counts the steps stays. What the recorder knows stays known: the frees of known blocks are recorded
during the pause, and where the recording goes on, the search among the live objects that every recording begins with
adds the blocks that were allocated in between. The trace shows the pause as a span of kind ``gap``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Final

import torch

from memtrace.format.schema import SPAN_KINDS
from memtrace.recording.background import BackgroundTask
from memtrace.recording.hook_errors import describe_error
from memtrace.recording.hooks import install_hooks

if TYPE_CHECKING:
    from memtrace.recording.out_of_memory import FailedAllocation
    from memtrace.recording.recorder import Recorder

logger = logging.getLogger("memtrace")
_GAP: Final = SPAN_KINDS.index("gap")


class Pauses:
    """Pauses and resumes one recording. Every method may be interrupted and called again.

    Args:
        recorder: the recording.

    Attributes:
        failed_allocation: what ended the program, if memory ran out; recorded if that was during a pause.
        resumed_ns: time from which on everything was observed after the last pause, ns.
        is_paused: whether nothing is observed at the moment.
        hooks: removes the hooks that are installed while the recording is not paused.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.is_paused = False
        self.failed_allocation: FailedAllocation | None = None
        self.hooks = ExitStack()
        self._recorder = recorder
        self._paused_ns = 0
        self.resumed_ns = 0
        self._lock = threading.Lock()  # only threads of memtrace's wait for it
        self._task: BackgroundTask | None = None

    def install(self) -> None:
        """Install the hooks."""
        recorder = self._recorder
        install_hooks(recorder.observer, recorder.labeller, self.hooks)

    def pause(self) -> None:
        """Observe nothing from now on. Called on the thread that is recorded."""
        self._recorder.observer.pause()
        self._run(self._finish_pause)

    def _finish_pause(self) -> None:
        with self._lock:
            recorder = self._recorder
            if self.is_paused or not recorder.is_running:
                return
            self._paused_ns = recorder.observer.now()
            self.hooks.close()
            if recorder.cuda is not None:
                recorder.cuda.pause()
            self.is_paused = True

    def resume(self) -> None:
        """Observe again. Called on the thread that is recorded."""
        try:
            self._recorder.observer.resume()
        except RuntimeError as error:
            self._recorder.stop(f"the recording could not be resumed: {describe_error(error)}")
            with suppress(Exception):  # a handler of the program's
                logger.warning("memtrace: recording stopped, training continues: %s", describe_error(error))
            return
        self._run(self._finish_resume)

    def _finish_resume(self) -> None:
        with self._lock:
            recorder = self._recorder
            if not self.is_paused or not recorder.is_running:
                return
            self.hooks = ExitStack()
            self.install()
            if recorder.cuda is not None:
                recorder.cuda.resume()
            self._list_state()
            self.is_paused = False

    def _list_state(self) -> None:
        """Record what is live, and the gap that ends here; the next part of the trace begins with it."""
        recorder = self._recorder
        labeller, protect = recorder.labeller, recorder.labeller.errors.protect
        if recorder.cuda is not None:
            recorder.cuda.list_state()
        protect(labeller.label_existing_tensors)()
        protect(labeller.label_live_optimizers)()
        protect(labeller.label_remaining_gradients)()
        self.resumed_ns = recorder.observer.now()
        recorder.observer.span(_GAP, -1, self._paused_ns, self.resumed_ns, -1)
        self._paused_ns = self.resumed_ns
        if recorder.writer is not None:
            recorder.writer.begin_part()

    def end(self) -> None:
        """Remove the hooks, and list what is live if the recording ends during a pause."""
        with self._lock:
            self.hooks.close()
            if self.is_paused:
                self._list_state()
                self.is_paused = False
                if (failed := self.failed_allocation) is not None:
                    self._recorder.observer.allocation_failed(failed.device, failed.size, failed.free)

    def save(self) -> threading.Event | None:
        """Bring the trace on disk up to date, also during a pause; called on a thread of memtrace's.

        Returns:
            Set when the trace is written; None if there is none.
        """
        with self._lock:
            recorder = self._recorder
            if not recorder.is_running or recorder.writer is None:
                return None
            if self.is_paused:
                self._list_state()
            else:
                recorder.labeller.errors.protect(recorder.labeller.label_remaining_gradients)()
                recorder.read_totals()
            return recorder.writer.begin_part(save=True)

    def must_observe(self) -> bool:
        """Return whether a recording inside this one runs, which is recorded whatever the schedule of this one."""
        return any(nested.has_started for nested in list(self._recorder.nested))

    def num_optimizers(self) -> int:
        """Return the number of live optimizers."""
        return len(self._recorder.observer.live_instances((torch.optim.Optimizer,))[0])

    def _run(self, work: Callable[[], None]) -> None:
        """Do work that an interrupt must not end half-way; what an interrupt left running is finished first."""
        if self._task is not None:
            self._task.finish()
        task = self._task = BackgroundTask(work)
        task.finish()
        if task.error is not None:
            self._recorder.labeller.errors.report(f"a pause of the recording failed: {describe_error(task.error)}")

    def abandon(self) -> None:
        """Remove the hooks in a forked child, where another thread may have held the lock."""
        self._lock = threading.Lock()
        self.hooks.close()
