"""The user's side of a recording: ``with memtrace.record("run.memtrace") as rec:``."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch

from memtrace.display import Displayed
from memtrace.errors import MemtraceError
from memtrace.format.manifest import RecordingOptions
from memtrace.format.storage import AnyPath, to_path
from memtrace.recording.nested import NestedRecorder
from memtrace.recording.observers import Observer
from memtrace.recording.observers.build import MODULE
from memtrace.recording.observers.select import select_observer
from memtrace.recording.options import ObserverKind, device_time_threshold, validate_options
from memtrace.recording.out_of_memory import explain_out_of_memory, is_out_of_memory
from memtrace.recording.pipelining import Direction, PipelinePosition, action_text, mark_action
from memtrace.recording.recorder import Recorder
from memtrace.recording.remote_trace import UPLOAD_SECONDS, RemoteTrace, UploadOptions
from memtrace.recording.schedule import ScheduleFunction, choose_schedule
from memtrace.recording.snapshots import SnapshotRequest, SnapshotSignal
from memtrace.recording.subscribers import Subscribers
from memtrace.recording.with_methods import WithMethod, call_or_undo, call_until_done
from memtrace.recording.writer import FLUSH_SECONDS

logger = logging.getLogger("memtrace")

ENTER_TIMEOUT_SECONDS: Final = 10.0
"""Maximum time that a recording waits for another one that is being entered on another thread."""

LoaderItem = TypeVar("LoaderItem")
_running: dict[str, Recording] = {}
"""The running recording, under "recording"; ``setdefault`` is atomic, and an interrupt cannot leave it half done."""

_explained_error: dict[str, int] = {}
"""The out-of-memory error that a recording has explained last, under "id", until another recording begins: an id says
nothing once its object is gone."""


def record(
    path: str | os.PathLike[str] = "run.memtrace",
    *,
    model: torch.nn.Module | Mapping[str, torch.nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    stacks: bool = True,
    accesses: bool = True,
    last_steps: int | None = None,
    max_steps: int | None = None,
    observer: ObserverKind = "auto",
    stack_min_bytes: int = 512,
    device_time: bool | int = False,
    flush_seconds: float = FLUSH_SECONDS,
    schedule: Callable[[int], object] | None = None,
    every: int | None = None,
    on_oom: bool = False,
    upload_seconds: float = UPLOAD_SECONDS,
    keep_local: bool = False,
    local_dir: str | os.PathLike[str] | None = None,
) -> Recording:
    """Record the memory of the training code inside a ``with`` block.

        with memtrace.record("run.memtrace"):
            train()

    Training steps, module names, parameters and optimizer state are detected automatically. Problems with the disk are
    logged as a warning and never raised: training continues.

    Args:
        path: Folder of the trace to write. A trace that is already there is renamed to ``<name>-old1`` (``-old2``,
            and so on). Or a URL of any storage that fsspec opens, such as "s3://bucket/run.memtrace": the trace is
            recorded on disk and uploaded by another process; if a trace is already there, the new one is
            ``<name>-2``. Default "run.memtrace".
        model: The model, or several models by name. Its modules and parameters are then named as in
            ``named_parameters()``. Default None: models are detected, and names start with the class of the model.
        optimizer: The optimizer, or several. State that exists before the first step is then labelled as optimizer
            state. Default None: optimizers are detected at their first step.
        stacks: Record the Python call stack of operators that allocate memory or create autograd nodes. Default True.
        accesses: Record every read and write of a block, in addition to allocations and frees. Default True.
        last_steps: Number of most recent steps to keep on disk (approximately), for long runs. Default None: all.
        max_steps: Number of steps after which the recording ends while training continues. Default None: no limit.
        observer: "native" (C++, built on first use), "dispatch" (pure Python, several times slower, supports fake
            tensors), or "auto". Default "auto": "dispatch" under a ``FakeTensorMode`` or if the native observer cannot
            be built (with a warning), otherwise "native".
        stack_min_bytes: Operators that allocate fewer bytes get no stack unless they create autograd nodes.
            Default 512.
        device_time: Also time operators on the GPU, where they run later than on the host. True times operators that
            access a GPU block of at least 1 MiB; an integer is that minimum in bytes. Default False.
        flush_seconds: Interval between two writes to disk, in seconds; a killed process loses at most this much.
            Default 5.
        schedule: Which steps to record, as in ``torch.profiler``: ``torch.profiler.schedule(wait=..., active=...)``, or
            any function from the number of a step, from 0, to such an action or to a bool. Between the recorded steps,
            warm-up included, nothing is observed and nothing is slowed down. Default None: all steps.
        every: Record one step in so many: the first two steps, and then each step whose number is a multiple of
            ``every``. Excludes ``schedule``. Default None.
        on_oom: Keep the trace of the last steps in memory (``last_steps``, here 3 by default), and write it only when
            memory runs out. Default False.
        upload_seconds: Maximum time in seconds that the end of the ``with`` block waits for the upload to a URL. What
            is not uploaded by then stays on disk, and a warning names the command that uploads it. Default 60.
        keep_local: Keep the trace on disk after it was uploaded to a URL. Default False.
        local_dir: Folder in which a trace is recorded before it is uploaded to a URL. Default None: the folder
            "memtrace-uploads" in the working directory.

    Returns:
        The recording, to be entered once with ``with``.

    Raises:
        MemtraceError: An option is out of range, the URL cannot be written to, or ``observer="native"`` is not
            available.
    """
    schedule_function, description = choose_schedule(schedule, every)
    options = RecordingOptions(
        stacks=stacks,
        accesses=accesses,
        last_steps=last_steps,
        max_steps=max_steps,
        observer=observer,
        stack_min_bytes=stack_min_bytes,
        device_time_min_bytes=device_time_threshold(device_time),
        flush_seconds=flush_seconds,
        schedule=description,
        on_oom=on_oom,
    )
    validate_options(options)
    models, optimizers = _models_by_name(model), _optimizer_list(optimizer)
    target = to_path(path)
    if isinstance(target, Path):
        return Recording(_absolute(target), options, models, optimizers, schedule_function)
    upload = UploadOptions(upload_seconds, keep_local, None if local_dir is None else _absolute(local_dir))
    remote = RemoteTrace(target, upload)
    return Recording(remote.local_path, options, models, optimizers, schedule_function, remote)


def _absolute(path: str | os.PathLike[str]) -> Path:
    """The path as it is now: the program may change its working directory while it is recorded."""
    with suppress(OSError):  # the working directory was deleted; whether the path can be used is seen later
        return Path(path).absolute()
    return Path(path)


def _models_by_name(model: torch.nn.Module | Mapping[str, torch.nn.Module] | None) -> dict[str, torch.nn.Module]:
    if model is None:
        return {}
    return {"": model} if isinstance(model, torch.nn.Module) else dict(model)


def _optimizer_list(
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None,
) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)


class Recording(Displayed):
    """One recording, created by ``memtrace.record``. Enter it once; its trace is complete after the ``with`` block.

    A recording inside another one, on any thread, writes a trace of its own, and is a range of the outer trace. There
    is one allocator to observe: times count from the start of the outer recording, whose options decide what is
    observed, and both end where the outer one ends. Methods have no effect when nothing is being recorded.
    """

    def __init__(
        self,
        path: Path,
        options: RecordingOptions,
        models: Mapping[str, torch.nn.Module],
        optimizers: Iterable[torch.optim.Optimizer],
        schedule: ScheduleFunction | None = None,
        remote: RemoteTrace | None = None,
    ) -> None:
        self._remote = remote
        self._requested_path = path
        self._options = options
        self._models = models
        self._optimizers = optimizers
        self._schedule = schedule
        self._signal = SnapshotSignal(self._save_soon)
        self._recorder: Recorder | NestedRecorder | None = None
        self._position = PipelinePosition()
        self._subscribers = Subscribers()
        self._has_entered = threading.Event()
        self._stop_reason: str | None = None
        self._ran_out_of_memory = False
        self._is_over = False

    @property
    def path(self) -> AnyPath:
        """Folder of the trace; not the requested one if another process is recording there.

        For a trace in a storage it is the URL; after the recording, the folder on disk if the upload is not complete.
        """
        if self._remote is not None:
            return self._remote.path
        return self._requested_path if self._recorder is None else self._recorder.trace_path

    @property
    def rank_folder(self) -> AnyPath:
        """Folder of this process's rank in the trace, on disk as long as it is there."""
        folder = self._requested_path if self._recorder is None else self._recorder.rank_folder
        return folder if self._remote is None else self._remote.rank_folder(folder)

    @property
    def flush_seconds(self) -> float:
        """Interval between two writes to disk, in seconds."""
        return self._options.flush_seconds

    @property
    def is_recording(self) -> bool:
        """Whether events are being recorded into this recording's own trace."""
        return self._active_recorder() is not None

    @property
    def has_ended(self) -> bool:
        """Whether the recording is over: its ``with`` block was left, or a limit such as ``max_steps`` was reached."""
        return self._has_ended()

    if TYPE_CHECKING:

        def __enter__(self) -> Recording: ...

        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
        ) -> None: ...

    else:
        __enter__ = WithMethod(lambda recording: recording._enter_method())
        __exit__ = WithMethod(lambda recording: recording._exit_method())

    def _enter_method(self) -> Callable[[], Recording]:
        """Select the observer, and build it if necessary: an interrupt then leaves nothing to undo."""
        try:
            selected = None if _running else select_observer(self._options.observer)
            enter = partial(self._enter, selected)
        except (MemoryError, ImportError) as error:
            enter = partial(self._enter_without_memory, error)
        native: Any = sys.modules.get(MODULE)
        return partial(call_or_undo if native is None else native.call_or_undo, enter, self._undo_enter)

    def _exit_method(self) -> Callable[..., None]:
        native: Any = sys.modules.get(MODULE)
        return partial(call_until_done if native is None else native.call_until_done, self._leave)

    def _enter_without_memory(self, error: Exception) -> Recording:
        logger.warning("memtrace: nothing is recorded, training continues: out of memory: %r", error)
        self._has_entered.set()
        return self

    def _enter(self, selected: tuple[Observer, list[str]] | None) -> Recording:
        _explained_error.clear()
        while (outer := _running.setdefault("recording", self)) is not self and outer._has_ended():
            outer._finish()  # it has reached max_steps, or was interrupted too often to wait for its end
        try:
            self._recorder = self._make_recorder(selected) if outer is self else self._make_nested(outer)
            if self._recorder is not None:
                self._recorder.output.steps.on_recorded = self._subscribers.step_ended
                self._recorder.output.remote = self._remote
        except (MemoryError, ImportError) as error:
            self._enter_without_memory(error)
        # Needed only here. A program that keeps the recording must not keep its models because of it.
        models, optimizers, self._models, self._optimizers = self._models, self._optimizers, {}, ()
        if self._recorder is not None and not self._recorder.start(models, optimizers):
            self._recorder = None
        if self._recorder is None:
            self._make_way()
        elif outer is self:
            self._signal.install()
        self._has_entered.set()
        return self

    def _make_recorder(self, selected: tuple[Observer, list[str]] | None) -> Recorder:
        # Without an observer here, the recording that was running has ended since.
        observer, notes = selected or select_observer(self._options.observer)
        return Recorder(self._requested_path, self._options, observer, notes, self._schedule)

    def _make_nested(self, outer: Recording) -> NestedRecorder | None:
        outer._has_entered.wait(ENTER_TIMEOUT_SECONDS)  # another thread may be entering it
        if not isinstance(outer._recorder, Recorder):
            logger.warning(
                "memtrace: %s: nothing is recorded there, training continues: another recording is being started",
                self._requested_path,
            )
            return None
        self._position = outer._position
        return NestedRecorder(outer._recorder, self._requested_path, self._options)

    def _has_ended(self) -> bool:
        return self._is_over or (self._recorder is not None and self._recorder.has_ended)

    def _undo_enter(self) -> None:
        self._signal.remove()
        if self._recorder is not None:
            self._recorder.undo_start()
        self._recorder = None
        self._make_way()
        self._has_entered.set()

    def _make_way(self) -> None:
        """Let the next recording be the outermost one, if this one is."""
        if _running.get("recording") is self:
            _running.pop("recording", None)

    def _leave(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the recording. May be interrupted and called again."""
        if error is not None and not self._is_over:
            self.report_exception(error, f"{type(error).__name__} left the recorded block")
        self._is_over = True
        self._finish()
        if self._ran_out_of_memory and self._recorder is not None and self._recorder.is_complete:
            self._ran_out_of_memory = False
            explain_out_of_memory(self._recorder.rank_folder)
        self._subscribers.recording_ended()
        if self._remote is not None:
            self._remote.leave()

    def _finish(self) -> None:
        self._signal.remove()
        if self._recorder is not None:
            self._recorder.stop(self._stop_reason)
        self._make_way()

    def _abandon(self) -> None:
        """Become inert in a forked child, whose parent goes on recording."""
        self._is_over = True
        self._signal.remove()
        self._subscribers.clear()
        if self._recorder is not None:
            self._recorder.abandon()

    def _forked(self) -> None:
        if isinstance(self._recorder, Recorder):
            self._recorder.children.forked()

    def report_exception(self, error: BaseException, reason: str) -> None:
        """Report that ``error`` ended the recorded program, for callers that do not let it leave the ``with`` block.

        Args:
            error: The exception. An out-of-memory error is explained on stderr when the recording ends.
            reason: Why the recording ended, for the manifest of the trace.
        """
        self._stop_reason = reason
        # Of recordings inside each other, the innermost one that the error leaves explains it.
        if is_out_of_memory(error) and self._recorder is not None:
            self._recorder.note_out_of_memory(error)
        self._ran_out_of_memory = is_out_of_memory(error) and _explained_error.get("id") != id(error)
        if self._ran_out_of_memory:
            _explained_error["id"] = id(error)

    def step(self) -> None:
        """Mark the end of a training step.

        The first step starts with the recording. From the first call on, only marks end steps; optimizer steps no
        longer do.
        """
        if (recorder := self._running_recorder()) is not None:
            recorder.output.steps.mark()

    def begin_step(self) -> None:
        """Mark the beginning of a training step: the time since the last step, such as validation, belongs to no step.

        Without this mark, a step begins where the last one ended. As with ``step``, only marks end steps from now on.
        """
        if (recorder := self._running_recorder()) is not None:
            recorder.observer.end_phase()
            recorder.output.steps.begin(is_each=True)

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Mark a range of the program, such as validation, in the trace (a span of kind ``range``).

        Args:
            name: Name of the range.
        """
        recorder = self._active_recorder()
        started_ns = 0
        if recorder is not None:
            recorder.observer.end_phase()
            started_ns = recorder.observer.now()
        try:
            yield
        finally:
            if recorder is not None and recorder.is_recording:
                recorder.observer.end_phase()
                recorder.mark_range(name, started_ns)

    def subscribe(self, step_ended: Callable[[int], None], recording_ended: Callable[[], None]) -> None:
        """Call functions at the end of each step and, once, at the end of the recording.

        A function that raises is reported once and is not called again; the program continues.

        Args:
            step_ended: Called on the training thread with the number of the step.
            recording_ended: Called when the trace is complete.
        """
        self._subscribers.add(step_ended, recording_ended)

    def steps(self, loader: Iterable[LoaderItem]) -> Iterator[LoaderItem]:
        """Iterate over a data loader, with one training step per item.

        The time spent waiting for the loader is recorded, and the tensors of each item are labelled as inputs.
        """
        if (recorder := self._running_recorder()) is not None:
            recorder.output.steps.begin()
        iterator: Iterator[LoaderItem] | None = None

        def fetch() -> LoaderItem:
            nonlocal iterator
            if iterator is None:
                iterator = iter(loader)  # starts the workers of a DataLoader, so it belongs to the first wait
            return next(iterator)

        while True:
            recorder = self._active_recorder()
            try:
                item = fetch() if recorder is None else recorder.time_fetch(fetch)
            except StopIteration:
                return
            yield item
            self.step()

    def serve(self, *, port: int = 0, host: str = "127.0.0.1", capacity_bytes: int | None = None) -> str | None:
        """Show this recording in the browser while it runs, from a server in a process of its own.

        The server needs ``pip install "memtrace[serve]"`` and ends with this process.

        Args:
            port: Port to listen on. Default 0: a free one.
            host: Address to listen on. Default "127.0.0.1": only this machine can open the page.
            capacity_bytes: Memory of every device, for the time to out-of-memory. Default None: as recorded.

        Returns:
            The address of the page, which ends with a secret token; None, after a warning, if there is no server.
        """
        if self._running_recorder() is None or self._recorder is None:
            logger.warning("memtrace: nothing is served: the recording is not running")
            return None
        if self._options.on_oom:
            logger.warning("memtrace: nothing is served: with on_oom, the trace is kept in memory")
            return None
        try:
            from memtrace.recording.serving import start_server

            return start_server(self._recorder.trace_path, host=host, port=port, capacity_bytes=capacity_bytes)
        except (MemtraceError, OSError, ImportError, OverflowError, ValueError, TypeError) as error:
            logger.warning("memtrace: nothing is served, training continues: %s", error)
            return None

    @contextmanager
    def stage(self, number: int, *, pipeline: int = 0) -> Iterator[None]:
        """Assign the micro-batches inside the ``with`` block to a stage of a hand-written pipeline.

        The stages of torch.distributed.pipelining are detected automatically.

        Args:
            number: Number of the stage in the model, from 0.
            pipeline: Number of the pipeline if the schedule has several, such as 0 (down) and 1 (up) in Chimera.

        Raises:
            MemtraceError: The call is inside ``microbatch``.
        """
        position = self._position
        if position.is_in_microbatch:
            raise MemtraceError("rec.stage(...) is inside rec.microbatch(...); put it around rec.microbatch(...)")
        previous, position.stage = position.stage, (number, pipeline)
        try:
            yield
        finally:
            position.stage = previous

    @contextmanager
    def microbatch(self, number: int, direction: Direction = "forward") -> Iterator[None]:
        """Mark the pass of one micro-batch in a hand-written pipeline.

        Its stage is that of the enclosing ``stage``, otherwise the rank of the process.

        Args:
            number: Number of the micro-batch, from 0.
            direction: "forward" or "backward"; "input_backward" and "weight_backward" if the backward pass is split.
        """
        position = self._position
        rank = self._recorder.output.job.rank if self._recorder is not None else 0
        stage, pipeline = position.stage or (rank, 0)
        previous, position.is_in_microbatch = position.is_in_microbatch, True
        try:
            with self.action(action_text(direction, stage, number, pipeline)):
                yield
        finally:
            position.is_in_microbatch = previous

    @contextmanager
    def action(self, text: str) -> Iterator[None]:
        """Mark one action of a pipeline schedule, such as "F0.3" or "B2.5a@1".

        Args:
            text: The action in the notation of ``memtrace.format.schema.SPAN_KINDS``.
        """
        recorder = self._active_recorder()
        if recorder is None:
            yield
            return
        with mark_action(recorder.observer, text):
            yield

    def snapshot(self) -> AnyPath | None:
        """Bring the trace on disk up to date: all that was recorded so far, with the live blocks of this moment.

        It can then be read while the recording goes on. That works at any time: between the steps of a schedule, where
        the live blocks are listed, and with ``on_oom``, where the trace in memory is written. On the main thread of a
        program that has no handler of its own for the signal SIGUSR2, that signal does the same.

        Returns:
            The folder of the trace; None if nothing was written, because the recording is not running or has failed.
        """
        recorder = self._running_recorder()
        if recorder is None:
            return None
        request = SnapshotRequest(recorder.pauses)
        return self.path if request.wait() and not recorder.has_ended else None

    def _save_soon(self) -> None:
        if (recorder := self._running_recorder()) is not None:
            SnapshotRequest(recorder.pauses).start()

    def _running_recorder(self) -> Recorder | NestedRecorder | None:
        recorder = self._recorder
        return recorder if recorder is not None and recorder.is_running else None

    def _active_recorder(self) -> Recorder | NestedRecorder | None:
        recorder = self._recorder
        return recorder if recorder is not None and recorder.is_recording else None


def _forked_child() -> None:
    recording = _running.pop("recording", None)
    if recording is not None:
        recording._abandon()


def _forked_parent() -> None:
    recording = _running.get("recording")
    if recording is not None:
        recording._forked()


os.register_at_fork(after_in_child=_forked_child, after_in_parent=_forked_parent)
