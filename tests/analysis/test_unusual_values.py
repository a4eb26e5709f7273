"""Values that a recording never writes, but a damaged trace or a file of another tool can contain."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memtrace.analysis.dead_graphs import is_made_without_backward
from memtrace.analysis.diff import compare_traces
from memtrace.trace import Trace
from tests.builders import event, op, step, trace_of


def trace_of_steps(numbers: Sequence[int]) -> Trace:
    """One block of 64 bytes in each step; ``numbers`` are the numbers of the steps in order of time."""
    events, steps = [], []
    for block, number in enumerate(numbers):
        steps.append(step(number, 100 * block, 100))
        events += [event("alloc", block, 100 * block + 10, 64), event("free", block, 100 * block + 50)]
    return trace_of(events=events, spans=steps)


def test_steps_need_not_be_numbered_in_order() -> None:
    ordered, shuffled = trace_of_steps(range(9)), trace_of_steps([8, 3, 5, 1, 0, 7, 2, 6, 4])
    assert compare_traces(ordered, shuffled).changes == ()
    assert compare_traces(shuffled, ordered).changes == ()


def test_sequence_numbers_can_have_any_value() -> None:
    numbers = [2**63 - 1, 3, -(2**63)]  # no backward, backward, not recorded by autograd
    trace = trace_of(
        events=[event("alloc", block, block, 64, op_id=block) for block in range(3)],
        ops=[*(op(block, "forward", sequence_nr=number) for block, number in enumerate(numbers)),
             op(3, "backward", sequence_nr=3)],
    )  # fmt: skip
    assert is_made_without_backward(trace, np.arange(3)).tolist() == [True, False, False]
