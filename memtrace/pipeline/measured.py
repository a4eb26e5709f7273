"""Memory, micro-batches in flight and bubbles of a recorded pipeline, by stage and by worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from memtrace.analysis.attribution import rows_at
from memtrace.analysis.blocks import CATEGORY, Blocks, blocks
from memtrace.analysis.peak import requested_bytes
from memtrace.analysis.rank_clocks import clock_shift_ns
from memtrace.analysis.ranks import find_missing_ranks, fullest_device_peak
from memtrace.display import Displayed
from memtrace.format.arrays import Array
from memtrace.pipeline.memory_rules import KeptOutputs
from memtrace.pipeline.recorded import (
    RankActions,
    action_of_rows,
    last_complete_step,
    recorded_actions,
    running_in_flight,
    step_interval_ns,
    torch_schedule,
    torch_steps,
)
from memtrace.pipeline.recorded_syncs import gradient_syncs, sync_time_ns
from memtrace.pipeline.recorded_versions import count_weight_versions
from memtrace.pipeline.schedules.actions import BACKWARD, FORWARD, INPUT_BACKWARD
from memtrace.trace import Trace

STATE_CATEGORIES: Final = ("parameter", "gradient", "optimizer_state")
_NEVER: Final = np.iinfo(np.int64).max


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


@dataclass(frozen=True, kw_only=True)
class MeasuredWorker:
    """One rank of a recorded pipeline."""

    rank: int
    stages: tuple[int, ...]
    peak_bytes: int
    """Peak memory of the rank's fullest device, over the whole recording."""
    in_flight_peak: int
    """Peak number of (stage, micro-batch) pairs in flight."""
    weight_versions: int | None
    """Peak number of versions of the weights, which PipeDream and PipeDream-2BW keep; None where no parameters are
    known."""
    bubble_ratio: float
    """Idle share of the last complete step, from the first action of any rank to the last one."""
    headroom_bytes: int | None
    """Capacity minus peak; None without a capacity."""
    gradient_sync_ns: int | None
    """Time of the last complete step from launching all-reduces of gradients to the first use of a reduced gradient;
    None where no all-reduce of gradients was recorded."""
    exposed_sync_ns: int | None
    """The part of ``gradient_sync_ns`` after the rank's last action: the rank waits for it."""


@dataclass(frozen=True, kw_only=True)
class MeasuredPipeline(Displayed):
    """Stages and workers of a recorded pipeline."""

    stages: tuple[MeasuredStage, ...]
    workers: tuple[MeasuredWorker, ...]
    imbalance: float | None
    """Highest peak of a worker over the mean of all peaks; None without memory events."""
    step: int
    """The last complete step of the pipeline, from 0: the step whose bubbles are counted."""
    torch_schedule: str | None
    """The schedule class of torch.distributed.pipelining; None: another program ran the pipeline."""
    kept_outputs: KeptOutputs
    """The model outputs that torch.distributed.pipelining kept on the last stage."""
    missing_ranks: tuple[int, ...]
    """Ranks of the job that the trace does not contain: their stages are missing as well."""


@dataclass(frozen=True)
class RankMemory:
    """Live bytes of one rank over a step; arrays have one entry per allocation or free."""

    rank: int
    time_ns: Array
    """Time since the start of the step, on the clock of the reference rank."""
    live_bytes: Array


def measure_pipeline(trace: Trace, capacity_bytes: int | None = None) -> MeasuredPipeline:
    """Measure the pipeline that the ranks of ``trace`` ran.

    Source: spans of kind action; blocks with their categories; read and write events.

    Args:
        trace: all ranks of the pipeline.
        capacity_bytes: memory of one worker, for the headroom.

    Raises:
        TraceError: no pipeline actions were recorded.
    """
    measured = trace.cached(_measure_pipeline)
    if capacity_bytes is None:
        return measured
    workers = (replace(worker, headroom_bytes=capacity_bytes - worker.peak_bytes) for worker in measured.workers)
    return replace(measured, workers=tuple(workers))


