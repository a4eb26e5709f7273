"""What happens to the trace that was at a recording's path before."""

from __future__ import annotations

import sys
from pathlib import Path

from memtrace import schema
from memtrace.errors import MemtraceError


def keep_older_trace(folder: Path, world_size: int | None = None) -> None:
    """Move a trace that is already in ``folder`` (one rank of a trace) to the first free name beside it.

    With ``world_size`` the ranks beside it that this job does not have (of an earlier, larger one) go with it.
    Raises MemtraceError when the folder holds something that is not a trace of ours.
    """
    old = [folder] if folder.exists() and any(folder.iterdir()) else []
    if old and not (folder / schema.MANIFEST_NAME).is_file():
        raise MemtraceError(f"{folder} exists and is not a memtrace trace; choose another path")
    if world_size is not None:
        ranks = {path: path.name.removeprefix("rank=") for path in folder.parent.glob("rank=*")}
        old += [path for path, rank in ranks.items() if rank.isdecimal() and int(rank) >= world_size]
    if not old:
        return
    trace = folder.parent
    number = 1
    while any((_older(trace, number) / path.name).exists() for path in old):
        number += 1
    _older(trace, number).mkdir(parents=True, exist_ok=True)
    for path in old:
        path.rename(_older(trace, number) / path.name)
    print(f"memtrace: the trace that was in {trace} is now {_older(trace, number)}", file=sys.stderr)


def _older(trace: Path, number: int) -> Path:
    return trace.with_name(f"{trace.stem}-old{number}{trace.suffix}")
