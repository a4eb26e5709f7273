"""The curve of a trace as an inline SVG image: it needs no script, and takes the text color of its surroundings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
from markupsafe import Markup, escape
from memtrace.dashboards.palette import CATEGORY_COLORS, STACK_ORDER

from memtrace.analysis.timeline import compute_timeline
from memtrace.categories import CATEGORY_LABELS
from memtrace.units import choose_byte_unit, choose_time_unit, format_bytes

if TYPE_CHECKING:
    from memtrace.format.arrays import Array
    from memtrace.trace import Trace

MAX_POINTS: Final = 6_000
"""Most instants from which the curve is drawn; the peak is always one of them."""
COLUMN_PIXELS: Final = 2
"""Width of the columns of which the first and the highest instant are drawn."""
WIDTH: Final = 820
HEIGHT: Final = 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 20, 34


def stacked_curve(trace: Trace, device: str) -> Markup:
    """Return the live bytes of a device over time, stacked by category, below a legend; empty without allocations."""
    table = compute_timeline(trace, device, MAX_POINTS)
    if table.empty:
        return Markup("")
    table = table.iloc[_select_instants(table["time_ns"].to_numpy(), table["requested"].to_numpy())]
    time = table["time_ns"].to_numpy(dtype=np.float64)
    curves = {name: table[name].to_numpy(dtype=np.float64) for name in STACK_ORDER}
    total = sum(curves.values(), np.zeros(len(time)))
    plot = _Plot(time, float(total.max()) or 1.0)
    base = np.zeros(len(time))
    areas = []
    for name, curve in curves.items():
        if curve.any():
            areas.append(f'<path d="{plot.area(base, base + curve)}" fill="{CATEGORY_COLORS[name]}"/>')
            base = base + curve
    top = int(np.argmax(total))
    label = f"Live bytes on {device} over time, stacked by category; peak {format_bytes(float(total[top]))}"
    return _legend([name for name, curve in curves.items() if curve.any()]) + Markup(
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" style="max-width:100%;height:auto" role="img" '
        f'aria-label="{escape(label)}" font-size="12" font-family="system-ui,sans-serif" fill="currentColor">'
        f"{''.join(areas)}{plot.axes()}{plot.peak(top, float(total[top]))}</svg>"
    )


def _legend(categories: Sequence[str]) -> Markup:
    entry = (
        '<span style="white-space:nowrap;margin-right:1em"><span style="display:inline-block;width:0.75em;'
        'height:0.75em;background:{};margin-right:0.35em"></span>{}</span>'
    )
    entries = " ".join(entry.format(CATEGORY_COLORS[name], CATEGORY_LABELS[name]) for name in categories)
    return Markup(f'<div style="margin-top:0.5em">{entries}</div>')


def _select_instants(time_ns: Array, num_bytes: Array) -> Array:
    """Return the first and the highest instant of each column of pixels, and the last one."""
    span = max(int(time_ns[-1] - time_ns[0]), 1)
    column = (time_ns - time_ns[0]) * (WIDTH // COLUMN_PIXELS) // span
    starts = np.flatnonzero(np.diff(column, prepend=-1))
    order = np.lexsort((num_bytes, column))
    highest = order[np.append(starts[1:], len(column)) - 1]
    return np.unique(np.concatenate([starts, highest, [len(column) - 1]]))


class _Plot:
    """Positions of times and bytes in the image."""

    def __init__(self, time_ns: Array, largest: float) -> None:
        self._start, self._span = float(time_ns[0]), float(time_ns[-1] - time_ns[0]) or 1.0
        self._largest = largest
        self._x = _LEFT + (time_ns - self._start) / self._span * (WIDTH - _LEFT - _RIGHT)

    def _y(self, num_bytes: Array | float) -> Array:
        height = HEIGHT - _TOP - _BOTTOM
        return np.asarray(HEIGHT - _BOTTOM - np.asarray(num_bytes) / self._largest * height)

    def area(self, low: Array, high: Array) -> str:
        """Return the path of the area between two curves that keep each level until the next instant."""
        there, back = self._steps(high), self._steps(low)
        forward = "".join(f"H{x:.1f}V{y:.1f}" for x, y in there)
        backward = "".join(f"V{y:.1f}H{x:.1f}" for x, y in reversed(back))
        end = self._x[-1]
        return f"M{self._x[0]:.1f} {back[0][1]:.1f}{forward}H{end:.1f}{backward}Z"

    def _steps(self, curve: Array) -> list[tuple[float, float]]:
        """Return where a curve changes its level, as positions."""
        y = np.round(self._y(curve), 1)
        changes = np.flatnonzero(np.diff(y, prepend=np.inf))
        return list(zip(self._x[changes].tolist(), y[changes].tolist(), strict=True))

    def axes(self) -> str:
        """Return the axes with three values each."""
        divisor, unit = choose_byte_unit(self._largest)
        nanoseconds, time_unit = choose_time_unit(self._span)
        parts = []
        for share in (0.0, 0.5, 1.0):
            y, x = float(self._y(share * self._largest)), _LEFT + share * (WIDTH - _LEFT - _RIGHT)
            parts.append(
                f'<path d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}" stroke="currentColor" stroke-opacity="0.2"/>'
                f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{share * self._largest / divisor:,.3g}</text>'
                f'<text x="{x:.1f}" y="{HEIGHT - 12}" text-anchor="{("start", "middle", "end")[round(2 * share)]}">'
                f"{share * self._span / nanoseconds:,.3g} {time_unit}</text>"
            )
        return "".join(parts) + f'<text x="{_LEFT - 6}" y="{_TOP - 8}" text-anchor="end">{unit}</text>'

    def peak(self, place: int, num_bytes: float) -> str:
        """Return the mark of the peak."""
        x, y = float(self._x[place]), float(self._y(num_bytes))
        anchor = "end" if x > WIDTH / 2 else "start"
        return (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="none" stroke="currentColor"/>'
            f'<text x="{x + (-7 if anchor == "end" else 7):.1f}" y="{y - 6:.1f}" text-anchor="{anchor}">'
            f"peak {format_bytes(num_bytes)}</text>"
        )
