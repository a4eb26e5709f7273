"""``plan spill``: train a model whose state does not fit the device (Hydra's model spilling)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from memtrace.analysis.bandwidth import TITAN_XP, CopyBandwidths
from memtrace.analysis.blocks import CATEGORY, blocks
from memtrace.display import Displayed
from memtrace.errors import MemtraceError
from memtrace.pipeline.layer_costs import MeasuredLayers, measure_layer_costs
from memtrace.planning.actions import Spill
from memtrace.planning.plan import Plan, StepCost
from memtrace.planning.recorded_step import RecordedStep, choose_step, main_device
from memtrace.planning.shards import SpilledModel, SpillShard, cut_shards
from memtrace.planning.spill_times import peak_bytes, step_seconds
from memtrace.trace import Trace
from memtrace.units import format_bytes

DEFAULT_BUFFER: Final = 0.05
"""Share of the budget that Hydra reserves for double buffering."""
BUFFER_SHARES: Final = (0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
"""Sizes of the buffer that are tried, as shares of the budget."""


@dataclass(frozen=True)
class SpillPlan(Displayed):
    """A plan that spills a model, and the shards it consists of."""

    plan: Plan
    shards: tuple[SpillShard, ...]
    budget_bytes: int
    buffer_bytes: int
    """Part of the budget for shards on their way to and from host memory."""
    state_bytes: int
    """Parameters, gradients and optimizer state of all shards."""
    resident_bytes: int
    """Bytes of the device that are never spilled."""
    unbuffered_step_ns: int | None
    """Step time of the same shards without double buffering; None: unknown."""
    bandwidths: CopyBandwidths


def plan_spill(
    trace: Trace,
    device: str | None = None,
    *,
    budget_bytes: int,
    buffer_bytes: int | None = None,
    bandwidths: CopyBandwidths = TITAN_XP,
    layers: Sequence[str] = (),
    recompute: bool = True,
) -> SpillPlan:
    """Return shards of consecutive layers with which a step of the trace stays under a budget.

    Args:
        trace: A single-rank trace of a program that trained the whole model.
        device: The device whose peak is planned; None: the first GPU, or the CPU.
        budget_bytes: Peak of the requested bytes that must not be exceeded.
        buffer_bytes: Part of the budget that double buffering uses; 0: no double buffering; None: as much as gives the
            shortest step, or 5 % of the budget where the trace has no times.
        bandwidths: Costs of copies between the device and host memory.
        layers: Modules that are layers, as ``fnmatch`` patterns; empty: the repeated blocks of the model and the
            modules beside them.
        recompute: Whether backward repeats the forward of every layer; otherwise activations stay on the device.

    Raises:
        MemtraceError: The trace has no steps, module calls or backward, or a layer does not fit the budget.
    """
    device = device or main_device(trace)
    step = choose_step(trace, device)
    measured = measure_layer_costs(trace, layers)
    model = _spilled_model(trace, device, step, measured, recompute=recompute)
    has_times = step.cost.step_ns is not None
    if buffer_bytes is None:
        buffer_bytes = _choose_buffer(model, budget_bytes, bandwidths if has_times else None)
    if not 0 <= buffer_bytes < budget_bytes:
        raise MemtraceError(
            f"a buffer of {format_bytes(buffer_bytes)} leaves nothing of the budget of {format_bytes(budget_bytes)}. "
            "Pass a smaller buffer."
        )
    shards = cut_shards(model, budget_bytes - buffer_bytes)
    seconds = step_seconds(shards, bandwidths, buffer_bytes) if has_times else None
    unbuffered = step_seconds(shards, bandwidths, 0) if has_times else None
    action = Spill(tuple(shard.layers for shard in shards), buffer_bytes, recompute)
    return SpillPlan(
        plan=Plan(
            device=device,
            actions=(action,),
            recorded=step.cost,
            predicted=StepCost(peak_bytes(shards, buffer_bytes), _to_ns(seconds)),
            assumptions=(*_assumptions(trace, bandwidths, has_times=has_times), *measured.notes),
            trace=str(trace.path) if trace.path else None,
        ),
        shards=shards,
        budget_bytes=budget_bytes,
        buffer_bytes=buffer_bytes,
        state_bytes=sum(layer.parameter_bytes + layer.gradient_bytes + layer.optimizer_bytes for layer in model.layers),
        resident_bytes=model.resident_bytes,
        unbuffered_step_ns=_to_ns(unbuffered),
        bandwidths=bandwidths,
    )


def _spilled_model(
    trace: Trace, device: str, step: RecordedStep, measured: MeasuredLayers, *, recompute: bool
) -> SpilledModel:
    layers = tuple(measured.layers)
    computed_s = sum(layer.forward_s + layer.backward_s for layer in layers)
    step_ns = step.cost.step_ns
    return SpilledModel(
        layers=layers,
        resident_bytes=_resident_bytes(trace, device, step, measured),
        update_s=0.0 if step_ns is None else max(0.0, step_ns / 1e9 - computed_s),
        recompute=recompute,
        num_parameters=_num_parameters(trace, device, step) if step_ns is not None else 0,
    )


def _num_parameters(trace: Trace, device: str, step: RecordedStep) -> int:
    """Return how many parameters are on the device in a step."""
    table = blocks(trace)
    live = (table.alloc_event < step.end_row) & ((table.free_event < 0) | (table.free_event >= step.first_row))
    chosen = live & (table.category == CATEGORY["parameter"]) & (table.device == trace.devices.index(device))
    return int(chosen.sum())


def _resident_bytes(trace: Trace, device: str, step: RecordedStep, measured: MeasuredLayers) -> int:
    """Return the bytes that are live when the step begins, and are not state of the layers.

    A batch that the step itself loads belongs to the first and the last layer.
    """
    table = blocks(trace)
    live = (
        (table.device == trace.devices.index(device))
        & (table.alloc_event < step.first_row)
        & ((table.free_event < 0) | (table.free_event >= step.first_row))
    )
    total = int(table.size[live].sum())
    of_state = {
        name: int(table.size[live & (table.category == CATEGORY[name])].sum())
        for name in ("parameter", "gradient", "optimizer_state")
    }
    of_layers = {
        "parameter": sum(layer.parameter_bytes for layer in measured.layers),
        "gradient": sum(layer.gradient_bytes for layer in measured.layers),
        "optimizer_state": sum(layer.optimizer_bytes for layer in measured.layers),
    }
    spilled = sum(min(of_state[name], of_layers[name]) for name in of_state)
    return total - spilled + _batch_bytes(trace, device, step, measured)


def _batch_bytes(trace: Trace, device: str, step: RecordedStep, measured: MeasuredLayers) -> int:
    """Return the bytes of the inputs that the step allocates and its layers read."""
    table = blocks(trace)
    inside = (table.alloc_event >= step.first_row) & (table.alloc_event < step.end_row)
    chosen = inside & (table.category == CATEGORY["input"]) & (table.device == trace.devices.index(device))
    return min(int(table.size[chosen].sum()), sum(layer.batch_bytes for layer in measured.layers))


def _choose_buffer(model: SpilledModel, budget_bytes: int, bandwidths: CopyBandwidths | None) -> int:
    """Return the size of the buffer that gives the shortest step; without times 5 % of the budget."""
    if bandwidths is None:
        return int(DEFAULT_BUFFER * budget_bytes)
    best: tuple[float, int] | None = None
    for share in BUFFER_SHARES:
        buffer_bytes = int(share * budget_bytes)
        try:
            seconds = step_seconds(cut_shards(model, budget_bytes - buffer_bytes), bandwidths, buffer_bytes)
        except MemtraceError:
            break
        if best is None or seconds < best[0]:
            best = seconds, buffer_bytes
    return 0 if best is None else best[1]


def _assumptions(trace: Trace, bandwidths: CopyBandwidths, *, has_times: bool) -> list[str]:
    notes = [
        "Each layer is called once per forward, in the recorded order. Inputs of layers wait in host memory, "
        "the optimizer updates one shard after the other."
    ]
    if has_times:
        notes.append(
            f"Copies run at {bandwidths.d2h.gb_per_s:.1f} GB/s to the host and {bandwidths.h2d.gb_per_s:.1f} GB/s back "
            f"({bandwidths.source}). Time outside forward and backward is that of the optimizer."
        )
    else:
        notes.append("The trace has no times, so the step time is unknown.")
    return notes


def _to_ns(seconds: float | None) -> int | None:
    return None if seconds is None else int(np.rint(seconds * 1e9))
