"""Weight versions and updates of a recorded pipeline."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from memtrace.analysis.attribution import PHASE, SPAN
from memtrace.analysis.blocks import CATEGORY, blocks
from memtrace.format.arrays import Array
from memtrace.pipeline.recorded import RankActions, last_complete_step, recorded_actions, recorded_schedule
from memtrace.pipeline.schedules.schedule import STASH, TWO_BUFFERED, Schedule
from memtrace.trace import Trace


def recorded_schedule_with_updates(trace: Trace) -> Schedule:
    """The recorded order of actions, with the rule by which the program updated the weights.

    Optimizer steps between the actions of one pipeline step mean a schedule without a flush: PipeDream where there is
    one for every micro-batch, else PipeDream-2BW. A program that makes one update per pipeline step and keeps two
    versions of the weights runs PipeDream-2BW as well.

    Raises:
        TraceError: there are no actions, or a rank is missing.
    """
    ranks = recorded_actions(trace)
    schedule = recorded_schedule(ranks)
    if len(schedule.placement) > 1:
        return schedule
    step = last_complete_step(ranks)
    # One update follows the last action of the step, which may not have been recorded any more.
    num_updates = 1 + max(
        int(_updated_after(trace.rank(rank.rank), rank)[np.flatnonzero(rank.step == step)[:-1]].sum()) for rank in ranks
    )
    versions = max(count_weight_versions(trace.rank(rank.rank)) for rank in ranks)
    if num_updates > 1 and num_updates == schedule.num_microbatches:
        return replace(schedule, update=STASH)
    if versions > 1 and schedule.num_microbatches % num_updates == 0:
        return replace(schedule, update=TWO_BUFFERED, update_every=schedule.num_microbatches // num_updates)
    return schedule


def _updated_after(trace: Trace, rank: RankActions) -> Array:
    """For every action whether an optimizer step began after its start and before that of the next action."""
    spans = trace.columns("spans", "kind", "name", "start_ns")
    phases = np.flatnonzero(spans["kind"] == SPAN["phase"])
    of_optimizer = [
        name
        for name in map(int, np.unique(spans["name"][phases]))
        if PHASE.get(trace.name(name) or "") == PHASE["optimizer"]
    ]
    starts = spans["start_ns"][phases[np.isin(spans["name"][phases], of_optimizer)]]
    # The actions are on the clock of the reference rank, the spans on that of their own.
    own_start = np.sort(rank.start_ns - rank.clock_shift_ns)
    place = np.searchsorted(own_start, starts, side="right") - 1
    updated = np.zeros(len(rank.actions), dtype=bool)
    updated[place[place >= 0]] = True
    return updated


def count_weight_versions(trace: Trace) -> int:
    """How many blocks of one parameter a rank held at the same time: the median over its parameters; 0 without any.

    Blocks of another size, such as the shards of FSDP, are not versions.
    """
    of_rank = blocks(trace)
    chosen = np.flatnonzero((of_rank.category == CATEGORY["parameter"]) & (of_rank.name >= 0))
    if not len(chosen):
        return 0
    keys = np.stack([of_rank.name[chosen], of_rank.size[chosen]], axis=1)
    names = np.unique(keys, axis=0, return_inverse=True)[1].ravel()
    return int(np.median(_most_at_once(names, of_rank.alloc_event[chosen], of_rank.free_event[chosen])))


def _most_at_once(names: Array, begins: Array, ends: Array) -> Array:
    """For every name the largest number of intervals that overlap; an end below 0 is open."""
    keys = np.concatenate([names, names])
    times = np.concatenate([begins, np.where(ends < 0, np.iinfo(np.int64).max, ends)])
    changes = np.repeat([1, -1], len(names))
    order = np.lexsort((changes, times, keys))
    levels = np.cumsum(changes[order])  # 0 at the end of every name
    groups = np.flatnonzero(np.append(True, keys[order][1:] != keys[order][:-1]))
    most: Array = np.maximum.reduceat(levels, groups)
    return most
