"""Work that an interrupt of the program cannot leave half done."""

from __future__ import annotations

import _thread
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

START_TIMEOUT_SECONDS: Final = 2.0
"""Time after which a thread that has not begun its work never will: there was no memory for it."""
POLL_SECONDS: Final = 0.02


NICENESS: Final = 5
"""By how much the priority of long background work is lower. It is not lower still because that work needs the
interpreter lock now and then: if other programs kept it from running just then, the program would have to wait."""


def _lower_priority() -> None:
    if sys.platform == "linux":  # elsewhere the priority belongs to the process
        with suppress(OSError):
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)


def _nothing() -> None:
    """Stands for work that is done."""


class BackgroundTask:
    """Runs a function once, on a thread of its own.

    Signal handlers run on the main thread, between any two instructions of it. An exception that one of them raises,
    such as KeyboardInterrupt, cannot end work on another thread. All methods may be interrupted and called again.

    ``threading.Thread`` is not used: an interrupt in its ``start`` leaves an entry behind that never goes away, and
    ``start`` waits without end for a thread that had no memory to begin.

    Args:
        work: the function.
        has_low_priority: whether the thread yields to those of the program where all processors are busy.

    Attributes:
        error: what ``work`` raised; None if it returned.
    """

    def __init__(self, work: Callable[[], object], *, has_low_priority: bool = False) -> None:
        self.error: BaseException | None = None
        self._work = work
        self._has_low_priority = has_low_priority
        self._runner: dict[str, object] = {}  # "runner": who runs the work; setdefault is atomic
        self._is_done = False
        self._done = _thread.allocate_lock()
        self._done.acquire()

    def start(self) -> bool:
        """Start the thread, unless the work has begun. Where no thread can be started, ``finish`` does the work.

        Returns:
            Whether the work has a thread.
        """
        if self._runner:
            return True
        try:
            _thread.start_new_thread(self._run_on_own_thread, ())
        except (RuntimeError, MemoryError):
            return False
        return True

    def run(self) -> None:
        """Start the thread, return when the work is done, and raise the work's exception."""
        self.start()
        self.finish()
        if self.error is not None:
            raise self.error

    def finish(self, timeout_seconds: float = math.inf) -> None:
        """Return when the work is done, or after ``timeout_seconds``."""
        now = time.monotonic()
        start_deadline = now + (START_TIMEOUT_SECONDS if self.start() else 0)
        end = now + timeout_seconds
        while not self._is_done and not sys.is_finalizing() and time.monotonic() < end:
            if not self._runner and time.monotonic() >= start_deadline:
                self._run()
            else:
                self._done.acquire(timeout=POLL_SECONDS)

    def settle(self) -> None:
        """Make sure that the work is not running: return when it is done if it has begun, and cancel it otherwise."""
        if self._runner.setdefault("runner", self) is self:
            self._is_done = True
            self._work = _nothing
        self.finish()

    def _run_on_own_thread(self) -> None:
        if self._has_low_priority:
            _lower_priority()
        self._run()

    def _run(self) -> None:
        runner = object()
        if self._runner.setdefault("runner", runner) is not runner:
            return
        try:
            self._work()
        except BaseException as error:
            self.error = error
        finally:
            # Where processors are busy, this thread ends much later, and would keep objects of the program until then.
            self._work = _nothing
            # Logging makes an entry in the list of the program's threads, which stays before Python 3.12.
            if threading.get_ident() != threading.main_thread().ident:
                getattr(threading, "_active", {}).pop(threading.get_ident(), None)
            self._is_done = True
            self._done.release()
