"""Chrome traces: nesting compared with brute force, profiles of the installed torch, and invalid files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memtrace
from memtrace.analysis import blocks_table, compute_coverage, steps_table
from memtrace.analysis.peak import requested_bytes
from memtrace.analysis.summary import summarize
from memtrace.errors import TraceError
from memtrace.readers.chrome_trace.nesting import Nesting


def load(folder: Path, value: Any) -> memtrace.Trace:
    path = folder / "trace.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return memtrace.load(path)


def memory(
    ts: float, size: int, address: int | None = None, device: tuple[int, int] = (1, 0), **more: Any
) -> dict[str, Any]:
    arguments: dict[str, Any] = {"Device Type": device[0], "Device Id": device[1], "Bytes": size, **more}
    if address is not None:
        arguments["Addr"] = address
    return {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 1, "tid": 1, "ts": ts, "args": arguments}


def call(name: str, ts: float, dur: float, cat: str = "cpu_op", tid: int = 1, **arguments: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": arguments}


@st.composite
def nested_slices(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Return slices (thread, start, end) that are nested or disjoint on each thread; some share an end."""
    slices: list[tuple[int, int, int]] = []

    def fill(thread: int, low: int, high: int, depth: int) -> None:
        at = low
        while depth < 5 and at < high and draw(st.booleans()):
            start = draw(st.integers(at, high - 1))
            end = draw(st.integers(start + 1, high))
            slices.append((thread, start, end))
            fill(thread, start, end, depth + 1)
            at = end

    for thread in range(draw(st.integers(1, 3))):
        fill(thread, 0, 60, 0)
    return draw(st.permutations(slices))


@settings(max_examples=200, deadline=None)
@given(slices=nested_slices(), times=st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 61)), max_size=20))
def test_nesting_equals_that_of_a_brute_force_search(
    slices: list[tuple[int, int, int]], times: list[tuple[int, int]]
) -> None:
    thread, start, end = (np.array([row[i] for row in slices], np.int64) for i in range(3))
    nesting = Nesting.of(thread, start, end)
    ordered = [slices[row] for row in nesting.order]

    def around(row: int) -> list[int]:
        inner = ordered[row]
        return [
            other for other, outer in enumerate(ordered)
            if other != row and outer[0] == inner[0] and outer[1] <= inner[1] and outer[2] >= inner[2] and (outer[1:] != inner[1:] or other < row)
        ]  # fmt: skip

    for row in range(len(ordered)):
        assert nesting.depth[row] == len(around(row))
        assert nesting.parent[row] == max(around(row), default=-1)
    innermost = nesting.innermost(np.array([t for t, _ in times], np.int64), np.array([t for _, t in times], np.int64))
    for (thread_number, time), row in zip(times, innermost, strict=True):
        open_slices = [i for i, item in enumerate(ordered) if item[0] == thread_number and item[1] <= time < item[2]]
        assert row == max(open_slices, default=-1)


def test_memory_older_than_the_trace_becomes_baseline_blocks(tmp_path: Path) -> None:
    totals = {"Total Allocated": 1100, "Total Reserved": 5000}
    events = [
        memory(10, 100, 7, **totals),
        memory(11, -300, 9, **{"Total Allocated": 800, "Total Reserved": 5000}),
        memory(12, 50, 9, **{"Total Allocated": 850, "Total Reserved": 6000}),
    ]
    trace = load(tmp_path, {"traceEvents": events, "baseTimeNanoseconds": 10**18})
    assert trace.manifest.t0_epoch_ns == 10**18 + 10_000
    # One block that the trace frees, and one block for the other 700 bytes.
    older = trace.events[trace.events["kind"] == "baseline"]
    assert older["allocated_size"].tolist() == [300, 700] and older["address"].isna().tolist() == [False, True]
    assert requested_bytes(trace, "cuda:0").bytes.tolist() == [1100, 800, 850]
    device = summarize(trace).devices[0]
    assert device.peak.allocated_bytes == 1100 and device.peak.reserved_bytes == 6000
    assert device.peak.requested_bytes is None and device.reserved_bytes_at_end == 6000


def test_events_are_sorted_by_time_and_keep_their_order_at_equal_times(tmp_path: Path) -> None:
    events = [memory(20, -5, 1), memory(10, 5, 1), memory(10, 7, 2), memory(10, -7, 2)]
    trace = load(tmp_path, {"traceEvents": events})
    assert requested_bytes(trace, "cuda:0").bytes.tolist() == [5, 12, 5, 0]


