"""Keeps the status of a running recording, from the rows that its trace gets (``memtrace.format.live_status``)."""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np

from memtrace.format.arrays import Array
from memtrace.format.keyframes import Columns, Level, LiveSet, PartColumns, order_of
from memtrace.format.live_status import (
    MAX_SAMPLES,
    MAX_STEPS,
    LiveSample,
    LiveStatus,
    LiveStep,
    remove_live_status,
    write_live_status,
)
from memtrace.format.schema import CATEGORIES, EVENT_KINDS, SPAN_KINDS
from memtrace.recording import arrow

STATUS_SECONDS: Final = 1.0
"""Time between two statuses."""
_SIGN_OF_KIND: Final = np.array(
    [1 if kind in ("alloc", "baseline", "live") else -1 if kind == "free" else 0 for kind in EVENT_KINDS], np.int8
)
"""By kind of event: whether the live bytes grow (1) or shrink (-1)."""
_STEP: Final = SPAN_KINDS.index("step")
_MAX_POINTS: Final = 4096
"""Points of the curve since the last step's end; of more, the higher of two neighbors stays."""
_NO_TIME: Final = np.iinfo(np.int64).min


class _DeviceCurve:
    """The live bytes of one device since the last step ended."""

    def __init__(self) -> None:
        self.level = self.peak = self.sample_peak = 0
        self._start = 0
        self._time = np.empty(0, np.int64)
        self._level = np.empty(0, np.int64)

    def advance(self, change: Level) -> None:
        """Add what further rows change."""
        level = self.level + change.size
        self.level, highest = int(level[-1]), int(level.max())
        self.peak, self.sample_peak = max(self.peak, highest), max(self.sample_peak, highest)
        self._time = np.concatenate([self._time, change.time_ns])
        self._level = np.concatenate([self._level, level])
        while len(self._time) > _MAX_POINTS:
            pairs = np.arange(0, len(self._time), 2)
            self._time, self._level = self._time[pairs], np.maximum.reduceat(self._level, pairs)

    def levels_until(self, ends_ns: Array) -> tuple[list[int], list[int]]:
        """Return the highest and the last level of each step, given the ends of the steps since the last one."""
        level = np.concatenate([[self._start], self._level])  # before each point, and after the last
        ends = np.maximum.accumulate(np.searchsorted(self._time, ends_ns))
        last = level[ends]
        highest = np.maximum.reduceat(level[: ends[-1] + 1], np.concatenate([[0], ends[:-1]]))
        return np.maximum(highest, last).clip(0).tolist(), last.tolist()

    def end_step(self, end_ns: int) -> None:
        """Forget what was before the end of a step."""
        end = int(np.searchsorted(self._time, end_ns))
        self._start = int(self._level[end - 1]) if end else self._start
        self._time, self._level = self._time[end:], self._level[end:]

    def take_sample(self) -> int:
        """Return the highest level since the last call."""
        highest, self.sample_peak = self.sample_peak, self.level
        return highest


