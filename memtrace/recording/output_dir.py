"""Where a recording goes, and what happens to the trace that was there before."""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final

from memtrace.errors import MemtraceError
from memtrace.format import schema

WAIT_SECONDS: Final = 3.0
LOOK_SECONDS: Final = 0.05


@dataclass
class Place:
    """The folder of one rank, this process's own until it is left."""

    folder: Path
    _lock: int | None

    @property
    def trace(self) -> Path:
        """The folder of the trace."""
        return self.folder.parent

    def leave(self) -> None:
        """From now on another recording may take the place; what is in it is kept aside then."""
        if self._lock is not None:
            import fcntl

            # Closing alone would leave it locked by children that were forked meanwhile.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = None


def take_place(trace: Path, rank: int, world_size: int) -> Place:
    """Make the folder of ``rank`` in ``trace`` this process's own; an older trace in it moves to a free name beside.

    Where another process is recording into it right now (two processes that take themselves for the same rank), it is
    that of ``<trace>-2``, ``-3``, ... instead. Raises MemtraceError where the folder holds something that is no trace
    of ours, OSError where it cannot be made.
    """
    for number in count(1):
        here = trace if number == 1 else trace.with_name(f"{trace.stem}-{number}{trace.suffix}")
        place = _claim(here / f"rank={rank}")
        if place is None:
            continue
        with ExitStack() as undo:
            undo.callback(place.leave)
            if keep_older_trace(place.folder, world_size if rank == 0 else None):
                # The lock went with what was there.
                place = _claim(place.folder)
                if place is None:
                    continue
            else:
                undo.pop_all()
        if number > 1:
            print(
                f"memtrace: another process is recording into {trace}, so this one records into {here}; if they join "
                "one process group, their traces are put together at the end",
                file=sys.stderr,
            )
        return place
    raise AssertionError("count() has no end")


def move_place(place: Place, trace: Path, rank: int) -> bool:
    """Make a place, in which nothing is written any more, that of ``rank`` in ``trace``; whether that was possible.

    Another process of the job may still be recording there, not knowing its rank either: it is given a moment.
    """
    target, left = trace / f"rank={rank}", place.trace
    deadline = time.monotonic() + WAIT_SECONDS
    while not _renamed(place.folder, target):
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_SECONDS)
    place.folder = target
    with suppress(OSError):
        left.rmdir()  # unless it holds other ranks
    return True


def _renamed(folder: Path, target: Path) -> bool:
    if folder != target:
        try:
            folder.rename(target)
        except OSError:
            return False
    return True


def _claim(folder: Path) -> Place | None:
    """The folder, made and locked; None where another process has it. Without locks everybody gets it.

    The system takes the lock from a process that ends, however it ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if sys.platform == "win32":
        return Place(folder, None)
    import fcntl

    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        return None if isinstance(error, BlockingIOError) else Place(folder, None)
    return Place(folder, lock)


def keep_older_trace(folder: Path, world_size: int | None = None) -> bool:
    """Move a trace that is already in ``folder`` (one rank of a trace) to the first free name beside it.

    With ``world_size`` the ranks beside it that this job does not have (of an earlier, larger one) go with it. Whether
    ``folder`` itself moved. Raises MemtraceError when it holds something that is not a trace of ours.
    """
    old = [folder] if folder.exists() and any(folder.iterdir()) else []
    if old and not (folder / schema.MANIFEST_NAME).is_file():
        raise MemtraceError(f"{folder} exists and is not a memtrace trace; choose another path")
    if world_size is not None:
        ranks = {path: path.name.removeprefix("rank=") for path in folder.parent.glob("rank=*")}
        old += [path for path, rank in ranks.items() if rank.isdecimal() and int(rank) >= world_size]
    if not old:
        return False
    trace = folder.parent
    number = 1
    while any((_older(trace, number) / path.name).exists() for path in old):
        number += 1
    _older(trace, number).mkdir(parents=True, exist_ok=True)
    for path in old:
        path.rename(_older(trace, number) / path.name)
    print(f"memtrace: the trace that was in {trace} is now {_older(trace, number)}", file=sys.stderr)
    return folder in old


def _older(trace: Path, number: int) -> Path:
    return trace.with_name(f"{trace.stem}-old{number}{trace.suffix}")