def test_without_addresses_a_free_ends_the_youngest_block_of_its_size(tmp_path: Path) -> None:
    sizes = [8, 8, -8, 4, -8, -4, -8]
    trace = load(tmp_path, {"traceEvents": [memory(10 + i, size) for i, size in enumerate(sizes)]})
    assert trace.events["block_id"].tolist() == [0, 1, 2, 2, 3, 1, 3, 0]
    assert trace.events["kind"].tolist()[0] == "baseline"
    assert requested_bytes(trace, "cuda:0").bytes.tolist() == [16, 24, 16, 20, 12, 8, 0]


def test_events_get_their_operator_phase_module_stack_and_step(tmp_path: Path) -> None:
    engine = "autograd::engine::evaluate_function: MmBackward0"
    events = [
        call("ProfilerStep#3", 0, 1000, "user_annotation"),
        call("train.py(5): main", 0, 1000, "python_function"),
        call("nn.Module: Net_0", 5, 100, "python_function"),
        call("model.py(7): forward", 6, 90, "python_function"),
        call("aten::linear", 10, 50, **{"Sequence number": 4}),
        call("aten::mm", 20, 20, **{"Sequence number": 5}),
        call("aten::empty", 22, 5),
        memory(23, 64, 1),
        call(engine, 200, 50, tid=2, **{"Sequence number": 5}),
        call("MmBackward0", 205, 40, tid=2, **{"Sequence number": 5}),
        call("aten::mm", 210, 20, tid=2),
        {**memory(215, 32, 2), "tid": 2},
        call("Optimizer.step#SGD.step", 400, 100, "user_annotation"),
        call("aten::add_", 410, 20),
        memory(415, 16, 3),
        memory(600, 8, 4),
    ]
    trace = load(tmp_path, {"traceEvents": events})
    blocks = blocks_table(trace)
    assert blocks["op_name"].astype(object).where(blocks["op_name"].notna(), None).tolist() == [
        "aten::linear",
        "aten::mm",
        "aten::add_",
        None,
    ]
    assert blocks["phase"].astype(object).where(blocks["phase"].notna(), None).tolist() == [
        "forward",
        "backward",
        "optimizer",
        None,
    ]
    modules = blocks["module"].astype(object).where(blocks["module"].notna(), None).tolist()
    assert modules == ["Net_0", "Net_0", None, None], "a backward operator has its forward operator's module"
    stacks = [[(f.file, f.line) for f in trace.frames(int(stack))] for stack in blocks["stack"].dropna()]
    assert stacks[0] == stacks[1] == [("model.py", 7), ("train.py", 5)]
    assert steps_table(trace)["step"].tolist() == [3]
    assert blocks["step"].tolist() == [3, 3, 3, 3]


