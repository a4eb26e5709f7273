"""Recordings of distributed jobs over gloo: one trace per job, with aligned clocks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import memtrace
from memtrace.analysis import compute_coverage, steps_table
from memtrace.analysis.blocks import CATEGORY, blocks
from memtrace.analysis.ranks import compare_ranks
from memtrace.format.manifest import RankCoordinate
from tests.recording.helpers import DATA_PARALLEL_PARAMETER_BYTES as PARAMETER_BYTES
from tests.recording.helpers import PROGRAMS, free_port


def run_job(program: str, trace: Path, world_size: int) -> list[int]:
    """Run a job of tests/programs/ranks.py and return the exit codes of its ranks."""
    command = [sys.executable, PROGRAMS / "ranks.py", program, trace, str(world_size), str(free_port())]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)
    assert result.returncode == 0, result.stderr[-3000:]
    exit_codes: list[int] = json.loads(result.stdout.splitlines()[-1])
    return exit_codes


def test_every_rank_records_into_its_folder_of_one_trace(data_parallel_job: Path) -> None:
    trace = memtrace.load(data_parallel_job)
    assert trace.ranks == (0, 1, 2, 3)
    for number in trace.ranks:
        manifest = trace.rank(number).manifest
        assert (manifest.rank, manifest.world_size, manifest.finished) == (number, 4, True)
        assert len(steps_table(trace.rank(number))) == 4


def test_clock_offsets_are_those_of_the_wall_clock(data_parallel_job: Path) -> None:
    """On one machine all ranks have the same wall clock, which shows when each recording started."""
    trace = memtrace.load(data_parallel_job)
    starts = [trace.rank(number).manifest.t0_epoch_ns for number in trace.ranks]
    for number in trace.ranks[1:]:
        clock = trace.rank(number).manifest.clock
        error_ns = abs(clock.offset_ns - (starts[number] - starts[0]))
        assert error_ns <= clock.error_ns + 200_000  # t0_epoch_ns is not exact either: it is read from two clocks
        assert clock.error_ns < 1_000_000_000  # half a round trip, on a machine that may be busy
        assert clock.drift_ns is not None and abs(clock.drift_ns) < 1_000_000_000


def test_a_killed_rank_does_not_damage_the_traces_of_the_others(tmp_path: Path) -> None:
    """Rank 1 is killed with SIGKILL; the connections of the other ranks break."""
    path = tmp_path / "job.memtrace"
    exit_codes = run_job("killed", path, 4)
    assert exit_codes[1] == -9
    trace = memtrace.load(path)
    assert trace.ranks == (0, 1, 2, 3)
    assert not compute_coverage(trace.rank(1)).finished
    assert len(steps_table(trace.rank(1))) >= 1
    for number in (0, 2, 3):
        coverage = compute_coverage(trace.rank(number))
        assert coverage.finished and "left the recorded block" in (coverage.stop_reason or "")
    comparison = compare_ranks(trace)
    assert all(row.peak_bytes for row in comparison.ranks)
    assert comparison.rank_to_inspect == 1
    assert "ended before the others" in comparison.reason


def test_sharded_tensors_are_labelled(tmp_path: Path) -> None:
    """With FSDP2, each of two ranks holds half of the parameters and of the optimizer state."""
    assert run_job("fully_sharded", tmp_path / "job.memtrace", 2) == [0, 0]
    trace = memtrace.load(tmp_path / "job.memtrace")
    total_bytes = {"parameter": 0, "optimizer_state": 0}
    for number in trace.ranks:
        assert trace.rank(number).manifest.coordinates == (RankCoordinate("dp_shard", number, 2),)
        table = blocks(trace.rank(number))
        gradients = table.size[table.category == CATEGORY["gradient"]]
        assert gradients.sum() == 4 * PARAMETER_BYTES // 2  # four steps
        row = compare_ranks(trace).ranks[number]
        for category in total_bytes:
            total_bytes[category] += row.bytes_by_category[category]
        # Only communication buffers at the peak have no category.
        assert row.bytes_by_category.get("unknown", 0) < 0.2 * row.peak_bytes
    assert total_bytes["parameter"] == PARAMETER_BYTES
    # Two moments of every parameter, and on each rank a step count of 4 bytes for each of the 4 parameters.
    assert total_bytes["optimizer_state"] == 2 * PARAMETER_BYTES + 2 * 4 * 4


def test_processes_that_join_a_job_while_they_record_write_one_trace(tmp_path: Path) -> None:
    """The second job moves the trace of the first one aside."""
    path = tmp_path / "job.memtrace"
    for _ in range(2):
        assert run_job("joining_late", path, 3) == [0, 0, 0]
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["job-old1.memtrace", "job.memtrace"]
    for folder in tmp_path.iterdir():
        trace = memtrace.load(folder)
        assert trace.ranks == (0, 1, 2)
        manifests = [trace.rank(number).manifest for number in trace.ranks]
        processes = [(manifest.command[1], manifest.rank, manifest.world_size) for manifest in manifests]
        assert processes == [("0", 0, 3), ("1", 1, 3), ("2", 2, 3)]
        # The alignment has started; on a busy machine a job this short may end before it is complete.
        assert all(manifest.finished and manifest.clock.reference_rank == 0 for manifest in manifests)
