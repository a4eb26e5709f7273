"""Functions of others that a recording calls: at the end of each step, and at its own end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

from memtrace.recording.hook_errors import describe_error

logger = logging.getLogger("memtrace")


class Subscribers:
    """The functions that were given to ``Recording.subscribe``. What they raise never reaches the program."""

    def __init__(self) -> None:
        self._step_ended: list[Callable[[int], None]] = []
        self._recording_ended: list[Callable[[], None]] = []

    def add(self, step_ended: Callable[[int], None], recording_ended: Callable[[], None]) -> None:
        """Add two functions."""
        self._step_ended.append(step_ended)
        self._recording_ended.append(recording_ended)

    def clear(self) -> None:
        """Forget all functions."""
        self._step_ended.clear()
        self._recording_ended.clear()

    def step_ended(self, step: int) -> None:
        """Call the functions that are called at the end of a step."""
        for function in list(self._step_ended):
            try:
                function(step)
            except Exception as error:  # noqa: PERF203 (the other functions, and the program, must go on)
                self._step_ended.remove(function)
                _warn(error)

    def recording_ended(self) -> None:
        """Call the functions that are called at the end of the recording, each once."""
        self._step_ended.clear()
        while self._recording_ended:
            function = self._recording_ended.pop(0)
            try:
                function()
            except Exception as error:
                _warn(error)


def _warn(error: BaseException) -> None:
    with suppress(Exception):  # a handler of the program's
        logger.warning("memtrace: a function that follows the recording failed, training continues: %s",
                       describe_error(error))  # fmt: skip