PROFILE = """
import sys, torch
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(32, 64)
activities = [torch.profiler.ProfilerActivity.CPU]
with torch.profiler.profile(activities=activities, profile_memory=True, record_shapes=True, with_stack=True) as profiler:
    for _ in range(3):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        profiler.step()
profiler.export_chrome_trace(sys.argv[1] + "/trace.json")
import warnings
warnings.simplefilter("ignore")
profiler.export_memory_timeline(sys.argv[1] + "/timeline.raw.json.gz", device="cpu")
profiler.export_memory_timeline(sys.argv[1] + "/timeline.json", device="cpu")
"""


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("profile")
    done = subprocess.run([sys.executable, "-c", PROFILE, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_profile_of_the_installed_torch_is_read(profiled: Path) -> None:
    """The reference is a walk over the events in the file."""
    events = json.loads((profiled / "trace.json").read_text(), strict=False)["traceEvents"]
    rows = sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"])
    trace = memtrace.load(profiled / "trace.json")
    assert trace.devices == ("cpu",)
    # The parameters are older than the recording, and the file does not contain them.
    assert any("before the recording began (such as parameters)" in note for note in compute_coverage(trace).notes)
    assert any("first line of a function" in note for note in compute_coverage(trace).notes)
    kinds = trace.events["kind"]
    assert (kinds != "baseline").sum() == len(rows)
    assert trace.events.loc[kinds == "alloc", "size"].sum() == sum(max(row["args"]["Bytes"], 0) for row in rows)
    blocks = blocks_table(trace)
    gradient = blocks[(blocks["phase"] == "backward") & (blocks["size"] == 64 * 128 * 4)]
    assert len(gradient) == 3, "each step has one gradient of the first weight"
    assert gradient["op_name"].str.startswith("aten::").all()
    assert set(trace.ops["phase"].dropna()) >= {"forward", "backward"}


def test_raw_rows_and_totals_of_the_same_profile_agree(profiled: Path) -> None:
    raw, totals = (memtrace.load(profiled / f"timeline{ending}") for ending in (".raw.json.gz", ".json"))
    raw_device, totals_device = (summarize(trace).devices[0] for trace in (raw, totals))
    # Totals have a resolution of one microsecond, so they can miss a peak but never exceed it.
    raw_peak, totals_peak = (device.peak.bytes for device in (raw_device, totals_device))
    assert 0.9 * raw_peak <= totals_peak <= raw_peak
    assert raw_device.live_requested_bytes_at_end == totals_device.live_requested_bytes_at_end
    times, rows = json.loads((profiled / "timeline.json").read_text())
    assert totals_peak == max(sum(row[1:]) for row in rows) and len(times) == len(rows)
    assert totals_device.live_requested_bytes_at_end == sum(rows[-1][1:])


@pytest.mark.parametrize("number", ["NaN", "nan", "-nan", "Infinity", "-inf", "inf"])
def test_numbers_that_json_forbids_are_accepted(tmp_path: Path, number: str) -> None:
    text = json.dumps({"a": 0.125, "traceEvents": [memory(1, 8, 1), {"name": "x", "ts": 0.125}, memory(2, -8, 1)]})
    trace = load(tmp_path, text.replace("0.125", number))
    assert trace.num_rows("events") == 2


def test_control_characters_and_invalid_utf_8_are_accepted(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": [call("a!b", 1, 2), memory(1, 8, 1)]}).replace("!", "\x01\n\t")
    (tmp_path / "a").write_bytes(text.encode() + b" ")
    assert memtrace.load(tmp_path / "a").num_rows("events") == 1
    (tmp_path / "a").write_bytes(text.replace("a", "\udcff").encode("utf-8", "surrogateescape").replace(b"n\xffme", b"name").replace(b"tr\xffceEvents", b"traceEvents").replace(b"\xffrgs", b"args").replace(b"c\xfft", b"cat"))  # fmt: skip
    assert memtrace.load(tmp_path / "a").num_rows("events") == 1


def test_an_array_of_events_with_a_trailing_comma_is_accepted(tmp_path: Path) -> None:
    trace = load(tmp_path, json.dumps([memory(1, 8, 1), memory(2, -8, 1)])[:-1] + ",\n]")
    assert trace.num_rows("events") == 2


def test_members_after_the_events_are_read(tmp_path: Path) -> None:
    trace = load(tmp_path, {"traceEvents": [memory(1, 8, 1)], "distributedInfo": {"rank": 3, "world_size": 8}})
    assert trace.ranks == (3,) and trace.rank(3).manifest.world_size == 8


def test_out_of_memory_events_are_read(tmp_path: Path) -> None:
    event = {**memory(3, 512), "name": "[OutOfMemory]"}
    trace = load(tmp_path, {"traceEvents": [memory(1, 8, 1), event]})
    row = trace.events.iloc[-1]
    assert (row["kind"], row["size"]) == ("oom", 512) and row[["address", "block_id"]].isna().all()


def test_an_error_explains_how_to_record_memory_events(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="profile_memory=True"):
        load(tmp_path, {"traceEvents": [call("aten::mm", 1, 2)]})


def test_the_size_of_chunks_does_not_change_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from memtrace.readers import json_stream
    from memtrace.readers.content import Content
    from memtrace.readers.registry import find_reader

    value = {
        "base": 123456,
        "traceEvents": [memory(1000 + i, 8 * (i + 1), i + 1) for i in range(20)],
        "last": [1.5, "é"],
    }
    (tmp_path / "a").write_text(json.dumps(value))
    content = Content.of(tmp_path / "a")
    (expected,) = find_reader(content).read(content)
    for size in range(1, 40):
        monkeypatch.setattr(json_stream, "CHUNK_BYTES", size)
        (rank,) = find_reader(content).read(content)
        assert rank.tables["events"].equals(expected.tables["events"])
