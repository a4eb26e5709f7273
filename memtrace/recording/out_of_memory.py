"""Recognises out-of-memory errors and has them explained when the recording ends."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from memtrace.interpreter import run_python

logger = logging.getLogger("memtrace")
_UNITS: Final = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZE: Final = rf"([\d.]+) ({'|'.join(_UNITS)})"


@dataclass(frozen=True)
class FailedAllocation:
    """An allocation that failed while nothing was observed, as its error describes it."""

    device: int
    """0 for the CPU, 1 + i for cuda:i."""
    size: int
    """Requested bytes; of a GPU, with the precision of the message."""
    free: int
    """Free bytes of the device; -1: unknown."""

    @staticmethod
    def from_error(error: BaseException) -> FailedAllocation | None:
        """Return what an out-of-memory error of torch says; None: its message is not understood."""
        text = str(error)
        if (on_cpu := re.search(r"you tried to allocate (\d+) bytes", text)) is not None:
            return FailedAllocation(0, int(on_cpu[1]), -1)
        size, device = re.search(rf"Tried to allocate {_SIZE}", text), re.search(r"GPU (\d+)", text)
        if size is None:
            return None
        free = re.search(rf"of which {_SIZE} is free", text)
        free_bytes = -1 if free is None else int(float(free[1]) * _UNITS[free[2]])
        number = 0 if device is None else int(device[1])
        return FailedAllocation(1 + number, int(float(size[1]) * _UNITS[size[2]]), free_bytes)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` is an out-of-memory error of a device or of torch's CPU allocator."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
    )


def explain_out_of_memory(rank_folder: Path) -> None:
    """Print to stderr why the last failed allocation in ``rank_folder``, the trace of one rank, did not fit.

    A separate process does the analysis, because this one may have no memory left for it. Trouble is a warning: the
    program's own exception is propagating and must reach the program.
    """
    try:
        run_python("from memtrace.cli.failure import main; main()", str(rank_folder), silent=False)
    except Exception as error:
        logger.warning("memtrace: cannot explain the out-of-memory error: %s", error)
