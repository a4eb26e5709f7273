"""The balance of a recorded pipeline: what every stage and every worker held, and how long it stood idle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from memtrace.analysis.attribution import rows_at
from memtrace.analysis.blocks import CATEGORY, Blocks, blocks
from memtrace.analysis.ranks import fullest, missing_ranks
from memtrace.format.arrays import Array
from memtrace.pipeline.recorded import (
    RankActions,
    last_complete_round,
    recorded_actions,
    torch_schedule,
    torch_steps,
)
from memtrace.pipeline.schedules.actions import BACKWARD, FORWARD, INPUT_BACKWARD
from memtrace.pipeline.simulation.memory import Outputs
from memtrace.trace import Trace

if TYPE_CHECKING:
    pass

STATE: Final = ("parameter", "gradient", "optimizer_state")

Place = tuple[int, int]
"""(pipeline, stage)"""


@dataclass(frozen=True, kw_only=True)
class MeasuredStage:
    """One copy of a stage. Bytes and ns; None: not known."""

    stage: int
    pipeline: int
    rank: int
    parameter_bytes: int | None
    gradient_bytes: int | None
    optimizer_bytes: int | None
    activation_bytes: int | None
    """What the forward of one micro-batch leaves until its backward begins, the received input among it; the median."""
    in_flight_peak: int
    forward_ns: int | None
    """Median duration of a forward."""
    backward_ns: int | None
    """Median duration of a backward; of a split one both halves."""


@dataclass(frozen=True, kw_only=True)
class MeasuredWorker:
    """One rank of the pipeline. Bytes and ns."""

    rank: int
    stages: tuple[int, ...]
    peak_bytes: int
    in_flight_peak: int
    """The most (stage, micro-batch) pairs in flight."""
    bubble_share: float
    """Idle share of the last complete round, from the first action of any rank to the last."""
    headroom_bytes: int | None
    """What the capacity leaves; None without one."""


@dataclass(frozen=True)
class Measured:
    """What ``measured`` found."""

    stages: tuple[MeasuredStage, ...]
    workers: tuple[MeasuredWorker, ...]
    ranks: tuple[RankActions, ...]
    round: int
    """The round whose bubbles are counted."""
    torch_schedule: str | None
    """The class of torch.distributed.pipelining that ran it; None: another program."""
    outputs: Outputs
    """What torch's schedule left of the outputs of the last stage."""
    missing: tuple[int, ...]
    """Ranks of the job that the trace does not have: their stages are not among these."""

    @property
    def imbalance(self) -> float:
        """The highest peak of a worker over the mean of all."""
        peaks = [worker.peak_bytes for worker in self.workers]
        return max(peaks) * len(peaks) / sum(peaks)

    def as_dict(self) -> dict[str, Any]:
        """The shape of ``memtrace pipeline --json``."""
        return {
            "stages": [asdict(stage) for stage in self.stages],
            "workers": [asdict(worker) for worker in self.workers],
            "imbalance": self.imbalance,
            "round": self.round,
            "torch_schedule": self.torch_schedule,
            "outputs": self.outputs,
            "missing_ranks": list(self.missing),
        }


def measured(trace: Trace, capacity_bytes: int | None = None) -> Measured:
    """The stages and workers of the pipeline that the ranks of ``trace`` ran.

    Source: spans of kind action, blocks with their categories, reads. Raises TraceError where no actions are marked.
    """
    found = recorded_actions(trace)
    chosen = last_complete_round(found)
    return Measured(
        tuple(stage for one in found for stage in _stages(trace.rank(one.rank), one)),
        tuple(_workers(trace, found, chosen, capacity_bytes)),
        tuple(found),
        chosen,
        torch_schedule(trace.rank(found[0].rank)),
        _outputs(trace, found),
        missing_ranks(trace),
    )


