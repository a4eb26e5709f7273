"""PyTorch Lightning: a callback that records ``Trainer.fit``.

    from memtrace.integrations.lightning import MemtraceCallback

    trainer = L.Trainer(callbacks=[MemtraceCallback("run.memtrace")])

Works with the packages ``lightning`` and ``pytorch_lightning``; neither is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from os import PathLike
from types import new_class
from typing import Any, Final

from memtrace.integrations.adapter import VALIDATION, RecorderAdapter, protected
from memtrace.integrations.scalars import Sink

_PACKAGES: Final = ("lightning.pytorch", "pytorch_lightning")


class MemtraceCallback:
    """Records ``Trainer.fit``: one training step per optimizer step, and validation as ranges outside the steps.

    Each rank records into its own part of the trace. The recording ends with the training, also where that ends with an
    exception. A callback that fails warns once and does nothing more.

    Args:
        path: Folder of the trace. Default "run.memtrace".
        log_scalars: Log the memory of each step with the trainer's loggers, on the global rank 0. Default False.
        sinks: Functions that get the number and the scalars of each step.
        options: Further arguments of ``memtrace.record``, such as ``last_steps=20``.

    Raises:
        MemtraceError: An option is out of range.
    """

    def __new__(cls, *_: Any, **__: Any) -> MemtraceCallback:
        """Create an instance that is a callback of the packages that the program has imported."""
        framework_class: Any = _with_framework_bases(cls, tuple(_imported_packages()))
        callback: MemtraceCallback = object.__new__(framework_class)
        return callback

    def __init__(
        self,
        path: str | PathLike[str] = "run.memtrace",
        *,
        log_scalars: bool = False,
        sinks: Sequence[Sink] = (),
        **options: Any,
    ) -> None:
        self.adapter = RecorderAdapter(path, sinks=sinks, **options)
        self._log_scalars = log_scalars
        self._num_optimizer_steps = 0

    def __reduce__(self) -> tuple[Any, ...]:
        original = next(base for base in type(self).__mro__ if base.__dict__.get("_memtrace_bases") is None)
        return _restore, (original, self.__dict__)

    @protected
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Start to record before the strategy moves the model to its device."""
        if stage == "fit":
            logs = self._log_scalars and trainer.is_global_zero
            self.adapter.start(model=pl_module, sinks=[partial(_log_metrics, trainer)] if logs else [])

    @protected
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin the first step; after a checkpoint the number of steps is not 0."""
        self._num_optimizer_steps = trainer.global_step
        self.adapter.begin_step()

    @protected
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin the first step of the epoch."""
        self.adapter.begin_step()

    @protected
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *batch: Any, **more: Any) -> None:
        """End the step if the optimizer has stepped: gradients may be accumulated over several batches."""
        if trainer.global_step != self._num_optimizer_steps:
            self._num_optimizer_steps = trainer.global_step
            self.adapter.end_step(_logged_step(trainer))

    @protected
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin the range of validation."""
        self.adapter.open_range(VALIDATION)

    @protected
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """End the range of validation."""
        self.adapter.close_range(VALIDATION)

    @protected
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End the recording, while the loggers are open."""
        self.adapter.end()

    @protected
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the recording and explain an out-of-memory error."""
        self.adapter.end(exception)

    @protected
    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """End the recording, however the trainer got here."""
        if stage == "fit":
            self.adapter.end()


def _imported_packages() -> list[str]:
    """Return the packages that the program has imported; the first that is installed where it has imported none."""
    imported: list[str] = [package for package in _PACKAGES if package in sys.modules]
    if imported:
        return imported
    for package in _PACKAGES:
        try:
            import_module(package)
        except ModuleNotFoundError:
            continue
        return [package]
    raise ModuleNotFoundError("MemtraceCallback needs Lightning: pip install 'memtrace[lightning]'")


def _with_framework_bases(cls: Any, packages: tuple[str, ...]) -> Any:
    """Return a subclass of ``cls`` that is a callback of the packages; ``cls`` itself if it is one."""
    bases: tuple[type, ...] = tuple(import_module(package).Callback for package in packages)
    if all(issubclass(cls, base) for base in bases):
        return cls
    body = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")} | {"_memtrace_bases": bases}
    return new_class(cls.__name__, (cls, *bases), exec_body=lambda namespace: namespace.update(body))


def _restore(cls: Any, state: dict[str, Any]) -> Any:
    """Return an unpickled or copied callback."""
    callback = cls.__new__(cls)
    callback.__dict__.update(state)
    return callback


def _logged_step(trainer: Any) -> int:
    """Return the number under which the trainer's loggers know the step that has just ended."""
    number = getattr(getattr(trainer.fit_loop, "epoch_loop", None), "_batches_that_stepped", None)
    return int(trainer.global_step) - 1 if number is None else int(number)


def _log_metrics(trainer: Any, number: int, scalars: dict[str, float]) -> None:
    for logger in trainer.loggers:
        logger.log_metrics(scalars, step=number)
