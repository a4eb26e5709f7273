"""A trace made by hand that has everything exports deal with, and the tools that open exports."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memtrace.trace import Trace
from tests.builders import event, step, trace_of, with_manifest

STACKS = {100: [110, 111], 101: [112, 111], 102: [113]}
NAMES = [
    *({"id": number, "kind": "operator", "text": f"aten::op{number}"} for number in range(3)),
    {"id": 10, "kind": "module", "text": "Net.layers.0"},
    {"id": 11, "kind": "module", "text": 'Net."quoted"\u2028é'},
    {"id": 20, "kind": "range", "text": "forward"},
    {"id": 30, "kind": "thread", "text": "0\tMainThread"},
    {"id": 110, "kind": "frame", "text": "/home/user/model.py\t12\tNet.forward"},
    {"id": 111, "kind": "frame", "text": "/home/user/train.py\t40\ttrain"},
    {"id": 112, "kind": "frame", "text": '/home/user/a "b"\\c.py\t7\t<lambda>'},
    {"id": 113, "kind": "frame", "text": "/home/user/train.py\t50\tmain"},
    *({"id": number, "kind": "stack", "text": None, "frames": frames} for number, frames in STACKS.items()),
]
NUM_STEPS = 4
STEP_NS = 100_000


def make_trace(seed: int, *, num_blocks: int = 120, with_gpu: bool = True) -> Trace:
    """Return a trace of random blocks: some older than the recording, some never freed, some without a stack."""
    rng = np.random.default_rng(seed)
    devices = ["cpu", "cuda:0"] if with_gpu else ["cpu"]
    rows: list[tuple[int, int, dict[str, Any]]] = []
    for block in range(num_blocks):
        device = devices[int(rng.integers(len(devices)))]
        size = int(rng.integers(1, 5000))
        begin = int(rng.integers(1, NUM_STEPS * STEP_NS))
        is_older = block < 10
        where = {"device": device, "address": 0x7F00_0000_0000 + 8192 * block, "thread": 0}
        rounded = -(-size // 512) * 512 if device != "cpu" else size
        kind = "baseline" if is_older else "alloc"
        operator = None if is_older else block
        time = 0 if is_older else begin
        rows.append((time, 0, event(kind, block, time, size, allocated_size=rounded, op_id=operator, **where)))
        if rng.random() < 0.7:
            end = int(rng.integers(time, NUM_STEPS * STEP_NS))
            rows.append((end, 1, event("free", block, end, size, allocated_size=rounded, **where)))
    if with_gpu:
        rows.append((250_000, 2, event("oom", None, 250_000, 1 << 34, device="cuda:0", device_free=4096)))
    ops = [
        {"op_id": row["op_id"], "name": row["op_id"] % 3, "start_ns": time, "duration_ns": 5, "thread": 0,
         "phase": "forward", "module": 10 + row["op_id"] % 2, "stack": (100, 101, 102, None)[row["op_id"] % 4]}
        for time, _, row in rows if row["kind"] == "alloc"
    ]  # fmt: skip
    spans: list[dict[str, Any]] = [step(number, number * STEP_NS, STEP_NS) for number in range(NUM_STEPS)]
    spans.append({"kind": "phase", "name": 20, "start_ns": 10, "duration_ns": 90, "thread": 0})
    spans += [
        {"kind": "module", "name": 10, "start_ns": 10, "duration_ns": 80, "thread": 0},
        {"kind": "module", "name": 11, "start_ns": 20, "duration_ns": 70, "thread": 0},
        {"kind": "range", "name": 20, "start_ns": 20, "duration_ns": 30, "thread": 0},
        {"kind": "range", "name": 20, "start_ns": 30, "duration_ns": 40, "thread": 0},
    ]
    rows.sort(key=lambda row: row[:2])
    trace = trace_of(events=[row[2] for row in rows], ops=ops, spans=spans, names=NAMES)
    return with_manifest(trace, t0_epoch_ns=1_790_000_000_000_000_000, process=4711)


@pytest.fixture(scope="module")
def trace() -> Trace:
    """A trace of a CPU and a GPU."""
    return make_trace(1)


@pytest.fixture(scope="session")
def tool() -> Any:
    """Return the path of a program or script of another project; skip the test where it is not at hand.

    They are looked for in the folder that the environment variable MEMTRACE_EXPORT_TOOLS names: pprof,
    trace_processor_shell, MemoryViz.js with process_alloc_data.js, and speedscope in node_modules. ``get_tools.sh``
    fills such a folder.
    """

    def find(name: str) -> Path:
        folder = os.environ.get("MEMTRACE_EXPORT_TOOLS")
        if not folder:
            pytest.skip(f"no {name}: MEMTRACE_EXPORT_TOOLS names no folder with it")
        if not (Path(folder) / name).exists():
            pytest.skip(f"no {name} in MEMTRACE_EXPORT_TOOLS")
        return Path(folder) / name

    return find
