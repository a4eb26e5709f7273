"""The oddities that real snapshots contain (formats.md), one by one, on small made files."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

import memtrace
from memtrace.analysis import blocks_table, compute_coverage, steps_table
from memtrace.analysis.peak import requested_bytes, reserved_bytes
from tests.readers.making import MIB, START_US, Maker, frame


def load(folder: Path, value: Any) -> memtrace.Trace:
    path = folder / "snapshot.pickle"
    path.write_bytes(pickle.dumps(value))
    return memtrace.load(path)


@pytest.fixture
def maker() -> Maker:
    made = Maker()
    kept = made.alloc(3 * MIB, [frame("train.py", 7, "forward")])
    made.free(made.alloc(1000))
    assert kept
    return made


def test_oom_has_no_address_and_says_what_was_free(tmp_path: Path, maker: Maker) -> None:
    maker.out_of_memory(5 * MIB, 123)
    row = load(tmp_path, maker.snapshot()).events.iloc[-1]
    assert (row["kind"], row["size"], row["device_free"]) == ("oom", 5 * MIB, 123)
    assert row[["address", "block_id"]].isna().all()


def test_snapshot_entries_are_checkpoints_not_allocations(tmp_path: Path, maker: Maker) -> None:
    before = load(tmp_path, maker.snapshot())
    maker.snapshot_entry()
    after = load(tmp_path, maker.snapshot())
    assert after.events.iloc[-1]["kind"] == "snapshot"
    assert requested_bytes(before, "cuda:0").bytes.tolist() == requested_bytes(after, "cuda:0").bytes.tolist()


@pytest.mark.parametrize("frames", ["absent", "empty", "None"])
def test_missing_frames(tmp_path: Path, maker: Maker, frames: str) -> None:
    value = maker.snapshot()
    for entry in value["device_traces"][0]:
        if frames == "absent":
            del entry["frames"]
        else:
            entry["frames"] = [] if frames == "empty" else None
    trace = load(tmp_path, value)
    # context="state": the stacks of live blocks alone are kept, with the blocks.
    assert blocks_table(trace)["stack"].notna().tolist() == [True, False]
    assert any("have no stacks" in note for note in compute_coverage(trace).notes)
    for segment in value["segments"]:
        for block in segment["blocks"]:
            block["frames"] = []
    assert load(tmp_path, value).num_rows("ops") == 0


def test_no_times_fall_back_to_the_number_of_the_entry(tmp_path: Path, maker: Maker) -> None:
    value = maker.snapshot()
    value["external_annotations"] = [{"name": "a", "stage": "START", "device": 0, "time_us": START_US}]
    for entry in value["device_traces"][0]:
        del entry["time_us"]
    trace = load(tmp_path, value)
    assert trace.events["time_ns"].tolist() == list(range(len(maker.entries)))
    assert trace.manifest.t0_epoch_ns is None
    assert any("number of the entry stands for the time" in note for note in compute_coverage(trace).notes)
    assert any("annotations are not read" in note for note in compute_coverage(trace).notes)


def test_a_clock_that_runs_backwards_keeps_the_order(tmp_path: Path, maker: Maker) -> None:
    value = maker.snapshot()
    value["device_traces"][0][2]["time_us"] -= 1000
    trace = load(tmp_path, value)
    assert trace.events["kind"].tolist()[:3] == ["segment_alloc", "alloc", "alloc"]
    assert any("runs backwards" in note for note in compute_coverage(trace).notes)


def test_block_history_of_torch_2_0(tmp_path: Path, maker: Maker) -> None:
    value = maker.snapshot()
    want = load(tmp_path, {"segments": value["segments"]})
    for segment in value["segments"]:
        for key in ("segment_pool_id", "is_expandable", "frames"):
            del segment[key]
        for block in segment["blocks"]:
            address, frames = block.pop("address"), block.pop("frames")
            if block["state"] != "inactive":
                block["history"] = [{"addr": address, "real_size": block.pop("requested_size"), "frames": frames}]
    trace = load(
        tmp_path,
        {"segments": value["segments"], "device_traces": [[{"action": "snapshot", "addr": 0, "size": 3, "stream": 0}]]},
    )
    columns = ["address", "size", "allocated_size", "stream", "op_id"]
    mine, theirs = (one.events.loc[one.events["kind"] == "baseline", columns] for one in (trace, want))
    assert len(mine) == 1 and mine.equals(theirs)
    assert trace.columns("segments", "pool")["pool"].tolist() == [-1]


def test_documented_and_written_name_of_pending(tmp_path: Path, maker: Maker) -> None:
    for state in ("active_pending_free", "active_awaiting_free"):
        value = maker.snapshot()
        value["segments"][0]["blocks"][0]["state"] = state
        assert any("wait for a stream" in note for note in compute_coverage(load(tmp_path, value)).notes)


def test_pools(tmp_path: Path, maker: Maker) -> None:
    value = maker.snapshot()
    for entry, pool in zip(value["device_traces"][0], [(0, 0), (0, 3), [4, 0], (5, 6)], strict=False):
        entry["pool_id"] = pool
    value["segments"][0]["segment_pool_id"] = [7, 0]
    trace = load(tmp_path, value)
    # Even: torch's (0, k); odd: (k, 0). (5, 6) is no pool that torch makes. Frees repeat what the alloc said.
    assert trace.events["pool"].tolist()[:3] == [0, 6, 9]
    assert trace.events["pool"].isna().tolist()[3:] == [True, True]
    assert trace.columns("segments", "pool")["pool"].tolist() == [15]


def test_expandable_segments_map_and_unmap(tmp_path: Path) -> None:
    base = 1 << 40
    entries = [
        {"action": "segment_map", "addr": base, "size": 40 * MIB, "stream": 0, "time_us": START_US},
        {"action": "alloc", "addr": base, "size": 30 * MIB, "stream": 0, "time_us": START_US + 1},
        {"action": "segment_unmap", "addr": base + 20 * MIB, "size": 20 * MIB, "stream": 0, "time_us": START_US + 2},
    ]
    segment = {
        "device": 0, "address": base, "total_size": 20 * MIB, "allocated_size": 30 * MIB, "active_size": 30 * MIB,
        "requested_size": 30 * MIB, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": True,
        "blocks": [{"address": base, "size": 30 * MIB, "requested_size": 30 * MIB, "state": "active_allocated", "frames": []}],
    }  # fmt: skip
    trace = load(tmp_path, {"segments": [segment], "device_traces": [entries]})
    reserved = reserved_bytes(trace, "cuda:0")
    assert reserved is not None and reserved.bytes.tolist() == [40 * MIB, 20 * MIB]
    assert trace.columns("segments", "expandable")["expandable"].tolist() == [True]


def test_actions_of_other_versions(tmp_path: Path, maker: Maker) -> None:
    value = maker.snapshot()
    trace = value["device_traces"][0]
    trace.append({"action": "annotate", "user_metadata": "note", "time_us": START_US})
    trace.append({"action": "user_defined", "frames": [frame("", 0, "mine")], "time_us": START_US})
    trace.append({"action": "teleport", "time_us": START_US})
    loaded = load(tmp_path, value)
    assert loaded.num_rows("events") == len(maker.entries)
    assert [note for note in compute_coverage(loaded).notes if "unknown actions" in note] == [
        "entries of unknown actions left out: 'teleport'"
    ]


def test_the_old_name_of_free(tmp_path: Path, maker: Maker) -> None:
    value = maker.snapshot()
    want = load(tmp_path, value).events["kind"].tolist()
    for entry in value["device_traces"][0]:
        if entry["action"] == "free_completed":
            entry["action"] = "free"
    assert load(tmp_path, value).events["kind"].tolist() == want


@pytest.mark.parametrize("flag", [True, 1, [False, True], {"0": True}])
@pytest.mark.parametrize("place", ["top", "settings"])
def test_the_overflow_flag_is_found_where_it_is(tmp_path: Path, maker: Maker, flag: Any, place: str) -> None:
    value = maker.snapshot()
    (value if place == "top" else value["allocator_settings"])["trace_alloc_overflowed"] = flag
    assert any(
        "is a ring of 5 entries that overflowed" in note for note in compute_coverage(load(tmp_path, value)).notes
    )


def test_addresses_beyond_63_bits_are_kept_as_words(tmp_path: Path, maker: Maker) -> None:
    """Some accelerators map memory there."""
    value = maker.snapshot()
    shift = 0xFF00_0000_0000_0000
    for entry in value["device_traces"][0]:
        entry["addr"] += shift
    for segment in value["segments"]:
        segment["address"] += shift
        for block in segment["blocks"]:
            block["address"] += shift
    trace = load(tmp_path, value)
    assert [int(address) % 2**64 for address in trace.events["address"]] == [
        entry["addr"] for entry in value["device_traces"][0]
    ]
    assert not any("contradicts" in note for note in compute_coverage(trace).notes)


def test_settings_are_kept_and_only_plain_values(tmp_path: Path, maker: Maker) -> None:
    value = maker.snapshot()
    value["allocator_settings"] |= {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "max_split_size": -1, "garbage_collection_threshold": float("nan"),
        "odd": [1, 2], 5: 6,
    }  # fmt: skip
    settings = load(tmp_path, value).manifest.allocator_settings
    assert settings == {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "max_split_size": -1, "expandable_segments": False,
        "roundup_power2_divisions": {"1": 0, "2": 0},
    }  # fmt: skip


def test_allocated_size_is_told_where_it_is_known(tmp_path: Path) -> None:
    """Live blocks by the segments; small ones by the rounding; large ones that are gone could have had slack."""
    maker = Maker()
    maker.free(maker.alloc(1000))
    maker.free(maker.alloc(3 * MIB))
    maker.alloc(5 * MIB - 1)
    value = maker.snapshot()
    sizes = blocks_table(load(tmp_path, value))["allocated_size"]
    assert [None if size is None else int(size) for size in sizes.astype(object).where(sizes.notna(), None)] == [
        1024,
        None,
        5 * MIB,
    ]
    value["allocator_settings"]["roundup_power2_divisions"] = {"1": 4}
    sizes = blocks_table(load(tmp_path, value))["allocated_size"]
    assert sizes.isna().tolist() == [True, True, False]


def test_annotations_become_spans(tmp_path: Path) -> None:
    maker = Maker()
    notes: list[dict[str, Any]] = []

    def note(name: str, stage: str) -> None:
        maker.clock_us += 5
        notes.append({"name": name, "stage": stage, "device": 0, "time_us": maker.clock_us})

    for _ in range(3):
        note("enumerate(DataLoader)#_It.__next__", "START")
        note("enumerate(DataLoader)#_It.__next__", "END")
        maker.alloc(100)
        note("mine", "START")
        note("mine", "START")
        maker.alloc(100)
        note("mine", "END")
        note("mine", "END")
        note("Optimizer.step#Adam.step", "START")
        maker.alloc(50)
        note("Optimizer.step#Adam.step", "END")
    note("open", "START")
    maker.alloc(1)
    value = maker.snapshot()
    value["external_annotations"] = notes
    trace = load(tmp_path, value)
    assert steps_table(trace)["step"].tolist() == [0, 1, 2]
    assert steps_table(trace)["num_allocs"].tolist() == [3, 3, 3]
    spans = trace.spans
    # The first wait was over before the first entry.
    assert (spans["kind"] == "data_wait").sum() == 2
    names = [trace.name(name) for name in spans.loc[spans["kind"] == "range", "name"]]
    assert sorted(set(names)) == ["Optimizer.step#Adam.step", "mine", "open"] and names.count("mine") == 6
    inner = spans[(spans["kind"] == "range")]["duration_ns"].tolist()
    assert all(duration >= 0 for duration in inner)
    phases = blocks_table(trace)["phase"].tolist()
    assert [phase for phase in phases if phase == "optimizer"] == ["optimizer"] * 3


def test_profiler_steps_have_their_own_numbers(tmp_path: Path) -> None:
    maker = Maker()
    notes = []
    for number in (7, 8):
        maker.alloc(10)
        notes.append({"name": f"ProfilerStep#{number}", "stage": "START", "device": 0, "time_us": maker.clock_us})
        maker.alloc(10)
        notes.append({"name": f"ProfilerStep#{number}", "stage": "END", "device": 0, "time_us": maker.clock_us + 1})
    value = maker.snapshot()
    value["external_annotations"] = notes
    assert steps_table(load(tmp_path, value))["step"].tolist() == [7, 8]


def test_a_step_that_began_before_a_ring_is_left_out(tmp_path: Path) -> None:
    maker = Maker()
    notes = []
    for _ in range(3):
        maker.alloc(10)
        for stage in ("START", "END"):
            maker.clock_us += 1
            notes.append({"name": "Optimizer.step#SGD.step", "stage": stage, "device": 0, "time_us": maker.clock_us})
    # The ring begins after the first optimizer step: the second iteration began before it.
    value = maker.snapshot(last=2)
    value["external_annotations"] = notes
    trace = load(tmp_path, value)
    assert steps_table(trace)["num_allocs"].tolist() == [1]
