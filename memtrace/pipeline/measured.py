"""Memory, micro-batches in flight and bubbles of a recorded pipeline, by stage and by worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from memtrace.analysis.attribution import rows_at
from memtrace.analysis.blocks import blocks
from memtrace.analysis.peak import requested_bytes
from memtrace.analysis.rank_results import RankAnalyzer, UnreadableRank, find_unreadable_ranks
from memtrace.analysis.rank_summary import fullest_device_peak
from memtrace.analysis.ranks import find_missing_ranks
from memtrace.analysis.timeline import select_plot_points
from memtrace.display import Displayed
from memtrace.format.arrays import Array
from memtrace.pipeline.measured_stages import NEVER, MeasuredStage, is_state, measure_stages
from memtrace.pipeline.memory_rules import KeptOutputs
from memtrace.pipeline.recorded import (
    RankActions,
    last_complete_step,
    own_actions,
    recorded_actions,
    shift_actions,
    step_interval_ns,
    torch_schedule,
    torch_steps,
)
from memtrace.pipeline.recorded_syncs import GradientSync, gradient_syncs, sync_time_ns
from memtrace.pipeline.recorded_versions import count_weight_versions
from memtrace.trace import Trace

MAX_POINTS: Final = 600
"""Most moments of the memory curve of one rank."""


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
    """Ranks of the job that the trace does not contain, or that cannot be read: their stages are missing as well."""
    unreadable: tuple[UnreadableRank, ...] = ()
    """Ranks that are left out because they cannot be read."""


@dataclass(frozen=True)
class RankMemory:
    """Live bytes of one rank over a step, at the most ``MAX_POINTS`` moments with the highest and lowest levels."""

    rank: int
    time_ns: Array
    """Time since the start of the step, on the clock of the reference rank."""
    live_bytes: Array


@dataclass(frozen=True)
class StepMoment:
    """The step of a pipeline that is measured, as one rank sees it."""

    step: int
    """The last complete step of the pipeline."""
    begin_ns: int
    """Start of its first action on any rank, on the clock of the reference rank, as ``end_ns``."""
    end_ns: int
    shift_ns: int
    """What to add to times of the rank's own clock."""
    is_last_stage: bool
    """Whether the model outputs that the last stage kept are looked for in this rank."""


@dataclass(frozen=True)
class MeasuredRank:
    """What one rank contributes to the pipeline."""

    worker: MeasuredWorker
    stages: tuple[MeasuredStage, ...]
    syncs: tuple[GradientSync, ...]
    """The gradient synchronizations of the last complete step."""
    memory: RankMemory | None
    """None: the rank has no memory events."""
    torch_schedule: str | None
    kept_outputs: KeptOutputs | None
    """None: not looked for in this rank."""


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


def analyze_pipeline(trace: Trace, analyze: RankAnalyzer) -> Trace:
    """Return a trace with what ``measure_pipeline`` and ``measure_ranks`` need of its ranks.

    Args:
        trace: all ranks of the pipeline.
        analyze: computes the results of the ranks.

    Raises:
        MemtraceError: no rank can be read.
    """
    trace = analyze(trace, own_actions, task="reading actions")
    if all(trace.rank_result(number, own_actions) is None for number in trace.ranks):
        return trace
    moments = _moments(trace, recorded_actions(trace))
    return analyze(trace, measure_rank, task="measuring", each={rank: (moment,) for rank, moment in moments.items()})


def measure_ranks(trace: Trace) -> list[MeasuredRank]:
    """Return what each rank with actions contributes to the pipeline, in the order of ``recorded_actions``.

    Raises:
        TraceError: no pipeline actions were recorded.
    """
    moments = _moments(trace, recorded_actions(trace))
    return [trace.rank_result(rank, measure_rank, moment) for rank, moment in moments.items()]


def _moments(trace: Trace, ranks: Sequence[RankActions]) -> dict[int, StepMoment]:
    step = last_complete_step(ranks)
    begin, end = step_interval_ns(ranks, step)
    last = max(ranks, key=lambda rank: max(stage for _, stage in rank.stage_copies)).rank
    return {rank.rank: StepMoment(step, begin, end, rank.clock_shift_ns, rank.rank == last) for rank in ranks}


