"""Time that training waits for its data: in one recording as it was seen, and split by comparing three.

Source: DS-Analyzer (CoorDL). Within one run a wait cannot be split: loaders overlap with training, so only the
difference between runs tells fetching (from storage) and preparing (decoding, augmenting) apart.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from memtrace.analysis.diff import usual_steps
from memtrace.analysis.steps import records_data_waits, step_columns
from memtrace.errors import TraceError
from memtrace.trace import Trace


@dataclass(frozen=True)
class StepWait:
    """One step: how long it took and how long of that it waited for data. ns; None: the trace tells of no waits."""

    step: int
    duration_ns: int
    data_wait_ns: int | None
    """None: waits were not seen."""


@dataclass(frozen=True)
class Stalls:
    """The waits of one recording; the shares are of the steps' time. None: no steps, or no waits were seen."""

    steps: tuple[StepWait, ...]
    share: float | None
    median_wait_ns: int | None
    median_duration_ns: int | None

    def as_dict(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Split:
    """Stalls of a usual step by difference. ns; the three are the medians over the steps after warm-up."""

    synthetic_ns: int
    cached_ns: int
    cold_ns: int

    @property
    def prep_stall_ns(self) -> int:
        """T3 - T1: what preparing adds when everything is cached."""
        return self.cached_ns - self.synthetic_ns

    @property
    def fetch_stall_ns(self) -> int:
        """T2 - T3: what fetching from storage adds."""
        return self.cold_ns - self.cached_ns

    def as_dict(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        return asdict(self) | {"prep_stall_ns": self.prep_stall_ns, "fetch_stall_ns": self.fetch_stall_ns}


def stalls(trace: Trace) -> Stalls:
    """The waits for data of a single-rank trace, step by step."""
    columns = step_columns(trace)
    number, lasting, waits = columns.step, columns.duration_ns, columns.data_wait_ns
    told = records_data_waits(trace) and len(number) > 0
    return Stalls(
        steps=tuple(map(StepWait, number.tolist(), lasting.tolist(), waits.tolist() if told else [None] * len(number))),
        share=int(waits.sum()) / max(int(lasting.sum()), 1) if told else None,
        median_wait_ns=int(np.median(waits)) if told else None,
        median_duration_ns=int(np.median(lasting)) if len(number) and trace.has_times else None,
    )


def split(synthetic: Trace, cold: Trace, cached: Trace) -> Split:
    """Prep and fetch stall from three recordings of one job: data made in memory (T1), read from storage with an empty
    cache (T2), and the same data cached (T3). TraceError where one has no steps."""
    durations = []
    for name, trace in (("synthetic", synthetic), ("cached", cached), ("cold", cold)):
        columns = step_columns(trace)
        usual = np.isin(columns.step, usual_steps(trace))
        if not usual.any():
            raise TraceError(f"the {name} recording has no steps: mark them with rec.step() or rec.steps(loader).")
        durations.append(int(np.median(columns.duration_ns[usual])))
    return Split(*durations)
