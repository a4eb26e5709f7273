"""The readers against mutated real files and made-up ones: a trace or one sentence, whatever they are given."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.readers.fuzz import judge

MUTATIONS = 2000


def test_mutated_real_files(data: Path) -> None:
    """A program of its own, so that a reader that hangs or dies does not take the tests along. Says what ran."""
    program = Path(__file__).with_name("fuzz.py")
    command = [sys.executable, str(program), "--mutations", str(MUTATIONS), "--seed", "20"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    assert sum(count for name, count in outcomes.items() if name != "seconds") == MUTATIONS
    # Damage that always ends one way would test nothing.
    assert outcomes["trace"] > MUTATIONS / 10 and outcomes["sentence"] > MUTATIONS / 10


QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)


def _records(*keys: str) -> st.SearchStrategy[dict[str, Any]]:
    """Records with some of the keys and odd values under them."""
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


@pytest.mark.parametrize("protocol", [2, 4])
@QUICK
@given(value=SNAPSHOT | PLAIN)
def test_made_up_snapshots(tmp_path: Path, protocol: int, value: Any) -> None:
    path = tmp_path / "value"
    path.write_bytes(pickle.dumps(value, protocol=protocol))
    judge(path, whole_way=False)


@QUICK
@given(value=TRACE | SNAPSHOT | PLAIN)
def test_made_up_json(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "value"
    path.write_text(json.dumps(value), encoding="utf-8", errors="surrogatepass")
    judge(path, whole_way=False)


@QUICK
@given(
    rows=st.lists(
        st.tuples(st.integers(-1, 20), st.integers(0, 5), st.integers(-9, 9) | PLAIN, st.integers(-1, 9)), max_size=8
    )
)
def test_made_up_timelines(tmp_path: Path, rows: list[Any]) -> None:
    path = tmp_path / "value"
    path.write_text(json.dumps(rows), encoding="utf-8", errors="surrogatepass")
    judge(path, whole_way=False)


@QUICK
@given(
    data=st.binary(max_size=300),
    head=st.sampled_from([b"", b"\x80\x04", b"\x80\x02", b"{", b"[", b"\x1f\x8b\x08\0", b"<html>"]),
)
def test_made_up_bytes(tmp_path: Path, data: bytes, head: bytes) -> None:
    path = tmp_path / "value"
    path.write_bytes(head + data)
    judge(path, whole_way=False)
