"""What can be exported. This module imports nothing, so that the command line can list it at once."""

from __future__ import annotations

from typing import Final

FORMATS: Final = ("perfetto", "pprof", "speedscope", "snapshot", "chrome", "csv")
STACK_FORMATS: Final = ("pprof", "speedscope")
"""Formats of bytes by call stack."""
JOB_FORMATS: Final = ("perfetto",)
"""Formats that can hold several ranks."""
MEASURES: Final = ("peak", "allocations", "churn")
"""What is counted by call stack; see ``StackSamples``."""
