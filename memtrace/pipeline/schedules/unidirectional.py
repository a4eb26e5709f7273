"""Schedules with one stage per worker and one direction: GPipe, 1F1B (DAPPLE), PipeDream and PipeDream-2BW."""

from __future__ import annotations

from memtrace.errors import MemtraceError
from memtrace.pipeline.schedules.actions import BACKWARD, FORWARD, Action
from memtrace.pipeline.schedules.dependencies import align_schedule
from memtrace.pipeline.schedules.schedule import FLUSH, STASH, TWO_BUFFERED, Placement, Schedule


def straight_placement(num_workers: int, num_chunks: int = 1) -> Placement:
    """Place one pipeline that passes through the workers in order, ``num_chunks`` times."""
    return (tuple(range(num_workers)) * num_chunks,)


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """GPipe: all forwards, then all backwards, in the order of the micro-batches (Huang et al., 2019)."""
    rows = [
        [Action(kind, stage, m) for kind in (FORWARD, BACKWARD) for m in range(num_microbatches)]
        for stage in range(num_stages)
    ]
    return align_schedule("gpipe", num_stages, num_microbatches, placement=straight_placement(num_stages), rows=rows)


def one_forward_one_backward(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B with a flush (DAPPLE, PipeDream-Flush): at most D - s micro-batches are in flight on stage s."""
    return _build_1f1b("1f1b", num_stages, num_microbatches)


def pipedream(num_stages: int, num_microbatches: int) -> Schedule:
    """PipeDream: 1F1B without a flush; every backward updates the weights, and old versions stay while in use."""
    return _build_1f1b("pipedream", num_stages, num_microbatches, STASH)


def pipedream_2bw(num_stages: int, num_microbatches: int, update_every: int | None = None) -> Schedule:
    """PipeDream-2BW: 1F1B without a flush, with two weight versions (Narayanan et al., ICML 2021).

    Args:
        num_stages: number of stages and of workers.
        num_microbatches: micro-batches of the table; the second version exists only in a table of several batches.
        update_every: micro-batches per update, at least ``num_stages``; None: all micro-batches of the table.

    Raises:
        MemtraceError: ``update_every`` is less than ``num_stages``.
    """
    every = update_every or num_microbatches
    if every < num_stages:
        raise MemtraceError(
            f"pipedream-2bw needs at least {num_stages} micro-batches per update, one for each stage; got {every}"
        )
    return _build_1f1b("pipedream-2bw", num_stages, num_microbatches, TWO_BUFFERED, every)


def _build_1f1b(
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
    return align_schedule(
        name,
        num_stages,
        num_microbatches,
        placement=straight_placement(num_stages),
        rows=rows,
        update=update,
        update_every=update_every,
    )
