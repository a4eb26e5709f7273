"""Half precision as a change that ``plan auto`` considers: the step as it would be under ``torch.autocast``."""

from __future__ import annotations

from typing import Final

import numpy as np

from memtrace.analysis.blocks import blocks
from memtrace.format.arrays import Array
from memtrace.planning.auto_changes import LevelChange, ProgramChange
from memtrace.planning.batch_size import constant_bytes_by_role
from memtrace.planning.operator_graph import build_graph
from memtrace.planning.recompute_model import MemoryLevels
from memtrace.planning.recompute_options import RecomputeOptions, find_options
from memtrace.planning.recorded_step import RecordedStep
from memtrace.planning.timeline import TICKS_PER_ROW, build_timeline
from memtrace.planning.timeline_moments import find_moments
from memtrace.planning.whatif import step_cost
from memtrace.planning.whatif_changes import Autocast, StepState
from memtrace.trace import Trace

INSTRUCTION: Final = """\
with torch.autocast("{device}", torch.{dtype}):
    loss = loss_function(model(inputs), targets)
loss.backward()  # outside; float16 also needs torch.amp.GradScaler"""


def autocast_options(trace: Trace, step: RecordedStep, device: str, dtype: str) -> tuple[RecomputeOptions, LevelChange]:
    """Return what recomputation can do in a step under autocast, and the memory that autocast adds to its model.

    The blocks of the model have the sizes that they have under autocast. The rest of the difference, such as casts of
    weights, is taken not to depend on what is recomputed.

    Args:
        trace: A single-rank trace with module calls and reads.
        step: The recorded step.
        device: The device whose memory is planned.
        dtype: ``bfloat16`` or ``float16``.
    """
    recorded = build_timeline(trace, device, step, constant_bytes_by_role(trace, step))
    graph = None if step.cost.step_ns is None else build_graph(trace, step)
    before = StepState(trace, device, step, find_moments(trace, step), recorded, graph)
    after = Autocast(dtype).apply(before)
    cost, table = step_cost(after, before), blocks(trace)
    sizes = table.size.copy()
    known = after.timeline.block >= 0
    sizes[after.timeline.block[known]] = after.timeline.size[known]
    found = find_options(trace, step, device, sizes=sizes)
    positions, level = after.timeline.levels
    changed = MemoryLevels(positions / TICKS_PER_ROW, level)
    rows, change = _difference(found.model.replay([]), changed)
    return found, LevelChange(
        ProgramChange(
            f"autocast to {dtype}",
            INSTRUCTION.format(device=device.partition(":")[0], dtype=dtype),
            None if cost.step_ns is None or step.cost.step_ns is None else cost.step_ns - step.cost.step_ns,
            " ".join((*after.assumptions, "Nothing is offloaded under autocast.")),
        ),
        rows,
        change,
    )


def _difference(levels: MemoryLevels, others: MemoryLevels) -> tuple[Array, Array]:
    """Return the positions and the changes that turn the first levels into the others."""
    positions = np.unique(np.concatenate([levels.positions, others.positions]))
    difference = _level_at(others, positions) - _level_at(levels, positions)
    return positions, np.diff(difference, prepend=0)


def _level_at(levels: MemoryLevels, positions: Array) -> Array:
    """Return the level after each position; before the first one, the first level."""
    place = np.maximum(np.searchsorted(levels.positions, positions, side="right") - 1, 0)
    level: Array = levels.bytes[place]
    return level
