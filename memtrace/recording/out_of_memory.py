"""Recognises out-of-memory errors and has them explained when the recording ends."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from memtrace.interpreter import run_python

logger = logging.getLogger("memtrace")


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
