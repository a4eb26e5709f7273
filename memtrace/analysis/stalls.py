"""Time that training spends waiting for data, and how much of it is spent on fetching and on preprocessing.

Source: DS-Analyzer (CoorDL, VLDB 2021). Within one run a wait cannot be broken down, because data loading overlaps with
training; only the difference between runs separates fetching (from storage) from preprocessing (decoding, augmenting).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.analysis.steps import records_data_waits, step_columns
from memtrace.analysis.warm_up import steps_after_warm_up
from memtrace.errors import TraceError
from memtrace.trace import Trace


@dataclass(frozen=True)
class StepWait:
    """How long a step took, and how long it waited for data."""

    step: int
    """Number of the step."""
    duration_ns: int
    """How long the step took."""
    data_wait_ns: int | None
    """None: the trace records no waits."""


@dataclass(frozen=True)
class StallBreakdown:
    """The data stall of a median step, by comparing three recordings of one training job."""

    synthetic_ns: int
    """Median step on data generated in memory (T1 of DS-Analyzer); warm-up steps are excluded."""
    cached_ns: int
    """Median step with all data cached (T3)."""
    cold_ns: int
    """Median step with an empty cache (T2)."""
    prep_stall_ns: int
    """Time that preprocessing adds: cached - synthetic."""
    fetch_stall_ns: int
    """Time that fetching from storage adds: cold - cached."""


@dataclass(frozen=True)
class DataStalls:
    """The waits for data of a recording. None: the trace has no steps, or it records no waits."""

    steps: tuple[StepWait, ...]
    """All steps in order."""
    wait_share: float | None
    """Share of the time of all steps, from 0 to 1."""
    median_wait_ns: int | None
    """Median of the waits of all steps."""
    median_duration_ns: int | None
    """Median of the durations of all steps."""
    breakdown: StallBreakdown | None
    """None: only one recording was given."""


def measure_stalls(trace: Trace, *, synthetic: Trace | None = None, cached: Trace | None = None) -> DataStalls:
    """Return how long each step of a single-rank trace waits for data.

    Args:
        trace: a recording of one rank; for a breakdown, one with an empty cache.
        synthetic: a recording of the same job on data generated in memory.
        cached: a recording of the same job with all data cached.

    Raises:
        TraceError: a breakdown is wanted and one of the recordings has no steps.
        ValueError: only one of ``synthetic`` and ``cached`` is given.
    """
    if (synthetic is None) != (cached is None):
        raise ValueError("a breakdown needs both the synthetic and the cached recording")
    columns = step_columns(trace)
    steps, duration_ns, wait_ns = columns.step, columns.duration_ns, columns.data_wait_ns
    has_steps = len(steps) > 0
    has_waits = has_steps and trace.has_times and records_data_waits(trace)
    waits = wait_ns.tolist() if has_waits else [None] * len(steps)
    return DataStalls(
        steps=tuple(map(StepWait, steps.tolist(), duration_ns.tolist(), waits)),
        wait_share=int(wait_ns.sum()) / max(int(duration_ns.sum()), 1) if has_waits else None,
        median_wait_ns=int(np.median(wait_ns)) if has_waits else None,
        median_duration_ns=int(np.median(duration_ns)) if has_steps and trace.has_times else None,
        breakdown=_break_down(synthetic, cached, trace) if synthetic is not None and cached is not None else None,
    )


def _break_down(synthetic: Trace, cached: Trace, cold: Trace) -> StallBreakdown:
    synthetic_ns = _median_step_ns("synthetic", synthetic)
    cached_ns = _median_step_ns("cached", cached)
    cold_ns = _median_step_ns("cold", cold)
    return StallBreakdown(synthetic_ns, cached_ns, cold_ns, cached_ns - synthetic_ns, cold_ns - cached_ns)


def _median_step_ns(name: str, trace: Trace) -> int:
    columns = step_columns(trace)
    after_warm_up = np.isin(columns.step, steps_after_warm_up(trace))
    if not after_warm_up.any():
        raise TraceError(f"the {name} recording has no steps; mark them with rec.step() or rec.steps(loader)")
    return int(np.median(columns.duration_ns[after_warm_up]))
