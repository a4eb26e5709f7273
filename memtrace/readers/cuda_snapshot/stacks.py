"""Interns the call stacks of a snapshot and finds what they reveal: phase, operator, category, FX node.

Frame dicts and frame lists are shared objects in a snapshot, so most of the work is done once per object, by ``id``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from memtrace.format.schema import CATEGORIES
from memtrace.frames import (
    BACKWARD,
    Frame,
    PhaseHint,
    category_hint,
    dispatched_operator,
    is_stack_machinery,
    parse_traceback,
    phase_hint,
    stack_phase,
)
from memtrace.readers.rows import Coded, FieldError
from memtrace.readers.tables import Array, Names

MAX_DEPTH: Final = 4096
_MAX_CANDIDATES: Final = 16
_MAX_LINE: Final = 1 << 31


@dataclass(frozen=True)
class SnapshotStack:
    """A distinct call stack and what it reveals; -1 where something is unknown."""

    stack: int
    """Id in the table ``names``."""
    phase: int
    """Index into ``PHASES``."""
    recompute: bool
    """Whether the stack is a recomputation (activation checkpointing)."""
    node: str
    """The FX node of the innermost generated frame, "" for none."""
    operator: int
    """Id in the table ``names`` of the operator that the C++ frames show."""
    category: int
    """What is allocated there, as an index into ``CATEGORIES``."""


NO_STACK: Final = SnapshotStack(-1, -1, False, "", -1, -1)


class _InternedFrame(NamedTuple):
    name: int
    """Id in the table ``names``."""
    phase_hint: PhaseHint
    category_hint: str


class _InternedRecord(NamedTuple):
    """What a frame dict means."""

    frame: Frame
    """The frame as the file contains it."""
    frames: tuple[_InternedFrame, ...]
    """The frames that it stands for: none for stack machinery, the original source before generated code."""
    node: str
    """Its FX node, "" for none."""


class StackTable:
    """Interns lists of frame dicts. It identifies them by ``id``, so they must stay alive as long as the table."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._records: dict[int, _InternedRecord] = {}
        self._index_by_ids: dict[tuple[int, ...], int] = {}
        self._index_by_stack: dict[SnapshotStack, int] = {NO_STACK: 0}
        self.distinct: list[SnapshotStack] = [NO_STACK]

    def intern(self, lists: Coded) -> Array:
        """Return for each list of frames its index in ``distinct``; 0 for None and for an empty list."""
        return lists.spread(self._intern_values(lists.values))

    def _intern_values(self, lists: Sequence[Any]) -> Array:
        similar: dict[tuple[int, int, int], list[tuple[Any, int]]] = {}
        indices: list[int] = []
        add, candidates_of, no_candidates = indices.append, similar.get, ()
        try:
            for frames in lists:
                if not frames:
                    add(0)
                    continue
                # Comparing lists compares pointers first, so with shared frames it is much faster than hashing the
                # whole list. Few different lists agree in these two frames and in length.
                depth = len(frames)
                key = (id(frames[0]), id(frames[depth >> 1]), depth)
                for candidate, index in candidates_of(key, no_candidates):
                    if candidate == frames:
                        add(index)
                        break
                else:
                    index = self._intern_list(frames)
                    add(index)
                    candidates = similar.setdefault(key, [])
                    if len(candidates) < _MAX_CANDIDATES:
                        candidates.append((frames, index))
        except (TypeError, KeyError, IndexError):
            raise FieldError("an entry has 'frames' that are not a list of frames") from None
        return np.array(indices, np.int32)

    def intern_printed(self, lists: Coded) -> Array:
        """Do the same for ``forward_frames``: printed tracebacks, one string per frame, outermost frame first."""
        known: dict[int, int] = {}
        for lines in lists.values:
            if id(lines) not in known:
                known[id(lines)] = self._intern_traceback(lines)
        return lists.spread(np.fromiter((known[id(lines)] for lines in lists.values), np.int32, len(lists.values)))

    def _intern_traceback(self, lines: Any) -> int:
        if not isinstance(lines, list | tuple):
            return 0
        frames = [self._frame_name(frame) for frame in parse_traceback(lines)[:MAX_DEPTH]]
        if not frames:
            return 0
        return self._add(SnapshotStack(self._names.stack(frames), BACKWARD, False, "", -1, -1))

    def _intern_list(self, records: Sequence[Any]) -> int:
        if not isinstance(records, list | tuple):
            raise FieldError("an entry has 'frames' that are not a list of frames")
        ids = tuple(map(id, records))
        if ids not in self._index_by_ids:
            self._index_by_ids[ids] = self._add_list(records[:MAX_DEPTH])
        return self._index_by_ids[ids]

    def _add_list(self, records: Sequence[Any]) -> int:
        interned = list(map(self._intern_record, records))
        frames = [frame for record in interned for frame in record.frames]
        if not frames:
            return 0
        phase, recompute = stack_phase([frame.phase_hint for frame in frames])
        node = next((record.node for record in interned if record.node), "")
        operator = dispatched_operator(record.frame for record in interned)
        hint = next((frame.category_hint for frame in frames if frame.category_hint), "none")
        return self._add(
            SnapshotStack(
                self._names.stack(frame.name for frame in frames),
                phase,
                recompute,
                node,
                self._names.text("operator", operator) if operator else -1,
                CATEGORIES.index(hint) if hint != "none" else -1,
            )
        )

    def _add(self, stack: SnapshotStack) -> int:
        index = self._index_by_stack.setdefault(stack, len(self.distinct))
        if index == len(self.distinct):
            self.distinct.append(stack)
        return index

    def _intern_record(self, record: Any) -> _InternedRecord:
        if id(record) not in self._records:
            if not isinstance(record, dict):
                raise FieldError("an entry has a frame that is not a dict")
            frame = _to_frame(record)
            self._records[id(record)] = _InternedRecord(frame, self._new_frames(frame, record), _fx_node(record))
        return self._records[id(record)]

    def _new_frames(self, frame: Frame, record: Mapping[str, Any]) -> tuple[_InternedFrame, ...]:
        if is_stack_machinery(frame):
            return ()
        original_frames = parse_traceback([record.get("fx_original_trace")])[:MAX_DEPTH]
        frames = [_InternedFrame(self._frame_name(item), phase_hint(item), "") for item in original_frames]
        return (*frames, _InternedFrame(self._frame_name(frame), phase_hint(frame), category_hint(frame)))

    def _frame_name(self, frame: Frame) -> int:
        return self._names.frame(frame.file, frame.line, frame.function)


def _to_frame(record: Mapping[str, Any]) -> Frame:
    """Convert a frame dict; file and function are "" and the line is 0 where their values are invalid.

    Equal dicts must give equal frames, because ``StackTable`` compares dicts: 7.0 is the line 7, as in a file that a
    JavaScript program has written.
    """
    file, line, function = record.get("filename"), record.get("line"), record.get("name")
    return Frame(
        file if isinstance(file, str) else "",
        int(line) if isinstance(line, int | float) and 0 <= line < _MAX_LINE and line == int(line) else 0,
        function if isinstance(function, str) else "",
    )


def _fx_node(record: Mapping[str, Any]) -> str:
    parts = [record.get(key) for key in ("fx_node_op", "fx_node_target", "fx_node_name")]
    return " ".join(text for text in parts if isinstance(text, str) and text)
