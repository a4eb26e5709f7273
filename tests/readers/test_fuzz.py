"""Mutated and generated files end in a valid trace or in one error message."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.readers.fuzz import check_file


@pytest.mark.parametrize("num_mutations", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_mutated_real_files_are_read_or_refused(data: Path, num_mutations: int) -> None:
    """The campaign runs in a separate program, so that a reader that hangs or crashes does not end the tests."""
    program = Path(__file__).with_name("fuzz.py")
    command = [sys.executable, str(program), "--mutations", str(num_mutations), "--seed", "20"]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert process.returncode == 0, process.stderr
    outcomes = json.loads(process.stdout)
    assert sum(count for name, count in outcomes.items() if name != "seconds") == num_mutations
    # Mutations that all have the same outcome would test nothing.
    assert outcomes["trace"] > num_mutations / 10 and outcomes["message"] > num_mutations / 10


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)


def _records(*keys: str) -> st.SearchStrategy[dict[str, Any]]:
    """Return a strategy for dicts with some of the keys and arbitrary values."""
    return st.dictionaries(st.sampled_from(keys), st.integers(0, 5000) | PLAIN, max_size=len(keys))


ACTIONS = st.sampled_from(
    ["alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "oom", "snapshot", "x"]
)
FRAME = _records("filename", "line", "name", "fx_original_trace", "fx_node_op")
ENTRY = st.builds(
    lambda action, rest: {"action": action, "addr": 512, "size": 512, "stream": 0, "time_us": 10} | rest,
    ACTIONS,
    st.fixed_dictionaries(
        {},
        optional={
            "addr": st.integers(0, 4) | PLAIN, "size": st.integers(0, 4) | PLAIN, "stream": st.integers(0, 2), "time_us": PLAIN,
            "frames": st.lists(FRAME, max_size=3) | PLAIN, "device_free": PLAIN, "user_metadata": PLAIN, "pool_id": PLAIN,
            "forward_frames": st.lists(st.text(max_size=9), max_size=2), "compile_context": PLAIN,
        },
    ),
)  # fmt: skip
BLOCK = _records("address", "size", "requested_size", "state", "frames", "history")
SEGMENT = st.builds(
    lambda rest, blocks: (
        {"device": 0, "address": 0, "total_size": 2048, "allocated_size": 0, "active_size": 0, "blocks": blocks} | rest
    ),
    _records("device", "address", "total_size", "stream", "segment_type", "segment_pool_id", "is_expandable"),
    st.lists(
        st.builds(lambda rest: {"size": 512, "requested_size": 9, "state": "active_allocated"} | rest, BLOCK),
        max_size=3,
    ),
)
ANNOTATION = st.builds(
    lambda rest: {"name": "a", "stage": "START", "device": 0, "time_us": 9} | rest, _records("name", "stage", "device")
)
SNAPSHOT = st.fixed_dictionaries(
    {"segments": st.lists(SEGMENT, max_size=3), "device_traces": st.lists(st.lists(ENTRY, max_size=6), max_size=2)},
    optional={"allocator_settings": PLAIN, "external_annotations": st.lists(ANNOTATION, max_size=3) | PLAIN},
)
EVENT = st.builds(
    lambda name, ph, rest, args: {"name": name, "ph": ph, "pid": 1, "tid": 1, "ts": 5, "dur": 3, "cat": "cpu_op", "args": args} | rest,
    st.sampled_from(["[memory]", "[OutOfMemory]", "aten::mm", "ProfilerStep#1", "nn.Module: A_0", "a.py(1): f"]),
    st.sampled_from(["i", "X"]),
    _records("ts", "dur", "pid", "tid", "cat"),
    st.fixed_dictionaries({"Bytes": st.integers(-64, 64)}, optional={"Addr": PLAIN, "Device Type": PLAIN, "Total Allocated": PLAIN, "Total Reserved": st.integers(0, 9)}),
)  # fmt: skip
TRACE = st.fixed_dictionaries(
    {"traceEvents": st.lists(EVENT, max_size=8)}, optional={"distributedInfo": PLAIN, "deviceProperties": PLAIN}
)


TIMELINE_ROWS = st.lists(
    st.tuples(st.integers(-1, 20), st.integers(0, 5), st.integers(-9, 9) | PLAIN, st.integers(-1, 9)), max_size=8
)
FILE_BYTES = st.builds(
    bytes.__add__,
    st.sampled_from([b"", b"\x80\x04", b"\x80\x02", b"{", b"[", b"\x1f\x8b\x08\0", b"<html>"]),
    st.binary(max_size=300),
)


def _json_bytes(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


# For each kind of file the strategy and how to write its values.
GENERATED: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], bytes]]] = {
    "pickle of protocol 2": (SNAPSHOT | PLAIN, lambda value: pickle.dumps(value, protocol=2)),
    "pickle of protocol 4": (SNAPSHOT | PLAIN, lambda value: pickle.dumps(value, protocol=4)),
    "JSON": (TRACE | SNAPSHOT | PLAIN, _json_bytes),
    "timeline": (TIMELINE_ROWS, _json_bytes),
    "bytes": (FILE_BYTES, lambda data: data),
}


@pytest.mark.parametrize("num_examples", [25, pytest.param(75, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", GENERATED)
def test_generated_files_are_read_or_refused(tmp_path: Path, kind: str, num_examples: int) -> None:
    strategy, to_bytes = GENERATED[kind]

    @settings(max_examples=num_examples, deadline=None)
    @given(value=strategy)
    def check(value: Any) -> None:
        path = tmp_path / "value"
        path.write_bytes(to_bytes(value))
        check_file(path, isolated=False)

    check()