def _measure_pipeline(trace: Trace) -> MeasuredPipeline:
    ranks = measure_ranks(trace)
    workers = tuple(rank.worker for rank in ranks)
    peaks = [worker.peak_bytes for worker in workers]
    return MeasuredPipeline(
        stages=tuple(stage for rank in ranks for stage in rank.stages),
        workers=workers,
        imbalance=max(peaks) * len(peaks) / sum(peaks) if sum(peaks) else None,
        step=last_complete_step(recorded_actions(trace)),
        torch_schedule=ranks[0].torch_schedule,
        kept_outputs=next(rank.kept_outputs for rank in ranks if rank.kept_outputs is not None),
        missing_ranks=find_missing_ranks(trace),
        unreadable=find_unreadable_ranks(trace),
    )


def measure_rank(trace: Trace, moment: StepMoment) -> MeasuredRank:
    """Return what a single-rank trace with actions contributes to its pipeline."""
    own = own_actions(trace)
    assert own is not None
    actions = shift_actions(own, moment.shift_ns)
    syncs = gradient_syncs(trace, actions)
    return MeasuredRank(
        worker=_measure_worker(trace, actions, syncs, moment),
        stages=tuple(measure_stages(trace, actions)),
        syncs=tuple(sync for sync in syncs if sync.step == moment.step),
        memory=_measure_memory(trace, moment),
        torch_schedule=torch_schedule(trace),
        kept_outputs=_find_kept_outputs(trace, actions) if moment.is_last_stage else None,
    )


def _measure_memory(trace: Trace, moment: StepMoment) -> RankMemory | None:
    top = fullest_device_peak(trace)
    if top is None:
        return None
    live = requested_bytes(trace, top.device)
    time = trace.columns("events", "time_ns")["time_ns"][live.rows] + moment.shift_ns
    inside = np.flatnonzero((time >= moment.begin_ns) & (time <= moment.end_ns))
    kept = inside[select_plot_points(live.bytes[inside], MAX_POINTS)]
    return RankMemory(trace.ranks[0], time[kept] - moment.begin_ns, live.bytes[kept])


def _find_kept_outputs(single: Trace, last: RankActions) -> KeptOutputs:
    """Whether steps of torch returned model outputs, and whether the program held these during the next step.

    Merged outputs are what a step allocates after its last action and does not free itself.

    Args:
        single: the trace of a rank with the last stage.
        last: its actions.
    """
    steps = torch_steps(single)
    if not len(steps):
        return "none"
    of_rank = blocks(single)
    freed = np.where(of_rank.free_event < 0, NEVER, of_rank.free_event)
    begins, ends = rows_at(single, steps[:, 0]), rows_at(single, steps[:, 1])
    last_action_end = last.end_row[np.maximum(np.searchsorted(last.end_row, ends, side="right") - 1, 0)]
    step = np.searchsorted(ends, of_rank.alloc_event, side="right")
    place = np.minimum(step, len(ends) - 1)
    after_actions = (step < len(ends)) & (of_rank.alloc_event >= last_action_end[place])
    returned = ~is_state(of_rank) & after_actions & (freed >= ends[place])
    if not returned.any():
        return "none"
    next_begin = np.append(begins[1:], NEVER)
    # A program that holds the outputs in a variable rebinds it when the next step has returned.
    held = returned & (freed > next_begin[place])
    return "merged" if held.sum() > returned.sum() // 2 else "microbatches"


def _measure_worker(trace: Trace, rank: RankActions, syncs: list[GradientSync], moment: StepMoment) -> MeasuredWorker:
    top = fullest_device_peak(trace)
    of_step = rank.step == moment.step
    busy = int((rank.end_ns - rank.start_ns)[of_step].sum())
    duration = moment.end_ns - moment.begin_ns
    sync = sync_time_ns(syncs, moment.step, int(rank.end_ns[of_step].max()))
    return MeasuredWorker(
        rank=rank.rank,
        stages=tuple(sorted({action.stage for action in rank.actions})),
        peak_bytes=top.requested.bytes if top is not None else 0,
        in_flight_peak=int(rank.in_flight().max(initial=0)),
        weight_versions=count_weight_versions(trace) or None,
        bubble_ratio=max(0.0, 1 - busy / duration) if duration > 0 else 0.0,
        headroom_bytes=None,
        gradient_sync_ns=None if sync is None else sync[0],
        exposed_sync_ns=None if sync is None else sync[1],
    )
