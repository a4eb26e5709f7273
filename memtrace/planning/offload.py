"""Plans that let saved tensors wait in host memory between forward and backward.

Sources: "Pinpointing the Memory Behaviors of DNN Training" (ISPASS 2021) for the inequality S/B_d2h + S/B_h2d <= ATI;
Capuchin (ASPLOS 2020) for the order of the candidates and the start of the copies back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.analysis.bandwidth import CopyBandwidths
from memtrace.analysis.block_accesses import has_accesses
from memtrace.errors import MemtraceError
from memtrace.format.arrays import Array
from memtrace.planning.actions import Offload, OffloadedTensor
from memtrace.planning.offload_candidates import Candidates, find_step_saves
from memtrace.planning.offload_problem import OffloadProblem, build_problem
from memtrace.planning.offload_schedule import OffloadSchedule
from memtrace.planning.offload_search import choose_tensors, least_peak_bytes
from memtrace.planning.plan import Plan, StepCost
from memtrace.planning.recorded_step import RecordedStep, choose_step
from memtrace.trace import Trace
from memtrace.units import format_bytes, format_duration

MIN_OFFLOAD_BYTES = 64 << 10
"""Smallest tensor to offload: for less, the latency of a copy and the work for each tensor outweigh its bytes."""


@dataclass(frozen=True)
class OffloadModel:
    """A recorded step, and what could be offloaded in it."""

    step: RecordedStep
    candidates: Candidates
    problem: OffloadProblem
    bandwidths: CopyBandwidths | None


def plan_offload(
    trace: Trace,
    *,
    device: str,
    bandwidths: CopyBandwidths,
    target_bytes: int | None = None,
    min_bytes: int = MIN_OFFLOAD_BYTES,
) -> Plan:
    """Return the plan that reaches a peak with the least added time by offloading saved tensors.

    Args:
        trace: A single-rank recording with reads and writes.
        device: The device whose peak is planned.
        bandwidths: Cost of copies between the device and the host. Not used where the trace has no times.
        target_bytes: The peak to reach; None: the least peak that offloading can reach, whatever time it adds.
        min_bytes: Smallest tensor to offload.

    Raises:
        MemtraceError: The trace has no accesses or no steps, or the peak cannot be reached.
    """
    if not has_accesses(trace):
        raise MemtraceError(
            "the trace has no reads and writes, which show when a tensor is needed. Record the program with memtrace."
        )
    step = choose_step(trace, device)
    saves = find_step_saves(trace, device, step, min_bytes=min_bytes)
    problem = build_problem(trace, device, step, saves)
    model = OffloadModel(step, saves.candidates, problem, bandwidths if step.cost.step_ns is not None else None)
    least = least_peak_bytes(problem)
    limit = least if target_bytes is None else target_bytes
    schedule = choose_tensors(problem, limit, model.bandwidths)
    if schedule is None:
        raise MemtraceError(
            f"offloading cannot bring the peak of {device} ({format_bytes(step.cost.peak_bytes)}) to "
            f"{format_bytes(limit)}: the least peak it can reach is {format_bytes(least)}."
        )
    return _make_plan(trace, device, model, schedule)


def _make_plan(trace: Trace, device: str, model: OffloadModel, schedule: OffloadSchedule) -> Plan:
    tensors = name_tensors(model, schedule)
    recorded = model.step.cost
    step_ns = None if recorded.step_ns is None else recorded.step_ns + round(schedule.added_ns)
    return Plan(
        device=device,
        actions=(Offload(tensors, device),) if tensors else (),
        recorded=recorded,
        predicted=StepCost(schedule.peak_bytes, step_ns),
        assumptions=offload_assumptions(trace, device, model, schedule) if tensors else (),
        trace=str(trace.path) if trace.path is not None else None,
    )


def name_tensors(model: OffloadModel, schedule: OffloadSchedule) -> tuple[OffloadedTensor, ...]:
    """Return the tensors as a plan names them. The same name in several calls has the distances that hold for all."""
    problem, candidates = model.problem, model.candidates
    deadline = _deadlines(problem, schedule)
    waits: dict[int, int | None] = {}
    prefetches: dict[int, int] = {}
    for position, tensor in enumerate(schedule.tensor.tolist()):
        name = int(candidates.name[tensor])
        wait = None
        if deadline[position] >= 0:
            wait = max(0, int(problem.piece_node[deadline[position]] - problem.node[tensor]))
        fetch = int(schedule.fetch[position])
        ahead = int(problem.piece_node[fetch] - problem.read_node[tensor]) if fetch < problem.back[tensor] else 0
        known = waits.get(name)
        waits[name] = wait if name not in waits or known is None else known if wait is None else min(known, wait)
        prefetches[name] = min(max(ahead, 0), prefetches.get(name, max(ahead, 0)))
    names = candidates.names
    return tuple(
        OffloadedTensor(names[name].module, names[name].index, names[name].bytes, waits[name], prefetches[name])
        for name in waits
    )


def _deadlines(problem: OffloadProblem, schedule: OffloadSchedule) -> Array:
    """Return the piece at whose start forward has to wait for each copy out, as late as the peak allows; -1: never.

    A copy that takes longer than predicted then delays the program, but does not raise its peak. Memory that variables
    of the program may still hold is not used up by waiting later.
    """
    level, peak = schedule.level.copy(), schedule.peak_bytes
    saves = np.flatnonzero(~problem.is_read)
    variable = np.minimum(problem.variable[schedule.tensor], schedule.fetch)
    for tensor, leave, end in zip(schedule.tensor.tolist(), schedule.leave.tolist(), variable.tolist(), strict=True):
        level[leave:end] += problem.size[tensor]
    deadlines = np.full(len(schedule.tensor), -1)
    for position in np.argsort(schedule.leave, kind="stable").tolist():
        tensor, leave, fetch = schedule.tensor[position], int(schedule.leave[position]), int(schedule.fetch[position])
        size = int(problem.size[tensor])
        level[leave : int(variable[position])] -= size
        too_high = np.flatnonzero(level[leave:fetch] + size > peak)
        if not len(too_high):
            level[leave:fetch] += size
            continue
        place = int(np.searchsorted(saves, leave + int(too_high[0]), side="right")) - 1
        deadlines[position] = saves[place]
        level[leave : max(int(saves[place]), int(variable[position]))] += size
    return deadlines


def offload_assumptions(trace: Trace, device: str, model: OffloadModel, schedule: OffloadSchedule) -> tuple[str, ...]:
    """Return what the prediction of an offload rests on, one sentence each."""
    held = (
        "A tensor leaves memory when its copy has ended and the module call that uses it last in forward has returned."
    )
    costs = model.bandwidths
    if costs is None:
        return (
            "The trace has no times, so that nothing is predicted about time: forward waits for each copy to host "
            "memory, and each copy back begins when backward reads the tensor.",
            held,
        )
    step_ns = float(model.problem.piece_ns[-1]) + schedule.added_ns
    clock = () if device == "cpu" else ("Times are those at which the host launched operators.",)
    return (
        f"Copies take {format_duration(schedule.to_host_ns)} to the host and {format_duration(schedule.to_device_ns)} "
        f"back in a step of {format_duration(step_ns)}, at {costs.d2h.gb_per_s:.2f} GB/s and "
        f"{costs.h2d.gb_per_s:.2f} GB/s ({costs.source}).",
        held,
        *clock,
    )