class LiveStatusFile:
    """Writes the status of one trace while it is recorded. Its methods are called on the writer's thread.

    A status that cannot be written is left out: the trace does not need it.

    Args:
        folder: the folder of the rank.

    Attributes:
        due: time of the next status, by ``time.monotonic``.
    """

    def __init__(self, folder: Path) -> None:
        self.due = 0.0
        self._folder = folder
        self._curves: dict[int, _DeviceCurve] = {}
        self._steps: deque[LiveStep] = deque(maxlen=MAX_STEPS)
        self._samples: deque[LiveSample] = deque(maxlen=MAX_SAMPLES)
        self._step_start_ns = 0
        self._order_ns = _NO_TIME
        self._num_events = -1
        self._has_failed = False

    def begin_with(self, live: LiveSet) -> None:
        """Begin with the live blocks of a trace that contains this one."""
        columns = live.keyframe()
        is_block = columns["block_id"] >= 0
        self.advance(PartColumns({name: values[is_block] for name, values in columns.items()}))

    def advance(self, rows: PartColumns) -> None:
        """Take note of rows of the trace."""
        if len(rows.events.get("kind", ())):
            levels = _levels(rows.events) if rows.levels is None else rows.levels
            for device, level in levels.items():
                time_ns = np.maximum(level.time_ns, self._order_ns)
                self._curves.setdefault(device, _DeviceCurve()).advance(Level(time_ns, level.size))
            self._order_ns = int(order_of(rows.events, self._order_ns)[-1])
        if len(rows.spans.get("kind", ())):
            self._end_steps(rows.spans)

    def _end_steps(self, spans: Columns) -> None:
        rows = np.flatnonzero(spans["kind"] == _STEP)
        if not len(rows):
            return
        start = spans["start_ns"][rows]
        end = start + spans["duration_ns"][rows]
        for step in self._steps_until(spans["index"][rows], start, end):
            if step.number == 0:
                self._steps.clear()  # the program marks its own steps from here on
            self._steps.append(step)
        for curve in self._curves.values():
            curve.end_step(int(end.max()))
        self._step_start_ns = int(end[-1])

    def _steps_until(self, numbers: Array, starts_ns: Array, ends_ns: Array) -> list[LiveStep]:
        """Return the steps since the last one."""
        levels = {arrow.DEVICES[device]: curve.levels_until(ends_ns) for device, curve in self._curves.items()}
        return [
            LiveStep(
                number,
                start,
                end - start,
                peak_bytes={device: highest[place] for device, (highest, _) in levels.items()},
                end_bytes={device: last[place] for device, (_, last) in levels.items()},
            )
            for place, (number, start, end) in enumerate(
                zip(numbers.tolist(), starts_ns.tolist(), ends_ns.tolist(), strict=True)
            )
        ]

    def write_if_due(self, live: LiveSet, num_events: int, now_ns: int) -> None:
        """Write the status, at most every ``STATUS_SECONDS`` and only where there is something new.

        Args:
            live: the live set after all rows so far.
            num_events: events so far.
            now_ns: the observer's time up to which events have been drained.
        """
        if time.monotonic() < self.due:
            return
        self.due = time.monotonic() + STATUS_SECONDS
        if self._has_failed or num_events == self._num_events:
            return
        self._num_events = num_events
        try:
            write_live_status(self._folder, self._status(live, num_events, now_ns))
        except (OSError, ValueError):
            self._has_failed = True

    def _status(self, live: LiveSet, num_events: int, now_ns: int) -> LiveStatus:
        names = {arrow.DEVICES[device]: curve for device, curve in sorted(self._curves.items())}
        keyframe = live.keyframe()
        sample = LiveSample(now_ns, {name: curve.take_sample() for name, curve in names.items()})
        self._samples.append(sample)
        last = self._steps[-1] if self._steps else None
        return LiveStatus(
            time_ns=now_ns,
            written_epoch_ns=time.time_ns(),
            num_events=num_events,
            live_bytes={name: max(curve.level, 0) for name, curve in names.items()},
            peak_bytes={name: curve.peak for name, curve in names.items()},
            category_bytes=_bytes_by_category(keyframe),
            reserved_bytes=_reserved_bytes(keyframe),
            steps=tuple(self._steps),
            open_step=None if last is None else self._open_step(last.number + 1, now_ns),
            samples=tuple(self._samples),
        )

    def _open_step(self, number: int, now_ns: int) -> LiveStep:
        # A step can end after the moment up to which events were asked for: its span comes with the events before it.
        start_ns = self._step_start_ns
        return self._steps_until(np.array([number]), np.array([start_ns]), np.array([max(now_ns, start_ns)]))[0]

    def remove(self) -> None:
        """Remove the file: the recording has ended."""
        with suppress(OSError):
            remove_live_status(self._folder)


def _levels(events: Columns) -> dict[int, Level]:
    """Return by device code how rows of events change the live bytes."""
    order = order_of(events, _NO_TIME)
    sign = _SIGN_OF_KIND[events["kind"]]
    rows = np.flatnonzero((sign != 0) & (events["block_id"] >= 0))
    device, change = events["device"][rows], sign[rows] * np.maximum(events["size"][rows], 0)
    levels = {}
    for code in arrow.device_codes(device):
        chosen = np.flatnonzero((device == code) & (change != 0))
        if len(chosen):
            levels[code] = Level(order[rows[chosen]], np.cumsum(change[chosen]))
    return levels


def _bytes_by_category(live: Columns) -> dict[str, dict[str, int]]:
    """Return the bytes of the live blocks by device and labeled category."""
    is_block = live["block_id"] >= 0
    device, size = live["device"][is_block], np.maximum(live["size"][is_block], 0)
    category = np.where(live["category"] >= 0, live["category"], CATEGORIES.index("unknown"))[is_block]
    result: dict[str, dict[str, int]] = {}
    for code in arrow.device_codes(device):
        of_device = device == code
        total = np.bincount(category[of_device], weights=size[of_device], minlength=len(CATEGORIES))
        result[arrow.DEVICES[code]] = {
            name: int(total[place]) for place, name in enumerate(CATEGORIES) if total[place] > 0
        }
    return result


def _reserved_bytes(live: Columns) -> dict[str, int]:
    """Return the bytes of the reserved segments by device."""
    is_segment = live["block_id"] < 0
    device, size = live["device"][is_segment], live["size"][is_segment]
    return {arrow.DEVICES[code]: int(size[device == code].sum()) for code in arrow.device_codes(device)}
