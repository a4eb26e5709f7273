"""The allocator's sizes of blocks that a snapshot leaves out: an exact replay supplies them, or they stay unknown."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memtrace.analysis import blocks_table
from memtrace.analysis.blocks import allocated_sizes, blocks
from memtrace.analysis.peak import allocated_bytes, find_peak
from memtrace.trace import Trace, load

KIB, MIB = 1 << 10, 1 << 20
SEGMENT = 0x7F0000000000
DATA = Path(__file__).parents[2] / ".." / "shared" / "data" / "snapshots"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the recorded snapshots are not beside the repository")

# peak of allocated bytes: where the whole history is known, the slack of no block can be another
PEAKS = {
    "complete_small": 3_249_144_832,
    "complete_windows": 1_790_894_592,
    "complete_forward_backward": 695_675_904,
    "transformer_training_step": 7_026_606_592,
    "expandable_segments": 13_724_932_096,
}


def entry(action: str, address: int, size: int) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": 0, "frames": [], "time_us": 0}


def block(address: int, size: int, requested: int, state: str = "active_allocated") -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": []}


def load_snapshot(folder: Path, entries: list[dict[str, Any]], final: list[dict[str, Any]], size: int) -> Trace:
    """Load a snapshot with one large segment."""
    used = [part for part in final if part["state"] != "inactive"]
    segment = {
        "device": 0,
        "address": SEGMENT,
        "total_size": size,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "allocated_size": sum(part["size"] for part in used),
        "active_size": sum(part["size"] for part in used),
        "requested_size": sum(part["requested_size"] for part in used),
        "blocks": final,
        "frames": [],
    }
    for number, row in enumerate(entries):
        row["time_us"] = 1000 + number
    path = folder / "snapshot.pickle"
    settings = {"roundup_power2_divisions": {}, "expandable_segments": False, "max_split_size": -1}
    value = {"segments": [segment], "device_traces": [entries], "allocator_settings": settings}
    path.write_bytes(pickle.dumps(value))
    return load(path)


def free(address: int, size: int) -> list[dict[str, Any]]:
    return [entry("free_requested", address, size), entry("free_completed", address, size)]


@needs_data
@pytest.mark.parametrize("name", [*PEAKS, "missing_frames", "wrapped_ring_25000", "torch20_block_history"])
def test_live_blocks_fill_what_the_segments_count(name: str) -> None:
    trace = load(DATA / f"{name}.pickle")
    table, sizes = blocks(trace), allocated_sizes(trace)
    segments = trace.columns("segments", "address", "size", "allocated_size")
    order = np.argsort(segments["address"])
    live = np.flatnonzero(table.free_event < 0)
    assert (sizes[live] >= table.size[live]).all()
    place = np.searchsorted(segments["address"][order], table.address[live], side="right") - 1
    in_segment = np.bincount(place, weights=sizes[live], minlength=len(order))
    assert in_segment.tolist() == segments["allocated_size"][order].tolist()


@needs_data
@pytest.mark.parametrize("name", PEAKS)
def test_the_allocated_peak_of_a_snapshot_is_known(name: str) -> None:
    trace = load(DATA / f"{name}.pickle")
    (device,) = trace.devices
    peak, level = find_peak(trace, device), allocated_bytes(trace, device)
    assert peak.allocated is not None and peak.reserved is not None and level is not None
    assert peak.allocated.bytes == PEAKS[name]
    assert peak.requested.bytes <= peak.allocated.bytes <= peak.reserved.bytes
    assert level.bytes[-1] == trace.columns("segments", "allocated_size")["allocated_size"].sum()
    assert blocks_table(trace)["allocated_size"].notna().all()


@needs_data
def test_a_window_knows_the_sizes_of_the_whole() -> None:
    trace = load(DATA / "complete_windows.pickle")
    window = trace.window_of_rows(5000, 9000)
    assert window.block_ids is not None
    assert (blocks(window).allocated_size < 0).any()
    assert allocated_sizes(window).tolist() == allocated_sizes(trace)[window.block_ids].tolist()


@needs_data
def test_a_history_that_does_not_replay_leaves_sizes_unknown() -> None:
    trace = load(DATA / "synthetic.pickle")
    assert allocated_bytes(trace, "cuda:0") is None
    assert allocated_sizes(trace).tolist() == blocks(trace).allocated_size.tolist()


def test_a_freed_block_has_the_slack_that_was_not_split_off(tmp_path: Path) -> None:
    """Of a segment of 20 MiB, the last 512 KiB are too small to be split off."""
    requested = 20 * MIB - 512 * KIB
    entries = [entry("segment_alloc", SEGMENT, 20 * MIB), entry("alloc", SEGMENT, requested), *free(SEGMENT, requested)]
    trace = load_snapshot(tmp_path, entries, [block(SEGMENT, 20 * MIB, 0, "inactive")], 20 * MIB)
    assert blocks(trace).allocated_size.tolist() == [-1]
    assert allocated_sizes(trace).tolist() == [20 * MIB]
    peak = find_peak(trace, "cuda:0").allocated
    assert peak is not None and peak.bytes == 20 * MIB


def test_a_size_that_contradicts_the_replay_leaves_all_unknown(tmp_path: Path) -> None:
    """The replay gives the live block 20 MiB, the file 19.5 MiB."""
    requested = 20 * MIB - 512 * KIB
    once = [entry("alloc", SEGMENT, requested), *free(SEGMENT, requested)]
    entries = [entry("segment_alloc", SEGMENT, 20 * MIB), *once, entry("alloc", SEGMENT, requested)]
    for size, expected in ((20 * MIB, [20 * MIB, 20 * MIB]), (requested, [-1, requested])):
        final = [block(SEGMENT, size, requested)]
        if size < 20 * MIB:
            final.append(block(SEGMENT + size, 20 * MIB - size, 0, "inactive"))
        assert allocated_sizes(load_snapshot(tmp_path, entries, final, 20 * MIB)).tolist() == expected


@pytest.mark.parametrize("is_observed", [True, False])
def test_an_older_block_has_a_size_only_if_no_other_fits(is_observed: bool, tmp_path: Path) -> None:
    """Up to 1 MiB behind the block may have belonged to it, unless another block was placed there before its free."""
    requested, slack = 13 * MIB, 512 * KIB
    behind = SEGMENT + requested + slack
    other = [entry("alloc", behind, 2 * MIB), *free(behind, 2 * MIB)] if is_observed else []
    final = [block(SEGMENT, 30 * MIB, 0, "inactive")]
    trace = load_snapshot(tmp_path, [*other, *free(SEGMENT, requested)], final, 30 * MIB)
    assert allocated_sizes(trace).tolist() == ([requested + slack, 2 * MIB] if is_observed else [-1])
    assert (allocated_bytes(trace, "cuda:0") is not None) == is_observed
