"""Unusual properties of real snapshots, one by one, in small generated files."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

import memtrace
from memtrace.allocator.plan import plan_allocator
from memtrace.analysis import blocks_table, compute_coverage, steps_table
from memtrace.analysis.oom import explain_out_of_memory
from memtrace.analysis.peak import requested_bytes, reserved_bytes
from memtrace.errors import TraceError
from memtrace.format.schema import MAX_BYTES
from tests.readers.snapshot_maker import MIB, START_US, SnapshotMaker, frame


def load(folder: Path, value: Any) -> memtrace.Trace:
    path = folder / "snapshot.pickle"
    path.write_bytes(pickle.dumps(value))
    return memtrace.load(path)


@pytest.fixture
def maker() -> SnapshotMaker:
    """A snapshot with one live block and one freed block."""
    snapshot_maker = SnapshotMaker()
    snapshot_maker.alloc(3 * MIB, [frame("train.py", 7, "forward")])
    snapshot_maker.free(snapshot_maker.alloc(1000))
    return snapshot_maker


def test_a_failed_allocation_has_no_address_and_keeps_the_free_memory(tmp_path: Path, maker: SnapshotMaker) -> None:
    maker.out_of_memory(5 * MIB, 123)
    row = load(tmp_path, maker.snapshot()).events.iloc[-1]
    assert (row["kind"], row["size"], row["device_free"]) == ("oom", 5 * MIB, 123)
    assert row[["address", "block_id"]].isna().all()


@pytest.mark.parametrize("size", [MAX_BYTES + 1, 1 << 62, (1 << 63) - 1])
def test_only_a_failed_allocation_can_have_any_size(size: int, tmp_path: Path, maker: SnapshotMaker) -> None:
    maker.out_of_memory(size, 123)
    trace = load(tmp_path, maker.snapshot())
    assert trace.events.iloc[-1]["size"] == size
    assert explain_out_of_memory(trace)[0].asked_bytes == size
    assert plan_allocator(trace, []).devices[0].failed_request_bytes == (size,)
    maker.entries[-1]["action"] = "alloc"
    with pytest.raises(TraceError, match=f"entry {len(maker.entries) - 1} of device 0 has"):
        load(tmp_path, maker.snapshot())


def test_snapshot_entries_do_not_allocate(tmp_path: Path, maker: SnapshotMaker) -> None:
    before = load(tmp_path, maker.snapshot())
    maker.snapshot_entry()
    after = load(tmp_path, maker.snapshot())
    assert after.events.iloc[-1]["kind"] == "snapshot"
    assert requested_bytes(before, "cuda:0").bytes.tolist() == requested_bytes(after, "cuda:0").bytes.tolist()


@pytest.mark.parametrize("frames", ["absent", "empty", "None"])
def test_entries_without_frames_are_reported(tmp_path: Path, maker: SnapshotMaker, frames: str) -> None:
    value = maker.snapshot()
    for entry in value["device_traces"][0]:
        if frames == "absent":
            del entry["frames"]
        else:
            entry["frames"] = [] if frames == "empty" else None
    trace = load(tmp_path, value)
    # With context="state" only the blocks in the segments keep their stacks.
    assert blocks_table(trace)["stack"].notna().tolist() == [True, False]
    assert any("have no call stacks" in note for note in compute_coverage(trace).notes)
    for segment in value["segments"]:
        for block in segment["blocks"]:
            block["frames"] = []
    assert load(tmp_path, value).num_rows("ops") == 0


def test_without_times_the_numbers_of_the_entries_are_used(tmp_path: Path, maker: SnapshotMaker) -> None:
    value = maker.snapshot()
    value["external_annotations"] = [{"name": "a", "stage": "START", "device": 0, "time_us": START_US}]
    for entry in value["device_traces"][0]:
        del entry["time_us"]
    trace = load(tmp_path, value)
    assert trace.events["time_ns"].tolist() == list(range(len(maker.entries)))
    assert trace.manifest.t0_epoch_ns is None
    assert any("uses the number of each entry as its time" in note for note in compute_coverage(trace).notes)
    assert any("annotations in the snapshot were not read" in note for note in compute_coverage(trace).notes)


def test_events_keep_their_order_if_the_clock_runs_backwards(tmp_path: Path, maker: SnapshotMaker) -> None:
    value = maker.snapshot()
    value["device_traces"][0][2]["time_us"] -= 1000
    trace = load(tmp_path, value)
    assert trace.events["kind"].tolist()[:3] == ["segment_alloc", "alloc", "alloc"]
    assert any("runs backwards" in note for note in compute_coverage(trace).notes)


def test_the_block_history_of_torch_2_0_gives_the_same_blocks(tmp_path: Path, maker: SnapshotMaker) -> None:
    value = maker.snapshot()
    expected = load(tmp_path, {"segments": value["segments"]})
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
    blocks, expected_blocks = (
        item.events.loc[item.events["kind"] == "baseline", columns] for item in (trace, expected)
    )
    assert len(blocks) == 1 and blocks.equals(expected_blocks)
    assert trace.columns("segments", "pool")["pool"].tolist() == [-1]


def test_both_names_of_the_pending_state_are_read(tmp_path: Path, maker: SnapshotMaker) -> None:
    for state in ("active_pending_free", "active_awaiting_free"):
        value = maker.snapshot()
        value["segments"][0]["blocks"][0]["state"] = state
        assert any("wait for a stream" in note for note in compute_coverage(load(tmp_path, value)).notes)


def test_memory_pools_are_numbered(tmp_path: Path, maker: SnapshotMaker) -> None:
    value = maker.snapshot()
    for entry, pool in zip(value["device_traces"][0], [(0, 0), (0, 3), [4, 0], (5, 6)], strict=False):
        entry["pool_id"] = pool
    value["segments"][0]["segment_pool_id"] = [7, 0]
    trace = load(tmp_path, value)
    # Even numbers are torch's (0, k), odd ones (k, 0). PyTorch never creates (5, 6). Frees have no pool of their own.
    assert trace.events["pool"].tolist()[:3] == [0, 6, 9]
    assert trace.events["pool"].isna().tolist()[3:] == [True, True]
    assert trace.columns("segments", "pool")["pool"].tolist() == [15]


def test_reserved_bytes_follow_expandable_segments(tmp_path: Path) -> None:
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


def test_unknown_actions_are_ignored_and_reported(tmp_path: Path, maker: SnapshotMaker) -> None:
    value = maker.snapshot()
    trace = value["device_traces"][0]
    trace.append({"action": "annotate", "user_metadata": "note", "time_us": START_US})
    trace.append({"action": "user_defined", "frames": [frame("", 0, "mine")], "time_us": START_US})
    trace.append({"action": "teleport", "time_us": START_US})
    loaded = load(tmp_path, value)
    assert loaded.num_rows("events") == len(maker.entries)
    assert [note for note in compute_coverage(loaded).notes if "unknown actions" in note] == [
        "Entries with unknown actions were ignored: 'teleport'"
    ]


def test_the_old_name_of_a_completed_free_is_read(tmp_path: Path, maker: SnapshotMaker) -> None:
    value = maker.snapshot()
    expected_kinds = load(tmp_path, value).events["kind"].tolist()
    for entry in value["device_traces"][0]:
        if entry["action"] == "free_completed":
            entry["action"] = "free"
    assert load(tmp_path, value).events["kind"].tolist() == expected_kinds


@pytest.mark.parametrize("flag", [True, 1, [False, True], {"0": True}])
@pytest.mark.parametrize("place", ["top", "settings"])
def test_an_overflow_of_the_ring_buffer_is_reported(
    tmp_path: Path, maker: SnapshotMaker, flag: Any, place: str
) -> None:
    value = maker.snapshot()
    (value if place == "top" else value["allocator_settings"])["trace_alloc_overflowed"] = flag
    notes = compute_coverage(load(tmp_path, value)).notes
    assert any("overflowed: it holds the last 5 entries" in note for note in notes)


def test_addresses_above_63_bits_are_kept(tmp_path: Path, maker: SnapshotMaker) -> None:
    """Some accelerators use such addresses."""
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
    assert not any("contradicts itself" in note for note in compute_coverage(trace).notes)


def test_allocator_settings_keep_plain_values_only(tmp_path: Path, maker: SnapshotMaker) -> None:
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


def test_allocated_sizes_are_given_where_they_are_known(tmp_path: Path) -> None:
    """Sizes of live blocks are in the segments, those of small blocks follow from rounding; others are unknown."""
    maker = SnapshotMaker()
    maker.free(maker.alloc(4500))
    maker.free(maker.alloc(3 * MIB))
    maker.alloc(5 * MIB - 1)
    value = maker.snapshot()

    def sizes() -> list[int | None]:
        column = blocks_table(load(tmp_path, value))["allocated_size"]
        return [int(size) if known else None for size, known in zip(column, column.notna(), strict=True)]

    assert sizes() == [4608, None, 5 * MIB]
    value["allocator_settings"]["roundup_power2_divisions"] = {"1": 4}  # multiples of a quarter of 4096
    assert sizes() == [5120, None, 5 * MIB]
    value["allocator_settings"]["roundup_power2_divisions"] = {"1": 3}  # torch has no such rule
    assert sizes() == [None, None, 5 * MIB]


def test_annotated_ranges_become_spans(tmp_path: Path) -> None:
    maker = SnapshotMaker()
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
    # The first wait ended before the first entry.
    assert (spans["kind"] == "data_wait").sum() == 2
    names = [trace.name(name) for name in spans.loc[spans["kind"] == "range", "name"]]
    assert sorted(set(names)) == ["Optimizer.step#Adam.step", "mine", "open"] and names.count("mine") == 6
    durations = spans[spans["kind"] == "range"]["duration_ns"].tolist()
    assert all(duration >= 0 for duration in durations)
    phases = blocks_table(trace)["phase"].tolist()
    assert [phase for phase in phases if phase == "optimizer"] == ["optimizer"] * 3


def test_steps_of_the_profiler_keep_their_numbers(tmp_path: Path) -> None:
    maker = SnapshotMaker()
    notes = []
    for number in (7, 8):
        maker.alloc(10)
        notes.append({"name": f"ProfilerStep#{number}", "stage": "START", "device": 0, "time_us": maker.clock_us})
        maker.alloc(10)
        notes.append({"name": f"ProfilerStep#{number}", "stage": "END", "device": 0, "time_us": maker.clock_us + 1})
    value = maker.snapshot()
    value["external_annotations"] = notes
    assert steps_table(load(tmp_path, value))["step"].tolist() == [7, 8]


def test_a_step_that_began_before_the_history_is_left_out(tmp_path: Path) -> None:
    maker = SnapshotMaker()
    notes = []
    for _ in range(3):
        maker.alloc(10)
        for stage in ("START", "END"):
            maker.clock_us += 1
            notes.append({"name": "Optimizer.step#SGD.step", "stage": stage, "device": 0, "time_us": maker.clock_us})
    # The history begins after the first optimizer step, within the second training step.
    value = maker.snapshot(last=2)
    value["external_annotations"] = notes
    trace = load(tmp_path, value)
    assert steps_table(trace)["num_allocs"].tolist() == [1]
