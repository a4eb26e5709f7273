"""Segments, free blocks and rounding at any moment, compared with the allocator of the tests; out-of-memory errors."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memtrace.dashboards.page import render

import memtrace
from memtrace.allocator.model import CachingAllocator
from memtrace.allocator.settings import AllocatorSettings
from memtrace.allocator.simulated_devices import SyntheticDevice
from memtrace.analysis import blocks_table
from memtrace.analysis.device_state import DeviceState, device_state_at
from memtrace.analysis.fragmentation import compute_fragmentation, largest_fit_bytes, pinned_segments_table
from memtrace.analysis.oom import MemoryHolder, explain_out_of_memory
from memtrace.analysis.summary import summarize
from memtrace.errors import TraceError
from tests.readers.snapshot_maker import MIB, START_US, Block, SnapshotMaker, frame, random_history, read_in_process

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
QUICK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@dataclass
class StateRecorder(SnapshotMaker):
    """Records its segments and blocks after each entry."""

    states: list[tuple[dict[int, int], dict[int, Block]]] = field(default_factory=list)

    def _append(self, entry: dict[str, Any], stack: list[dict[str, Any]] | None) -> None:
        super()._append(entry, stack)
        self.states.append((dict(self.segments), copy.deepcopy(self.blocks)))


def _free_blocks(segments: dict[int, int], blocks: dict[int, Block]) -> dict[int, int]:
    """Return the free blocks by brute force. A gap of at most 1 MiB belongs to the block in front of it."""
    free_blocks = {}
    for start, size in segments.items():
        at = start
        mine = sorted((b for b in blocks.values() if start <= b.address < start + size), key=lambda b: b.address)
        for end in [*(block.address for block in mine), start + size]:
            slack = at > start and end - at <= MIB
            if end > at and not slack:
                free_blocks[at] = end - at
            block = next((b for b in mine if b.address == end), None)
            at = end + (block.size if block else 0)
    return free_blocks


@QUICK
@given(seed=st.integers(0, 2**32), actions=st.integers(1, 60), kept=st.floats(0.1, 1))
def test_state_is_right_after_every_entry(tmp_path: Path, seed: int, actions: int, kept: float) -> None:
    maker = StateRecorder()
    random_history(seed, actions, maker)
    last = max(round(kept * len(maker.entries)), 1)
    trace = read_in_process(tmp_path / "a", maker.snapshot(last=last))
    older = int((trace.events["kind"] == "baseline").sum())
    for number in range(last):
        segments, blocks = maker.states[len(maker.entries) - last + number]
        state = device_state_at(trace, 0, older + number)
        assert dict(zip(state.segments.address.tolist(), state.segments.size.tolist(), strict=True)) == segments
        assert sorted(state.live.address.tolist()) == sorted(blocks)
        assert dict(zip(state.free.address.tolist(), state.free.size.tolist(), strict=True)) == _free_blocks(
            segments, blocks
        )
        _assert_adds_up(state)


def _assert_adds_up(state: DeviceState) -> None:
    inside = state.live.segment >= 0
    assert inside.all()
    assert state.live.size.sum() + state.free.size.sum() == state.segments.size.sum()


@pytest.mark.parametrize(
    "name", ["complete_small", "transformer_training_step", "wrapped_ring_25000", "expandable_segments"]
)
def test_blocks_of_real_files_add_up_to_their_segments(name: str) -> None:
    if not DATA.is_dir():
        pytest.skip(f"no real files: {DATA} is absent")
    trace = memtrace.load(DATA / "snapshots" / f"{name}.pickle")
    rows = trace.num_rows("events")
    older = int((trace.events["kind"] == "baseline").sum())
    for row in np.linspace(max(older - 1, 0), rows - 1, 25).astype(int):
        _assert_adds_up(device_state_at(trace, 0, int(row)))
    end = device_state_at(trace, 0, rows - 1)
    segments = trace.columns("segments", "active_size", "address")
    used = np.bincount(end.live.segment, weights=end.live.size, minlength=len(end.segments))
    order = np.argsort(segments["address"])
    assert used.tolist() == segments["active_size"][order].tolist(), (
        "each segment has the active bytes that the file states"
    )


def test_fragmentation_of_a_small_program(tmp_path: Path) -> None:
    maker = SnapshotMaker()
    stack = [frame("train.py", 3, "step")]
    first, pin, last = (maker.alloc(size * MIB, stack) for size in (8, 4, 8))
    maker.free(first)
    maker.free(last)
    maker.alloc(18 * MIB - 100)
    trace = read_in_process(tmp_path / "a", maker.snapshot())
    at_end = compute_fragmentation(trace, "cuda:0", row=trace.num_rows("events") - 1)
    assert at_end is not None
    assert at_end.reserved_bytes == 40 * MIB and at_end.num_segments == 2
    assert at_end.requested_bytes == 22 * MIB - 100 and at_end.waste_bytes == 100
    # 8 MiB in front of the pinning block, 8 MiB behind it, 2 MiB behind the last block.
    assert at_end.free_bytes == at_end.pinned_bytes == 18 * MIB and at_end.releasable_bytes == 0
    assert at_end.largest_fit_bytes == 8 * MIB
    table = pinned_segments_table(trace, "cuda:0", row=at_end.event)
    assert table["free_bytes"].tolist() == [16 * MIB, 2 * MIB]
    assert table["pin_bytes"].tolist()[0] == 4 * MIB and table["num_blocks"].tolist() == [1, 1]
    assert trace.frames(int(table["pin_stack"].iloc[0]))[0].file == "train.py"
    assert pin in set(blocks_table(trace).loc[table["pin_block"].astype(int), "address"])
    # The default is the peak of reserved memory, and there the moment with most live bytes.
    fullest = compute_fragmentation(trace, "cuda:0")
    assert fullest is not None and fullest.requested_bytes == 22 * MIB - 100


def test_largest_fit_depends_on_stream_and_pool(tmp_path: Path) -> None:
    maker = SnapshotMaker()
    maker.free(maker.alloc(8 * MIB))
    maker.stream = 7
    value = maker.snapshot()
    trace = read_in_process(tmp_path / "a", value)
    state = device_state_at(trace, 0, trace.num_rows("events") - 1)
    assert largest_fit_bytes(state, 0, 0) == 0 or state.segments.stream.tolist() == [0]
    assert largest_fit_bytes(state, 0, int(state.segments.stream[0])) == 20 * MIB
    assert largest_fit_bytes(state, 2, 0) == 0


def test_traces_without_segments_have_no_fragmentation(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(
        '{"traceEvents": [{"name": "[memory]", "ph": "i", "pid": 1, "tid": 1, "ts": 1, "args": {"Bytes": 8}}]}'
    )
    trace = memtrace.load(tmp_path / "a")
    (device,) = trace.devices
    assert compute_fragmentation(trace, device) is None and pinned_segments_table(trace, device).empty
    with pytest.raises(TraceError, match="no device cuda:9"):
        compute_fragmentation(trace, "cuda:9")


@pytest.mark.parametrize(
    "setting",
    [
        "",
        "roundup_power2_divisions:4",
        "large_segment_size_mb:40",
        "expandable_segments:True",
        "expandable_segments:True,large_segment_size_mb:12",
        "max_split_size_mb:32",
    ],
)
def test_out_of_memory_requests_the_segment_that_the_model_takes(tmp_path: Path, setting: str) -> None:
    """The segment size honours the recorded settings: an empty model with these settings takes just as much."""
    sizes = [1, MIB, MIB + 1, 1100 * 1024, 9 * MIB, 10 * MIB - 1, 10 * MIB, 11 * MIB, 45 * MIB]
    maker = SnapshotMaker()
    maker.alloc(18 * MIB)
    for asked in sizes:
        maker.out_of_memory(asked, 0)
    value = maker.snapshot()
    value["allocator_settings"] = {"PYTORCH_CUDA_ALLOC_CONF": setting}
    failures = explain_out_of_memory(read_in_process(tmp_path / "a", value))
    for asked, failure in zip(sizes, failures, strict=True):
        model = CachingAllocator(AllocatorSettings.parse(setting), SyntheticDevice())
        model.malloc(asked)
        assert failure.room is not None and failure.room.segment_bytes == model.reserved, asked


def _failing(tmp_path: Path, *, expandable: bool = False) -> memtrace.Trace:
    """A 20 MiB segment with a pin in the middle, then a request for 12 MiB that the device cannot serve."""
    maker = SnapshotMaker()
    stack = [frame("/home/me/train.py", 3, "step")]
    first, _, last = (maker.alloc(size * MIB, stack) for size in (8, 4, 8))
    maker.free(first)
    maker.free(last)
    maker.out_of_memory(12 * MIB, 3 * MIB)
    maker.entries[-1]["frames"] = [frame("/home/me/model.py", 9, "forward")]
    value = maker.snapshot()
    value["allocator_settings"]["expandable_segments"] = expandable
    return read_in_process(tmp_path / "a", value)


def test_out_of_memory_by_fragmentation_is_explained(tmp_path: Path) -> None:
    (failure,) = explain_out_of_memory(_failing(tmp_path))
    assert (failure.asked_bytes, failure.device_free_bytes, failure.live_bytes) == (12 * MIB, 3 * MIB, 4 * MIB)
    room = failure.room
    assert room is not None
    assert (room.segment_bytes, room.largest_fit_bytes, room.free_same_stream_bytes) == (12 * MIB, 8 * MIB, 16 * MIB)
    assert (room.lacking_bytes, room.free_elsewhere_bytes) == (0, 0)
    assert [(holder.requested_bytes, holder.num_blocks) for holder in failure.holders] == [(4 * MIB, 1)]
    assert "expandable_segments:True" in failure.advice[0]


def test_expandable_segments_are_not_suggested_when_they_are_on(tmp_path: Path) -> None:
    (failure,) = explain_out_of_memory(_failing(tmp_path, expandable=True))
    assert not any("expandable_segments" in sentence for sentence in failure.advice) and failure.advice


def test_out_of_memory_states_by_how_much_live_memory_must_shrink(tmp_path: Path) -> None:
    maker = SnapshotMaker()
    maker.alloc(18 * MIB)
    maker.out_of_memory(21 * MIB, 2 * MIB)
    (failure,) = explain_out_of_memory(read_in_process(tmp_path / "a", maker.snapshot()))
    assert failure.room is not None and failure.room.lacking_bytes == 17 * MIB
    assert failure.advice[0].startswith("Reduce live memory by 17.0 MiB")
    assert not any("expandable" in sentence for sentence in failure.advice)


def test_a_request_larger_than_the_device_should_ask_for_less(tmp_path: Path) -> None:
    maker = SnapshotMaker()
    maker.alloc(18 * MIB)
    maker.out_of_memory(100 * MIB, 2 * MIB)
    (failure,) = explain_out_of_memory(read_in_process(tmp_path / "a", maker.snapshot()))
    assert failure.advice[0].startswith("Request less memory") and "100 MiB exceed the 22.0 MiB" in failure.advice[0]
    assert not any("live memory" in sentence for sentence in failure.advice)


def test_out_of_memory_on_a_device_with_free_memory_points_to_a_limit(tmp_path: Path) -> None:
    """``set_per_process_memory_fraction``: the driver has free memory that the process may not use."""
    maker = SnapshotMaker()
    maker.alloc(18 * MIB)
    maker.out_of_memory(30 * MIB, 900 * MIB)
    (failure,) = explain_out_of_memory(read_in_process(tmp_path / "a", maker.snapshot()))
    assert "set_per_process_memory_fraction" in failure.advice[0] and "900 MiB free" in failure.advice[0]


def test_room_is_limited_to_the_pool_and_size_class_of_the_request(tmp_path: Path) -> None:
    """A small request cannot use large segments, and a request in a private pool cannot use other pools."""
    maker = SnapshotMaker()
    maker.free(maker.alloc(8 * MIB))
    maker.alloc(4 * MIB)
    maker.out_of_memory(1000, 0)
    maker.out_of_memory(12 * MIB, 0)
    maker.entries[-1]["pool_id"] = (3, 0)
    maker.out_of_memory(18 * MIB, 0)
    small, private, usual = explain_out_of_memory(read_in_process(tmp_path / "a", maker.snapshot()))
    for failure, fit in ((small, 0), (private, 0), (usual, 16 * MIB)):
        room = failure.room
        assert room is not None and room.largest_fit_bytes == room.free_same_stream_bytes == fit
        assert room.free_elsewhere_bytes == 16 * MIB - fit


def test_summary_has_fragmentation_and_out_of_memory_errors(tmp_path: Path) -> None:
    result = summarize(_failing(tmp_path))
    (failure,) = result.out_of_memory
    assert failure.site == "me/model.py:9 forward"
    assert failure.holders == (MemoryHolder("me/train.py:3 step", 4 * MIB, 1),)
    state = result.devices[0].fragmentation
    assert state is not None and state.reserved_bytes == 20 * MIB


def test_mappings_of_expandable_segments_are_walked_back(tmp_path: Path) -> None:
    base = 1 << 40

    def entry(action: str, at: int, size: int, number: int) -> dict[str, object]:
        return {
            "action": action,
            "addr": base + at * MIB,
            "size": size * MIB,
            "stream": 0,
            "time_us": START_US + number,
        }

    entries = [
        entry("segment_map", 0, 20, 0), entry("segment_map", 20, 20, 1), entry("alloc", 0, 30, 2), entry("segment_map", 60, 20, 3),
        entry("segment_unmap", 60, 20, 4),
    ]  # fmt: skip
    segment = {
        "device": 0, "address": base, "total_size": 40 * MIB, "allocated_size": 30 * MIB, "active_size": 30 * MIB,
        "requested_size": 30 * MIB, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": True,
        "blocks": [{"address": base, "size": 30 * MIB, "requested_size": 30 * MIB, "state": "active_allocated", "frames": []}],
    }  # fmt: skip
    trace = read_in_process(tmp_path / "a", {"segments": [segment], "device_traces": [entries]})

    def mapped(row: int) -> list[tuple[int, int]]:
        segments = device_state_at(trace, 0, row).segments
        return [
            ((at - base) // MIB, size // MIB)
            for at, size in zip(segments.address.tolist(), segments.size.tolist(), strict=True)
        ]

    assert [mapped(row) for row in range(-1, 5)] == [
        [],
        [(0, 20)],
        [(0, 40)],
        [(0, 40)],
        [(0, 40), (60, 20)],
        [(0, 40)],
    ]


def test_page_has_fragmentation_and_out_of_memory_errors(tmp_path: Path) -> None:
    page = render(_failing(tmp_path))
    assert "The largest request that fits without" in page
    assert "Out-of-memory errors" in page and "expandable_segments:True" in page