def _outputs(trace: Trace, found: Sequence[RankActions]) -> Outputs:
    """Whether torch's steps returned outputs, and whether the program held these while the next step ran.

    Merged outputs are what a step makes behind its last action and does not free itself.
    """
    last = max(found, key=lambda one: max(stage for _, stage in one.places))
    rank = trace.rank(last.rank)
    steps = torch_steps(rank)
    if not len(steps):
        return "gone"
    blocks_of = blocks(rank)
    freed = np.where(blocks_of.free_event < 0, np.iinfo(np.int64).max, blocks_of.free_event)
    of_state = np.isin(blocks_of.category, [CATEGORY[name] for name in STATE])
    begins, ends = rows_at(rank, steps[:, 0]), rows_at(rank, steps[:, 1])
    behind = last.end_row[np.maximum(np.searchsorted(last.end_row, ends, side="right") - 1, 0)]
    step = np.searchsorted(ends, blocks_of.alloc_event, side="right")
    place = np.minimum(step, len(ends) - 1)
    returned = ~of_state & (step < len(ends)) & (blocks_of.alloc_event >= behind[place]) & (freed >= ends[place])
    if not returned.any():
        return "gone"
    following = np.append(begins[1:], np.iinfo(np.int64).max)
    # The name that a program gives them is bound anew when the next step has returned.
    return "held" if (returned & (freed > following[place])).sum() > returned.sum() // 2 else "kept"


def _workers(
    trace: Trace, found: Sequence[RankActions], chosen: int, capacity_bytes: int | None
) -> list[MeasuredWorker]:
    of_round = [one.round == chosen for one in found]
    begin = min(int(one.start_ns[mask].min()) for one, mask in zip(found, of_round, strict=True))
    end = max(int(one.end_ns[mask].max()) for one, mask in zip(found, of_round, strict=True))
    workers = []
    for one, mask in zip(found, of_round, strict=True):
        top = fullest(trace.rank(one.rank))
        peak = top.requested.bytes if top is not None else 0
        busy = int((one.end_ns - one.start_ns)[mask].sum())
        workers.append(
            MeasuredWorker(
                rank=one.rank,
                stages=tuple(sorted({action.stage for action in one.actions})),
                peak_bytes=peak,
                in_flight_peak=int(one.in_flight().max(initial=0)),
                bubble_share=max(0.0, 1 - busy / (end - begin)) if end > begin else 0.0,
                headroom_bytes=None if capacity_bytes is None else capacity_bytes - peak,
            )
        )
    return workers


def _stages(trace: Trace, one: RankActions) -> list[MeasuredStage]:
    places = sorted({(action.pipeline, action.stage) for action in one.actions})
    of_action = np.array([places.index((action.pipeline, action.stage)) for action in one.actions])
    state = _state_bytes(trace, one, places, of_action)
    kinds, took = one.kinds, one.end_ns - one.start_ns
    warm = one.round > 0 if one.round.max(initial=0) > 0 else np.ones(len(of_action), bool)
    kept = _kept_bytes(trace, one)
    stages = []
    for number, (pipeline, stage) in enumerate(places):
        mine = of_action == number
        forwards = mine & (kinds == FORWARD) & warm
        rounds = len(np.unique(one.round[mine & warm])) * len(
            {action.microbatch for action, is_mine in zip(one.actions, mine, strict=True) if is_mine}
        )
        backwards = took[mine & (kinds != FORWARD) & warm]
        stages.append(
            MeasuredStage(
                stage=stage,
                pipeline=pipeline,
                rank=one.rank,
                parameter_bytes=state["parameter"][number],
                gradient_bytes=state["gradient"][number],
                optimizer_bytes=state["optimizer_state"][number],
                activation_bytes=_median(kept[forwards & (kept >= 0)]),
                in_flight_peak=_in_flight_peak(one, mine),
                forward_ns=_median(took[forwards]),
                backward_ns=int(backwards.sum()) // rounds if rounds and len(backwards) else None,
            )
        )
    return stages


def _median(values: Array) -> int | None:
    return int(np.median(values)) if len(values) else None


def _in_flight_peak(one: RankActions, mine: Array) -> int:
    begins, ends = one.in_flight_change
    level = np.cumsum(np.stack([begins[mine], ends[mine]], axis=1).ravel())
    return int(level.max(initial=0)) - min(0, int(level.min(initial=0)))


