"""Tasks that worker processes import."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from memtrace.errors import MemtraceError
from memtrace.trace import Trace


def square(number: int) -> int:
    return number * number


def name_of_process(_: int) -> int:
    return os.getpid()


def die_once(task: tuple[int, str]) -> int:
    """Kill the worker the first time that the task with the number 3 runs."""
    number, folder = task
    mark = Path(folder) / "died"
    if number == 3 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def die_always(number: int) -> int:
    """Kill the worker whenever the task with the number 1 runs."""
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def fail_on_rank_1(trace: Trace) -> int:
    if trace.manifest.rank == 1:
        raise MemtraceError("rank 1 is broken")
    return int(trace.num_rows("events"))


def call_square(number: int) -> int:
    """Call ``square`` as it is defined in the worker."""
    return square(number)
