"""The Python stacks of the dispatch observer."""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Final

from memtrace.format.schema import NAME_KINDS
from memtrace.recording.observers.dispatch_buffer import RecordBuffer
from memtrace.recording.observers.dispatch_regions import Regions

_FRAME: Final = NAME_KINDS.index("frame")
_MAX_DEPTH: Final = 128


class PythonStacks:
    """Records Python stacks, each distinct one once.

    Args:
        buffer: receives the names of frames and stacks.
        regions: the generated code, whose frames follow those of the program that they were generated from.
        hidden_file: frames of this file are left out.

    Attributes:
        hidden: code whose frames are left out.
    """

    def __init__(self, buffer: RecordBuffer, regions: Regions, hidden_file: str) -> None:
        self._buffer = buffer
        self._regions = regions
        self._hidden_files = {hidden_file, __file__}
        self.hidden: set[CodeType] = set()

    def current(self) -> int:
        """The id of the Python stack of the calling thread."""
        frame: FrameType | None = sys._getframe(1)
        positions: list[tuple[CodeType, int]] = []
        while frame is not None and len(positions) < _MAX_DEPTH:
            if frame.f_code not in self.hidden and frame.f_code.co_filename not in self._hidden_files:
                positions.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        key = tuple(positions)
        known = self._buffer.stack_id(key)
        if known is not None:
            return known
        return self._buffer.add_stack(key, [frame for code, line in positions for frame in self._frames(code, line)])

    def _frames(self, code: CodeType, line: int) -> list[int]:
        site = self._regions.find(code, line)
        if site is not None:
            return [*site.frames, site.generated_frame]
        name = getattr(code, "co_qualname", code.co_name)
        return [self._buffer.name_id(_FRAME, f"{code.co_filename}\t{line}\t{name}")]
