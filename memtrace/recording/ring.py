"""Keeps the parts of the last steps of a long recording and deletes the older ones.

Every part begins with a keyframe, so deleting the parts before it loses no live block.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path

from memtrace.format.part_files import part_name
from memtrace.format.part_writer import KEYFRAMED_TABLES
from memtrace.recording.memory_files import MAX_HELD_BYTES, MemoryFiles, delete_file


@dataclass(frozen=True)
class _Part:
    number: int
    num_events: int
    end_ns: int


class Ring:
    """Deletes parts that ended before the last ``last_steps`` steps began.

    Args:
        folder: the folder of the rank.
        last_steps: number of steps to keep.
        files: the parts, where they are in memory: their size is bounded too. None: they are on disk.

    Attributes:
        folder: the folder of the rank; it can be set until the first part is written.
        dropped_events: events of the deleted parts.
    """

    def __init__(self, folder: Path, last_steps: int, files: MemoryFiles | None = None) -> None:
        self.folder = folder
        self._files = files
        self._last_steps = last_steps
        self._step_starts: deque[int] = deque(maxlen=last_steps + 1)
        self._parts: deque[_Part] = deque()
        self.dropped_events = 0

    def step_began(self, start_ns: int) -> None:
        """Note the start of a step; called on the training thread."""
        self._step_starts.append(start_ns)

    def forget_steps(self) -> None:
        """Discard the steps noted so far: the program marks its own from here on."""
        self._step_starts.clear()

    def part_written(self, number: int, num_events: int, end_ns: int) -> int | None:
        """Note a new part and delete those that are no longer needed.

        Args:
            number: the part's number.
            num_events: its events.
            end_ns: largest time of the events up to its end.

        Returns:
            The largest number that was deleted, None where nothing was.
        """
        self._parts.append(_Part(number, num_events, end_ns))
        dropped = None
        while len(self._parts) > 1 and (self._is_past(self._parts[0]) or self._are_too_large()):
            part = self._parts.popleft()
            self._delete(part.number)
            self.dropped_events += part.num_events
            dropped = part.number
        return dropped

    def _is_past(self, part: _Part) -> bool:
        return len(self._step_starts) > self._last_steps and part.end_ns < self._step_starts[0]

    def _are_too_large(self) -> bool:
        return self._files is not None and self._files.num_bytes > MAX_HELD_BYTES

    def _delete(self, number: int) -> None:
        delete = delete_file if self._files is None else self._files.delete
        # The keyframe goes first: a trace begins with the first keyframe that is there, whatever else is left.
        for table in KEYFRAMED_TABLES:
            delete(self.folder / part_name(table, number))
