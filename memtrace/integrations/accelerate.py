"""Hugging Face Accelerate: records a training loop that its ``Accelerator`` prepares.

from memtrace.integrations.accelerate import record

with record(accelerator, "run.memtrace") as recording:
    for batch in loader:
        with accelerator.accumulate(model):
            ...
        recording.step()
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from types import TracebackType
from typing import Any

from memtrace.integrations.adapter import VALIDATION, RecorderAdapter, protected
from memtrace.integrations.wandb import run_sink


def record(
    accelerator: Any, path: str | PathLike[str] = "run.memtrace", *, model: Any = None, log_scalars: bool = False,
    **options: Any,
) -> AcceleratedRecording:  # fmt: skip
    """Record a training loop, in which a step ends where ``accelerator.sync_gradients`` is true.

    Each process records into its own part of the trace.

    Args:
        accelerator: The ``accelerate.Accelerator`` of the loop.
        path: Folder of the trace. Default "run.memtrace".
        model: The model, prepared or not. Default None: it is detected.
        log_scalars: Log the memory of each step with the accelerator's trackers, on the main process. Default False.
        options: Further arguments of ``memtrace.record``, such as ``last_steps=20``.

    Raises:
        MemtraceError: An option is out of range.
    """
    return AcceleratedRecording(accelerator, RecorderAdapter(path, **options), model, log_scalars)


class AcceleratedRecording:
    """A recording of a loop of Accelerate, created by ``record``. It never raises an error of its own into the loop."""

    def __init__(self, accelerator: Any, adapter: RecorderAdapter, model: Any, log_scalars: bool) -> None:
        self.adapter = adapter
        self._accelerator = accelerator
        self._model = model
        self._log_scalars = log_scalars

    def __enter__(self) -> AcceleratedRecording:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(error)

    @protected
    def _start(self) -> None:
        accelerator = self._accelerator
        model = None if self._model is None else accelerator.unwrap_model(self._model)
        logs = self._log_scalars and accelerator.is_main_process
        self.adapter.start(
            model=model, sinks=[_tracker_sink(tracker) for tracker in accelerator.trackers] if logs else []
        )
        self.adapter.begin_step()

    @protected
    def _end(self, error: BaseException | None) -> None:
        self.adapter.end(error)

    @protected
    def step(self) -> None:
        """Mark the end of a training step if this batch has completed the gradients; call it once per batch."""
        if self._accelerator.sync_gradients:
            self.adapter.end_step()

    @contextmanager
    def validation(self) -> Iterator[None]:
        """Mark the validation inside the ``with`` block as a range that no training step contains."""
        self._begin_validation()
        try:
            yield
        finally:
            self._end_validation()

    @protected
    def _begin_validation(self) -> None:
        self.adapter.open_range(VALIDATION)

    @protected
    def _end_validation(self) -> None:
        self.adapter.close_range(VALIDATION)


def _tracker_sink(tracker: Any) -> Any:
    """Return a sink for a tracker of the accelerator."""
    if tracker.name == "wandb":  # refuses numbers of steps that are smaller than the last one
        return run_sink(tracker.tracker)
    return lambda number, scalars: tracker.log(scalars, step=number)
