"""The status of a running recording (``live.json``), for those who watch it: a small file, replaced about every second.

It is in the folder of the rank while the recording runs, and is removed when the recording ends. Parts are written less
often, so that a long recording has few files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from memtrace.errors import TraceError
from memtrace.format.files import replace_file
from memtrace.format.schema import FORMAT_VERSION
from memtrace.format.typed_json import InvalidMember, parse_value, read_json_file

LIVE_STATUS_NAME: Final = "live.json"
LIVE_STATUS_TEMPORARY: Final = f".{LIVE_STATUS_NAME}.tmp"
"""A temporary file that remains if the process dies while it writes the status; readers of the trace ignore it."""
MAX_STEPS: Final = 64
"""Number of the last steps in the status."""
MAX_SAMPLES: Final = 180
"""Number of the last samples in the status."""
_SIGNED: Final = ("time_ns", "steps.start_ns", "samples.time_ns", "open_step.start_ns")


@dataclass(frozen=True)
class LiveStep:
    """A step that has ended, or the current step so far. Bytes are requested bytes by device."""

    number: int
    start_ns: int
    duration_ns: int
    peak_bytes: Mapping[str, int]
    end_bytes: Mapping[str, int]
    """Live at the end of the step."""


@dataclass(frozen=True)
class LiveSample:
    """The highest live bytes by device since the sample before."""

    time_ns: int
    peak_bytes: Mapping[str, int]


@dataclass(frozen=True)
class LiveStatus:
    """What a recording knows of itself while it runs. Times are nanoseconds since the recording began."""

    time_ns: int
    """Time at which the observer was asked for its events last."""
    written_epoch_ns: int
    """Unix time at which the status was written."""
    num_events: int
    live_bytes: Mapping[str, int]
    """Requested bytes that are live, by device."""
    peak_bytes: Mapping[str, int]
    """Their maximum so far."""
    category_bytes: Mapping[str, Mapping[str, int]]
    """Live bytes by device and category, as far as the program labels blocks; ``unknown`` for all others."""
    reserved_bytes: Mapping[str, int]
    """Bytes in the segments that the CUDA allocator reserved during the recording, by device."""
    steps: tuple[LiveStep, ...]
    """The last steps, at most ``MAX_STEPS``."""
    open_step: LiveStep | None
    """The current step so far; None before the first step has ended."""
    samples: tuple[LiveSample, ...]
    """One for each status of the last minutes, at most ``MAX_SAMPLES``."""


def write_live_status(folder: Path, status: LiveStatus) -> None:
    """Replace ``live.json`` in the folder of a rank. Raises OSError."""
    content = {"format": "memtrace", "format_version": FORMAT_VERSION, **vars(status)}
    # `vars` of the dataclasses in it: `asdict` would copy everything first, while training threads wait for the GIL.
    replace_file(folder / LIVE_STATUS_NAME, json.dumps(content, separators=(",", ":"), default=vars).encode())


def remove_live_status(folder: Path) -> None:
    """Remove ``live.json`` from the folder of a rank, if it is there. Raises OSError."""
    (folder / LIVE_STATUS_NAME).unlink(missing_ok=True)


def read_live_status(folder: Path) -> LiveStatus | None:
    """Return the status in the folder of a rank; None where there is none.

    Raises:
        TraceError: the file is damaged, or of another format version.
    """
    path = folder / LIVE_STATUS_NAME
    try:
        content: Any = read_json_file(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise TraceError(f"{path} cannot be read ({error}). Delete it; the trace does not need it.") from error
    if not isinstance(content, dict) or content.get("format_version") != FORMAT_VERSION:
        raise TraceError(f"{path} was written by another version of memtrace. Delete it; the trace does not need it.")
    try:
        status: LiveStatus = parse_value(LiveStatus, content, signed=_SIGNED)
    except InvalidMember as error:
        raise TraceError(f"{path}: {error}. Delete it; the trace does not need it.") from None
    return status
