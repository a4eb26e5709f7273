"""The memory of each step as scalars, for the loggers of frameworks while the recording runs.

The numbers are those of ``memtrace.analysis.measure_step_memory``, read from the parts of the trace that have been
written. A step is therefore logged some seconds after its end (``flush_seconds`` of ``memtrace.record``), and the last
ones when the recording ends.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from memtrace.errors import TraceError
from memtrace.format.schema import CATEGORIES

if TYPE_CHECKING:
    from memtrace.analysis.step_memory import StepMemory
    from memtrace.recording.session import Recording
    from memtrace.trace import Trace

logger = logging.getLogger("memtrace")
PREFIX: Final = "memtrace"
Sink = Callable[[int, dict[str, float]], None]
"""Gets the number of a step and its scalars; called on the training thread."""


def step_scalars(memory: StepMemory) -> dict[str, float]:
    """Return the scalars of a step by name, such as ``memtrace/cuda_0/peak_bytes``; unknown values are left out.

    Every device has ``peak_bytes``, ``peak_bytes_by_category/<category>``, ``reserved_bytes`` and ``growth_bytes``.
    """
    scalars: dict[str, float] = {}
    for device in memory.devices:
        prefix = f"{PREFIX}/{device.device.replace(':', '_')}"
        values = {
            "peak_bytes": device.peak_bytes,
            "reserved_bytes": device.reserved_bytes,
            "growth_bytes": device.growth_bytes,
        }
        values |= {f"peak_bytes_by_category/{name}": device.category_bytes.get(name, 0) for name in CATEGORIES}
        scalars |= {f"{prefix}/{name}": float(value) for name, value in values.items() if value is not None}
    return scalars


class ScalarStream:
    """Measures the steps of a running recording on a thread of its own, and gives them to sinks at the ends of steps.

    Args:
        recording: a recording that has been entered. The stream ends with it.
        sinks: what gets the scalars. A sink that raises is reported once and gets nothing more.

    Attributes:
        next_number: number in the framework of the step that ends next; None: the number in the trace.
    """

    def __init__(self, recording: Recording, sinks: Sequence[Sink]) -> None:
        self.next_number: int | None = None
        self._recording = recording
        self._sinks = list(sinks)
        self._numbers: dict[int, int] = {}
        self._measured: list[StepMemory] = []  # replaced, never changed, by the thread
        self._last: StepMemory | None = None
        self._numbering = 0  # counts how often the steps were numbered anew
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="memtrace-scalars", daemon=True)
        recording.subscribe(self._step_ended, self._recording_ended)
        if recording.is_recording:
            self._thread.start()

    def _step_ended(self, step: int) -> None:
        if step == 0:
            self._number_anew()
        self._numbers[step] = step if self.next_number is None else self.next_number
        if self._measured:
            self._emit()

    def _number_anew(self) -> None:
        """Forget the steps so far: there are none, or they came from optimizers and the program now marks its own."""
        with self._lock:
            self._numbering += 1
            self._numbers.clear()
            self._last, self._measured = None, []

    def _recording_ended(self) -> None:
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._measure(is_complete=True)
        self._emit()

    def _emit(self) -> None:
        with self._lock:
            measured, self._measured = self._measured, []
        for memory in measured:
            while self._numbers and next(iter(self._numbers)) < memory.step:
                self._numbers.pop(next(iter(self._numbers)))  # a ring deleted this step before it was measured
            number, scalars = self._numbers.pop(memory.step, memory.step), step_scalars(memory)
            for sink in list(self._sinks):
                try:
                    sink(number, dict(scalars))
                except Exception as error:  # noqa: PERF203 (the other sinks, and the program, must go on)
                    self._sinks.remove(sink)
                    _warn("a logger of scalars failed", error)

    def _run(self) -> None:
        while not self._is_over.wait(self._recording.flush_seconds):
            self._measure(is_complete=False)

    def _measure(self, *, is_complete: bool) -> None:
        """Measure the steps that have been written since the last call."""
        if self._has_failed or not self._sinks:
            return
        numbering = self._numbering
        try:
            new = _measure_new_steps(self._recording, self._last, is_complete=is_complete)
        except Exception as error:
            self._has_failed = True
            _warn("the memory of the steps cannot be measured", error)
            return
        with self._lock:
            if new and numbering == self._numbering:
                self._last = new[-1]
                self._measured = [*self._measured, *new]


def _measure_new_steps(recording: Recording, last: StepMemory | None, *, is_complete: bool) -> tuple[StepMemory, ...]:
    from memtrace.analysis.attribution import steps_are_marked
    from memtrace.analysis.step_memory import measure_step_memory
    from memtrace.trace import load

    try:
        window = _open_steps_after(load(recording.rank_folder), last)
        if not steps_are_marked(window):
            return ()  # steps that only the events reveal are no steps of the recording
        times = window.columns("events", "time_ns")["time_ns"]
    except (TraceError, OSError):
        return ()  # nothing new has been written yet, or a ring deleted a part that was being read
    # The events of a step can be written later than its end.
    return measure_step_memory(window, previous=last, until_ns=None if is_complete else int(times.max(initial=0)))


def _open_steps_after(trace: Trace, last: StepMemory | None) -> Trace:
    if last is None:
        return trace
    try:
        return trace.window(last.step + 1)
    except TraceError:
        options = trace.manifest.options
        if options is None or options.last_steps is None:
            raise
        return trace  # the ring may have deleted the next step: it keeps few


def _warn(what: str, error: Exception) -> None:
    with suppress(Exception):  # a logging handler of the program's
        logger.warning("memtrace: training continues, but %s (%s: %s)", what, type(error).__name__, error)
