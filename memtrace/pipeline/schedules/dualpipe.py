"""DualPipe and DualPipeV (DeepSeek-AI, 2025): forward and backward of opposite directions overlap as one unit."""

from __future__ import annotations

from memtrace.errors import MemtraceError
from memtrace.pipeline.schedules.actions import BACKWARD, FORWARD, INPUT_BACKWARD, Action
from memtrace.pipeline.schedules.bidirectional import bidirectional_placement
from memtrace.pipeline.schedules.dependencies import align_schedule
from memtrace.pipeline.schedules.schedule import Schedule
from memtrace.pipeline.schedules.zero_bubble import ChunkRow, v_placement


def dualpipe(num_workers: int, num_microbatches: int) -> Schedule:
    """DualPipe: two directions over two copies of the model, each with half of the micro-batches.

    Raises:
        MemtraceError: the number of workers or of micro-batches is odd, or there are fewer than two micro-batches per
            worker.
    """
    if num_workers % 2:
        raise MemtraceError(f"dualpipe needs an even number of workers, got {num_workers}")
    if num_microbatches % 2 or num_microbatches < 2 * num_workers:
        raise MemtraceError(
            f"dualpipe over {num_workers} workers needs an even number of micro-batches, at least "
            f"{2 * num_workers}, got {num_microbatches}"
        )
    half = num_microbatches // 2
    rows = []
    for worker in range(num_workers):
        mirror = num_workers - 1 - worker
        near = 0 if worker < mirror else 1  # the direction in which the worker comes early
        stage = min(worker, mirror)
        row = ChunkRow((stage, num_workers - 1 - stage), (near, 1 - near))
        row.begin_at(0, near * half)
        row.begin_at(1, (1 - near) * half)
        rows.append(_dual_row(row, stage, num_workers // 2, half))
    placement = bidirectional_placement(num_workers)
    return align_schedule("dualpipe", num_workers, num_microbatches, placement=placement, rows=rows)


def dualpipe_v(num_workers: int, num_microbatches: int) -> Schedule:
    """DualPipeV: DualPipe over one copy of the model, with two chunks per worker placed in a V.

    ``num_workers`` is p: there are 2p stages.

    Raises:
        MemtraceError: there are fewer than 2p micro-batches.
    """
    if num_microbatches < 2 * num_workers:
        raise MemtraceError(
            f"dualpipe-v over {num_workers} workers needs at least {2 * num_workers} micro-batches, "
            f"got {num_microbatches}"
        )
    rows = []
    for worker in range(num_workers):
        row = ChunkRow((worker, 2 * num_workers - 1 - worker))
        rows.append(_dual_row(row, worker, num_workers, num_microbatches))
    placement = v_placement(num_workers)
    return align_schedule("dualpipe-v", 2 * num_workers, num_microbatches, placement=placement, rows=rows)


def _dual_row(row: ChunkRow, position: int, depth: int, count: int) -> list[Action]:
    """The eight phases of a worker; chunk 0 is the chunk whose forward comes early on this worker.

    Args:
        row: the empty row.
        position: distance of the worker from its end of the pipeline, 0 to ``depth`` - 1.
        depth: workers from the end to the turn.
        count: micro-batches of each chunk.
    """
    inner = depth - position - 1
    for _ in range(2 * inner):
        row.add(FORWARD, 0)
    for _ in range(position + 1):
        row.add(FORWARD, 0)
        row.add(FORWARD, 1)
    for _ in range(inner):
        row.add(INPUT_BACKWARD, 1)
        row.add_weight()
        row.add(FORWARD, 1)
    for turn in range(count - 2 * depth + position + 1):
        # At the turn the worker's own other chunk needs the first forward at once: overlapping would delay it.
        row.add(FORWARD, 0, overlapped=turn > 0 or inner > 0)
        row.add(BACKWARD, 1)
        row.add(FORWARD, 1, overlapped=True)
        row.add(BACKWARD, 0)
    for _ in range(inner):
        row.add(BACKWARD, 1)
        row.add(FORWARD, 1, overlapped=True)
        row.add(BACKWARD, 0)
    _cool_down(row, position, inner)
    return row.actions


def _cool_down(row: ChunkRow, position: int, inner: int) -> None:
    """The last backwards; the later half of them is split, and weight gradients fill the waits."""
    for turn in range(position + 1):
        for chunk in (1, 0):
            late = 2 * turn + (1 - chunk) > position
            row.add(INPUT_BACKWARD if late else BACKWARD, chunk)
    for _ in range(inner):
        row.add_weight()
        row.add(INPUT_BACKWARD, 0)
    row.add_all_weights()
