"""Memory snapshots: opened by PyTorch's functions, by its viewer, and by memtrace's reader, with the same sums."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memtrace
from memtrace.analysis.blocks import blocks
from memtrace.analysis.peak import find_peak
from memtrace.analysis.steps import steps_table
from memtrace.exporters import export_trace
from memtrace.trace import Trace
from tests.builders import event, trace_of
from tests.exporters.conftest import NUM_STEPS, make_trace

VIEWER = Path(__file__).with_name("viewer.cjs")
REAL_SNAPSHOTS = (
    "complete_forward_backward.pickle",
    "expandable_segments.pickle",
    "missing_frames.pickle",
    "transformer_training_step.pickle",
)


def export(trace: Trace, folder: Path) -> Path:
    return export_trace(trace, folder / "snapshot.pickle", format="snapshot")


@pytest.mark.parametrize("seed", range(3))
def test_memtrace_reads_the_same_peaks_back(seed: int, tmp_path: Path) -> None:
    trace = make_trace(seed)
    again = memtrace.load(str(export(trace, tmp_path)))
    # GPUs keep their number; the CPU gets the next one.
    for device, number in (("cuda:0", "cuda:0"), ("cpu", "cuda:1")):
        peak, peak_again = find_peak(trace, device), find_peak(again, number)
        assert peak_again.requested.bytes == peak.requested.bytes
        assert peak_again.baseline_bytes == peak.baseline_bytes
        assert peak_again.end_bytes == peak.end_bytes
    table, table_again = blocks(trace), blocks(again)
    assert sorted(table_again.size.tolist()) == sorted(table.size.tolist())
    assert sum(table_again.stack >= 0) == sum(table.stack >= 0)
    # The file begins with its first entry, so the reader leaves out a step that begins before that.
    assert steps_table(again)["step"].tolist() == list(range(1, NUM_STEPS))


def test_torch_prints_the_segments_and_the_history(trace: Trace, tmp_path: Path) -> None:
    from torch.cuda import _memory_viz

    snapshot = pickle.loads(export(trace, tmp_path).read_bytes())
    total = sum(find_peak(trace, device).end_bytes for device in trace.devices)
    for lines in (_memory_viz.segments(snapshot, str), _memory_viz.memory(snapshot, str)):
        assert sum(int(line.rpartition(" ")[2]) for line in lines.splitlines()) == total
        assert "train.py:40:train;model.py:12:Net.forward" in lines
    assert "total_reserved" in _memory_viz.segsum(snapshot)
    history = _memory_viz.trace(snapshot)
    assert "Device 0" in history and "Device 1" in history and "OutOfMemoryError" in history
    assert "snapshot.pickle" in _memory_viz.trace_plot(snapshot)


def test_entries_have_the_frames_and_the_category_of_their_block(trace: Trace, tmp_path: Path) -> None:
    snapshot = pickle.loads(export(trace, tmp_path).read_bytes())
    table = trace.events
    entries = [entry for entry in snapshot["device_traces"][1] if entry["action"] == "alloc"]
    allocs = table[(table["kind"] == "alloc") & (table["device"] == "cpu")]
    assert [entry["addr"] for entry in entries] == allocs["address"].tolist()
    assert [entry["size"] for entry in entries] == allocs["size"].tolist()
    assert entries[0]["time_us"] == (1_790_000_000_000_000_000 + int(allocs["time_ns"].iloc[0])) // 1000
    frames = [entry["frames"][0] for entry in entries if "frames" in entry]
    assert {"filename": "/home/user/model.py", "line": 12, "name": "Net.forward"} in frames
    assert "unknown" in {
        entry["category"] for trace in snapshot["device_traces"] for entry in trace if "category" in entry
    }


def test_blocks_without_an_address_of_their_own_get_one(tmp_path: Path) -> None:
    trace = trace_of(
        events=[
            event("alloc", 0, 1, 100, address=64),
            event("alloc", 1, 2, 200, address=64),  # the same NumPy buffer, seen with another size
            event("alloc", 2, 3, 300),
            event("free", 0, 4, 100, address=64),
            event("alloc", 3, 5, 0, address=64),
            event("alloc", 4, 6, 50, address=64),
        ]
    )
    again = memtrace.load(str(export(trace, tmp_path)))
    assert find_peak(again, "cuda:0").requested.bytes == 600
    assert find_peak(again, "cuda:0").end_bytes == 550


def test_a_history_without_blocks_can_be_exported(tmp_path: Path) -> None:
    trace = trace_of(events=[event("oom", None, 5, 100, device="cuda:0", device_free=7)])
    snapshot = pickle.loads(export(trace, tmp_path).read_bytes())
    assert [(entry["action"], entry["size"]) for entry in snapshot["device_traces"][0]] == [
        ("oom", 100),
        ("snapshot", 0),
    ]


def test_a_window_has_the_blocks_that_are_live_at_its_start(trace: Trace, tmp_path: Path) -> None:
    window = trace.window(1, 2)
    again = memtrace.load(str(export(window, tmp_path)))
    assert find_peak(again, "cuda:1").requested.bytes == find_peak(window, "cpu").requested.bytes
    assert find_peak(again, "cuda:1").baseline_bytes == find_peak(window, "cpu").baseline_bytes


@pytest.mark.parametrize("name", REAL_SNAPSHOTS)
def test_a_real_snapshot_keeps_its_segments_and_its_history(name: str, data: Path, tmp_path: Path) -> None:
    trace = memtrace.load(str(data / "snapshots" / name))
    again = memtrace.load(str(export(trace, tmp_path)))
    for device in trace.devices:
        peak, peak_again = find_peak(trace, device), find_peak(again, device)
        assert peak_again.requested.bytes == peak.requested.bytes
        assert peak_again.reserved is not None and peak.reserved is not None
        assert peak_again.reserved.bytes == peak.reserved.bytes
        assert peak_again.reserved_end_bytes == peak.reserved_end_bytes
        assert peak_again.end_bytes == peak.end_bytes


@pytest.fixture(scope="session")
def viewer(tool: Any) -> Any:
    """Return a function that opens a snapshot with PyTorch's viewer and returns what the viewer computes."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    scripts = [tool("process_alloc_data.js"), tool("MemoryViz.js")]

    def show(path: Path, device: int) -> Any:
        command = [node, VIEWER, path, str(device), *scripts]
        return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    return show


@pytest.mark.parametrize(("device", "number"), [("cuda:0", 0), ("cpu", 1)])
def test_the_viewer_of_pytorch_draws_the_peak(
    trace: Trace, tmp_path: Path, viewer: Any, device: str, number: int
) -> None:
    shown = viewer(export(trace, tmp_path), number)
    assert shown["max_size"] == find_peak(trace, device).requested.bytes
    assert shown["elements"] == np.count_nonzero(blocks(trace).device == trace.devices.index(device))
    assert shown["states"] and all(allocated <= reserved for _, reserved, allocated in shown["states"])


@pytest.mark.parametrize("name", REAL_SNAPSHOTS)
def test_the_viewer_of_pytorch_draws_what_it_draws_for_the_original(
    name: str, data: Path, tmp_path: Path, viewer: Any
) -> None:
    original = data / "snapshots" / name
    shown = viewer(export(memtrace.load(str(original)), tmp_path), 0)
    expected = viewer(original, 0)
    assert [shown[key] for key in ("max_size", "max_segments", "elements")] == [
        expected[key] for key in ("max_size", "max_segments", "elements")
    ]
