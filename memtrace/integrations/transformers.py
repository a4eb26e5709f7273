"""Hugging Face Transformers: a callback that records ``Trainer.train``.

from memtrace.integrations.transformers import MemtraceCallback

Trainer(..., callbacks=[MemtraceCallback("run.memtrace")]).train()
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from os import PathLike
from types import TracebackType
from typing import Any

from transformers import TrainerCallback

from memtrace.integrations.adapter import VALIDATION, RecorderAdapter, protected
from memtrace.integrations.scalars import Sink

_last_adapter: list[weakref.ref[RecorderAdapter]] = []
"""The adapter of the training that has begun last."""


class MemtraceCallback(TrainerCallback):
    """Records ``Trainer.train``: one training step per optimizer step, and evaluation as ranges outside the steps.

    Each rank records into its own part of the trace. ``Trainer`` does not report exceptions to callbacks: used as a
    context manager around ``train``, the callback ends the recording, and explains an out-of-memory error, when an
    exception leaves the block; otherwise it does so when the process ends or the next training begins.

    Args:
        path: Folder of the trace. Default "run.memtrace".
        sinks: Functions that get the number (``state.global_step``) and the scalars of each step on the world's process
            zero, such as ``memtrace.integrations.wandb.run_sink()``.
        options: Further arguments of ``memtrace.record``, such as ``last_steps=20``.

    Raises:
        MemtraceError: An option is out of range.
    """

    def __init__(
        self, path: str | PathLike[str] = "run.memtrace", *, sinks: Sequence[Sink] = (), **options: Any
    ) -> None:
        self.adapter = RecorderAdapter(path, **options)
        self._sinks = tuple(sinks)

    def __enter__(self) -> MemtraceCallback:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(error)

    @protected
    def _end(self, error: BaseException | None) -> None:
        self.adapter.end(error)

    @protected
    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Start to record; the model is on its device, and its optimizer exists."""
        _end_recording_of_earlier_training()
        _last_adapter[:] = [weakref.ref(self.adapter)]
        sinks = self._sinks if state.is_world_process_zero else ()
        self.adapter.start(model=objects.get("model"), sinks=sinks)
        self.adapter.begin_step()

    @protected
    def on_epoch_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Begin the first step of the epoch, which waits for its data."""
        self.adapter.begin_step()

    @protected
    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """End an evaluation that was announced and did not report its end."""
        self.adapter.close_range(VALIDATION)

    @protected
    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """End the step: the optimizer has stepped."""
        self.adapter.end_step(state.global_step)
        self._expect_evaluation(control)

    @protected
    def on_epoch_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Begin the range of an evaluation that follows."""
        self._expect_evaluation(control)

    def _expect_evaluation(self, control: Any) -> None:
        # There is no event at the start of an evaluation.
        if control.should_evaluate:
            self.adapter.open_range(VALIDATION)

    @protected
    def on_prediction_step(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Begin the range of an evaluation that was not announced."""
        self.adapter.open_range(VALIDATION)

    @protected
    def on_evaluate(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """End the range of the evaluation."""
        self.adapter.close_range(VALIDATION)

    @protected
    def on_predict(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """End the range of the prediction."""
        self.adapter.close_range(VALIDATION)

    @protected
    def on_save(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Begin the next step after the checkpoint."""
        self.adapter.begin_step()

    @protected
    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """End the recording."""
        self.adapter.end()


def _end_recording_of_earlier_training() -> None:
    """End the recording of a training that an exception ended, which nobody reported."""
    adapter = _last_adapter[0]() if _last_adapter else None
    if adapter is not None:
        adapter.end()
