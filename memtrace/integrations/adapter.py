"""One recording that a framework's callbacks drive: the only place where an integration meets ``memtrace.record``."""

from __future__ import annotations

import atexit
import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial, wraps
from os import PathLike
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from memtrace.format.storage import AnyPath, to_path
from memtrace.integrations.scalars import ScalarStream, Sink

if TYPE_CHECKING:
    import torch

    from memtrace.recording.session import Recording

logger = logging.getLogger("memtrace")

VALIDATION: Final = "validation"
"""Name of the range of a validation loop in every trace."""
_Hook = TypeVar("_Hook", bound=Callable[..., None])


class RecorderAdapter:
    """Starts, marks and ends one recording after another for a framework.

    Nothing that is raised here may end the training: methods are called inside ``protected`` hooks, and the first error
    ends the recording, with one warning. An adapter can be copied and pickled; the copy is not recording.

    Args:
        path: folder of the trace.
        sinks: functions that get the memory of each step; see ``memtrace.integrations.scalars``.
        options: further arguments of ``memtrace.record``, which are checked at once.

    Raises:
        MemtraceError: an option is out of range.
    """

    def __init__(self, path: str | PathLike[str], *, sinks: Sequence[Sink] = (), **options: Any) -> None:
        from memtrace.recording.session import record

        record(path, **options)  # raises for options that are out of range, and starts nothing
        self.sinks = tuple(sinks)
        self._path = path
        self._options = options
        self._has_failed = False
        self._recording: Recording | None = None
        self._stream: ScalarStream | None = None
        self._ranges: dict[str, AbstractContextManager[None]] = {}
        self._close_at_exit: Callable[[], None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_recording": None, "_stream": None, "_ranges": {}, "_close_at_exit": None}

    @property
    def is_disabled(self) -> bool:
        """Whether an error has ended all recording."""
        return self._has_failed

    @property
    def recording(self) -> Recording | None:
        """The running recording, or the last one; None before the first."""
        return self._recording

    @property
    def is_recording(self) -> bool:
        """Whether events are being recorded."""
        return self._recording is not None and self._recording.is_recording

    @property
    def path(self) -> AnyPath:
        """Folder of the trace; see ``Recording.path``."""
        return to_path(self._path) if self._recording is None else self._recording.path

    def start(
        self, *, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None,
        sinks: Sequence[Sink] = (),
    ) -> None:  # fmt: skip
        """Start to record; a recording that is still running ends first.

        Args:
            model: the model, without the wrappers of data parallelism, so that names are those of its parameters.
            optimizer: the optimizer, where it exists already.
            sinks: further sinks of this recording.
        """
        from memtrace.recording.session import record

        self.end()
        options = {"model": model, "optimizer": optimizer} | self._options
        recording = record(self._path, **options)
        self._recording = recording
        self._close_at_exit = atexit.register(partial(_end_at_exit, weakref.ref(self)))
        recording.__enter__()
        if all_sinks := (*self.sinks, *sinks):
            self._stream = ScalarStream(recording, all_sinks)

    def begin_step(self) -> None:
        """Mark the beginning of a step: the time since the last step belongs to no step."""
        self.close_ranges()
        if self._recording is not None:
            self._recording.begin_step()

    def end_step(self, number: int | None = None) -> None:
        """Mark the end of a step.

        Args:
            number: number of the step in the framework, under which its scalars are logged; None: the trace's number.
        """
        if self._recording is not None:
            if self._stream is not None:
                self._stream.next_number = number
            self._recording.step()

    def open_range(self, name: str) -> None:
        """Begin a range that no step contains, such as validation; does nothing inside a range of the same name."""
        if self._recording is not None and name not in self._ranges:
            self._ranges[name] = span = self._recording.range(name)
            span.__enter__()

    def close_range(self, name: str) -> None:
        """End a range, after which a step begins; does nothing where it was not begun."""
        if (span := self._ranges.pop(name, None)) is not None:
            span.__exit__(None, None, None)
            self.begin_step()

    def close_ranges(self) -> None:
        """End the ranges that were begun."""
        while self._ranges:
            self._ranges.popitem()[1].__exit__(None, None, None)

    def end(self, error: BaseException | None = None) -> None:
        """End the recording, if one is running.

        Args:
            error: the exception that ends the training; an out-of-memory error is explained on stderr.
        """
        recording, close_at_exit = self._recording, self._close_at_exit
        if recording is None or close_at_exit is None:
            return
        self._close_at_exit = None
        atexit.unregister(close_at_exit)
        with ExitStack() as always:
            always.callback(
                recording.__exit__, None if error is None else type(error), error,
                None if error is None else error.__traceback__,
            )  # fmt: skip
            self.close_ranges()

    def disable(self, error: Exception) -> None:
        """Warn once that a hook failed, end the recording, and ignore all further hooks."""
        if self._has_failed:
            return
        self._has_failed = True
        with suppress(Exception):  # a logging handler of the program's
            logger.warning(
                "memtrace: training continues, but recording ends: an integration failed (%s: %s)",
                type(error).__name__, error, exc_info=logger.isEnabledFor(logging.DEBUG),
            )  # fmt: skip
        with suppress(Exception):
            self.end()


def protected(hook: _Hook) -> _Hook:
    """Return a hook of a callback that never raises an error of its own into the training.

    Only exceptions are caught: a KeyboardInterrupt that arrives while a hook runs belongs to the program.

    Args:
        hook: a method without a result, of a class with the attribute ``adapter``.
    """

    @wraps(hook)
    def call(callback: Any, /, *args: Any, **kwargs: Any) -> None:
        adapter: RecorderAdapter = callback.adapter
        if not adapter.is_disabled:
            try:
                hook(callback, *args, **kwargs)
            except Exception as error:
                adapter.disable(error)

    return cast("_Hook", call)


def _end_at_exit(reference: weakref.ref[RecorderAdapter]) -> None:
    """End a recording whose framework did not report that an exception ended the training."""
    adapter = reference()
    if adapter is not None:
        error = getattr(sys, "last_value", None)
        adapter.end(error if isinstance(error, BaseException) else None)
