"""Parts on disk: keyframes against brute force, lost and damaged files, rings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memtrace
from memtrace.analysis.coverage import compute_coverage
from memtrace.analysis.summary import summarize
from memtrace.errors import TraceError
from memtrace.format.manifest import RecordingOptions, read_manifest, write_manifest
from memtrace.format.part_files import part_name
from memtrace.recording.ring import Ring
from tests.format.agreement import assert_agrees, end_of_part, random_starts
from tests.format.random_traces import RandomTrace, Rows, in_memory, on_disk


def rows_of(seed: int) -> Rows:
    rows = RandomTrace(seed).rows
    assert len(rows["events"]) > 10
    return rows


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_keyframe_has_the_live_blocks_and_their_operators(seed: int) -> None:
    rows = RandomTrace(seed).rows
    starts = random_starts(Random(seed), max(2, len(rows["events"])))
    returned_at = {op["op_id"]: op["start_ns"] + op["duration_ns"] for op in rows["ops"]}
    assert all(time > 0 for time in returned_at.values())
    with TemporaryDirectory() as folder:
        on_disk(rows, Path(folder) / "x", starts)
        for number, start in enumerate(starts):
            expected: dict[int, dict[str, object]] = {}
            for row in rows["events"][:start]:
                if row["kind"] in ("alloc", "baseline"):
                    expected[row["block_id"]] = row
                elif row["kind"] == "free":
                    del expected[row["block_id"]]
            live = pq.read_table(
                Path(folder) / "x" / "rank=0" / part_name("live", number), partitioning=None
            ).to_pylist()
            blocks = [row for row in live if row["block_id"] is not None]
            assert [row["block_id"] for row in blocks] == sorted(expected)
            for row in blocks:
                event = expected[row["block_id"]]
                assert [row.get(key) for key in ("time_ns", "size", "op_id")] == [
                    event.get(key) for key in ("time_ns", "size", "op_id")
                ]
                if row.get("op_name") is not None:
                    call = next(op for op in rows["ops"] if op["op_id"] == row["op_id"])
                    assert (row.get("op_module"), row.get("op_phase")) == (call["module"], call["phase"])


@pytest.mark.parametrize("table", ["events", "live", "ops", "names"])
def test_a_lost_file_is_an_error_that_names_it(table: str, tmp_path: Path) -> None:
    on_disk(rows_of(1), tmp_path / "x", [0, 5, 9])
    number = 0 if table == "names" else 1
    (tmp_path / "x" / "rank=0" / part_name(table, number)).unlink()
    with pytest.raises(TraceError, match=f"{part_name(table, number)} is missing"):
        memtrace.load(tmp_path / "x").names, memtrace.load(tmp_path / "x").ops


def test_a_lost_first_or_last_part_is_noticed(tmp_path: Path) -> None:
    for number in (0, 2):
        folder = tmp_path / str(number) / "rank=0"
        on_disk(rows_of(1), folder.parent, [0, 5, 9])
        for file in folder.glob(f"*-{number:05d}.parquet"):
            file.unlink()
        with pytest.raises(TraceError, match=f"-{number:05d}.parquet is missing"):
            memtrace.load(folder.parent)


def test_a_ring_deletes_parts_before_its_last_steps(tmp_path: Path) -> None:
    rows = rows_of(3)
    starts = [0, 6, 12, 18]
    on_disk(rows, tmp_path / "x", starts)
    folder, times = tmp_path / "x" / "rank=0", [row["time_ns"] for row in rows["events"]]
    ring = Ring(folder, last_steps=1)
    ring.step_began(times[12])
    ring.step_began(times[18] + 10**6)  # the step that has just begun
    ends = [*starts[1:], len(times)]
    dropped = [
        ring.part_written(number, end - start, max(times[:end]))
        for number, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]
    assert dropped == [None, 0, 1, None]
    assert ring.dropped_events == 12
    assert not list(folder.glob("[!n]*-00000.parquet")) and (folder / "names-00000.parquet").exists()


def test_a_ring_trace_begins_with_the_live_set(tmp_path: Path) -> None:
    rows, starts = rows_of(3), [0, 6, 12, 18]
    on_disk(rows, tmp_path / "x", starts)
    folder = tmp_path / "x" / "rank=0"
    ring = Ring(folder, last_steps=1)
    for number in (0, 1):
        ring._delete(number)
    manifest = read_manifest(folder / "manifest.json")
    # The process died before it wrote a manifest without the deleted parts.
    write_manifest(folder, replace(manifest, finished=False, options=RecordingOptions(last_steps=1)))
    trace, whole = memtrace.load(tmp_path / "x"), in_memory(rows)
    assert_agrees(trace, whole, 12, len(rows["events"]))
    assert compute_coverage(trace).num_events == len(rows["events"]) - 12
    assert summarize(trace).devices
    window = trace.window(start_ns=rows["events"][20]["time_ns"])
    first = next(i for i, row in enumerate(rows["events"]) if row["time_ns"] >= rows["events"][20]["time_ns"])
    assert_agrees(window, in_memory(rows, end_of_part(starts, len(rows["events"]), 10**9)), first, len(rows["events"]))


def test_a_damaged_part_is_an_error_that_names_it(tmp_path: Path) -> None:
    on_disk(rows_of(1), tmp_path / "x", [0, 5, 9])
    (tmp_path / "x" / "rank=0" / "events-00001.parquet").write_bytes(b"PAR1 nonsense PAR1")
    with pytest.raises(TraceError, match=r"events-00001.parquet is damaged"):
        memtrace.load(tmp_path / "x").columns("events", "time_ns")
