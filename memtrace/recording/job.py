"""The rank of a recorded process in its distributed job, and the alignment of its clock with rank 0."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from memtrace.format.manifest import ClockOffset
from memtrace.recording.clock import ClockAligner


def is_in_process_group() -> bool:
    """Whether this process has joined a job of torch.distributed."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def rank_and_world_size() -> tuple[int, int]:
    """Rank and world size from torch.distributed, else from torchrun's environment; (0, 1) outside of a job."""
    if is_in_process_group():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    try:
        return int(os.environ.get("RANK", "0") or 0), int(os.environ.get("WORLD_SIZE", "1") or 1)
    except ValueError:  # the variables mean something else in this program
        return 0, 1


class JobMembership:
    """Rank and world size of this process, which it may learn only after the recording has started.

    Args:
        trace_name: name of the trace as passed to ``memtrace.record``; the same on all ranks.
        now: the clock of the recording, in nanoseconds.
    """

    def __init__(self, trace_name: str, now: Callable[[], int]) -> None:
        self.rank, self.world_size = rank_and_world_size()
        self._trace_name = trace_name
        self._now = now
        self._aligner: ClockAligner | None = None

    def start(self) -> None:
        """Start to align the clock if the process belongs to a job."""
        if self.world_size > 1:
            self._aligner = ClockAligner(self._trace_name, self.rank, self._now)
            self._aligner.start()

    def refresh(self) -> None:
        """Check whether a process without a rank has joined a job since the last call.

        Called in every step: the environment, which takes longer to read, is read at the start only.
        """
        if self.world_size == 1 and is_in_process_group():
            self.rank, self.world_size = rank_and_world_size()
            self.start()

    def stop(self) -> ClockOffset | None:
        """End the alignment of the clock and return its result; None outside of a job."""
        return self._aligner.stop() if self._aligner is not None else None
