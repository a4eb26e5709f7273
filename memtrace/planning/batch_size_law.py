"""How the peak of a step depends on the batch, and the largest batch that fits.

At each moment of the step the live bytes are c + k * b: blocks that do not grow, and blocks that do. The peak is the
largest of these lines, a convex function made of few straight pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from memtrace.format.arrays import Array
from memtrace.planning.timeline import Timeline


@dataclass(frozen=True)
class BatchPiece:
    """Batches for which one moment of the step has the peak: ``constant_bytes + bytes_per_batch * batch``."""

    from_batch: float
    """The smallest batch of the piece. Batches are multiples of the recorded one where its size is unknown."""
    constant_bytes: int
    bytes_per_batch: float


@dataclass(frozen=True)
class BatchResidual:
    """A recorded peak beside that of the law."""

    batch: int
    recorded_bytes: int
    predicted_bytes: int
    is_fitted: bool
    """Whether the law was made from this recording; the others test it."""


@dataclass(frozen=True)
class BatchLaw:
    """The peak as a function of the batch."""

    recorded_batch: int | None
    """Batch size of the recorded step; None: unknown, batches are multiples of it."""
    batch: float
    """The batch with all changes."""
    pieces: tuple[BatchPiece, ...]
    """In the order of the batch; the first begins at 0."""
    residuals: tuple[BatchResidual, ...]
    """One per recording of a known batch size; empty where the step is changed."""

    def peak_bytes(self, batch: float) -> int:
        """Return the peak with a batch."""
        return round(max(piece.constant_bytes + piece.bytes_per_batch * batch for piece in self.pieces))


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch that fits."""

    capacity_bytes: int
    batch: float | None
    """A whole number where the recorded batch size is known, else a multiple of it; None: no batch is too large."""
    peak_bytes: int
    """The peak with this batch."""


def find_batch_law(timeline: Timeline, batch: int | None, recorded: Mapping[int, int], factor: float = 1) -> BatchLaw:
    """Return the law of the peak of a timeline.

    Args:
        timeline: the step.
        batch: batch size of the recorded step; None: unknown.
        recorded: recorded peaks by batch size, to compare with.
        factor: the batch of the timeline as a multiple of the recorded one.
    """
    position, constant = replace(timeline, size=timeline.constant).levels
    total_position, total = timeline.levels
    total_at = total[np.searchsorted(total_position, position)]
    first, lines = _upper_envelope(constant, total_at - constant)
    unit = (batch or 1) * factor
    pieces = tuple(
        BatchPiece(start * unit, int(constant[line]), float(total_at[line] - constant[line]) / unit)
        for start, line in zip(first, lines, strict=True)
    )
    law = BatchLaw(batch, unit, pieces, ())
    farthest = max(recorded, key=lambda size: abs(size - (batch or 0)), default=None)
    residuals = tuple(
        BatchResidual(size, peak, law.peak_bytes(size), size in (batch, farthest))
        for size, peak in sorted(recorded.items())
    )
    return replace(law, residuals=residuals)


def _upper_envelope(constant: Array, slope: Array) -> tuple[list[float], list[int]]:
    """Return which lines ``constant + slope * x`` are largest for x >= 0, in order, and from which x on each is."""
    order = np.lexsort((constant, slope))
    # Of lines with one slope only the highest counts.
    kept = order[np.append(slope[order][1:] != slope[order][:-1], True)]
    starts: list[float] = []
    lines: list[int] = []
    for line in kept.tolist():
        start = 0.0
        while lines:
            crossing = (int(constant[lines[-1]]) - int(constant[line])) / (int(slope[line]) - int(slope[lines[-1]]))
            start = max(crossing, 0.0)
            if crossing > starts[-1]:
                break
            starts.pop()
            lines.pop()
            start = 0.0
        starts.append(start)
        lines.append(line)
    return starts, lines


def find_largest_batch(timeline: Timeline, law: BatchLaw, capacity_bytes: int) -> LargestBatch:
    """Return the largest batch whose peak fits, by bisection over the timeline itself.

    Args:
        timeline: the step.
        law: its law, which bounds the search.
        capacity_bytes: the memory of the device.
    """
    last = law.pieces[-1]
    if last.bytes_per_batch == 0:
        fits = last.constant_bytes <= capacity_bytes
        return LargestBatch(capacity_bytes, None if fits else 0, last.constant_bytes)
    # Whole samples, or hundredths of the recorded batch.
    step = 0.01 if law.recorded_batch is None else 1

    def peak(count: int) -> int:
        return timeline.scale_batch(count * step / law.batch).peak_bytes

    low, high = 0, 1
    while peak(high) <= capacity_bytes:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if peak(middle) <= capacity_bytes else (low, middle)
    return LargestBatch(capacity_bytes, low if law.recorded_batch is not None else low / 100, peak(low))
