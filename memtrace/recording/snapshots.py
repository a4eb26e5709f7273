"""Traces that are brought up to date while the recording runs: ``Recording.snapshot`` and the signal SIGUSR2."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, MethodType
from typing import TYPE_CHECKING, Any, Final

from memtrace.recording.background import BackgroundTask

if TYPE_CHECKING:
    from memtrace.recording.pauses import Pauses

logger = logging.getLogger("memtrace")
SNAPSHOT_SECONDS: Final = 60.0
"""Maximum time that a snapshot waits for the writer."""
_SIGNAL: Final[int] = getattr(signal, "SIGUSR2", 0)
"""Number of the signal; 0 where there is none."""


class SnapshotRequest:
    """One snapshot, which is made on a thread of its own: its caller may be a signal handler.

    Args:
        pauses: those of the recording, which knows how to list what is live.
    """

    def __init__(self, pauses: Pauses) -> None:
        self._pauses = pauses
        self._done: threading.Event | None = None
        self._task = BackgroundTask(self._save)

    def start(self) -> None:
        """Begin to make the snapshot, and do not wait for it."""
        self._task.start()

    def wait(self) -> bool:
        """Make the snapshot; return whether the trace is written."""
        self._task.run()
        return self._done is not None and self._done.wait(SNAPSHOT_SECONDS)

    def _save(self) -> None:
        self._done = self._pauses.save()


class SnapshotSignal:
    """The handler of SIGUSR2 while a recording runs. A program that has a handler of its own keeps it.

    Args:
        save: called when the signal arrives; must return at once.
    """

    def __init__(self, save: Callable[[], None]) -> None:
        self._save = save
        self._handler = self._handle  # one object, which can be recognised
        self._is_installed = False

    def _handle(self, number: int, frame: FrameType | None) -> Any:
        with suppress(Exception):
            self._save()

    def install(self) -> None:
        """Handle the signal, if the program does not, and if this is the main thread."""
        if not _SIGNAL or threading.current_thread() is not threading.main_thread():
            return
        with suppress(ValueError, OSError):  # a thread of an embedded interpreter
            handler = signal.getsignal(_SIGNAL)
            if handler is not signal.SIG_DFL and not _is_of_ended_recording(handler):
                logger.info("memtrace: SIGUSR2 makes no snapshot: the program handles that signal itself")
                return
            self._is_installed = True
            signal.signal(_SIGNAL, self._handler)

    def remove(self) -> None:
        """Restore what was before, unless the program has set a handler since."""
        if not self._is_installed:
            return
        with suppress(ValueError, OSError):  # on another thread than the main one, the handler stays, without effect
            if signal.getsignal(_SIGNAL) is self._handler:
                signal.signal(_SIGNAL, signal.SIG_DFL)
            self._is_installed = False


def _is_of_ended_recording(handler: object) -> bool:
    """Whether a library, such as Lightning, has restored the handler of a recording after the recording had ended."""
    return (
        type(handler) is MethodType and type(handler.__self__) is SnapshotSignal and not handler.__self__._is_installed
    )
