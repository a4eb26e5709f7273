"""How long a step of a spilled model takes: shard units, their copies, and what of the copies computation hides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memtrace.analysis.bandwidth import CopyBandwidths, CopyCost
from memtrace.planning.multi_model import ShardUnit
from memtrace.planning.shards import SpillShard


@dataclass(frozen=True)
class _Unit:
    """A shard unit with the bytes that it moves."""

    shard: int
    phase: str
    compute_s: float
    load_bytes: int
    unload_bytes: int


def _units(shards: Sequence[SpillShard], bandwidths: CopyBandwidths) -> list[_Unit]:
    """Return the units of a step in order: forward, backward in reverse, then the optimizer."""
    units = []
    for number, shard in enumerate(shards):
        seconds = shard.forward_s + copy_seconds(shard.checkpoint_bytes, bandwidths.d2h)
        units.append(_Unit(number, "forward", seconds, shard.parameter_bytes, 0))
    for number, shard in reversed(list(enumerate(shards))):
        seconds = shard.backward_s + copy_seconds(shard.checkpoint_bytes, bandwidths.h2d)
        # The last shard is still on the device when the backward begins.
        loaded = 0 if number == len(shards) - 1 else shard.parameter_bytes
        units.append(_Unit(number, "backward", seconds, loaded, shard.gradient_bytes))
    for number, shard in enumerate(shards):
        changed_bytes = shard.parameter_bytes + shard.optimizer_bytes
        units.append(_Unit(number, "update", shard.update_s, shard.state_bytes, changed_bytes))
    return units


def copy_seconds(num_bytes: int, cost: CopyCost) -> float:
    """Return the duration of a copy; copying nothing takes no time."""
    return (cost.latency_ns + cost.ns_per_byte * num_bytes) / 1e9 if num_bytes else 0.0


def shard_units(shards: Sequence[SpillShard], bandwidths: CopyBandwidths) -> tuple[ShardUnit, ...]:
    """Return the shard units of a step, for the scheduling of several models: the update belongs to the backward.

    A schedule that leaves a shard on its device does not load it again.
    """
    units = []
    for number, shard in enumerate(shards):
        seconds = shard.forward_s + copy_seconds(shard.checkpoint_bytes, bandwidths.d2h)
        units.append(ShardUnit(number, seconds, copy_seconds(shard.parameter_bytes, bandwidths.h2d), 0.0))
    for number, shard in reversed(list(enumerate(shards))):
        seconds = shard.backward_s + shard.update_s + copy_seconds(shard.checkpoint_bytes, bandwidths.h2d)
        load = copy_seconds(shard.parameter_bytes + shard.optimizer_bytes, bandwidths.h2d)
        unload = copy_seconds(shard.parameter_bytes + shard.optimizer_bytes, bandwidths.d2h)
        units.append(ShardUnit(number, seconds, load, unload))
    return tuple(units)


def step_seconds(shards: Sequence[SpillShard], bandwidths: CopyBandwidths, buffer_bytes: int) -> float:
    """Return the duration of a step.

    Without a buffer, copies and computation follow each other. With one, as many bytes as fit it are stored from the
    last unit, and then loaded for the next one, while a unit computes: the unit takes as long as the computation or
    these copies, whichever is longer. Nothing overlaps at the ends of the three passes through the model, because the
    program sees the whole model there, in host memory.

    Args:
        shards: The shards.
        bandwidths: Costs of copies between device and host.
        buffer_bytes: Size of the buffer; 0: no double buffering.
    """
    units = _units(shards, bandwidths)
    total_s = 0.0
    for place, unit in enumerate(units):
        before = units[place - 1] if place and units[place - 1].phase == unit.phase else None
        after = units[place + 1] if place + 1 < len(units) and units[place + 1].phase == unit.phase else None
        hidden_in = min(buffer_bytes, after.load_bytes) if after is not None else 0
        hidden_out = min(buffer_bytes, before.unload_bytes) if before is not None else 0
        own_in = unit.load_bytes - (min(buffer_bytes, unit.load_bytes) if before is not None else 0)
        own_out = unit.unload_bytes - (min(buffer_bytes, unit.unload_bytes) if after is not None else 0)
        total_s += copy_seconds(own_in, bandwidths.h2d) + copy_seconds(own_out, bandwidths.d2h)
        hidden_s = copy_seconds(hidden_in, bandwidths.h2d) + copy_seconds(hidden_out, bandwidths.d2h)
        total_s += max(unit.compute_s, hidden_s)
    return total_s


def peak_bytes(shards: Sequence[SpillShard], buffer_bytes: int) -> int:
    """Return the peak of the device: a shard, and what is on its way to or from the shards beside it."""
    peak = 0
    for number, shard in enumerate(shards):
        neighbors = [shards[place] for place in (number - 1, number + 1) if 0 <= place < len(shards)]
        moving = sum(neighbor.parameter_bytes for neighbor in neighbors)
        moving_in_backward = moving + sum(neighbor.gradient_bytes for neighbor in neighbors)
        moving_in_update = sum(neighbor.state_bytes for neighbor in neighbors)
        peak = max(
            peak,
            shard.forward_peak_bytes + min(buffer_bytes, moving),
            shard.backward_peak_bytes + min(buffer_bytes, moving_in_backward),
            shard.update_peak_bytes + min(buffer_bytes, moving_in_update),
        )
    return peak
