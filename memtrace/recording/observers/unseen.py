"""Which code ran in the process without an observer seeing its reads and writes."""

from __future__ import annotations

import sys
from typing import Any, Final

from memtrace.recording.observers import Observer

THREADS_NOTE: Final = (
    "of the threads that the program started, the pure-Python observer recorded operators in module calls and backward "
    "passes only: their other memory and accesses are missing, so peaks may be too low"
)


def unseen_accesses(observer: Observer) -> list[str]:
    """The sources of accesses that were not recorded, in the words of ``FileCoverage.unseen_accesses``."""
    sources = []
    if _runs_compiled_kernels():
        sources.append("compiled")
    if not observer.sees_python_handlers():
        sources.append("python_handlers")
    if not observer.sees_threads():
        sources.append("threads")
    return sources


def _runs_compiled_kernels() -> bool:
    """Whether the process has loaded code that torch.compile generated. It accesses memory through raw pointers."""
    code_cache: Any = sys.modules.get("torch._inductor.codecache")
    python_code = getattr(code_cache, "PyCodeCache", None)
    return bool(getattr(python_code, "modules", None))
