"""What changed between two traces: by category, module and line, and step by step; never by address.

Compared is what is held at the peak, and what a usual step allocates (the median over the steps after warm-up, so that
runs of different lengths compare).
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from memtrace.analysis.allocation_sites import allocation_site
from memtrace.analysis.attribution import step_rows
from memtrace.analysis.block_groups import group_by_category, group_by_module_pattern, group_by_site
from memtrace.analysis.blocks import blocks
from memtrace.analysis.growth import WARM_UP_STEPS
from memtrace.analysis.peak import find_peak
from memtrace.analysis.steps import step_columns
from memtrace.format.arrays import Array
from memtrace.format.schema import CATEGORIES
from memtrace.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

GROUPINGS: Final = ("category", "module", "site")
MEASURES: Final = ("held at the peak", "allocated by a usual step")
_LINE: Final = re.compile(r":\d+ ")


@dataclass(frozen=True)
class Change:
    """One category, module or line in both traces. Bytes; None: it is not there."""

    grouping: str
    """One of GROUPINGS."""
    measure: str
    """One of MEASURES."""
    name: str | None
    """As in the second trace; None: unknown."""
    before_bytes: int | None
    after_bytes: int | None
    before_blocks: float | None
    after_blocks: float | None

    @property
    def change_bytes(self) -> int:
        """What is there more now."""
        return (self.after_bytes or 0) - (self.before_bytes or 0)

    @property
    def kind(self) -> str:
        """appeared, vanished, grew, shrank or same."""
        if self.before_bytes is None or self.after_bytes is None:
            return "appeared" if self.before_bytes is None else "vanished"
        if self.change_bytes == 0:
            return "same"
        return "grew" if self.change_bytes > 0 else "shrank"

    def as_dict(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        return asdict(self) | {"change_bytes": self.change_bytes, "kind": self.kind}


@dataclass(frozen=True)
class Diff:
    """Two traces beside each other. ``totals`` has pairs (before, after), None where a trace does not tell."""

    totals: dict[str, tuple[float | None, float | None]]
    """The peak, the number of steps, and of a usual step its peak, allocated bytes, allocations and duration."""
    changes: tuple[Change, ...]
    """Whatever is not the same, the largest change first."""
    step_peaks: tuple[tuple[int, int, int], ...]
    """(number of the step, peak before, peak after) of the steps that both have. Bytes."""

    def as_dict(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        return {
            "totals": {name: {"before": before, "after": after} for name, (before, after) in self.totals.items()},
            "changes": [change.as_dict() for change in self.changes],
            "steps": [{"step": step, "before_bytes": one, "after_bytes": two} for step, one, two in self.step_peaks],
        }


def diff(before: Trace, after: Trace) -> Diff:
    """What changed from one single-rank trace to another, all devices added. A line that only moved within its function
    is the same line. A file of totals tells only the bytes of its categories."""
    steps = _compared_steps(before, after)
    changes = _changes(MEASURES[0], _held(before), _held(after))
    changes += _changes(MEASURES[1], _allocated(before, steps[0]), _allocated(after, steps[1]))
    if not (before.has_blocks and after.has_blocks):
        changes = [_of_totals(change, before, after) for change in changes if _is_of_totals(change)]
    changes = [change for change in changes if change.kind != "same"]
    changes.sort(key=lambda change: -abs(change.change_bytes))
    one, two = _totals(before, steps[0]), _totals(after, steps[1])
    return Diff({name: (one[name], two[name]) for name in one}, tuple(changes), _step_peaks(before, after))


def _is_of_totals(change: Change) -> bool:
    return (change.grouping, change.measure) == (GROUPINGS[0], MEASURES[0])


def _of_totals(change: Change, before: Trace, after: Trace) -> Change:
    had = change.before_blocks if before.has_blocks else None
    return replace(change, before_blocks=had, after_blocks=change.after_blocks if after.has_blocks else None)


def diff_table(before: Trace, after: Trace) -> pd.DataFrame:
    """One row a change: the columns of ``Change``, change_bytes and kind."""
    import pandas as pd

    columns = [*Change.__dataclass_fields__, "change_bytes", "kind"]
    frame: pd.DataFrame = pd.DataFrame([change.as_dict() for change in diff(before, after).changes], columns=columns)
    return frame


Sums = dict[str, dict[str | None, tuple[int, float]]]
"""grouping -> name -> (bytes, blocks)."""


def _held(trace: Trace) -> Sums:
    sums: Sums = {grouping: {} for grouping in GROUPINGS}
    for device in trace.devices:
        live = find_peak(trace, device).live
        for grouping, rows in zip(
            GROUPINGS,
            (group_by_category(trace, live), group_by_module_pattern(trace, live), group_by_site(trace, live)),
            strict=True,
        ):
            for group in rows:
                had = sums[grouping].get(group.name, (0, 0.0))
                sums[grouping][group.name] = had[0] + group.bytes, had[1] + group.num_blocks
    return sums


def _allocated(trace: Trace, steps: Array) -> Sums:
    """The median over some steps of what each group allocates in a step."""
    found = blocks(trace)
    place = np.searchsorted(steps, found.step) if len(steps) else np.zeros(len(found), np.int64)
    inside = np.isin(found.step, steps)
    names: dict[str, tuple[Array, list[str | None]]] = {
        "category": (found.category.astype(np.int64), [*CATEGORIES, None]),
        "module": _coded(found.module, lambda code: _pattern(trace.name(code))),
        "site": _coded(found.stack, lambda code: allocation_site(trace, code)),
    }
    sums: Sums = {}
    for grouping, (codes, texts) in names.items():
        width = max(len(steps), 1)
        key = codes[inside] * width + place[inside]
        total = np.bincount(key, weights=found.size[inside], minlength=len(texts) * width).reshape(-1, width)
        number = np.bincount(key, minlength=len(texts) * width).reshape(-1, width)
        sums[grouping] = {
            texts[code]: (int(np.median(total[code])), float(np.median(number[code])))
            for code in np.flatnonzero(number.any(axis=1)).tolist()
        }
    return sums


def _coded(column: Array, text: Any) -> tuple[Array, list[str | None]]:
    """Codes into a list of distinct texts: several ids may have one text."""
    ids, place = np.unique(column, return_inverse=True)
    texts: dict[str | None, int] = {}
    code = np.array([texts.setdefault(text(identity), len(texts)) for identity in ids.tolist()], np.int64)
    return code[place] if len(ids) else place, list(texts)


def _pattern(name: str | None) -> str | None:
    return name and ".".join("*" if part.isdigit() else part for part in name.split("."))


def usual_steps(trace: Trace) -> Array:
    """The numbers of the steps after warm-up; of all where there are too few."""
    steps = step_rows(trace).number
    return steps[WARM_UP_STEPS:] if len(steps) > WARM_UP_STEPS + 1 else steps


def _compared_steps(before: Trace, after: Trace) -> tuple[Array, Array]:
    """The usual steps of both; where one has too few to leave out its warm-up, those of the same numbers in both."""
    one, two = step_rows(before).number, step_rows(after).number
    shared = np.intersect1d(one, two)
    if len(shared) and min(len(one), len(two)) <= WARM_UP_STEPS + 1:
        return shared, shared
    return usual_steps(before), usual_steps(after)


def _changes(measure: str, before: Sums, after: Sums) -> list[Change]:
    changes = []
    for grouping in GROUPINGS:
        one, two = before[grouping], after[grouping]
        moved = _moved(one, two) if grouping == "site" else {}
        for name in dict.fromkeys([*two, *(name for name in one if name not in two)]):
            if name in moved.values():
                continue
            had, has = one.get(moved.get(name, name)), two.get(name)
            changes.append(
                Change(grouping, measure, name, had[0] if had else None, has[0] if has else None,
                       had[1] if had else None, has[1] if has else None)
            )  # fmt: skip
    return changes


def _moved(one: dict[str | None, Any], two: dict[str | None, Any]) -> dict[str | None, str | None]:
    """New lines that are old ones with another number: each the only one left of its function on both sides."""
    gone: dict[str, list[str]] = {}
    come: dict[str, list[str]] = {}
    for names, others, sides in ((one, two, gone), (two, one, come)):
        for name in names:
            if name is not None and name not in others:
                sides.setdefault(_LINE.sub(": ", name), []).append(name)
    return {new[0]: gone[key][0] for key, new in come.items() if len(new) == 1 and len(gone.get(key, ())) == 1}


def _totals(trace: Trace, steps: Array) -> dict[str, float | None]:
    columns, usual = step_columns(trace), np.isin(step_columns(trace)["step"], steps)
    names = {
        "usual_step_peak_bytes": "peak_bytes",
        "usual_step_allocated_bytes": "allocated_bytes",
        "usual_step_allocations": "num_allocs",
        "usual_step_duration_ns": "duration_ns",
    }
    medians = {name: float(np.median(columns[of][usual])) if usual.any() else None for name, of in names.items()}
    peaks = [find_peak(trace, device).requested.bytes for device in trace.devices]
    return {"peak_bytes": sum(peaks), "num_steps": len(columns["step"]) if trace.has_blocks else None, **medians}


def _step_peaks(before: Trace, after: Trace) -> tuple[tuple[int, int, int], ...]:
    one, two = step_columns(before), step_columns(after)
    had = dict(zip(one["step"].tolist(), one["peak_bytes"].tolist(), strict=True))
    rows = zip(two["step"].tolist(), two["peak_bytes"].tolist(), strict=True)
    return tuple((step, had[step], bytes_) for step, bytes_ in rows if step in had)
