"""A recording inside another recording of the process: it writes a trace of its own.

There is one allocator to observe, so the observer, the hooks and the writer's thread are those of the outer recording.
What they record between the start and the end of the inner recording goes to both traces. The inner trace begins with
the live set of that moment, as every part of a trace does, so that both traces agree about every block.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from memtrace.errors import MemtraceError
from memtrace.format.manifest import Manifest, RecordingOptions
from memtrace.recording.background import BackgroundTask
from memtrace.recording.hook_errors import describe_error
from memtrace.recording.manifest import new_manifest
from memtrace.recording.observers.dispatch_blocks import fake_mode_active
from memtrace.recording.observers.unseen import THREADS_NOTE
from memtrace.recording.pauses import Pauses
from memtrace.recording.trace_output import TraceOutput
from memtrace.units import format_bytes

if TYPE_CHECKING:
    import torch

    from memtrace.recording.recorder import Recorder
    from memtrace.recording.sink import TraceSink

logger = logging.getLogger("memtrace")
OUTER_ENDED: Final = "the recording that contains it ended first"

LoaderItem = TypeVar("LoaderItem")


class NestedRecorder:
    """An inner recording. As with ``Recorder``, an interrupt of ``start`` is followed by ``undo_start``.

    Args:
        outer: the recording that contains it.
        requested_path: folder of the trace.
        options: what the inner recording asks for.

    Attributes:
        output: the trace, with its rank and its steps.
        observer: the observer of the outer recording.
        is_complete: whether the trace is written and its manifest final.
        has_started: whether ``start`` was called.
    """

    def __init__(self, outer: Recorder, requested_path: Path, options: RecordingOptions) -> None:
        self.observer = outer.observer
        self.is_complete = False
        self._outer = outer
        self._requested_path = requested_path
        self._options, missing = _possible_options(options, outer.options, outer.observer.kind)
        self._missing_note = (
            f"{', '.join(missing)}: not recorded, because the recording into {outer.trace_path} contains this one and "
            "decides what is observed"
            if missing
            else None
        )
        self.output = TraceOutput(
            requested_path,
            self._options,
            self.observer,
            self._new_manifest,
            number=next(outer.nested_numbers),
            on_limit=lambda: self.stop("max_steps reached"),
            on_step_end=self._step_ended,
        )
        self._sink: TraceSink | None = None
        self._started_ns = self.observer.now()
        self._started: dict[str, int] = {}  # counts of the outer recording when this one began
        self.has_started = False
        self._is_recording = False
        self._is_abandoned = False
        self._range: dict[str, object] = {}  # "range": who records it; setdefault is atomic
        self._tasks: list[BackgroundTask] = []
        self._end: dict[str, BackgroundTask] = {}

    def _new_manifest(self, rank: int, world_size: int) -> Manifest:
        outer = self._outer.output.manifest.current
        notes = [
            f"recorded inside the recording into {self._outer.trace_path}: times count from the start of that recording"
        ]
        if self._missing_note is not None:
            notes.append(self._missing_note)
        manifest = new_manifest(self.observer, self._options, notes, rank, world_size)
        return replace(manifest, t0_epoch_ns=outer.t0_epoch_ns)

    @property
    def is_running(self) -> bool:
        """Whether the recording has begun and not ended."""
        return self._is_recording and self._outer.is_running

    @property
    def is_recording(self) -> bool:
        """Whether events are being recorded at the moment."""
        return self._is_recording and self._outer.is_recording

    @property
    def pauses(self) -> Pauses:
        """Those of the outer recording."""
        return self._outer.pauses

    @property
    def has_ended(self) -> bool:
        """Whether the recording has ended, although the recorded block may go on."""
        return "end" in self._end or self._outer.has_ended

    @property
    def trace_path(self) -> Path:
        """Folder of the trace."""
        return self.output.trace_path

    @property
    def rank_folder(self) -> Path:
        """Folder of this process's rank in the trace."""
        return self.output.rank_folder

    def _warn(self, message: str) -> None:
        with suppress(Exception):  # a handler of the program's
            logger.warning("memtrace: %s: %s", self.trace_path, message)

    # Start.

    def start(self, models: Mapping[str, torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> bool:
        """Start to record; return False, after a warning, if that is not possible."""
        self.observer.end_phase()
        self.has_started = True
        if self._outer.pauses.is_paused:  # until this recording ends
            self._outer.pauses.resume()
        task = BackgroundTask(partial(self._begin, models, optimizers))
        self._tasks.append(task)
        task.finish()
        if task.error is None:
            if self._missing_note is not None:
                self._warn(self._missing_note)
            return True
        self._warn(f"nothing is recorded there, training continues: {describe_error(task.error)}")
        self.undo_start()
        return False

    def _begin(self, models: Mapping[str, torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        outer = self._outer
        if outer.writer is None or not outer.is_recording:
            raise MemtraceError("the recording that contains it has ended")
        outer.nested.append(self)
        sink = self.output.open(self._writing_failed)
        outer.label(models, optimizers)
        outer.step_ended()
        outer.writer.add(sink)
        self._sink = sink
        self._started = {
            "children": outer.children.num_started,
            "replays": _num_replays(outer),
            "opaque_bytes": outer.compiled.opaque_bytes or 0,
        }
        self.output.steps.start()
        self._is_recording = True
        self.output.job.start()

    def undo_start(self) -> None:
        """Leave everything as it was before ``start``, however far that came."""
        for task in self._tasks:
            task.settle()
        self._end.setdefault("end", BackgroundTask(self._undo)).finish()

    def _undo(self) -> None:
        self._is_recording = False
        self._do_all(self.output.job.stop, self._end_sink, self.output.discard, self._forget)

    # While recording.

    def time_fetch(self, fetch: Callable[[], LoaderItem]) -> LoaderItem:
        """See ``Recorder.time_fetch``."""
        return self._outer.time_fetch(fetch)

    def mark_range(self, name: str, started_ns: int) -> None:
        """See ``Recorder.mark_range``."""
        self._outer.mark_range(name, started_ns)

    def _step_ended(self) -> None:
        self.output.job.refresh()
        self._outer.step_ended()

    def note_out_of_memory(self, error: BaseException) -> None:
        """Take note of the out-of-memory error that ends the program."""
        self.output.save_at_end()

    def _writing_failed(self, reason: str) -> None:
        # Runs on the writer's thread.
        self._is_recording = False
        self.output.manifest.update(stop_reason=reason)
        self._warn(f"recording stopped, training continues: {reason}")

    def abandon(self) -> None:
        """Make this recorder inert in a forked child."""
        self._is_abandoned = True
        self._is_recording = False
        self.output.leave_to_parent()

    # End.

    def stop(self, reason: str | None) -> None:
        """End the recording and write the rest of the trace. May be interrupted and called again.

        Args:
            reason: why the recording ends before the recorded block does, for the manifest; None if it does not.
        """
        if self._is_abandoned:
            return
        if self.is_recording and "end" not in self._end:
            self.observer.end_phase()  # on this thread, which phases and steps belong to
            self.output.steps.close()
        self._end.setdefault("end", BackgroundTask(partial(self._stop_now, reason))).finish()
        self._mark_range()

    def close_spans(self) -> None:
        """Record the last step and the range in the outer trace, whose recording ends first."""
        self.output.steps.close()
        self._mark_range()

    def stop_with_outer(self) -> None:
        """End with the outer recording, which ends first."""
        if "end" not in self._end:
            self._warn(f"the recording into {self._outer.trace_path}, which contains this one, has ended, and so ends "
                       "this one; training continues")  # fmt: skip
            self.stop(OUTER_ENDED)

    def _mark_range(self) -> None:
        """Show the inner recording as a range of the outer trace."""
        key = object()
        if self._range.setdefault("range", key) is key:
            self._outer.mark_range(str(self._requested_path), self._started_ns)

    def _stop_now(self, reason: str | None) -> None:
        for task in self._tasks:
            task.settle()
        outer = self._outer
        if self.is_recording:
            self._is_recording = False
            self._do_all(outer.labeller.errors.protect(outer.labeller.label_remaining_gradients), outer.step_ended)
        self._do_all(self.output.align_clock, self._end_sink, partial(self._finish_manifest, reason))
        self._do_all(self.output.release, self._forget)

    def _do_all(self, *steps: Callable[[], object]) -> None:
        """Take all steps, even if one fails."""
        for step in steps:
            try:
                step()
            except BaseException as error:  # noqa: PERF203 (whatever it is, the next step must be taken)
                self._warn(f"the trace may be incomplete: {describe_error(error)}")

    def _end_sink(self) -> None:
        if self._sink is not None and self._outer.writer is not None:
            cuda = self._outer.cuda
            tables = cuda.segments_now() if cuda is not None and self._outer.is_recording else {}
            self._outer.writer.remove(self._sink, tables)

    def _forget(self) -> None:
        if self in self._outer.nested:
            self._outer.nested.remove(self)

    def _finish_manifest(self, reason: str | None) -> None:
        if self._sink is None:
            return
        manifest, outer = self.output.manifest, self._outer.output.manifest.current
        manifest.update(
            devices=outer.devices,
            cuda_allocator=outer.cuda_allocator,
            allocator_settings=outer.allocator_settings,
        )
        if outer.stop_reason is not None and not outer.finished and manifest.current.stop_reason is None:
            manifest.update(stop_reason=f"the recording that contains it stopped: {outer.stop_reason}")
        for note in self._notes(outer.coverage.notes):
            if note not in (*manifest.current.coverage.notes, THREADS_NOTE):
                manifest.add_note(note)
        opaque_bytes = self._outer.compiled.opaque_bytes
        self.is_complete = self.output.finish(
            reason, None if opaque_bytes is None else opaque_bytes - self._started["opaque_bytes"]
        )

    def _notes(self, outer_notes: Sequence[str]) -> list[str]:
        """What the outer recording notes, with the counts of the time of this recording."""
        children, cuda = self._outer.children, self._outer.cuda
        counts = [(children.note(), children.note(self._started["children"]))]
        if cuda is not None:
            counts.append((cuda.replay_note(), cuda.replay_note(self._started["replays"])))
        notes = [note for note in outer_notes if note not in {of_outer for of_outer, _ in counts}]
        return notes + [own for _, own in counts if own is not None]


def _num_replays(outer: Recorder) -> int:
    return 0 if outer.cuda is None else outer.cuda.num_replays


def _possible_options(
    wanted: RecordingOptions, outer: RecordingOptions, observer: str
) -> tuple[RecordingOptions, list[str]]:
    """Return the options of an inner recording as the outer one can fulfil them, and what is missing."""
    missing = []
    if wanted.accesses and not outer.accesses:
        missing.append("reads and writes")
    if wanted.stacks and not outer.stacks:
        missing.append("call stacks")
    elif wanted.stacks and wanted.stack_min_bytes < outer.stack_min_bytes:
        missing.append(f"call stacks of operators that allocate less than {format_bytes(outer.stack_min_bytes)}")
    if wanted.device_time_min_bytes >= 0 and outer.device_time_min_bytes < 0:
        missing.append("device times")
    elif 0 <= wanted.device_time_min_bytes < outer.device_time_min_bytes:
        missing.append(
            f"device times of operators that access blocks below {format_bytes(outer.device_time_min_bytes)} only"
        )
    if wanted.schedule is not None:
        missing.append("only some of the steps")
    if observer == "native" and (wanted.observer == "dispatch" or (wanted.observer == "auto" and fake_mode_active())):
        missing.append("fake tensors")
    shared: dict[str, Any] = {
        name: getattr(outer, name) for name in ("accesses", "stacks", "stack_min_bytes", "device_time_min_bytes")
    }
    return replace(wanted, **shared, schedule=None), missing
