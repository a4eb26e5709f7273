"""Fixes: changes that lower the peak of a recorded step, each with the bytes that it saves and what it costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np

from memtrace.allocator.plan import MAX_SWEPT_ENTRIES, sweep_device
from memtrace.allocator.requests import devices_to_plan
from memtrace.analysis.findings import find_device_waste
from memtrace.analysis.options import AnalysisOptions
from memtrace.analysis.peak import find_peak
from memtrace.analysis.summary import MAX_PATTERN_EVENTS
from memtrace.errors import MemtraceError
from memtrace.planning.auto_changes import OPTIMIZER_IN_BACKWARD, optimizer_in_backward
from memtrace.planning.fix import NO_COST, Fix, Shortfall, trace_argument
from memtrace.planning.plan import StepCost
from memtrace.planning.recompute import make_plan, recompute_options
from memtrace.planning.recompute_model import RecomputeModel
from memtrace.planning.recompute_solver import minimize_cost, minimize_peak
from memtrace.planning.recorded_step import choose_step
from memtrace.planning.whatif import plan_whatif
from memtrace.planning.whatif_changes import FuseOptimizer
from memtrace.trace import Trace
from memtrace.units import format_bytes, format_count, format_share

MIN_USEFUL_SHARE: Final = 0.1
"""Share of the missing bytes that a fix must save to be proposed although it is not enough."""
SOLVER_SECONDS: Final = 2.0
"""Time for choosing what to recompute; the best choice until then is reported."""
FUSE: Final = "fused=True,  # add this option where the optimizer is created"
IN_BACKWARD_COST: Final = "gradient clipping, accumulation and loss scaling are not possible"


def line_fixes(trace: Trace, device: str, shortfall: Shortfall | None, options: AnalysisOptions) -> Iterator[Fix]:
    """Yield the findings that one line fixes.

    Args:
        trace: A single-rank trace.
        device: The device.
        shortfall: By how much memory was too small; None: unknown, or it was not.
        options: Thresholds.
    """
    if trace.num_rows("events") > MAX_PATTERN_EVENTS or not trace.has_blocks:
        return
    for finding in find_device_waste(trace, device, min_bytes=options.min_waste_bytes).findings:
        if finding.is_single_line_fix and finding.saved_bytes:
            where = f" ({finding.site})" if finding.site else ""
            what = f"{finding.pattern.capitalize()}{where}: {finding.advice}"
            yield Fix(what, None, finding.saved_bytes, NO_COST, _is_enough(shortfall, finding.saved_bytes))


def select_useful(fixes: Iterable[Fix], shortfall: Shortfall | None) -> list[Fix]:
    """Return the fixes that are enough, or that save at least a part of what is missing.

    A fix with a cost is left out where another one saves as much without.
    """
    found = list(fixes)
    least = 0 if shortfall is None else MIN_USEFUL_SHARE * shortfall.certain_bytes
    free = max((fix.saved_bytes for fix in found if fix.cost == NO_COST), default=-1)
    return [
        fix
        for fix in found
        if (fix.is_enough or fix.saved_bytes >= least) and (fix.cost == NO_COST or fix.saved_bytes > free)
    ]


def _is_enough(shortfall: Shortfall | None, saved_bytes: int) -> bool | None:
    return None if shortfall is None else shortfall.is_covered_by(saved_bytes)


def step_fixes(trace: Trace, device: str, shortfall: Shortfall | None) -> Iterator[Fix]:
    """Yield what recomputation, an optimizer in backward and a fused optimizer would save in a recorded step.

    Nothing where the trace has no complete step, no module calls or no reads. For the arguments see ``line_fixes``.
    """
    if trace.num_rows("events") > MAX_PATTERN_EVENTS or not trace.has_blocks:
        return
    yield from _fused_optimizer(trace, device, shortfall)
    try:
        step, found = recompute_options(trace, device)
    except MemtraceError:  # no steps, no module calls, or nothing that backward needs
        return
    peak = step.cost.peak_bytes
    target = None if shortfall is None else max(peak - shortfall.certain_bytes, 0)
    choice = None if target is None else minimize_cost(found.model, target, max_seconds=SOLVER_SECONDS)
    if choice is None:
        target, choice = None, minimize_peak(found.model, max_seconds=SOLVER_SECONDS)
    planned = make_plan(trace, device, step, found, choice, target)
    saved = peak - planned.plan.predicted.peak_bytes
    limit = f" --target-peak {target}" if target is not None else ""
    modules = format_count(len(planned.modules), "module")
    if saved > 0:
        yield Fix(
            f"Recompute {modules} in backward instead of keeping their activations: the peak becomes "
            f"{format_bytes(planned.plan.predicted.peak_bytes)}.",
            f"memtrace plan recompute {trace_argument(trace)}{limit} -o plan.json\n"
            "memtrace record --apply plan.json YOUR_SCRIPT.py",
            saved,
            _added_time(step.cost, planned.plan.predicted),
            _is_enough(shortfall, saved),
        )
    change = optimizer_in_backward(trace, step, device)
    if change is not None:
        yield from _optimizer_in_backward(found.model.with_fixed_changes(change.positions, change.bytes), peak,
                                          shortfall)  # fmt: skip


def _added_time(recorded: StepCost, predicted: StepCost) -> str:
    if recorded.step_ns and predicted.step_ns is not None:
        return f"{format_share(predicted.step_ns - recorded.step_ns, recorded.step_ns)} longer steps"
    return "a part of forward runs twice"


def _optimizer_in_backward(changed: RecomputeModel, peak: int, shortfall: Shortfall | None) -> Iterator[Fix]:
    saved = peak - changed.replay(np.zeros(changed.num_options, bool)).peak_bytes
    if saved > 0:
        yield Fix(
            f"Update each parameter in backward, as soon as its gradient is complete: the peak becomes "
            f"{format_bytes(peak - saved)}.",
            OPTIMIZER_IN_BACKWARD,
            saved,
            IN_BACKWARD_COST,
            _is_enough(shortfall, saved),
        )


def _fused_optimizer(trace: Trace, device: str, shortfall: Shortfall | None) -> Iterator[Fix]:
    """Yield what a fused optimizer saves, where the peak is reached in the update of an optimizer that has one."""
    if find_peak(trace, device).phase != "optimizer":
        return
    try:
        choose_step(trace, device)
        fused = plan_whatif(trace, [FuseOptimizer()], device=device)
    except MemtraceError:  # no steps, or no update in them
        return
    saved = fused.recorded.peak_bytes - fused.predicted.peak_bytes
    if saved > 0:
        yield Fix(
            "Use a fused optimizer, which allocates no temporary tensors (Adam, AdamW, SGD and Adagrad have one): the "
            f"peak becomes {format_bytes(fused.predicted.peak_bytes)}.",
            FUSE,
            saved,
            NO_COST,
            _is_enough(shortfall, saved),
        )


def allocator_fixes(trace: Trace, device: str, *, has_failed: bool, capacity_bytes: int | None) -> Iterator[Fix]:
    """Yield the setting of the CUDA allocator that the allocator's plan recommends.

    Args:
        trace: A single-rank trace.
        device: The device.
        has_failed: Whether a request failed on it.
        capacity_bytes: Memory of the device for the process; None: what the trace reveals.
    """
    # Where memory ran out, the answer is worth a longer wait.
    max_events = MAX_PATTERN_EVENTS if has_failed or capacity_bytes is not None else MAX_SWEPT_ENTRIES
    if find_peak(trace, device).reserved is None or trace.num_rows("events") > max_events:
        return
    if device not in devices_to_plan(trace):
        return
    try:
        plan = sweep_device(trace, device, capacity_bytes)
    except MemtraceError:  # a size, address or setting that no device can have
        return
    if plan.suggestion is None or plan.replay is None or plan.baseline is None:
        return
    chosen = next(each for each in plan.predictions if each.setting == plan.suggestion.setting)
    has_limit = has_failed or capacity_bytes is not None
    reserved = format_bytes(chosen.peak_reserved_bytes)
    fits = f": every request fits in {reserved}" if has_limit else f": the reserved memory becomes {reserved}"
    yield Fix(
        f"Change the settings of the CUDA allocator{fits}.",
        plan.suggestion.environment_setting,
        max(plan.baseline.peak_reserved_bytes - chosen.peak_reserved_bytes, 0),
        " ".join(plan.suggestion.caveats) or NO_COST,
        chosen.fits if has_limit else None,
    )
