"""The options of a recording and their validation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from memtrace.errors import MemtraceError
from memtrace.recording.writer import FLUSH_SECONDS

ObserverKind = Literal["auto", "native", "dispatch"]
DEFAULT_DEVICE_TIME_MIN_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class RecordingOptions:
    """What a recording collects and how often it writes to disk. The manifest of the trace lists these options.

    Raises:
        MemtraceError: a value is out of range.
    """

    stacks: bool = True
    """Whether operators that allocate get a Python stack."""
    accesses: bool = True
    """Whether reads and writes of blocks are recorded, not only their allocation and free."""
    last_steps: int | None = None
    """Number of most recent steps to keep on disk; None keeps all of them."""
    max_steps: int | None = None
    """Number of steps after which the recording ends; None records until the end of the ``with`` block."""
    observer: ObserverKind = "auto"
    """Which observer to use; see ``memtrace.record``."""
    stack_min_bytes: int = 512
    """Operators that allocate fewer bytes get no stack unless they create autograd nodes."""
    device_time_min_bytes: int | None = None
    """Operators that access a GPU block of at least this size are timed on the GPU; None times none."""
    flush_seconds: float = FLUSH_SECONDS
    """Time between two writes to disk, in seconds."""

    def __post_init__(self) -> None:
        for name in ("last_steps", "max_steps"):
            num_steps = getattr(self, name)
            if num_steps is not None and num_steps < 1:
                raise MemtraceError(f"{name}={num_steps} is out of range; pass a number of steps from 1, or None")
        if self.observer not in get_args(ObserverKind):
            known = ", ".join(f'"{kind}"' for kind in get_args(ObserverKind))
            raise MemtraceError(f"observer={self.observer!r} is unknown; pass one of {known}")


def device_time_threshold(device_time: bool | int) -> int | None:
    """Convert the ``device_time`` argument of ``memtrace.record`` to ``RecordingOptions.device_time_min_bytes``."""
    if device_time is True:
        return DEFAULT_DEVICE_TIME_MIN_BYTES
    return int(device_time) or None
