"""The user's side of a recording: ``with memtrace.record("run.memtrace") as rec:``."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import torch

from memtrace.errors import MemtraceError
from memtrace.format.manifest import RecordingOptions
from memtrace.recording.options import ObserverKind, device_time_threshold, validate_options
from memtrace.recording.out_of_memory import explain_out_of_memory, is_out_of_memory
from memtrace.recording.pipelining import Direction, PipelinePosition, action_text, mark_action
from memtrace.recording.recorder import Recorder, start_recorder
from memtrace.recording.writer import FLUSH_SECONDS

logger = logging.getLogger("memtrace")

LoaderItem = TypeVar("LoaderItem")
_running: Recording | None = None


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
) -> Recording:
    """Record the memory of the training code inside a ``with`` block.

        with memtrace.record("run.memtrace"):
            train()

    Training steps, module names, parameters and optimizer state are detected automatically. Problems with the disk are
    logged as a warning and never raised: training continues.

    Args:
        path: Folder of the trace to write. A trace that is already there is renamed to ``<name>-old1`` (``-old2``,
            and so on). Default "run.memtrace".
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

    Returns:
        The recording, to be entered once with ``with``.

    Raises:
        MemtraceError: An option is out of range, or ``observer="native"`` is not available.
    """
    options = RecordingOptions(
        stacks=stacks,
        accesses=accesses,
        last_steps=last_steps,
        max_steps=max_steps,
        observer=observer,
        stack_min_bytes=stack_min_bytes,
        device_time_min_bytes=device_time_threshold(device_time),
        flush_seconds=flush_seconds,
    )
    validate_options(options)
    return Recording(Path(path), options, _models_by_name(model), _optimizer_list(optimizer))


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


class Recording:
    """One recording, created by ``memtrace.record``. Enter it once; its trace is complete after the ``with`` block.

    A recording inside another recording becomes a range of the outer one: there is one allocator to observe. The
    methods of the inner recording then act on the outer one. Methods have no effect when nothing is being recorded.
    """

    def __init__(
        self,
        path: Path,
        options: RecordingOptions,
        models: Mapping[str, torch.nn.Module],
        optimizers: Iterable[torch.optim.Optimizer],
    ) -> None:
        self._requested_path = path
        self._options = options
        self._models = models
        self._optimizers = optimizers
        self._recorder: Recorder | None = None
        self._position = PipelinePosition()
        self._nested_since_ns: int | None = None
        self._stop_reason: str | None = None
        self._ran_out_of_memory = False

    @property
    def path(self) -> Path:
        """Folder of the trace; not the requested one if another process is recording there."""
        if self._recorder is None or self._nested_since_ns is not None:
            return self._requested_path
        return self._recorder.trace_path

    @property
    def is_recording(self) -> bool:
        """Whether events are being recorded into this recording's own trace."""
        return self._nested_since_ns is None and self._active_recorder() is not None

    def __enter__(self) -> Recording:
        global _running
        if _running is not None:
            self._enter_nested(_running)
            return self
        _running = self
        try:
            self._recorder = start_recorder(self._requested_path, self._options, self._models, self._optimizers)
        except BaseException:
            _running = None
            raise
        return self

    def _enter_nested(self, outer: Recording) -> None:
        logger.warning(
            "memtrace: %s is already being recorded; %s becomes a range of it", outer.path, self._requested_path
        )
        self._recorder, self._position = outer._recorder, outer._position
        self._nested_since_ns = outer._recorder.observer.now() if outer._recorder is not None else 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        global _running
        if self._nested_since_ns is not None:
            if (recorder := self._active_recorder()) is not None:
                recorder.mark_range(str(self._requested_path), self._nested_since_ns)
            return
        _running = None
        if error is not None:
            self.report_exception(error, f"{type(error).__name__} left the recorded block")
        if self._recorder is None:
            return
        self._recorder.stop(self._stop_reason)
        if self._ran_out_of_memory and self._recorder.is_complete:
            explain_out_of_memory(self._recorder.rank_folder)

    def report_exception(self, error: BaseException, reason: str) -> None:
        """Report that ``error`` ended the recorded program, for callers that do not let it leave the ``with`` block.

        Args:
            error: The exception. An out-of-memory error is explained on stderr when the recording ends.
            reason: Why the recording ended, for the manifest of the trace.
        """
        self._stop_reason = reason
        self._ran_out_of_memory = is_out_of_memory(error)

    def step(self) -> None:
        """Mark the end of a training step.

        The first step starts with the recording. From the first call on, only marks end steps; optimizer steps no
        longer do.
        """
        if (recorder := self._active_recorder()) is not None:
            recorder.steps.mark()

    def steps(self, loader: Iterable[LoaderItem]) -> Iterator[LoaderItem]:
        """Iterate over a data loader, with one training step per item.

        The time spent waiting for the loader is recorded, and the tensors of each item are labelled as inputs.
        """
        if (recorder := self._active_recorder()) is not None:
            recorder.steps.begin()
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
        rank = self._recorder.job.rank if self._recorder is not None else 0
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

    def _active_recorder(self) -> Recorder | None:
        recorder = self._recorder
        return recorder if recorder is not None and recorder.is_recording else None