def _kept_bytes(trace: Trace, one: RankActions) -> Array:
    """For every forward the bytes allocated for it that are live when its backward begins; -1 where there is none."""
    found = blocks(trace)
    action_of = _action_of_rows(one, found.alloc_event)
    until = _backward_rows(one)
    freed = np.where(found.free_event < 0, np.iinfo(np.int64).max, found.free_event)
    kept = (action_of >= 0) & (until[action_of] >= 0) & (freed >= until[action_of])
    kept &= ~np.isin(found.category, [CATEGORY[name] for name in STATE])
    # Exact in float64 up to 2**53 bytes.
    total = np.bincount(action_of[kept], weights=found.size[kept], minlength=len(until)).astype(np.int64)
    return np.where(until >= 0, total, -1)


def _action_of_rows(one: RankActions, rows: Array) -> Array:
    """The action to which each row of events belongs; -1: none."""
    place = np.searchsorted(one.end_row, rows, side="right")
    inside = np.minimum(place, len(one.end_row) - 1)
    return np.where((rows >= 0) & (place < len(one.end_row)) & (rows >= one.first_row[inside]), inside, -1)


def _backward_rows(one: RankActions) -> Array:
    """For every forward the row at which the backward of its micro-batch begins; -1 for other actions and none."""
    begins: dict[tuple[int, int, int, int], int] = {}
    keys = [
        (action.pipeline, action.stage, action.microbatch, int(number))
        for action, number in zip(one.actions, one.round, strict=True)
    ]
    for key, action, row in zip(keys, one.actions, one.start_row, strict=True):
        if action.kind in (BACKWARD, INPUT_BACKWARD):
            begins.setdefault(key, int(row))
    rows = [
        begins.get(key, -1) if action.kind == FORWARD else -1 for key, action in zip(keys, one.actions, strict=True)
    ]
    return np.array(rows, np.int64)


def _state_bytes(
    trace: Trace, one: RankActions, places: Sequence[Place], of_action: Array
) -> dict[str, list[int | None]]:
    """Parameters, gradients and optimizer state of every stage of a rank.

    Where the rank has several stages a parameter is of the stage whose actions touch it first; its gradient and its
    optimizer state are known by its name.
    """
    found = blocks(trace)
    stage_of_name: dict[str, int] = {}
    stage_of_block = np.full(len(found), 0 if len(places) == 1 else -1)
    if len(places) > 1:
        stage_of_block = _first_touching_stage(trace, one, of_action, len(found))
        parameters = np.flatnonzero((found.category == CATEGORY["parameter"]) & (stage_of_block >= 0))
        for block in parameters:
            stage_of_name.setdefault(trace.name(int(found.name[block])) or "", int(stage_of_block[block]))
    result: dict[str, list[int | None]] = {}
    for category in STATE:
        chosen = np.flatnonzero(found.category == CATEGORY[category])
        result[category] = _by_stage(trace, found, chosen, stage_of_block, stage_of_name, len(places))
    return result


def _by_stage(
    trace: Trace, found: Blocks, chosen: Array, stage_of_block: Array, stage_of_name: dict[str, int], count: int
) -> list[int | None]:
    """Bytes of each stage; of what has one name (the gradient of every step) the largest counts once."""
    # Unnamed blocks are each their own: numbers below -1, which no name has.
    names = np.where(found.name[chosen] >= 0, found.name[chosen], -2 - chosen)
    order = np.lexsort((found.size[chosen], names))
    largest = order[np.append(names[order][1:] != names[order][:-1], True)] if len(order) else order
    total = [0] * count
    known = False
    for block in chosen[largest]:
        name = trace.name(int(found.name[block])) or ""
        by_block = int(stage_of_block[block])
        stage = stage_of_name.get(name, stage_of_name.get(name.rpartition(".")[0], by_block))
        if stage >= 0:
            total[stage] += int(found.size[block])
            known = True
    return [None] * count if len(chosen) and not known else list(total)


def _first_touching_stage(trace: Trace, one: RankActions, of_action: Array, num_blocks: int) -> Array:
    """The stage (as a place in the rank's list) whose action first reads or writes each block; -1: none."""
    events = trace.columns("events", "block_id")
    action = _action_of_rows(one, np.arange(len(events["block_id"])))
    touching = np.flatnonzero((action >= 0) & (events["block_id"] >= 0))[::-1]
    stage = np.full(num_blocks, -1, np.int64)
    stage[events["block_id"][touching]] = of_action[action[touching]]
    return stage
