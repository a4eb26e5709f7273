"""Blocks that wait for a backward that did not run because memory ran out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtrace.analysis.blocks import blocks
from memtrace.format.schema import CATEGORIES
from memtrace.trace import Trace
from tests.builders import event, op, trace_of


def waiting(trace: Trace) -> list[int]:
    """Return the blocks that wait for backward."""
    return np.flatnonzero(blocks(trace).waits_for_backward).tolist()


def categories(trace: Trace) -> list[str]:
    return [CATEGORIES[code] for code in blocks(trace).category]


def failing_forward(
    *, sequence_nr: int | None = 5, phase: str = "forward", after: Sequence[dict[str, Any]] = ()
) -> Trace:
    rows = [event("alloc", 0, 0, 1000, op_id=0), event("oom", None, 1, 1 << 40, op_id=1), *after]
    return trace_of(events=rows, ops=[op(0, phase, sequence_nr=sequence_nr), op(1, "forward", sequence_nr=6),
                                      op(2, "backward", sequence_nr=6)])  # fmt: skip


def test_what_autograd_saved_before_memory_ran_out_is_an_activation() -> None:
    assert categories(failing_forward()) == ["activation"]


@pytest.mark.parametrize("phase", ["backward", "optimizer", "other"])
def test_blocks_of_other_phases_are_no_activations(phase: str) -> None:
    assert categories(failing_forward(phase=phase)) == ["unknown"]


def test_blocks_that_autograd_did_not_record_are_no_activations() -> None:
    assert categories(failing_forward(sequence_nr=None)) == ["unknown"]


def test_blocks_of_a_file_without_autograd_need_a_backward_elsewhere() -> None:
    rows = [event("alloc", 0, 0, 1000, op_id=0), event("oom", None, 1, 1 << 40)]
    assert categories(trace_of(events=rows, ops=[op(0, "forward")])) == ["unknown"]
    earlier = [event("alloc", 1, 0, 10, op_id=1), event("free", 1, 0)]
    rows = [*earlier, *rows]
    assert categories(trace_of(events=rows, ops=[op(0, "forward"), op(1, "backward")]))[0] == "activation"


def test_an_activation_that_is_freed_when_the_program_catches_the_error_stays_one() -> None:
    assert categories(failing_forward(after=[event("free", 0, 2)])) == ["activation"]


def test_blocks_after_the_failure_do_not_wait() -> None:
    later = [event("alloc", 1, 2, 500, op_id=0)]
    assert waiting(failing_forward(after=later)) == [0]


KINDS = st.sampled_from(["forward", "backward", "other", "free", "oom"])


@given(st.lists(KINDS, max_size=30), st.randoms(use_true_random=False))
def test_waiting_blocks_equal_those_of_a_search_through_the_events(kinds: list[str], random: Any) -> None:
    rows, ops, live = [], [], []
    alive_at_failure: set[int] = set()
    pending: set[int] = set()  # blocks of forward since the last backward
    last = ""
    interruptible: set[int] = set()  # blocks that the backward that is running has not read
    for time, kind in enumerate(kinds):
        if kind == "oom":
            rows.append(event("oom", None, time, 1 << 40))
            alive_at_failure |= (pending | (interruptible if last == "backward" else set())) & set(live)
        elif kind == "free":
            if live:
                rows.append(event("free", live.pop(random.randrange(len(live))), time))
        else:
            number, last = len(ops), kind
            ops.append(op(number, kind, sequence_nr=number))
            if kind == "backward":
                pending, interruptible = set(), pending or interruptible
                if live and random.random() < 0.5:
                    block = random.choice(live)
                    rows.append(event("read", block, time, op_id=number))
                    interruptible = interruptible - {block}
            elif kind == "forward":
                pending, interruptible = pending | {number}, set()
            rows.append(event("alloc", number, time, 100, op_id=number))
            live.append(number)
    if rows:
        assert waiting(trace_of(events=rows, ops=ops)) == sorted(alive_at_failure)
