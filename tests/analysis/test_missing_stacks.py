"""The reason why a block has no call stack is that of its own allocation."""

from __future__ import annotations

import numpy as np

from memtrace.analysis import group_by_site
from memtrace.analysis import missing_stacks as reasons
from memtrace.format.manifest import RecordingOptions
from memtrace.trace import Trace
from tests.builders import event, op, trace_of, with_manifest


def trace_without_stacks() -> Trace:
    """One block per reason, and one with a stack."""
    return trace_of(
        events=[
            event("baseline", 0, 0, 2000),
            event("alloc", 1, 1, 2001),
            event("alloc", 2, 2, 2002, op_id=77),
            event("alloc", 3, 3, 2003, op_id=3),
            event("alloc", 4, 4, 4, op_id=4),
            event("alloc", 5, 5, 2005, op_id=5),
            event("alloc", 6, 6, 2006, op_id=6),
        ],
        ops=[op(3, "backward"), op(4, "forward"), op(5, "forward"), op(6, "forward", stack=9, module=7)],
        names=[
            {"id": 7, "kind": "module", "text": "net.layers.3"},
            {"id": 8, "kind": "frame", "text": "/home/me/train.py\t3\tf"},
            {"id": 9, "kind": "stack", "frames": [8]},
        ],
    )


def reasons_of(trace: Trace) -> dict[int, str | None]:
    """Return the reason by the size of the only block that has it."""
    return {group.bytes: group.no_stack_reason for group in group_by_site(trace, np.arange(7))}


def test_every_block_of_a_recording_has_its_own_reason() -> None:
    trace = with_manifest(trace_without_stacks(), options=RecordingOptions())
    assert reasons_of(trace) == {
        2000: reasons.BEFORE_RECORDING,
        2001: reasons.OUTSIDE_OPERATORS,
        2002: reasons.OPERATOR_NOT_WRITTEN,
        2003: reasons.UNMATCHED_BACKWARD,
        4: "allocated by operators that allocate less than stack_min_bytes (512 B)",
        2005: reasons.NO_PYTHON_FRAMES,
        2006: None,
    }


def test_stacks_that_were_switched_off_are_the_reason_for_all_blocks_of_the_recording() -> None:
    trace = with_manifest(trace_without_stacks(), options=RecordingOptions(stacks=False))
    num_bytes = 2001 + 2002 + 2003 + 4 + 2005
    assert reasons_of(trace) == {2000: reasons.BEFORE_RECORDING, num_bytes: reasons.STACKS_OFF, 2006: None}


def test_a_file_of_another_tool_has_stacks_or_not() -> None:
    num_bytes = 2001 + 2002 + 2003 + 4 + 2005
    assert reasons_of(trace_without_stacks()) == {
        2000: reasons.BEFORE_RECORDING,
        num_bytes: reasons.NOT_IN_FILE,
        2006: None,
    }


def test_a_site_names_the_modules_that_own_its_blocks() -> None:
    sites = [group for group in group_by_site(trace_without_stacks(), np.arange(7)) if group.name]
    assert [(group.name, group.modules) for group in sites] == [("me/train.py:3 f", ("net.layers.*",))]
