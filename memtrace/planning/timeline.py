"""The memory of one training step as blocks with lifetimes, and what it would be if blocks were changed.

A timeline is a value: every change returns a new one. It holds the blocks of one device that are live during the step.
Positions on its axis are rows of the table events times ``TICKS_PER_ROW``, so that inserted blocks can begin and end
between two recorded events.

Source: the primitives (select, shrink, remove, insert, shift) are those of Daydream (USENIX ATC 2020), which has them
for time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import numpy as np

from memtrace.analysis.blocks import CATEGORY, blocks
from memtrace.analysis.counterfactual import END_OF_TRACE
from memtrace.format.arrays import Array
from memtrace.format.schema import CATEGORIES
from memtrace.planning.recorded_step import RecordedStep
from memtrace.trace import Trace

TICKS_PER_ROW: Final = 16
"""Positions from one row of events to the next."""


@dataclass(frozen=True)
class Timeline:
    """The blocks of one device during one step, one element per block.

    A block is live at the positions from ``begin`` up to, but not including, ``end``.
    """

    start: int
    """Position just before the first event of the step: what is live there counts."""
    stop: int
    """Position after the last event of the step."""
    block: Array
    """The block of the trace; -1: inserted."""
    size: Array
    """Bytes."""
    constant: Array
    """The part of ``size`` that does not grow with the batch."""
    begin: Array
    end: Array
    category: Array
    """Code into ``schema.CATEGORIES``."""

    def __len__(self) -> int:
        return len(self.size)

    @property
    def levels(self) -> tuple[Array, Array]:
        """The positions at which the live bytes change, in order, and the live bytes from each of them on."""
        begin, end = np.maximum(self.begin, self.start), np.minimum(self.end, self.stop)
        shown = begin < end
        position = np.concatenate([[self.start], begin[shown], end[shown]])
        change = np.concatenate([[0], self.size[shown], -self.size[shown]])
        order = np.argsort(position, kind="stable")
        position, level = position[order], np.cumsum(change[order])
        is_last = np.append(position[1:] != position[:-1], True) & (position < self.stop)
        return position[is_last], level[is_last]

    @property
    def peak_bytes(self) -> int:
        """Most bytes that are live at one position."""
        return int(self.levels[1].max())

    @property
    def peak_position(self) -> int:
        """The first position at which the peak is reached."""
        position, level = self.levels
        return int(position[np.argmax(level)])

    def live_at(self, position: int) -> Array:
        """Return a mask of the blocks that are live at a position."""
        live: Array = (self.begin <= position) & (position < self.end)
        return live

    def bytes_by_category(self, position: int) -> dict[str, int]:
        """Return the live bytes of each category at a position, without categories that have none."""
        live = self.live_at(position)
        total = np.zeros(len(CATEGORIES), np.int64)
        np.add.at(total, self.category[live], self.size[live])
        return {name: int(total[code]) for name, code in CATEGORY.items() if total[code]}

    def of_category(self, *names: str) -> Array:
        """Return a mask of the blocks of some categories."""
        return np.isin(self.category, [CATEGORY[name] for name in names])

    # -- changes -----------------------------------------------------------------------------------------------

    def remove(self, mask: Array) -> Timeline:
        """Return the timeline without the blocks of ``mask``."""
        return self._at(~mask)

    def resize(self, mask: Array, factor: float) -> Timeline:
        """Return the timeline with the blocks of ``mask`` larger or smaller by a factor, rounded up to bytes."""
        return replace(
            self,
            size=np.where(mask, _times(self.size, factor), self.size),
            constant=np.where(mask, _times(self.constant, factor), self.constant),
        )

    def scale_batch(self, factor: float) -> Timeline:
        """Return the timeline with a batch that is larger or smaller by a factor."""
        return replace(self, size=self.constant + _times(self.size - self.constant, factor))

    def cut(self, mask: Array, *, begin: Array | int | None = None, end: Array | int | None = None) -> Timeline:
        """Return the timeline with the lifetimes of ``mask`` beginning no earlier, or ending no later.

        Args:
            mask: the blocks.
            begin: position, one for all blocks of the timeline or one for each; None: as it is.
            end: position, likewise.
        """
        new_begin = self.begin if begin is None else np.where(mask, np.maximum(self.begin, begin), self.begin)
        new_end = self.end if end is None else np.where(mask, np.minimum(self.end, end), self.end)
        return replace(self, begin=new_begin, end=np.maximum(new_begin, new_end))

    def extend(self, mask: Array, *, begin: int | None = None, end: int | None = None) -> Timeline:
        """Return the timeline with the lifetimes of ``mask`` beginning at ``begin`` or earlier, ending at ``end`` or
        later."""
        new_begin = self.begin if begin is None else np.where(mask, np.minimum(self.begin, begin), self.begin)
        new_end = self.end if end is None else np.where(mask, np.maximum(self.end, end), self.end)
        return replace(self, begin=new_begin, end=new_end)

    def shift(self, mask: Array, ticks: int) -> Timeline:
        """Return the timeline with the lifetimes of ``mask`` moved by ``ticks`` positions."""
        return replace(
            self, begin=np.where(mask, self.begin + ticks, self.begin), end=np.where(mask, self.end + ticks, self.end)
        )

    def insert(
        self, size: Array | Sequence[int], begin: Array | Sequence[int], end: Array | Sequence[int], category: str,
        *, grows_with_batch: bool = False,
    ) -> Timeline:  # fmt: skip
        """Return the timeline with further blocks, one per element.

        Args:
            size: bytes.
            begin: first position of each block.
            end: the position after the last one.
            category: one of ``schema.CATEGORIES``.
            grows_with_batch: whether the sizes are proportional to the batch.
        """
        sizes = np.asarray(size, np.int64)
        added = replace(
            self,
            block=np.full(len(sizes), -1, np.int64),
            size=sizes,
            constant=np.zeros_like(sizes) if grows_with_batch else sizes,
            begin=np.asarray(begin, np.int64),
            end=np.asarray(end, np.int64),
            category=np.full(len(sizes), CATEGORY[category]),
        )
        columns: dict[str, Any] = {
            name: np.concatenate([getattr(self, name), getattr(added, name)]) for name in _COLUMNS
        }
        return replace(self, **columns)

    def _at(self, mask: Array) -> Timeline:
        return replace(self, **{name: getattr(self, name)[mask] for name in _COLUMNS})


_COLUMNS: Final = tuple(field.name for field in fields(Timeline) if field.type == "Array")


def build_timeline(trace: Trace, device: str, step: RecordedStep, constant_bytes: Array) -> Timeline:
    """Return the timeline of a recorded step.

    Args:
        trace: a trace of one rank.
        device: the device.
        step: the step.
        constant_bytes: for each block of the trace, the bytes that do not grow with the batch.
    """
    columns = blocks(trace)
    begin = columns.alloc_event.astype(np.int64)
    end = np.where(columns.free_event >= 0, columns.free_event.astype(np.int64), END_OF_TRACE)
    on_device = columns.device == trace.devices.index(device)
    chosen = np.flatnonzero(on_device & (begin < step.end_row) & (end >= step.first_row))
    return Timeline(
        start=step.first_row * TICKS_PER_ROW - 1,
        stop=step.end_row * TICKS_PER_ROW,
        block=chosen,
        size=columns.size[chosen].astype(np.int64),
        constant=constant_bytes[chosen].astype(np.int64),
        begin=begin[chosen] * TICKS_PER_ROW,
        end=end[chosen] * TICKS_PER_ROW,
        category=columns.category[chosen],
    )


def _times(size: Array, factor: float) -> Array:
    if factor == 1:
        return size
    # A product such as 3 * (1 / 3) must not be rounded up to the next byte.
    return np.ceil(size * factor - 1e-6).astype(np.int64)
