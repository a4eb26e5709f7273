"""Every file of shared/data against the reference values in its README, to the byte."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from memtrace.cli.output import SCHEMA_VERSION, SCHEMA_VERSION_KEY

import memtrace
from memtrace.analysis import blocks_table, compute_coverage, steps_table
from memtrace.analysis.peak import counted_bytes, requested_bytes

MIB = 1 << 20

LoadFile = Callable[[str], memtrace.Trace]
SummarizeFile = Callable[[str], dict[str, Any]]


class ReferenceValues(NamedTuple):
    """Requested bytes at the peak, before the history and at its end; reserved bytes at the end; number of entries."""

    peak: int | None
    baseline: int | None
    end: int
    reserved: int
    num_entries: int


SNAPSHOTS = {
    "complete_small": ReferenceValues(3_249_143_816, 0, 31_719_428, 3606 * MIB, 97),
    "complete_windows": ReferenceValues(1_783_664_516, 0, 1_011_485_828, 1810 * MIB, 23_105),
    "complete_forward_backward": ReferenceValues(682_735_240, 0, 420_190_612, 750 * MIB, 11_300),
    "transformer_training_step": ReferenceValues(7_013_335_044, 5_095_321_600, 6_808_535_044, 6900 * MIB, 19_136),
    "expandable_segments": ReferenceValues(13_724_932_096, 13_635_803_136, 13_635_803_136, 13_122 * MIB, 5_112),
    "wrapped_ring_25000": ReferenceValues(17_489_876_072, 17_443_212_392, 7_792_830_466, 20_532 * MIB, 25_000),
    "missing_frames": ReferenceValues(13_923_997_700, 1_373_919_236, 1_373_919_236, 13_524 * MIB, 5_163),
    "no_history_pending_free": ReferenceValues(None, None, 25_483_614_352, 24_976 * MIB, 0),
    "torch20_block_history": ReferenceValues(None, None, 11_840_159_744, 11_296 * MIB, 1),
    "trimmed": ReferenceValues(402_752_512, 0, 0, 402 * MIB, 50),
    "synthetic": ReferenceValues(2_255_398_598, None, 113_623_118, 250 * MIB, 1_040),
}
# The README gives baselines in MiB to one decimal; those above follow from its recipe, to the byte.
README_BASELINE_MIB = {
    "transformer_training_step": 4859.3, "expandable_segments": 13004.1, "wrapped_ring_25000": 16635.1, "missing_frames": 1310.3,
}  # fmt: skip

# By device: the peak of Total Allocated, and the peak of Total Reserved where there is one.
CHROME = {
    "v100_rank1_of_2.json.gz": ({"cuda:1": 6_629_508_096, "cpu": 8}, {"cuda:1": 12_782_141_440}),
    "h100_bert_small.json.gz": ({"cuda:0": 101_305_344, "cpu": 16}, {"cuda:0": 121_634_816}),
    "mi300_bert_small.json.gz": ({"hip:0": 146_394_112, "cpu": 8}, {"hip:0": 224_395_264}),
    "a100_switch_transformer.json": ({"cuda:0": 4_588_013_568, "cpu": 160}, {"cuda:0": 4_655_677_440}),
}


def test_the_summary_command_prints_the_summary_of_a_file(data: Path, summarize_real_file: SummarizeFile) -> None:
    name = "snapshots/complete_small.pickle"
    command = [sys.executable, "-c", "from memtrace.cli import main; main()", "summary", "--json", str(data / name)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    printed = json.loads(process.stdout)
    assert printed.pop("verdict")["device"] == "cuda:0"
    assert printed.pop(SCHEMA_VERSION_KEY) == SCHEMA_VERSION
    assert printed == summarize_real_file(name)


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_a_snapshot_has_the_reference_values(summarize_real_file: SummarizeFile, name: str) -> None:
    reference = SNAPSHOTS[name]
    (device,) = summarize_real_file(f"snapshots/{name}.pickle")["devices"]
    assert device["live_requested_bytes_at_end"] == reference.end
    assert device["reserved_bytes_at_end"] == reference.reserved
    if reference.peak is not None:
        assert device["peak"]["requested_bytes"] == reference.peak
        assert device["peak"]["reserved_bytes"] >= reference.reserved
    if reference.baseline is not None:
        assert device["baseline_requested_bytes"] == reference.baseline
    if name in README_BASELINE_MIB:
        assert round(device["baseline_requested_bytes"] / MIB, 1) == README_BASELINE_MIB[name]
    assert sum(device["peak"]["by_category"].values()) == device["peak"]["requested_bytes"]


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_every_entry_becomes_an_event(load_real_file: LoadFile, name: str) -> None:
    events = load_real_file(f"snapshots/{name}.pickle").events
    assert (events["kind"] != "baseline").sum() == SNAPSHOTS[name].num_entries
    older = events["kind"] == "baseline"
    assert older.iloc[: int(older.sum())].all(), "blocks that are older than the history come first"
    blocks = events.loc[events["kind"].isin(["alloc", "baseline"]), "block_id"]
    assert list(blocks) == list(range(len(blocks))), "blocks are numbered in order of first appearance"


@pytest.mark.parametrize("name", sorted(set(SNAPSHOTS) - {"synthetic", "trimmed"}))
def test_live_blocks_at_the_end_are_those_of_the_segments(load_real_file: LoadFile, name: str) -> None:
    trace = load_real_file(f"snapshots/{name}.pickle")
    live = requested_bytes(trace, "cuda:0")
    segments = trace.columns("segments", "requested_size", "size", "active_size")
    assert (int(live.bytes[-1]) if len(live.bytes) else live.start) == segments["requested_size"].sum()
    blocks = blocks_table(trace)
    live_blocks = blocks[blocks["free_event"].isna()]
    assert live_blocks["allocated_size"].notna().all(), "the segments state the size of live blocks"
    assert live_blocks["allocated_size"].sum() == segments["active_size"].sum()


def test_contradictions_in_the_synthetic_file_are_reported(load_real_file: LoadFile) -> None:
    notes = compute_coverage(load_real_file("snapshots/synthetic.pickle")).notes
    assert any("contradicts itself" in note and "520 allocations are outside of all segments" in note for note in notes)
    assert any("108 MiB of requested memory, but their blocks add up to 466 B" in note for note in notes)


def test_missing_entries_of_the_trimmed_file_are_reported(load_real_file: LoadFile) -> None:
    notes = compute_coverage(load_real_file("snapshots/trimmed.pickle")).notes
    expected = "The segments lack blocks that are live at the end of the history: 24 blocks (384 MiB)"
    assert any(note.startswith(expected) for note in notes)


@pytest.mark.parametrize("name", sorted(set(SNAPSHOTS) - {"synthetic", "trimmed"}))
def test_no_contradiction_is_reported_for_valid_files(load_real_file: LoadFile, name: str) -> None:
    notes = compute_coverage(load_real_file(f"snapshots/{name}.pickle")).notes
    assert not any("contradicts itself" in note or "segments lack blocks" in note for note in notes)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("wrapped_ring_25000", "the ring buffer probably wrapped around"),
        ("wrapped_ring_25000", "1,978 blocks already existed, 1,548 of them were freed later"),
        ("transformer_training_step", "664 blocks already existed, 438 of them were freed later"),
        ("expandable_segments", "294 blocks already existed, none of them was freed"),
        ("missing_frames", "1,066 of 1,721 allocations have no call stack"),
        ("no_history_pending_free", "no history"),
        ("no_history_pending_free", "count as live: 9 blocks (569 MiB)"),
        ("torch20_block_history", "no history"),
    ],
)
def test_coverage_reports_what_is_missing(load_real_file: LoadFile, name: str, expected: str) -> None:
    assert any(expected in note for note in compute_coverage(load_real_file(f"snapshots/{name}.pickle")).notes)


@pytest.mark.parametrize("name", ["complete_small", "complete_windows", "complete_forward_backward"])
def test_a_complete_history_is_not_reported_as_partial(load_real_file: LoadFile, name: str) -> None:
    notes = compute_coverage(load_real_file(f"snapshots/{name}.pickle")).notes
    assert not any("mid-run" in note or "earlier events" in note for note in notes)


@pytest.mark.parametrize("name", CHROME)
def test_a_chrome_trace_has_the_reference_totals(summarize_real_file: SummarizeFile, name: str) -> None:
    allocated, reserved = CHROME[name]
    devices = {device["device"]: device for device in summarize_real_file(f"chrome/{name}")["devices"]}
    assert {name: device["peak"]["allocated_bytes"] for name, device in devices.items()} == allocated
    for device, value in reserved.items():
        assert devices[device]["peak"]["reserved_bytes"] == value
        assert devices[device]["peak"]["requested_bytes"] is None, "the file states sizes of allocator blocks only"
        assert devices[device]["baseline_requested_bytes"] is None
    assert devices["cpu"]["peak"]["requested_bytes"] == devices["cpu"]["peak"]["allocated_bytes"]


@pytest.mark.parametrize("name", CHROME)
def test_sums_of_blocks_equal_the_totals_at_every_event(load_real_file: LoadFile, name: str) -> None:
    trace = load_real_file(f"chrome/{name}")
    for device in trace.devices:
        counted = counted_bytes(trace, device, "allocated")
        assert counted is not None
        summed = requested_bytes(trace, device)
        assert np.array_equal(np.unique(counted.bytes), np.unique(summed.bytes))


def test_rank_steps_and_initial_total_of_the_v100_trace(load_real_file: LoadFile) -> None:
    trace = load_real_file("chrome/v100_rank1_of_2.json.gz")
    counted = counted_bytes(trace, "cuda:1", "allocated")
    assert counted is not None and counted.start == 4_121_780_224
    assert trace.manifest.rank == 1 and trace.manifest.world_size == 2
    assert steps_table(trace)["step"].tolist() == [2, 3, 4, 5, 6]


def test_a_trace_of_2021_without_addresses_and_totals_reports_both(summarize_real_file: SummarizeFile) -> None:
    result = summarize_real_file("chrome/resnet50_2021_no_addr.pt.trace.json.gz")
    notes = result["coverage"]["notes"]
    assert any("no addresses" in note for note in notes) and any("no totals for cuda:0" in note for note in notes)
    peaks = {device["device"]: device["peak"] for device in result["devices"]}
    assert peaks["cuda:0"]["reserved_bytes"] is None and peaks["cuda:0"]["requested_bytes"] is None
    assert result["steps"]["num_steps"] == 6


def test_the_raw_timeline_has_the_reference_peak(summarize_real_file: SummarizeFile) -> None:
    (device,) = summarize_real_file("timeline/memory_timeline.raw.json.gz")["devices"]
    assert device["peak"]["requested_bytes"] == 3_082_832_104
    assert device["peak"]["allocated_bytes"] is None and device["peak"]["reserved_bytes"] is None
    assert sum(device["peak"]["by_category"].values()) == 3_082_832_104


def test_timeline_categories_are_exact_at_the_peak(data: Path, summarize_real_file: SummarizeFile) -> None:
    """The reference is a sum over the rows in their order."""

    rows = json.loads(gzip.decompress((data / "timeline" / "memory_timeline.raw.json.gz").read_bytes()))
    names = ["parameter", "optimizer_state", "input", "temporary", "activation", "gradient", "temporary", "unknown"]
    live, peak, live_at_peak = [0] * 8, 0, [0] * 8
    for _, _, size, category in rows:
        live[category] += size
        if sum(live) > peak:
            peak, live_at_peak = sum(live), list(live)
    expected: dict[str, int] = {}
    for name, size in zip(names, live_at_peak, strict=True):
        expected[name] = expected.get(name, 0) + size
    (device,) = summarize_real_file("timeline/memory_timeline.raw.json.gz")["devices"]
    assert device["peak"]["by_category"] == {name: size for name, size in expected.items() if size}
