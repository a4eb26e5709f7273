"""The stacks of a snapshot, interned: frames, phases, and what the compiler says of them.

Frame dicts and frame lists are shared objects in a snapshot, so most of the work is done once an object, by ``id``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from memtrace.format.schema import CATEGORIES
from memtrace.readers.fields import FieldError
from memtrace.readers.frames import (
    BACKWARD,
    Sign,
    hint_of,
    is_noise,
    operator_of,
    parse_traceback,
    phase_of,
    sign_of,
)
from memtrace.readers.tables import Array, Names

MAX_DEPTH: Final = 4096
MAX_ALIKE: Final = 16


@dataclass(frozen=True)
class Stack:
    """One distinct stack. -1: none, not told."""

    stack: int
    """Its id in the table of names."""
    phase: int
    recompute: bool
    node: str
    """The FX node that the innermost generated frame stands for; empty where there is none."""
    operator: int
    """names.id of the operator that its C++ frames tell."""
    category: int
    """What is allocated there, an index into CATEGORIES."""


NO_STACK: Final = Stack(-1, -1, False, "", -1, -1)


class Piece(NamedTuple):
    """A frame as the table of names has it, and what it tells."""

    name: int
    sign: Sign
    hint: str


class Stacks:
    """Interns lists of frame dicts. The lists must outlive it."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._frames: dict[int, tuple[Piece, ...]] = {}
        self._exact: dict[tuple[int, ...], int] = {}
        self._contents: dict[Stack, int] = {NO_STACK: 0}
        self.distinct: list[Stack] = [NO_STACK]

    def intern(self, lists: Sequence[Any]) -> Array:
        """For each list of frames its place in ``distinct``; 0 for None and for an empty list."""
        alike: dict[tuple[int, int, int], list[tuple[Any, int]]] = {}
        places: list[int] = []
        add, candidates_of, nobody = places.append, alike.get, ()
        try:
            for frames in lists:
                if not frames:
                    add(0)
                    continue
                # Equality of lists looks at pointers first, so with shared frames it costs next to nothing: far less
                # than a key of the whole list. Few lists agree in both of these frames and in length.
                depth = len(frames)
                key = (id(frames[0]), id(frames[depth >> 1]), depth)
                for seen, place in candidates_of(key, nobody):
                    if seen == frames:
                        add(place)
                        break
                else:
                    place = self._place(frames)
                    places.append(place)
                    candidates = alike.setdefault(key, [])
                    if len(candidates) < MAX_ALIKE:
                        candidates.append((frames, place))
        except (TypeError, KeyError, IndexError):
            raise FieldError("an entry has 'frames' that are no list of frames") from None
        return np.array(places, np.int32)

    def intern_printed(self, lists: Sequence[Any]) -> Array:
        """The same for ``forward_frames``: printed tracebacks, one text a frame, outermost first."""
        known: dict[int, int] = {}
        for lines in lists:
            if id(lines) not in known:
                known[id(lines)] = self._printed(lines)
        return np.fromiter((known[id(lines)] for lines in lists), np.int32, len(lists))

    def _printed(self, lines: Any) -> int:
        if not isinstance(lines, list | tuple):
            return 0
        frames = [self._names.frame(*frame) for frame in parse_traceback(lines)[:MAX_DEPTH]]
        if not frames:
            return 0
        return self._add(Stack(self._names.stack(frames), BACKWARD, False, "", -1, -1))

    def _place(self, frames: Sequence[Any]) -> int:
        if not isinstance(frames, list | tuple):
            raise FieldError("an entry has 'frames' that are no list of frames")
        shared = tuple(map(id, frames))
        if shared not in self._exact:
            self._exact[shared] = self._new(frames[:MAX_DEPTH])
        return self._exact[shared]

    def _new(self, frames: Sequence[Any]) -> int:
        pieces = [piece for frame in frames for piece in self._frame(frame)]
        if not pieces:
            return 0
        phase, recompute = phase_of([piece.sign for piece in pieces])
        node = next((text for text in map(_node, frames) if text), "")
        operator = operator_of(_texts(frame) for frame in frames)
        hint = next((piece.hint for piece in pieces if piece.hint), "none")
        return self._add(
            Stack(
                self._names.stack(piece.name for piece in pieces),
                phase,
                recompute,
                node,
                self._names.text("operator", operator) if operator else -1,
                CATEGORIES.index(hint) if hint != "none" else -1,
            )
        )

    def _add(self, stack: Stack) -> int:
        place = self._contents.setdefault(stack, len(self.distinct))
        if place == len(self.distinct):
            self.distinct.append(stack)
        return place

    def _frame(self, frame: Any) -> tuple[Piece, ...]:
        """The frames that a frame dict stands for: none for noise, the original source before generated code."""
        if id(frame) not in self._frames:
            if not isinstance(frame, dict):
                raise FieldError("an entry has a frame that is no record")
            self._frames[id(frame)] = tuple(self._pieces(frame))
        return self._frames[id(frame)]

    def _pieces(self, frame: Mapping[str, Any]) -> list[Piece]:
        file, function = _texts(frame)
        if is_noise(file, function):
            return []
        original = parse_traceback([frame.get("fx_original_trace")])[:MAX_DEPTH]
        pieces = [Piece(self._names.frame(*place), sign_of(place[0], place[2]), "") for place in original]
        own = Piece(
            self._names.frame(file, frame.get("line"), function), sign_of(file, function), hint_of(file, function)
        )
        return [*pieces, own]


def _texts(frame: Mapping[str, Any]) -> tuple[str, str]:
    """File and function of a frame, "" for what is no text."""
    file, function = frame.get("filename"), frame.get("name")
    return file if isinstance(file, str) else "", function if isinstance(function, str) else ""


def _node(frame: Mapping[str, Any]) -> str:
    told = [frame.get(key) for key in ("fx_node_op", "fx_node_target", "fx_node_name")]
    return " ".join(text for text in told if isinstance(text, str) and text)
