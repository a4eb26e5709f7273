"""What commands print besides their results: progress, notes, hints, and with --verbose what was read and how long.

Results go to stdout, everything else to stderr. Progress is one line that appears on a terminal after a second of work
and vanishes with the first output.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

import click

from memtrace.text import to_printable

if TYPE_CHECKING:
    from rich.status import Status

PROGRESS_AFTER_SECONDS: Final = 1.0
"""Work that is quicker shows no progress."""


class Verbosity(IntEnum):
    """How much commands print besides their results."""

    QUIET = 0
    """Nothing but errors and warnings of the trace itself."""
    NORMAL = 1
    VERBOSE = 2
    """Also what is read and computed, and how long that takes."""


class Feedback:
    """Prints notes and progress on stderr."""

    def __init__(self) -> None:
        self.verbosity = Verbosity.NORMAL
        self._begin_s = time.perf_counter()
        self._lock = threading.Lock()
        self._task = ""
        self._timer: threading.Timer | None = None
        self._status: Status | None = None

    def note(self, text: str) -> None:
        """Print a note on stderr, unless the user asked for quiet."""
        if self.verbosity > Verbosity.QUIET:
            self._print(text)

    def detail(self, text: str) -> None:
        """Print on stderr what only --verbose shows."""
        if self.verbosity == Verbosity.VERBOSE:
            self._print(text)

    def begin(self, task: str) -> None:
        """Show a task as progress, from a second after the first one began."""
        if self.verbosity == Verbosity.QUIET or not sys.stderr.isatty():
            return
        with self._lock:
            self._task = to_printable(task)
            if self._status is not None:
                self._status.update(_escape_markup(self._task))
            elif self._timer is None:
                self._timer = threading.Timer(PROGRESS_AFTER_SECONDS, self._show)
                self._timer.daemon = True
                self._timer.start()

    def end(self) -> None:
        """Remove the progress before something else is printed."""
        with self._lock:
            timer, status = self._timer, self._status
            self._timer = self._status = None
        if timer is not None:
            timer.cancel()
            timer.join()  # files are read in a fork, which is safe beside no other thread
        if status is not None:
            status.stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Show no progress in a block, which then runs beside no thread of progress and can fork."""
        with self._lock:
            is_shown, task = self._timer is not None, self._task
        self.end()
        yield
        if is_shown:
            self.begin(task)

    @contextmanager
    def working(self, task: str) -> Iterator[None]:
        """Show a task as progress while it runs; --verbose prints how long it took."""
        begin_s = time.perf_counter()
        self.begin(task)
        try:
            yield
        finally:
            self.end()
        self.detail(f"{task}: {time.perf_counter() - begin_s:.2f} s")

    def finish(self) -> None:
        """Remove the progress; --verbose prints how long the command took."""
        self.end()
        self.detail(f"finished in {time.perf_counter() - self._begin_s:.2f} s")

    def set_verbosity(self, verbosity: Verbosity) -> None:
        """Set how much is printed."""
        self.verbosity = verbosity
        if verbosity == Verbosity.VERBOSE:
            logger = logging.getLogger("memtrace")
            logger.setLevel(logging.DEBUG)
            logger.addHandler(_DetailHandler(self))

    def _show(self) -> None:
        from rich.console import Console

        with self._lock:
            if self._timer is not None and self._status is None:
                self._status = Console(stderr=True).status(_escape_markup(self._task))
                self._status.start()

    def _print(self, text: str) -> None:
        self.end()
        click.echo(f"memtrace: {to_printable(text)}", err=True)


class _DetailHandler(logging.Handler):
    """Passes what the library logs about its work to --verbose; warnings reach the terminal by themselves."""

    def __init__(self, feedback: Feedback) -> None:
        super().__init__(logging.DEBUG)
        self._feedback = feedback

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message below the level of a warning."""
        if record.levelno < logging.WARNING:
            self._feedback.detail(record.getMessage())


FEEDBACK: Final = Feedback()
"""The feedback of this process, which runs one command."""


def _escape_markup(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _set(verbosity: Verbosity) -> Any:
    def callback(context: click.Context, parameter: click.Parameter, is_given: bool) -> None:
        if is_given:
            FEEDBACK.set_verbosity(verbosity)

    return callback


def add_verbosity_options(command: click.Command) -> None:
    """Add --quiet and --verbose to a command; they hold from where they are given on."""
    if any(parameter.name == "quiet" for parameter in command.params):
        return
    command.params += [
        click.Option(["-q", "--quiet"], is_flag=True, expose_value=False, is_eager=True,
                     callback=_set(Verbosity.QUIET), help="Print results and errors only."),
        click.Option(["-v", "--verbose"], is_flag=True, expose_value=False, is_eager=True,
                     callback=_set(Verbosity.VERBOSE), help="Also print what is read, and how long the work takes."),
    ]  # fmt: skip
