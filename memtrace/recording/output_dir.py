"""The folder a rank records into: claiming it, moving it, and keeping the trace that was there before."""

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
from memtrace.format.files import FileIdentity, close_protected, is_file, open_protected

MOVE_TIMEOUT_SECONDS: Final = 3.0
MOVE_RETRY_SECONDS: Final = 0.05


@dataclass
class OutputDir:
    """The folder of one rank in a trace, claimed by this process until it is released."""

    folder: Path
    """Folder of the rank, such as ``run.memtrace/rank=0``."""
    _lock: tuple[int, FileIdentity] | None
    """Descriptor of the folder, and the folder that it was opened for."""

    @property
    def trace(self) -> Path:
        """Folder of the trace."""
        return self.folder.parent

    def release(self) -> None:
        """Allow other recordings to claim the folder. They move the trace in it aside."""
        lock, self._lock = self._lock, None
        if lock is not None and is_file(*lock):  # the program may have closed the descriptor, and used its number
            import fcntl

            # Closing the file alone would leave the folder locked by child processes forked in the meantime.
            with suppress(OSError):
                fcntl.flock(lock[0], fcntl.LOCK_UN)
            close_protected(*lock)

    def leave_to_parent(self) -> None:
        """Close this forked child's descriptor of the folder, which stays claimed by the parent."""
        lock, self._lock = self._lock, None
        if lock is not None:
            close_protected(*lock)

    def discard(self) -> None:
        """Remove the files of a recording that never began, as far as possible, and release the folder."""
        with suppress(OSError):
            for path in self.folder.iterdir():
                path.unlink()
            self.folder.rmdir()
            self.trace.rmdir()  # fails if it contains other ranks
        self.release()


def claim_output_dir(trace: Path, rank: int, world_size: int) -> OutputDir:
    """Create and claim the folder of ``rank`` in ``trace``. An older trace in it is moved aside.

    If another recording is writing to that folder (two processes with the same rank), the folder is in
    ``<trace>-2``, ``<trace>-3``, ... instead.

    Raises:
        MemtraceError: The folder contains something other than a memtrace trace.
        OSError: The folder cannot be created.
    """
    for number in count(1):
        candidate = trace if number == 1 else trace.with_name(f"{trace.stem}-{number}{trace.suffix}")
        output_dir = _try_claim(candidate / f"rank={rank}")
        if output_dir is None:
            continue
        with ExitStack() as undo:
            undo.callback(output_dir.release)
            if move_older_trace(output_dir.folder, world_size if rank == 0 else None):
                # The claimed folder itself was moved: claim the new one.
                output_dir = _try_claim(output_dir.folder)
                if output_dir is None:
                    continue
            else:
                undo.pop_all()
        if number > 1:
            print(
                f"memtrace: another recording is writing to {trace}; recording into {candidate} instead. If its "
                "process and this one join one process group, their traces are merged when the recording ends",
                file=sys.stderr,
            )
        return output_dir
    raise AssertionError("count() never ends")


def check_rank_folder(folder: Path) -> None:
    """Check that a recording can be written to the folder of a rank.

    Raises:
        MemtraceError: The folder contains something other than a memtrace trace.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / schema.MANIFEST_NAME).is_file():
        raise MemtraceError(f"{folder} contains files but is not a memtrace trace; choose another path")


def move_output_dir(output_dir: OutputDir, trace: Path, rank: int) -> bool:
    """Move a finished rank folder to the folder of ``rank`` in ``trace``; return whether that was possible.

    Another process of the job that does not know its rank yet may still be recording there, so this retries for up to
    ``MOVE_TIMEOUT_SECONDS``.
    """
    target, previous_trace = trace / f"rank={rank}", output_dir.trace
    deadline = time.monotonic() + MOVE_TIMEOUT_SECONDS
    while not _try_rename(output_dir.folder, target):
        if time.monotonic() > deadline:
            return False
        time.sleep(MOVE_RETRY_SECONDS)
    output_dir.folder = target
    with suppress(OSError):
        previous_trace.rmdir()  # fails if it contains other ranks
    return True


def _try_rename(folder: Path, target: Path) -> bool:
    if folder != target:
        try:
            folder.rename(target)
        except OSError:
            return False
    return True


def _try_claim(folder: Path) -> OutputDir | None:
    """Create and lock a folder; None if another process has locked it. Without file locks every claim succeeds.

    The operating system releases the lock when the process ends, however it ends.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        if sys.platform == "win32":
            return OutputDir(folder, None)
        import fcntl

        lock = open_protected(folder, os.O_RDONLY)
        try:
            fcntl.flock(lock[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            close_protected(*lock)
            return None if isinstance(error, BlockingIOError) else OutputDir(folder, None)
        if _is_at(folder, lock[0]):
            return OutputDir(folder, lock)
        # Another process has moved the folder aside since it was opened, and may be recording into a new one.
        os.close(lock[0])


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether a descriptor refers to the folder that is at ``path`` now."""
    try:
        status = path.stat()
    except OSError:
        return False
    return is_file(descriptor, (status.st_dev, status.st_ino))


def move_older_trace(rank_folder: Path, world_size: int | None = None) -> bool:
    """Move an existing trace in ``rank_folder`` to the first free name ``<trace>-old1``, ``<trace>-old2``, ....

    Args:
        rank_folder: Folder of one rank in a trace.
        world_size: If given, ranks of an earlier, larger job that this job does not have are moved as well.

    Returns:
        Whether ``rank_folder`` itself was moved.

    Raises:
        MemtraceError: ``rank_folder`` contains something other than a memtrace trace.
    """
    check_rank_folder(rank_folder)
    folders = [rank_folder] if rank_folder.exists() and any(rank_folder.iterdir()) else []
    trace = rank_folder.parent
    if world_size is not None:
        ranks = {folder: folder.name.removeprefix("rank=") for folder in trace.glob("rank=*")}
        folders += [folder for folder, rank in ranks.items() if rank.isdecimal() and int(rank) >= world_size]
    if not folders:
        return False
    number = 1
    while any((_backup(trace, number) / folder.name).exists() for folder in folders):
        number += 1
    backup = _backup(trace, number)
    backup.mkdir(parents=True, exist_ok=True)
    for folder in folders:
        folder.rename(backup / folder.name)
    print(f"memtrace: renamed the existing trace {trace} to {backup}", file=sys.stderr)
    return rank_folder in folders


def _backup(trace: Path, number: int) -> Path:
    return trace.with_name(f"{trace.stem}-old{number}{trace.suffix}")