def _measure_pipeline(trace: Trace) -> MeasuredPipeline:
    ranks = recorded_actions(trace)
    step = last_complete_step(ranks)
    workers = tuple(_measure_workers(trace, ranks, step))
    peaks = [worker.peak_bytes for worker in workers]
    return MeasuredPipeline(
        stages=tuple(stage for rank in ranks for stage in _measure_stages(trace.rank(rank.rank), rank)),
        workers=workers,
        imbalance=max(peaks) * len(peaks) / sum(peaks) if sum(peaks) else None,
        step=step,
        torch_schedule=torch_schedule(trace.rank(ranks[0].rank)),
        kept_outputs=_find_kept_outputs(trace, ranks),
        missing_ranks=find_missing_ranks(trace),
    )


def rank_memories(trace: Trace) -> list[RankMemory]:
    """Live bytes on the fullest device of every rank over the last complete step; ranks without memory are left out."""
    ranks = recorded_actions(trace)
    begin, end = step_interval_ns(ranks, last_complete_step(ranks))
    reference = trace.rank(trace.ranks[0]).manifest
    memories = []
    for rank in ranks:
        single = trace.rank(rank.rank)
        top = fullest_device_peak(single)
        if top is None:
            continue
        live = requested_bytes(single, top.device)
        time = single.columns("events", "time_ns")["time_ns"][live.rows] + clock_shift_ns(single.manifest, reference)
        inside = (time >= begin) & (time <= end)
        memories.append(RankMemory(rank.rank, time[inside] - begin, live.bytes[inside]))
    return memories


def _find_kept_outputs(trace: Trace, ranks: Sequence[RankActions]) -> KeptOutputs:
    """Whether steps of torch returned model outputs, and whether the program held these during the next step.

    Merged outputs are what a step allocates after its last action and does not free itself.
    """
    last = max(ranks, key=lambda rank: max(stage for _, stage in rank.stage_copies))
    single = trace.rank(last.rank)
    steps = torch_steps(single)
    if not len(steps):
        return "none"
    of_rank = blocks(single)
    freed = np.where(of_rank.free_event < 0, _NEVER, of_rank.free_event)
    begins, ends = rows_at(single, steps[:, 0]), rows_at(single, steps[:, 1])
    last_action_end = last.end_row[np.maximum(np.searchsorted(last.end_row, ends, side="right") - 1, 0)]
    step = np.searchsorted(ends, of_rank.alloc_event, side="right")
    place = np.minimum(step, len(ends) - 1)
    after_actions = (step < len(ends)) & (of_rank.alloc_event >= last_action_end[place])
    returned = ~_is_state(of_rank) & after_actions & (freed >= ends[place])
    if not returned.any():
        return "none"
    next_begin = np.append(begins[1:], _NEVER)
    # A program that holds the outputs in a variable rebinds it when the next step has returned.
    held = returned & (freed > next_begin[place])
    return "merged" if held.sum() > returned.sum() // 2 else "microbatches"


def _is_state(of_rank: Blocks) -> Array:
    """Which blocks are parameters, gradients or optimizer state."""
    return np.isin(of_rank.category, [CATEGORY[name] for name in STATE_CATEGORIES])


def _measure_workers(trace: Trace, ranks: Sequence[RankActions], step: int) -> list[MeasuredWorker]:
    begin, end = step_interval_ns(ranks, step)
    workers = []
    for rank in ranks:
        top = fullest_device_peak(trace.rank(rank.rank))
        peak_bytes = top.requested.bytes if top is not None else 0
        busy = int((rank.end_ns - rank.start_ns)[rank.step == step].sum())
        last_end = int(rank.end_ns[rank.step == step].max())
        sync = sync_time_ns(gradient_syncs(trace.rank(rank.rank), rank), step, last_end)
        workers.append(
            MeasuredWorker(
                rank=rank.rank,
                stages=tuple(sorted({action.stage for action in rank.actions})),
                peak_bytes=peak_bytes,
                in_flight_peak=int(rank.in_flight().max(initial=0)),
                weight_versions=count_weight_versions(trace.rank(rank.rank)) or None,
                bubble_ratio=max(0.0, 1 - busy / (end - begin)) if end > begin else 0.0,
                headroom_bytes=None,
                gradient_sync_ns=None if sync is None else sync[0],
                exposed_sync_ns=None if sync is None else sync[1],
            )
        )
    return workers


def _measure_stages(trace: Trace, rank: RankActions) -> list[MeasuredStage]:
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
    freed = np.where(of_rank.free_event < 0, _NEVER, of_rank.free_event)
    kept = (action_of >= 0) & (until[action_of] >= 0) & (freed >= until[action_of]) & ~_is_state(of_rank)
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
