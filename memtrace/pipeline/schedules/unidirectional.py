"""Schedules with one stage a worker and one direction: GPipe, DAPPLE (1F1B), PipeDream, PipeDream-2BW."""

from __future__ import annotations

from memtrace.errors import MemtraceError
from memtrace.pipeline.schedules.actions import BACKWARD, FORWARD, Action
from memtrace.pipeline.schedules.dependencies import aligned
from memtrace.pipeline.schedules.schedule import FLUSH, STASH, TWO_BUFFERED, Placement, Schedule


def straight(num_workers: int, num_chunks: int = 1) -> Placement:
    """One pipeline that goes through the workers in order, ``num_chunks`` times."""
    return (tuple(range(num_workers)) * num_chunks,)


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards, in the order of the micro-batches (Huang et al. 2019)."""
    rows = [
        [Action(kind, stage, m) for kind in (FORWARD, BACKWARD) for m in range(num_microbatches)]
        for stage in range(num_stages)
    ]
    return aligned("gpipe", num_stages, num_microbatches, placement=straight(num_stages), rows=rows)


def dapple(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B with a flush (DAPPLE, PipeDream-Flush): stage s runs at most D - s micro-batches ahead."""
    return _one_forward_one_backward("dapple", num_stages, num_microbatches)


def pipedream(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B without a flush, an update after every backward, old weights kept while in use (PipeDream)."""
    return _one_forward_one_backward("pipedream", num_stages, num_microbatches, STASH)


def pipedream_2bw(num_stages: int, num_microbatches: int, update_every: int | None = None) -> Schedule:
    """1F1B without a flush, with gradients summed over ``update_every`` micro-batches and two weight
    versions.

    ``update_every`` is by default the whole table, one batch; it must be at least ``num_stages`` (Narayanan
    et al. 2021), and a table of several batches shows the second version.
    """
    every = update_every or num_microbatches
    if every < num_stages:
        raise MemtraceError(
            f"pipedream-2bw needs at least as many micro-batches a batch as stages: {every} < {num_stages}"
        )
    return _one_forward_one_backward("pipedream-2bw", num_stages, num_microbatches, TWO_BUFFERED, every)


def _one_forward_one_backward(
    name: str, num_stages: int, num_microbatches: int, update: str = FLUSH, update_every: int | None = None
) -> Schedule:
    rows = []
    for stage in range(num_stages):
        ahead = min(num_stages - stage, num_microbatches)
        row = [Action(FORWARD, stage, m) for m in range(ahead)]
        for m in range(num_microbatches):
            row.append(Action(BACKWARD, stage, m))
            if m + ahead < num_microbatches:
                row.append(Action(FORWARD, stage, m + ahead))
        rows.append(row)
    return aligned(
        name,
        num_stages,
        num_microbatches,
        placement=straight(num_stages),
        rows=rows,
        update=update,
        update_every=update_every,
    )
