"""The stages of a recorded pipeline on one rank: their state, what a micro-batch keeps, and their times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from memtrace.analysis.blocks import CATEGORY, Blocks, blocks
from memtrace.format.arrays import Array
from memtrace.pipeline.recorded import RankActions, action_of_rows, running_in_flight
from memtrace.pipeline.schedules.actions import BACKWARD, FORWARD, INPUT_BACKWARD
from memtrace.trace import Trace

STATE_CATEGORIES: Final = ("parameter", "gradient", "optimizer_state")
NEVER: Final = np.iinfo(np.int64).max
"""The row in which blocks are freed that stay."""


@dataclass(frozen=True, kw_only=True)
class MeasuredStage:
    """One copy of a pipeline stage. None: unknown."""

    stage: int
    pipeline: int
    """Pipeline that the copy belongs to; 0 unless the schedule has several."""
    rank: int
    parameter_bytes: int | None
    gradient_bytes: int | None
    optimizer_bytes: int | None
    activation_bytes: int | None
    """Median of what one micro-batch keeps from its forward to its backward, the received input included."""
    in_flight_peak: int
    """Peak number of micro-batches in flight."""
    forward_ns: int | None
    """Median duration of a forward."""
    backward_ns: int | None
    """Mean duration of a backward; of a split backward both parts together."""

    @property
    def in_flight_bytes(self) -> int | None:
        """Activations of all micro-batches in flight at their peak."""
        return None if self.activation_bytes is None else self.activation_bytes * self.in_flight_peak


def is_state(of_rank: Blocks) -> Array:
    """Return which blocks are parameters, gradients or optimizer state."""
    return np.isin(of_rank.category, [CATEGORY[name] for name in STATE_CATEGORIES])


def measure_stages(trace: Trace, rank: RankActions) -> list[MeasuredStage]:
    """Return the copies of stages that a rank holds.

    Args:
        trace: its trace.
        rank: its actions.
    """
    copies = sorted(rank.stage_copies)
    copy_of_action = np.array([copies.index((action.pipeline, action.stage)) for action in rank.actions])
    state = _state_bytes(trace, rank, len(copies), copy_of_action)
    kinds, duration = rank.kinds, rank.end_ns - rank.start_ns
    # The first step warms up: it counts only where there is no other.
    warm = rank.step > 0 if rank.step.max(initial=0) > 0 else np.ones(len(copy_of_action), bool)
    kept = _kept_bytes(trace, rank)
    stages = []
    for number, (pipeline, stage) in enumerate(copies):
        mine = copy_of_action == number
        forwards = mine & (kinds == FORWARD) & warm
        actions = [action for action, is_mine in zip(rank.actions, mine, strict=True) if is_mine]
        num_backwards = len(np.unique(rank.step[mine & warm])) * len({action.microbatch for action in actions})
        backwards = duration[mine & (kinds != FORWARD) & warm]
        stages.append(
            MeasuredStage(
                stage=stage,
                pipeline=pipeline,
                rank=rank.rank,
                parameter_bytes=state["parameter"][number],
                gradient_bytes=state["gradient"][number],
                optimizer_bytes=state["optimizer_state"][number],
                activation_bytes=_median(kept[forwards & (kept >= 0)]),
                in_flight_peak=int(running_in_flight(actions).max(initial=0)),
                forward_ns=_median(duration[forwards]),
                backward_ns=int(backwards.sum()) // num_backwards if num_backwards and len(backwards) else None,
            )
        )
    return stages


def _median(values: Array) -> int | None:
    return int(np.median(values)) if len(values) else None


def _kept_bytes(trace: Trace, rank: RankActions) -> Array:
    """For every forward the bytes allocated for it that are live when its backward begins; -1 without a backward."""
    of_rank = blocks(trace)
    action_of = action_of_rows(rank, of_rank.alloc_event)
    until = _backward_rows(rank)
    freed = np.where(of_rank.free_event < 0, NEVER, of_rank.free_event)
    kept = (action_of >= 0) & (until[action_of] >= 0) & (freed >= until[action_of]) & ~is_state(of_rank)
    # Exact in float64 up to 2**53 bytes.
    total = np.bincount(action_of[kept], weights=of_rank.size[kept], minlength=len(until)).astype(np.int64)
    return np.where(until >= 0, total, -1)


def _backward_rows(rank: RankActions) -> Array:
    """For every forward the row at which the backward of its micro-batch begins; -1 for other actions or without."""
    begins: dict[tuple[int, int, int, int], int] = {}
    keys = [
        (action.pipeline, action.stage, action.microbatch, int(step))
        for action, step in zip(rank.actions, rank.step, strict=True)
    ]
    for key, action, row in zip(keys, rank.actions, rank.start_row, strict=True):
        if action.kind in (BACKWARD, INPUT_BACKWARD):
            begins.setdefault(key, int(row))
    return np.array(
        [begins.get(key, -1) if action.kind == FORWARD else -1 for key, action in zip(keys, rank.actions, strict=True)],
        np.int64,
    )


def _state_bytes(
    trace: Trace, rank: RankActions, num_copies: int, copy_of_action: Array
) -> dict[str, list[int | None]]:
    """Bytes of parameters, gradients and optimizer state of every stage copy of a rank.

    Where the rank holds several copies, a parameter belongs to the copy whose actions access it first; its gradient and
    optimizer state are recognized by its name.
    """
    of_rank = blocks(trace)
    copy_of_name: dict[str, int] = {}
    copy_of_block = np.full(len(of_rank), 0 if num_copies == 1 else -1)
    if num_copies > 1:
        copy_of_block = _first_accessing_copy(trace, rank, copy_of_action, len(of_rank))
        parameters = np.flatnonzero((of_rank.category == CATEGORY["parameter"]) & (copy_of_block >= 0))
        for block in parameters:
            copy_of_name.setdefault(trace.name(int(of_rank.name[block])) or "", int(copy_of_block[block]))
    result: dict[str, list[int | None]] = {}
    for category in STATE_CATEGORIES:
        chosen = np.flatnonzero(of_rank.category == CATEGORY[category])
        result[category] = _bytes_per_copy(trace, of_rank, chosen, copy_of_block, copy_of_name, num_copies)
    return result


def _bytes_per_copy(
    trace: Trace, of_rank: Blocks, chosen: Array, copy_of_block: Array, copy_of_name: dict[str, int], num_copies: int
) -> list[int | None]:
    """Bytes of each stage copy; of blocks with one name (the gradient of every step) only the largest counts."""
    # Unnamed blocks get numbers below -1, which no name has: each counts on its own.
    names = np.where(of_rank.name[chosen] >= 0, of_rank.name[chosen], -2 - chosen)
    order = np.lexsort((of_rank.size[chosen], names))
    largest = order[np.append(names[order][1:] != names[order][:-1], True)] if len(order) else order
    total = [0] * num_copies
    known = False
    for block in chosen[largest]:
        name = trace.name(int(of_rank.name[block])) or ""
        by_block = int(copy_of_block[block])
        copy = copy_of_name.get(name, copy_of_name.get(name.rpartition(".")[0], by_block))
        if copy >= 0:
            total[copy] += int(of_rank.size[block])
            known = True
    return [None] * num_copies if len(chosen) and not known else list(total)


def _first_accessing_copy(trace: Trace, rank: RankActions, copy_of_action: Array, num_blocks: int) -> Array:
    """The stage copy whose action first reads or writes each block; -1: none."""
    block_id = trace.columns("events", "block_id")["block_id"]
    action = action_of_rows(rank, np.arange(len(block_id)))
    accesses = np.flatnonzero((action >= 0) & (block_id >= 0))[::-1]
    copy = np.full(num_blocks, -1, np.int64)
    copy[block_id[accesses]] = copy_of_action[action[accesses]]
    return copy
