"""Which code ran in the process without an observer seeing its reads and writes."""

from __future__ import annotations

import sys
from typing import Any

from memtrace.recording.observers import Observer


def unseen_accesses(observer: Observer) -> list[str]:
    """The sources of accesses that were not recorded, in the words of ``FileCoverage.unseen_accesses``."""
    sources = []
    if _runs_compiled_kernels():
        sources.append("compiled")
    if not observer.sees_python_handlers():
        sources.append("python_handlers")
    return sources


def _runs_compiled_kernels() -> bool:
    """Whether the process has loaded code that torch.compile generated. It accesses memory through raw pointers."""
    code_cache: Any = sys.modules.get("torch._inductor.codecache")
    python_code = getattr(code_cache, "PyCodeCache", None)
    return bool(getattr(python_code, "modules", None))
