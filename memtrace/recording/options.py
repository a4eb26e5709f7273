"""Validation of the options of a recording, which are ``memtrace.format.manifest.RecordingOptions``."""

from __future__ import annotations

from typing import Final, Literal, get_args

from memtrace.errors import MemtraceError
from memtrace.format.manifest import RecordingOptions

ObserverKind = Literal["auto", "native", "dispatch"]
DEFAULT_DEVICE_TIME_MIN_BYTES: Final = 1 << 20


def validate_options(options: RecordingOptions) -> None:
    """Check that the options are in range.

    Raises:
        MemtraceError: an option is out of range; the message says which one and what to pass.
    """
    for name, num_steps in (("last_steps", options.last_steps), ("max_steps", options.max_steps)):
        if num_steps is not None and num_steps < 1:
            raise MemtraceError(f"{name}={num_steps} is out of range; pass a number of steps from 1, or None")
    if options.observer not in get_args(ObserverKind):
        known = ", ".join(f'"{kind}"' for kind in get_args(ObserverKind))
        raise MemtraceError(f"observer={options.observer!r} is unknown; pass one of {known}")


def device_time_threshold(device_time: bool | int) -> int:
    """Convert the ``device_time`` argument of ``memtrace.record`` to ``RecordingOptions.device_time_min_bytes``."""
    if device_time is True:
        return DEFAULT_DEVICE_TIME_MIN_BYTES
    return int(device_time) or -1
