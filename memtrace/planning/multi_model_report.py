"""Schedules of several spilled models on several devices, compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memtrace.errors import MemtraceError
from memtrace.format.arrays import Array
from memtrace.planning.multi_model import (
    POLICIES,
    ModelJob,
    MultiModelSchedule,
    lower_bound_seconds,
    schedule_models,
)
from memtrace.planning.multi_model_optimum import MAX_UNITS, find_optimal_schedule
from memtrace.planning.spill import SpillPlan
from memtrace.planning.spill_times import shard_units


@dataclass(frozen=True)
class SpilledModelSummary:
    """One of the models."""

    name: str
    num_shards: int
    peak_bytes: int
    """Predicted peak of a device that trains the model."""
    minibatch_s: float
    """Seconds of computation of one mini-batch."""
    copy_s: float
    """Seconds of all copies of one mini-batch."""


@dataclass(frozen=True)
class PolicySummary:
    """What one policy gives."""

    policy: str
    makespan_s: float
    """Until all models are trained."""
    utilization: float
    """Share of the time of all devices in which they compute."""
    gap: float | None
    """Of the optimum: how much of its makespan may still be saved; None: not an optimum."""


@dataclass(frozen=True)
class MultiModelReport:
    """Policies compared, and what the devices do over time under the first of them."""

    num_devices: int
    num_minibatches: int
    models: tuple[SpilledModelSummary, ...]
    policies: tuple[PolicySummary, ...]
    """Sharded-LRTF first, then the others."""
    lower_bound_s: float
    """No schedule is shorter: the longest model, or all computation spread evenly."""
    timeline: tuple[tuple[int, ...], ...]
    """For each device the position of the model that computes most in each of equal intervals; -1: none computes."""
    notes: tuple[str, ...]


def compare_schedules(
    names: Sequence[str],
    plans: Sequence[SpillPlan],
    num_devices: int,
    *,
    num_minibatches: int = 100,
    num_cells: int = 60,
    optimum_s: float = 10.0,
) -> MultiModelReport:
    """Compare the policies for models that were planned with ``plan_spill``.

    Args:
        names: Names of the models.
        plans: Their plans.
        num_devices: Number of equal devices.
        num_minibatches: Mini-batches that each model is trained on.
        num_cells: Intervals of the timeline.
        optimum_s: Time limit for the optimum, which is computed for few shard units only.

    Raises:
        MemtraceError: A trace has no times.
    """
    untimed = [name for name, plan in zip(names, plans, strict=True) if plan.plan.predicted.step_ns is None]
    if untimed:
        raise MemtraceError(
            f"{untimed[0]} has no times, so that it cannot be scheduled. Record the program as it runs."
        )
    jobs = [
        ModelJob(name, shard_units(plan.shards, plan.bandwidths), num_minibatches)
        for name, plan in zip(names, plans, strict=True)
    ]
    buffered = all(plan.buffer_bytes for plan in plans)
    schedules = [schedule_models(jobs, num_devices, policy, double_buffered=buffered) for policy in POLICIES]
    policies = [PolicySummary(each.policy, each.makespan_s, each.utilization, None) for each in schedules]
    notes = [] if buffered else ["A model has no buffer, so that no copy overlaps computation."]
    num_units = sum(job.num_units for job in jobs)
    if num_units <= MAX_UNITS:
        optimum = find_optimal_schedule(jobs, num_devices, time_limit_s=optimum_s)
        best = optimum.schedule
        policies.append(PolicySummary("optimum", best.makespan_s, best.utilization, optimum.gap))
        notes.append("The optimum counts computation only, as if double buffering hid all copies.")
    else:
        notes.append(f"The optimum is computed for at most {MAX_UNITS} shard units; these models have {num_units:,}.")
    return MultiModelReport(
        num_devices=num_devices,
        num_minibatches=num_minibatches,
        models=tuple(map(_summarize_model, jobs, plans)),
        policies=tuple(policies),
        lower_bound_s=lower_bound_seconds(jobs, num_devices),
        timeline=tuple(tuple(row) for row in device_timeline(schedules[0], num_cells).tolist()),
        notes=tuple(notes),
    )


def _summarize_model(job: ModelJob, plan: SpillPlan) -> SpilledModelSummary:
    return SpilledModelSummary(
        name=job.name,
        num_shards=len(plan.shards),
        peak_bytes=plan.plan.predicted.peak_bytes,
        minibatch_s=job.minibatch_s,
        copy_s=sum(unit.load_s + unit.unload_s for unit in job.units),
    )


def device_timeline(schedule: MultiModelSchedule, num_cells: int) -> Array:
    """Return which model computes most on each device in each of equal intervals; -1: none computes.

    Args:
        schedule: The schedule.
        num_cells: Number of intervals between 0 and the makespan.
    """
    edges = np.linspace(0, schedule.makespan_s, num_cells + 1)
    num_models = int(schedule.model.max(initial=-1)) + 1
    busy_s = np.zeros((num_models, schedule.num_devices, num_cells))
    pair = schedule.model * schedule.num_devices + schedule.device
    for number in np.unique(pair).tolist():
        chosen = np.flatnonzero(pair == number)
        start, end = schedule.start_s[chosen], schedule.end_s[chosen]
        until = np.cumsum(end - start)
        times = np.stack([start, end], axis=1).ravel()
        levels = np.stack([until - (end - start), until], axis=1).ravel()
        busy_s[number // schedule.num_devices, number % schedule.num_devices] = np.diff(np.interp(edges, times, levels))
    owner: Array = busy_s.argmax(axis=0)
    return np.where(busy_s.sum(axis=0) > 0.5 * schedule.makespan_s / num_cells, owner, -1)
