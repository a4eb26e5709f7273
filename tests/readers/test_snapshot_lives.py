"""The blocks of a snapshot follow from its history and its final state, compared with the allocator of the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memtrace.analysis import blocks_table, compute_coverage
from memtrace.analysis.peak import level_at, requested_bytes, reserved_bytes
from memtrace.trace import Trace
from tests.readers.snapshot_maker import SnapshotMaker, random_history, read_in_process


def load(folder: Path, value: Any) -> Trace:
    return read_in_process(folder / "snapshot.pickle", value)


QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@QUICK
@given(seed=st.integers(0, 2**32), actions=st.integers(0, 150), kept=st.floats(0, 1))
def test_any_suffix_of_a_history_gives_the_correct_live_bytes(
    tmp_path: Path, seed: int, actions: int, kept: float
) -> None:
    """A ring buffer keeps the newest entries. The segments make up for the lost ones."""
    maker = random_history(seed, actions)
    last = round(kept * len(maker.entries))
    trace = load(tmp_path, maker.snapshot(last=last))
    curves = (maker.requested_curve, maker.reserved_curve)
    expected_requested, expected_reserved = (curve[len(curve) - last :] if last else [] for curve in curves)
    if not trace.devices:
        assert not maker.blocks and not maker.segments and not last
        return
    older = int((trace.events["kind"] == "baseline").sum())
    rows = range(older, older + last)
    assert level_at(requested_bytes(trace, "cuda:0"), list(rows)).tolist() == expected_requested
    reserved = reserved_bytes(trace, "cuda:0")
    assert (level_at(reserved, list(rows)).tolist() if reserved else []) == (expected_reserved if reserved else [])
    assert not any(
        "contradicts itself" in note or "segments lack blocks" in note for note in compute_coverage(trace).notes
    )


@QUICK
@given(seed=st.integers(0, 2**32), actions=st.integers(1, 120))
def test_a_complete_history_has_no_older_blocks(tmp_path: Path, seed: int, actions: int) -> None:
    maker = random_history(seed, actions)
    trace = load(tmp_path, maker.snapshot())
    kinds = trace.events["kind"].tolist()
    assert "baseline" not in kinds
    names = {"free_completed": "free"}
    assert kinds == [names.get(entry["action"], entry["action"]) for entry in maker.entries]
    assert trace.events["address"].tolist() == [entry["addr"] for entry in maker.entries]
    assert trace.events["time_ns"].tolist() == [
        1000 * (entry["time_us"] - maker.entries[0]["time_us"]) for entry in maker.entries
    ]


@QUICK
@given(seed=st.integers(0, 2**32), actions=st.integers(1, 120))
def test_blocks_equal_those_of_a_brute_force_search(tmp_path: Path, seed: int, actions: int) -> None:
    maker = random_history(seed, actions)
    trace = load(tmp_path, maker.snapshot())
    open_blocks: dict[int, int] = {}
    number = -1
    expected = []
    for entry in maker.entries:
        action, address = entry["action"], entry["addr"]
        if action == "alloc":
            number += 1
            open_blocks[address] = number
        is_block_entry = action in ("alloc", "free_requested", "free_completed")
        expected.append(open_blocks[address] if is_block_entry else None)
        if action == "free_completed":
            del open_blocks[address]
    assert [
        None if block != block else block
        for block in trace.events["block_id"].astype(object).where(trace.events["block_id"].notna(), None)
    ] == expected


def test_a_requested_free_without_completion_leaves_the_block_live(tmp_path: Path) -> None:
    maker = SnapshotMaker()
    first = maker.alloc(1000)
    maker.alloc(2000)
    maker.free(first, complete=False)
    trace = load(tmp_path, maker.snapshot())
    assert int(requested_bytes(trace, "cuda:0").bytes[-1]) == 3000
    notes = compute_coverage(trace).notes
    assert any("count as live: 1 block (1,000 B)" in note for note in notes)
    assert not any("no completed frees" in note for note in notes)


def test_without_completed_frees_a_block_ends_at_the_request(tmp_path: Path) -> None:
    maker = SnapshotMaker()
    maker.free(maker.alloc(1000))
    maker.free(maker.alloc(500))
    value = maker.snapshot()
    value["device_traces"][0] = [entry for entry in value["device_traces"][0] if entry["action"] != "free_completed"]
    trace = load(tmp_path, value)
    assert requested_bytes(trace, "cuda:0").bytes.tolist() == [1000, 0, 500, 0]
    assert any("no completed frees" in note for note in compute_coverage(trace).notes)


def test_entries_of_several_devices_are_ordered_by_time(tmp_path: Path) -> None:
    one, two = SnapshotMaker(device=1), SnapshotMaker(device=3)
    two.clock_us += 1
    for maker in (one, two):
        maker.free(maker.alloc(1000 * (1 + maker.device)))
    value = two.snapshot()
    value["device_traces"][1] = one.entries
    value["segments"] += one.snapshot()["segments"]
    trace = load(tmp_path, value)
    assert trace.devices == ("cuda:1", "cuda:3")
    assert trace.events["time_ns"].is_monotonic_increasing
    assert trace.events["device"].tolist() == ["cuda:1", "cuda:3"] * 4
    assert trace.events["block_id"].dropna().tolist() == [0, 1, 0, 1, 0, 1]


def test_the_same_address_on_two_devices_is_two_blocks(tmp_path: Path) -> None:
    makers = [SnapshotMaker(device=0), SnapshotMaker(device=1)]
    addresses = [maker.alloc(700) for maker in makers]
    assert addresses[0] == addresses[1]
    value = makers[1].snapshot()
    value["device_traces"][0] = makers[0].entries
    value["segments"] += makers[0].snapshot()["segments"]
    trace = load(tmp_path, value)
    assert len(blocks_table(trace)) == 2
    assert not any("contradicts itself" in note for note in compute_coverage(trace).notes)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda entries: entries.append({**entries[1]}), "1 block was allocated at an address in use"),
        (lambda entries: entries.extend([{**entries[1], "action": "free_completed"}] * 2), "1 block was freed twice"),
        (
            lambda entries: entries.append({**entries[1], "action": "free_completed", "size": 5}),
            "1 block was freed with a different size",
        ),
        (lambda entries: entries[1].update(addr=99), "1 allocation is outside of all segments"),
        (
            lambda entries: entries[1].update(size=4),
            "1 live block has different sizes in the history and in its segment",
        ),
    ],
)
def test_contradictions_are_reported(tmp_path: Path, damage: Any, expected: str) -> None:
    maker = SnapshotMaker()
    maker.alloc(1000)
    value = maker.snapshot()
    damage(value["device_traces"][0])
    notes = compute_coverage(load(tmp_path, value)).notes
    assert any("contradicts itself" in note and expected in note for note in notes), notes
