"""Every file of ../shared/data against the reference values of its README, to the byte."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import memtrace
from memtrace.analysis import blocks_table, compute_coverage, steps_table
from memtrace.analysis.peak import counted_bytes, requested_bytes
from memtrace.analysis.summary import summarize

MIB = 1 << 20


class Snapshot(NamedTuple):
    peak: int | None
    base: int | None
    end: int
    reserved: int
    entries: int


SNAPSHOTS = {
    "complete_small": Snapshot(3_249_143_816, 0, 31_719_428, 3606 * MIB, 97),
    "complete_windows": Snapshot(1_783_664_516, 0, 1_011_485_828, 1810 * MIB, 23_105),
    "complete_forward_backward": Snapshot(682_735_240, 0, 420_190_612, 750 * MIB, 11_300),
    "transformer_training_step": Snapshot(7_013_335_044, 5_095_321_600, 6_808_535_044, 6900 * MIB, 19_136),
    "expandable_segments": Snapshot(13_724_932_096, 13_635_803_136, 13_635_803_136, 13_122 * MIB, 5_112),
    "wrapped_ring_25000": Snapshot(17_489_876_072, 17_443_212_392, 7_792_830_466, 20_532 * MIB, 25_000),
    "missing_frames": Snapshot(13_923_997_700, 1_373_919_236, 1_373_919_236, 13_524 * MIB, 5_163),
    "no_history_pending_free": Snapshot(None, None, 25_483_614_352, 24_976 * MIB, 0),
    "torch20_block_history": Snapshot(None, None, 11_840_159_744, 11_296 * MIB, 1),
    "trimmed": Snapshot(402_752_512, 0, 0, 402 * MIB, 50),
    "synthetic": Snapshot(2_255_398_598, None, 113_623_118, 250 * MIB, 1_040),
}
# README: bases in MiB to one decimal; above to the byte from the README's own recipe, here against its figures.
README_BASE_MIB = {
    "transformer_training_step": 4859.3, "expandable_segments": 13004.1, "wrapped_ring_25000": 16635.1, "missing_frames": 1310.3,
}  # fmt: skip

# Peak of Total Allocated by device; the peak of Total Reserved, where there is one.
CHROME = {
    "v100_rank1_of_2.json.gz": ({"cuda:1": 6_629_508_096, "cpu": 8}, {"cuda:1": 12_782_141_440}),
    "h100_bert_small.json.gz": ({"cuda:0": 101_305_344, "cpu": 16}, {"cuda:0": 121_634_816}),
    "mi300_bert_small.json.gz": ({"hip:0": 146_394_112, "cpu": 8}, {"hip:0": 224_395_264}),
    "a100_switch_transformer.json": ({"cuda:0": 4_588_013_568, "cpu": 160}, {"cuda:0": 4_655_677_440}),
}


def _summary(data: Path, name: str) -> dict[str, Any]:
    """As a user gets it, from the shell."""
    command = [sys.executable, "-c", "from memtrace.cli import main; main()", "summary", "--json", str(data / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_snapshot_has_the_reference_values(data: Path, name: str) -> None:
    want = SNAPSHOTS[name]
    found = _summary(data, f"snapshots/{name}.pickle")
    (device,) = found["devices"]
    assert device["live_requested_bytes_at_end"] == want.end
    assert device["reserved_bytes_at_end"] == want.reserved
    if want.peak is not None:
        assert device["peak"]["requested_bytes"] == want.peak
        assert device["peak"]["reserved_bytes"] >= want.reserved
    if want.base is not None:
        assert device["baseline_requested_bytes"] == want.base
    if name in README_BASE_MIB:
        assert round(device["baseline_requested_bytes"] / MIB, 1) == README_BASE_MIB[name]
    assert sum(device["peak"]["by_category"].values()) == device["peak"]["requested_bytes"]


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_every_entry_becomes_an_event(data: Path, name: str) -> None:
    trace = memtrace.load(data / "snapshots" / f"{name}.pickle")
    events = trace.events
    assert (events["kind"] != "baseline").sum() == SNAPSHOTS[name].entries
    older = events["kind"] == "baseline"
    assert older.iloc[: int(older.sum())].all(), "blocks older than the history come first"
    blocks = events.loc[events["kind"].isin(["alloc", "baseline"]), "block_id"]
    assert list(blocks) == list(range(len(blocks))), "numbered in order of first sight"


@pytest.mark.parametrize("name", sorted(set(SNAPSHOTS) - {"synthetic", "trimmed"}))
def test_live_blocks_at_the_end_are_those_of_the_segments(data: Path, name: str) -> None:
    trace = memtrace.load(data / "snapshots" / f"{name}.pickle")
    live = requested_bytes(trace, "cuda:0")
    segments = trace.columns("segments", "requested_size", "size", "active_size")
    assert (int(live.bytes[-1]) if len(live.bytes) else live.start) == segments["requested_size"].sum()
    blocks = blocks_table(trace)
    left = blocks[blocks["free_event"].isna()]
    assert left["allocated_size"].notna().all(), "the segments tell the size of what is live"
    assert left["allocated_size"].sum() == segments["active_size"].sum()


def test_the_synthetic_file_is_called_contradictory(data: Path) -> None:
    notes = _summary(data, "snapshots/synthetic.pickle")["coverage"]["notes"]
    assert any("contradicts itself" in note and "520 allocations outside of every segment" in note for note in notes)
    assert any("108.4 MiB requested while the blocks in them add up to 466 bytes" in note for note in notes)


def test_the_trimmed_file_is_called_cut(data: Path) -> None:
    notes = _summary(data, "snapshots/trimmed.pickle")["coverage"]["notes"]
    assert any(
        note.startswith("24 blocks (384.1 MiB) that its history leaves live are not in its segments") for note in notes
    )


@pytest.mark.parametrize("name", sorted(set(SNAPSHOTS) - {"synthetic", "trimmed"}))
def test_no_real_file_is_called_contradictory(data: Path, name: str) -> None:
    notes = compute_coverage(memtrace.load(data / "snapshots" / f"{name}.pickle")).notes
    assert not any("contradicts" in note or "not in its segments" in note for note in notes)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("wrapped_ring_25000", "as by a ring that wrapped"),
        ("wrapped_ring_25000", "1978 blocks are older (1548 of them are freed in it, 430 stay)"),
        ("transformer_training_step", "664 blocks are older (438 of them are freed in it, 226 stay)"),
        ("missing_frames", "1066 of its 1721 allocations have no stack"),
        ("no_history_pending_free", "no history"),
        ("no_history_pending_free", "9 blocks (569.2 MiB) were freed and wait for a stream"),
        ("torch20_block_history", "no history"),
    ],
)
def test_coverage_says_what_is_missing(data: Path, name: str, said: str) -> None:
    assert any(said in note for note in compute_coverage(memtrace.load(data / "snapshots" / f"{name}.pickle")).notes)


@pytest.mark.parametrize("name", ["complete_small", "complete_windows", "complete_forward_backward"])
def test_a_whole_history_is_not_called_partial(data: Path, name: str) -> None:
    assert not any(
        "older" in note for note in compute_coverage(memtrace.load(data / "snapshots" / f"{name}.pickle")).notes
    )


@pytest.mark.parametrize("name", CHROME)
def test_chrome_trace_has_the_reference_totals(data: Path, name: str) -> None:
    allocated, reserved = CHROME[name]
    found = {device["device"]: device for device in _summary(data, f"chrome/{name}")["devices"]}
    assert {name: device["peak"]["allocated_bytes"] for name, device in found.items()} == allocated
    for device, value in reserved.items():
        assert found[device]["peak"]["reserved_bytes"] == value
        assert found[device]["peak"]["requested_bytes"] is None, "only the allocator's bytes are told"
        assert found[device]["baseline_requested_bytes"] is None
    assert found["cpu"]["peak"]["requested_bytes"] == found["cpu"]["peak"]["allocated_bytes"]


@pytest.mark.parametrize("name", CHROME)
def test_sums_of_blocks_agree_with_the_totals_at_every_event(data: Path, name: str) -> None:
    trace = memtrace.load(data / "chrome" / name)
    for device in trace.devices:
        counted = counted_bytes(trace, device, "allocated")
        assert counted is not None
        summed = requested_bytes(trace, device)
        assert np.array_equal(np.unique(counted.bytes), np.unique(summed.bytes))


def test_the_first_total_of_the_v100_trace(data: Path) -> None:
    trace = memtrace.load(data / "chrome" / "v100_rank1_of_2.json.gz")
    counted = counted_bytes(trace, "cuda:1", "allocated")
    assert counted is not None and counted.start == 4_121_780_224
    assert trace.manifest["rank"] == 1 and trace.manifest["world_size"] == 2
    assert steps_table(trace)["step"].tolist() == [2, 3, 4, 5, 6]


def test_the_2021_form_gives_relative_curves_and_says_so(data: Path) -> None:
    found = _summary(data, "chrome/resnet50_2021_no_addr.pt.trace.json.gz")
    notes = found["coverage"]["notes"]
    assert any("no addresses" in note for note in notes) and any("no totals for cuda:0" in note for note in notes)
    devices = {device["device"]: device["peak"] for device in found["devices"]}
    assert devices["cuda:0"]["reserved_bytes"] is None and devices["cuda:0"]["requested_bytes"] is None
    assert found["steps"]["num_steps"] == 6


def test_the_raw_timeline_has_the_reference_peak(data: Path) -> None:
    (device,) = _summary(data, "timeline/memory_timeline.raw.json.gz")["devices"]
    assert device["peak"]["requested_bytes"] == 3_082_832_104
    assert device["peak"]["allocated_bytes"] is None and device["peak"]["reserved_bytes"] is None
    assert sum(device["peak"]["by_category"].values()) == 3_082_832_104


def test_timeline_categories_are_exact_at_the_peak(data: Path) -> None:
    """Against a plain sum over the rows, in their order."""
    import gzip

    rows = json.loads(gzip.decompress((data / "timeline" / "memory_timeline.raw.json.gz").read_bytes()))
    names = ["parameter", "optimizer_state", "input", "temporary", "activation", "gradient", "temporary", "unknown"]
    live, best, at_best = [0] * 8, 0, [0] * 8
    for _, _, size, category in rows:
        live[category] += size
        if sum(live) > best:
            best, at_best = sum(live), list(live)
    want: dict[str, int] = {}
    for name, size in zip(names, at_best, strict=True):
        want[name] = want.get(name, 0) + size
    trace = memtrace.load(data / "timeline" / "memory_timeline.raw.json.gz")
    assert summarize(trace).devices[0].peak.by_category == {name: size for name, size in want.items() if size}
