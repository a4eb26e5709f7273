"""Interleaved 1F1B: every worker holds several chunks of the model (Megatron-LM, Narayanan et al., SC 2021)."""

from __future__ import annotations

from memtrace.errors import MemtraceError
from memtrace.pipeline.schedules.actions import BACKWARD, FORWARD, Action
from memtrace.pipeline.schedules.dependencies import align_schedule
from memtrace.pipeline.schedules.schedule import Schedule
from memtrace.pipeline.schedules.unidirectional import straight_placement


def interleaved(num_workers: int, num_microbatches: int, *, chunks: int = 2) -> Schedule:
    """1F1B over ``chunks`` x ``num_workers`` stages, stage s on worker s mod ``num_workers``.

    Micro-batches pass through the chunks in rounds of about ``num_workers``, as in ``torch.distributed.pipelining``.

    Raises:
        MemtraceError: the number of micro-batches is not a multiple of the number of rounds.
    """
    rounds = max(1, num_microbatches // num_workers)
    if num_microbatches % rounds:
        raise MemtraceError(
            f"interleaved: {num_microbatches} micro-batches do not divide into {rounds} rounds over {num_workers} "
            f"workers; use a multiple of {num_workers}"
        )
    per_round = num_microbatches // rounds
    total = chunks * num_microbatches

    def action(kind: str, worker: int, step: int) -> Action:
        chunk = (step // per_round) % chunks
        if kind == BACKWARD:
            chunk = chunks - 1 - chunk
        microbatch = step // (per_round * chunks) * per_round + step % per_round
        return Action(kind, chunk * num_workers + worker, microbatch)

    rows = []
    for worker in range(num_workers):
        warm_up = min(total, (chunks - 1) * per_round + 2 * (num_workers - 1 - worker))
        row = [action(FORWARD, worker, step) for step in range(warm_up)]
        for step in range(total):
            if warm_up + step < total:
                row.append(action(FORWARD, worker, warm_up + step))
            row.append(action(BACKWARD, worker, step))
        rows.append(row)
    return align_schedule(
        "interleaved",
        chunks * num_workers,
        num_microbatches,
        placement=straight_placement(num_workers, chunks),
        rows=rows,
        options={"chunks": str(chunks)},
    )
