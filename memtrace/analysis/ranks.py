"""The ranks of one job side by side: who holds how much, who is slow, and which one to look at first."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from memtrace.analysis.attribution import KIND
from memtrace.analysis.coverage import compute_coverage
from memtrace.analysis.peak import Peak, find_peak, peak_by_category
from memtrace.analysis.steps import step_columns
from memtrace.errors import TraceError
from memtrace.format.arrays import Array
from memtrace.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

NOTICEABLE: Final = 1.05
"""Ranks whose peaks are below this many times the mean are alike."""
SLOW: Final = 1.2
"""The same for times, which differ from run to run, against the median."""


@dataclass(frozen=True, kw_only=True)
class RankRow:
    """One rank. Bytes and ns; None: not known."""

    rank: int
    device: str | None = None
    """The fullest device: an accelerator where the rank uses one, else the CPU."""
    peak_bytes: int | None = None
    """Most bytes requested on that device."""
    phase: str | None = None
    """The phase in which the peak was reached."""
    by_category: dict[str, int] = field(default_factory=dict)
    """What was live at the peak."""
    end_bytes: int | None = None
    num_steps: int | None = None
    step_ns: int | None = None
    """Median duration of a step. Ranks that wait for each other have the same."""
    working_ns: int | None = None
    """Median time of a step spent in operators, those of torch.distributed left out."""
    clock_error_ns: int | None = None
    """By how much its clock can be off from rank 0's at most."""
    clock_drift_ns: int | None = None
    """By how much it had moved against rank 0's when the recording ended."""
    num_oom: int | None = None
    finished: bool | None = None
    ended_epoch_ns: int | None = None
    """Its last event, by the wall clock."""
    problem: str | None = None
    """Why the rank's recording ended early, or cannot be read."""


@dataclass(frozen=True)
class Ranks:
    """What ``ranks`` found."""

    rows: tuple[RankRow, ...]
    missing: tuple[int, ...]
    """Ranks of the job (its world size) that the trace does not have."""
    imbalance: float | None
    """The highest peak over the mean of all ranks' peaks."""
    slowest: int | None
    """The rank that works longest in a step; None where none stands out."""
    look_at: int | None
    why: str

    def as_dict(self) -> dict[str, Any]:
        """The shape of ``memtrace ranks --json``."""
        return {
            "ranks": [asdict(row) for row in self.rows],
            "missing_ranks": list(self.missing),
            "imbalance": self.imbalance,
            "slowest_rank": self.slowest,
            "look_at": {"rank": self.look_at, "why": self.why},
        }


def ranks(trace: Trace) -> Ranks:
    """All ranks of a trace, whatever it was made from. A rank that cannot be read is a row that says why.

    Source: events, ops, spans and labels of every rank, and the manifests.
    """
    rows = tuple(_row(trace, number) for number in sorted({*trace.ranks, *trace.unreadable}))
    peaks = [row.peak_bytes for row in rows if row.peak_bytes is not None]
    look_at, why = _look_at(rows)
    return Ranks(
        rows,
        tuple(number for number in missing_ranks(trace) if number not in trace.unreadable),
        max(peaks) / (sum(peaks) / len(peaks)) if peaks and sum(peaks) else None,
        _slowest(rows),
        look_at,
        why,
    )


def missing_ranks(trace: Trace) -> tuple[int, ...]:
    """Ranks of the job (its world size) that the trace does not have."""
    manifests = [trace.rank(number).manifest for number in trace.ranks]
    world = max((manifest.world_size for manifest in manifests), default=0)
    return tuple(sorted(set(range(world)) - set(trace.ranks))) if len(manifests) < world else ()


def ranks_table(trace: Trace) -> pd.DataFrame:
    """One row a rank: the fields of ``RankRow``, with one column of bytes for each category; NA: not known."""
    import pandas as pd

    rows = [asdict(row) for row in ranks(trace).rows]
    table: pd.DataFrame = pd.DataFrame([{**row, **row.pop("by_category")} for row in rows]).convert_dtypes()
    return table


def _row(trace: Trace, number: int) -> RankRow:
    try:
        return _summed(trace.rank(number), number)
    except TraceError as error:
        return RankRow(rank=number, problem=str(error))


