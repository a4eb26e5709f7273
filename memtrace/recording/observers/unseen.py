"""Which code ran in the process without an observer seeing its reads and writes."""

from __future__ import annotations

from typing import Final

from memtrace.recording.observers import Observer

THREADS_NOTE: Final = (
    "of the threads that the program started, the pure-Python observer recorded operators in module calls and backward "
    "passes only: their other memory and accesses are missing, so peaks may be too low"
)


def unseen_accesses(observer: Observer, *, ran_opaque_code: bool) -> list[str]:
    """The sources of accesses that were not recorded, in the words of ``FileCoverage.unseen_accesses``.

    Args:
        observer: the observer of the recording.
        ran_opaque_code: whether code of torch.compile ran whose kernels were not observed.
    """
    sources = []
    if ran_opaque_code:
        sources.append("compiled")
    if not observer.sees_python_handlers():
        sources.append("python_handlers")
    if not observer.sees_threads():
        sources.append("threads")
    return sources
