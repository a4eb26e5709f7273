"""What optimizers of torch allocate: state for every parameter, and temporaries during the update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np

from memtrace.analysis.blocks import blocks
from memtrace.analysis.event_codes import PHASE
from memtrace.errors import MemtraceError
from memtrace.format.arrays import Array
from memtrace.planning.timeline import TICKS_PER_ROW, Timeline
from memtrace.planning.timeline_moments import StepMoments
from memtrace.planning.timeline_parameters import find_parameters
from memtrace.trace import Trace

Implementation = Literal["for-loop", "foreach", "fused"]
IMPLEMENTATIONS: Final[tuple[Implementation, ...]] = get_args(Implementation)


@dataclass(frozen=True)
class OptimizerMemory:
    """What an optimizer allocates, in multiples of the size of the parameters, with torch's default options."""

    state: int
    """Tensors of the size of a parameter that the optimizer keeps for it."""
    scalar_bytes: int
    """Bytes of the numbers that it keeps for each parameter."""
    own_temporaries: int
    """Tensors of the size of a parameter that a for-loop update holds at once for this parameter."""
    previous_temporaries: int
    """The same of the parameter before it, whose temporary is freed only when its variable is assigned again."""
    foreach_temporaries: int
    """Tensors of the size of all parameters that a foreach update holds at once."""
    has_fused: bool
    """Whether torch has a fused update, which allocates nothing."""


OPTIMIZERS: Final = {
    "sgd": OptimizerMemory(0, 0, 0, 0, 0, has_fused=True),
    "sgd-momentum": OptimizerMemory(1, 0, 0, 0, 0, has_fused=True),
    "sgd-nesterov": OptimizerMemory(1, 0, 1, 0, 0, has_fused=True),
    "adam": OptimizerMemory(2, 4, 2, 1, 1, has_fused=True),
    "adamw": OptimizerMemory(2, 4, 2, 1, 1, has_fused=True),
    "adamw-amsgrad": OptimizerMemory(3, 4, 2, 1, 1, has_fused=True),
    "nadam": OptimizerMemory(2, 8, 2, 1, 1, has_fused=False),
    "adamax": OptimizerMemory(2, 4, 1, 0, 1, has_fused=False),
    "rmsprop": OptimizerMemory(1, 4, 1, 1, 1, has_fused=False),
    "adagrad": OptimizerMemory(1, 4, 1, 1, 2, has_fused=True),
}
"""Measured with torch 2.13; tests measure them again with the installed version."""


def temporary_bytes(memory: OptimizerMemory, implementation: Implementation, sizes: Array) -> int:
    """Return the most bytes that an update of parameters allocates at once.

    Args:
        memory: the optimizer.
        implementation: how it updates.
        sizes: bytes of each parameter, in the order of the update.
    """
    if implementation == "fused" or not len(sizes):
        return 0
    if implementation == "foreach":
        return memory.foreach_temporaries * int(sizes.sum())
    previous = np.concatenate([[0], sizes[:-1]])
    return int((memory.own_temporaries * sizes + memory.previous_temporaries * previous).max())


def change_optimizer(
    trace: Trace, timeline: Timeline, moments: StepMoments, name: str, implementation: Implementation
) -> Timeline:
    """Return the timeline with the state and the temporaries of another optimizer.

    Raises:
        MemtraceError: the optimizer is unknown, has no such implementation, or the step has no update.
    """
    memory = find_optimizer(name, implementation)
    parameters = find_parameters(trace, timeline)
    sizes = parameters.size[parameters.is_trained]
    update = moments.require("optimizer")
    begin, end = update.begin, update.end + TICKS_PER_ROW
    changed = remove_update(trace, timeline)
    changed = changed.remove(changed.of_category("optimizer_state"))
    state = np.repeat(sizes, memory.state)
    scalars = np.full(len(sizes) if memory.scalar_bytes else 0, memory.scalar_bytes)
    kept = np.concatenate([state, scalars])
    changed = changed.insert(
        kept, np.full(len(kept), changed.start), np.full(len(kept), changed.stop), "optimizer_state"
    )
    return changed.insert([temporary_bytes(memory, implementation, sizes)], [begin], [end], "temporary")


def find_optimizer(name: str, implementation: Implementation) -> OptimizerMemory:
    """Return what an optimizer allocates; MemtraceError if it is unknown or has no such implementation."""
    if name not in OPTIMIZERS:
        raise MemtraceError(f"the optimizer {name!r} is unknown. Known optimizers: {', '.join(OPTIMIZERS)}.")
    memory = OPTIMIZERS[name]
    if implementation == "fused" and not memory.has_fused:
        raise MemtraceError(f"torch has no fused {name}: use {name}:for-loop or {name}:foreach.")
    return memory


def default_implementation(device: str) -> Implementation:
    """Return the implementation that torch chooses for parameters on a device."""
    return "for-loop" if device == "cpu" else "foreach"


def remove_update(trace: Trace, timeline: Timeline) -> Timeline:
    """Return the timeline without what the optimizer allocates for one update: with a fused optimizer, for example."""
    phase = np.where(timeline.block >= 0, blocks(trace).phase[np.maximum(timeline.block, 0)], -1)
    is_passing = ~timeline.of_category("parameter", "gradient", "optimizer_state")
    begins = (timeline.begin >= timeline.start) & (timeline.end < timeline.stop)
    return timeline.remove((phase == PHASE["optimizer"]) & is_passing & begins)
