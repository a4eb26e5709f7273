"""How processes and threads are called in exports, and how the clocks of the ranks relate."""

from __future__ import annotations

from pathlib import PurePath

from memtrace.format.schema import NAME_KINDS
from memtrace.text import to_printable
from memtrace.trace import Trace


def rank_title(trace: Trace) -> str:
    """Return the name of the process of a rank, such as ``rank 0: train.py``."""
    manifest = trace.manifest
    program = manifest.command[0] if manifest.command else manifest.source.file
    title = to_printable(PurePath(program).name) if program else "memtrace"
    return f"rank {manifest.rank}: {title}" if manifest.rank_is_known or manifest.world_size > 1 else title


def thread_names(trace: Trace) -> dict[int, str]:
    """Return the names that the program gives its threads, by the number of the thread."""
    columns = trace.columns("names", "id", "kind")
    names = {}
    for identity in columns["id"][columns["kind"] == NAME_KINDS.index("thread")].tolist():
        text = trace.name(identity) or ""
        # The tab between number and name is shown as a replacement character.
        number = text[: len(text) - len(text.lstrip("0123456789"))]
        if number and len(text) > len(number) + 1:
            names[int(number)] = text[len(number) + 1 :]
    return names


def process_ids(trace: Trace) -> dict[int, int]:
    """Return a process id for each rank: its own, or another number where ranks of two hosts have the same one."""
    ids: dict[int, int] = {}
    for rank in trace.ranks:
        own = trace.rank(rank).manifest.process
        number = rank + 1 if own is None or own <= 0 else own
        while number in ids.values():
            number += 1
        ids[rank] = number
    return ids
