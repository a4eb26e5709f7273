"""Sites: a stack told by the user's own innermost line."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from memtrace.trace import Frame, Trace

_INSIDE = (
    "/site-packages/",
    "/dist-packages/",
    "\\site-packages\\",
    "<frozen ",
    "<string>",
    "<eval_with_key>",
)
_STANDARD = (
    sysconfig.get_paths()["stdlib"],
    str(Path(__file__).parent.parent),
    str(Path(__file__).parents[2] / "cli"),
)


def is_internal(frame: Frame) -> bool:
    """Whether a frame belongs to torch, to Python's library or to memtrace, not to the user."""
    file = frame.file
    if any(part in file for part in _INSIDE) or file.startswith(_STANDARD) or file in ("??", ""):
        return True
    return "/lib/python3" in file or "/torch/" in file


def own_frame(frames: list[Frame]) -> Frame | None:
    """The user's own innermost frame; the innermost of all where there is no own one; None for an empty stack."""
    return next((frame for frame in frames if not is_internal(frame)), frames[0] if frames else None)


def site(trace: Trace, stack: int) -> str | None:
    """'file:line function' of the user's own innermost line; None where there is no stack."""
    frame = own_frame(trace.frames(stack))
    if frame is None:
        return None
    parts = Path(frame.file.replace("\\", "/")).parts
    return f"{'/'.join(parts[-2:])}:{frame.line} {frame.function}"