def _summed(trace: Trace, number: int) -> RankRow:
    covered = compute_coverage(trace)
    clock = trace.manifest.clock
    problem = covered.stop_reason if covered.stop_reason or covered.finished else "died while recording"
    begin, last = trace.manifest.t0_epoch_ns, covered.last_event_ns
    common: dict[str, Any] = {
        "rank": number,
        "num_steps": covered.num_steps,
        "clock_error_ns": clock.error_ns if clock else None,
        "clock_drift_ns": clock.drift_ns if clock else None,
        "num_oom": int((trace.columns("events", "kind")["kind"] == KIND["oom"]).sum()),
        "finished": covered.finished,
        "ended_epoch_ns": None if begin is None or last is None else begin + last,
        "problem": problem,
    }
    found = fullest(trace)
    if found is None:
        return RankRow(**common)
    duration = step_columns(trace)["duration_ns"]
    working = working_ns(trace)
    return RankRow(
        **common,
        device=found.device,
        peak_bytes=found.requested.bytes,
        phase=found.phase,
        by_category={
            group.name: group.bytes for group in peak_by_category(trace, found.device) if group.name is not None
        },
        end_bytes=found.end_bytes,
        step_ns=int(np.median(duration)) if len(duration) and trace.has_times else None,
        working_ns=int(np.median(working)) if working is not None and len(working) else None,
    )


def fullest(trace: Trace) -> Peak | None:
    """The peak of the fullest device of a single-rank trace, accelerators before the CPU; None without events."""
    devices = [device for device in trace.devices if device != "cpu"] or list(trace.devices)
    return max((find_peak(trace, device) for device in devices), key=lambda found: found.requested.bytes, default=None)


def working_ns(trace: Trace) -> Array | None:
    """Time of every step in operators, those of torch.distributed left out; None where durations are not known.

    What runs on several threads at once, or within another (ranges of a Chrome trace), counts once.
    """
    steps = step_columns(trace)
    ops = trace.columns("ops", "start_ns", "duration_ns", "name")
    if not len(ops["duration_ns"]) or (ops["duration_ns"] < 0).all():
        return None
    names = {int(name): trace.name(int(name)) or "" for name in np.unique(ops["name"])}
    communicates = [name for name, text in names.items() if text.startswith("c10d")]
    computes = (ops["duration_ns"] > 0) & ~np.isin(ops["name"], communicates)
    order = np.argsort(ops["start_ns"][computes], kind="stable")
    starts = ops["start_ns"][computes][order]
    ends = starts + ops["duration_ns"][computes][order]
    reached = np.concatenate([starts[:1], np.maximum.accumulate(ends)[:-1]])
    total = np.concatenate([[0], np.cumsum(np.maximum(ends - np.maximum(starts, reached), 0))])
    begin, end = steps["start_ns"], steps["start_ns"] + steps["duration_ns"]
    worked: Array = total[np.searchsorted(starts, end)] - total[np.searchsorted(starts, begin)]
    return worked


def _slowest(rows: tuple[RankRow, ...]) -> int | None:
    rows = tuple(row for row in rows if row.finished is not None)  # that could be read
    for name in ("working_ns", "step_ns"):
        times = {row.rank: getattr(row, name) for row in rows if getattr(row, name) is not None}
        if len(times) == len(rows) > 1 and max(times.values()) > SLOW * float(np.median([*times.values()])):
            return max(times, key=lambda rank: times[rank])
    return None


def _look_at(rows: tuple[RankRow, ...]) -> tuple[int | None, str]:
    """The rank to look at before any other, and why."""
    known = [row for row in rows if row.peak_bytes is not None]
    if not known:
        return None, "no rank has memory events"
    out_of_memory = [row for row in known if row.num_oom]
    if out_of_memory:
        worst = max(out_of_memory, key=lambda row: row.peak_bytes or 0)
        return worst.rank, "it ran out of memory"
    dead = [row for row in known if not row.finished and row.problem]
    if dead and len(dead) < len(rows):
        # Whoever starts a job ends its other ranks when one dies: the first to go is the one to blame.
        first = min(dead, key=lambda row: math.inf if row.ended_epoch_ns is None else row.ended_epoch_ns)
        return first.rank, f"it ended before the others: {first.problem}"
    peaks = [row.peak_bytes or 0 for row in known]
    fullest_row = max(known, key=lambda row: row.peak_bytes or 0)
    mean = sum(peaks) / len(peaks)
    if mean and max(peaks) > NOTICEABLE * mean:
        return fullest_row.rank, f"its peak is {max(peaks) / mean:.2f} times the mean"
    slowest = _slowest(rows)
    if slowest is not None:
        return slowest, "it works longest in a step; the others wait for it"
    return fullest_row.rank, "the ranks are alike; it has the highest peak"
