"""The parameters of a recorded model, and the blocks that belong to each of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from memtrace.analysis.blocks import CATEGORY, blocks
from memtrace.errors import MemtraceError
from memtrace.format.arrays import Array
from memtrace.planning.timeline import Timeline
from memtrace.trace import Trace

_FROZEN_NAMES = ("weight", "bias")
"""Last parts of the names of parameters without a gradient; other named tensors without one are buffers."""


@dataclass(frozen=True)
class Parameters:
    """The parameters that are live during a step, in the order of the model; one element per parameter."""

    block: Array
    """The block of the trace."""
    name: tuple[str, ...]
    """Qualified name, such as ``blocks.0.qkv.weight``."""
    size: Array
    """Bytes."""
    is_trained: Array
    """Whether the parameter has a gradient."""

    def __len__(self) -> int:
        return len(self.name)

    @property
    def module(self) -> tuple[str, ...]:
        """The module that owns each parameter; empty: the model itself."""
        return tuple(name.rpartition(".")[0] for name in self.name)


def find_parameters(trace: Trace, timeline: Timeline) -> Parameters:
    """Return the parameters of a timeline.

    Raises:
        MemtraceError: the trace names no parameters.
    """
    columns = blocks(trace)
    recorded = timeline.block[timeline.block >= 0]
    candidates = recorded[(columns.category[recorded] == CATEGORY["parameter"]) & (columns.name[recorded] >= 0)]
    with_gradient = np.unique(columns.name[columns.category == CATEGORY["gradient"]])
    is_trained = np.isin(columns.name[candidates], with_gradient)
    names = [trace.name(number) or "" for number in columns.name[candidates].tolist()]
    is_frozen = np.array([name.rpartition(".")[2] in _FROZEN_NAMES for name in names], bool)
    chosen = is_trained | is_frozen
    if not chosen.any():
        raise MemtraceError(
            "the trace names no parameters, which this change needs: record with memtrace.record(model=model) or "
            "memtrace record."
        )
    kept = np.flatnonzero(chosen)
    block = candidates[kept]
    return Parameters(block, tuple(names[place] for place in kept.tolist()), columns.size[block], is_trained[kept])


def state_of_parameters(trace: Trace, timeline: Timeline, names: Iterable[str]) -> Array:
    """Return a mask of named parameters, their gradients and their optimizer state in a timeline.

    Optimizer state that was inserted belongs to no parameter and is counted as well; so are its numbers.
    """
    columns = blocks(trace)
    wanted = set(names)
    name = np.where(timeline.block >= 0, columns.name[np.maximum(timeline.block, 0)], -1)
    distinct, index = np.unique(name, return_inverse=True)
    texts = [trace.name(number) or "" for number in distinct.tolist()]
    # The name of a state is that of its parameter and its own, such as head.weight.exp_avg.
    hits = np.array([text in wanted or text.rpartition(".")[0] in wanted for text in texts], bool)[index]
    is_state = timeline.of_category("parameter", "gradient", "optimizer_state")
    inserted = (timeline.block < 0) & timeline.of_category("optimizer_state")
    found: Array = (is_state & hits) | inserted
    return found


def gradient_blocks(trace: Trace, timeline: Timeline, names: set[str]) -> Array:
    """Return a mask of the gradients of named parameters in a timeline."""
    columns = blocks(trace)
    of_category = timeline.of_category("gradient") & (timeline.block >= 0)
    name = columns.name[np.maximum(timeline.block, 0)]
    wanted = [number for number in np.unique(name[of_category]).tolist() if (trace.name(number) or "") in names]
    return of_category & np.isin(name, wanted)
