"""Hand-made traces of a few events, for tests of wasted-memory patterns."""

from __future__ import annotations

from typing import Any

from memtrace.analysis.findings import DeviceWaste, Finding, find_device_waste
from memtrace.trace import Trace
from tests.builders import event, op, step, trace_of

Act = tuple[str, int, int]
"""The kind of an event, its block and its operator call (-1: none)."""
SITE = "me/train.py:7 train"
"""The allocation site of every block."""
NAMES = [
    {"id": 0, "kind": "frame", "text": "/home/me/train.py\t7\ttrain"},
    {"id": 1, "kind": "stack", "frames": [0]},
    {"id": 2, "kind": "operator", "text": "aten::relu"},
    {"id": 3, "kind": "operator", "text": "aten::clone"},
]


def trace_of_acts(
    acts: list[Act], *, ops: list[dict[str, Any]] | None = None, device: str = "cpu", **tables: Any
) -> Trace:
    """Return a trace of events 10 ns apart; even blocks have 1000 bytes, odd ones 1000 and their number.

    Args:
        acts: the events.
        ops: the operator calls; by default every call is an ``aten::relu`` of forward.
        device: the device of all blocks.
        tables: further tables.
    """
    rows = [
        event(
            kind,
            block,
            10 * number,
            1000 + block % 2 * block if kind not in ("read", "write") else None,
            op_id=op_id if op_id >= 0 else None,
            device=device,
        )
        for number, (kind, block, op_id) in enumerate(acts)
    ]
    op_ids = sorted({op_id for *_, op_id in acts if op_id >= 0})
    calls = ops or [op(op_id, "forward", name=2, stack=1) for op_id in op_ids]
    return trace_of(**({"events": rows, "ops": calls, "names": NAMES} | tables))


def trace_of_steps(num_steps: int, *, freed: bool, sequence_nr: int | None = None) -> Trace:
    """Return a trace in which every step allocates a block of 1000 bytes, uses it, and frees it or not."""
    acts: list[Act] = []
    for number in range(num_steps):
        acts += [("alloc", 2 * number, number), ("write", 2 * number, number), ("read", 2 * number, number)]
        acts += [("free", 2 * number, -1)] if freed else []
    duration = 10 * len(acts) // num_steps
    ops = [op(number, "forward", name=2, stack=1, sequence_nr=sequence_nr) for number in range(num_steps)]
    return trace_of_acts(acts, ops=ops, spans=[step(n, n * duration, duration) for n in range(num_steps)])


def find_waste(trace: Trace) -> DeviceWaste:
    """Return all findings of a short trace, however small."""
    return find_device_waste(trace, trace.devices[0], min_bytes=1)


def findings_of(trace: Trace, pattern: str) -> list[Finding]:
    """Return the findings of one pattern."""
    return [finding for finding in find_waste(trace).findings if finding.pattern == pattern]
