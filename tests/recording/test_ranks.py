"""Comparison of the ranks of one job: recorded over gloo, imported, and made by hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from memtrace.cli import cli

import memtrace
from memtrace.analysis import compute_coverage
from memtrace.analysis.ranks import compare_ranks, ranks_table
from memtrace.errors import TraceError
from memtrace.format.manifest import Manifest
from memtrace.trace import Trace
from tests.builders import event, op, step, trace_of, with_manifest
from tests.recording.helpers import DATA_PARALLEL_PARAMETER_BYTES

SNAPSHOTS = Path(__file__).resolve().parents[3] / "shared" / "data" / "snapshots"


def test_the_rank_with_the_largest_batch_is_pointed_out(data_parallel_job: Path) -> None:
    comparison = compare_ranks(memtrace.load(data_parallel_job))
    assert comparison.missing_ranks == ()
    assert [row.bytes_by_category["parameter"] for row in comparison.ranks] == [DATA_PARALLEL_PARAMETER_BYTES] * 4
    assert (comparison.rank_to_inspect, comparison.slowest_rank) == (2, 2)
    peaks = [row.peak_bytes for row in comparison.ranks]
    assert peaks[0] == peaks[1] == peaks[3] < peaks[2]
    assert comparison.imbalance == pytest.approx(4 * peaks[2] / sum(peaks))
    shown = CliRunner().invoke(cli, ["ranks", str(data_parallel_job)])
    assert shown.exit_code == 0, shown.output
    assert "Inspect rank 2 first" in shown.output
    given = json.loads(CliRunner().invoke(cli, ["ranks", str(data_parallel_job), "--json"]).output)
    assert [row["peak_bytes"] for row in given["ranks"]] == peaks
    assert given["rank_to_inspect"] == 2
    assert list(ranks_table(memtrace.load(data_parallel_job))["peak_bytes"]) == peaks


def job(*sources: Trace, world_size: int | None = None) -> Trace:
    numbered = [
        with_manifest(source, rank=number, world_size=world_size or len(sources))
        for number, source in enumerate(sources)
    ]
    return Trace(None, {number: trace._source for number, trace in enumerate(numbered)})


def rank_of(peak: int, works: int = 10, **more: Any) -> Trace:
    events = [event("alloc", 0, 5, peak, op_id=0), event("free", 0, 90, peak), *more.pop("events", [])]
    return trace_of(
        events=events,
        ops=[op(0, "forward", name=0) | {"start_ns": 2, "duration_ns": works}],
        names=[{"id": 0, "kind": "operator", "text": "aten::mm"}],
        spans=[step(0, 0, 100)],
    )


def test_ranks_with_equal_peaks_have_no_slowest_rank() -> None:
    comparison = compare_ranks(job(rank_of(100), rank_of(102), rank_of(101)))
    assert (comparison.rank_to_inspect, comparison.slowest_rank) == (1, None)
    assert "no rank stands out" in comparison.reason
    assert comparison.imbalance == pytest.approx(102 / 101)


def test_the_slowest_rank_computes_longest_per_step() -> None:
    comparison = compare_ranks(job(rank_of(100), rank_of(100, works=30), rank_of(100)))
    assert [row.compute_ns for row in comparison.ranks] == [10, 30, 10]
    assert comparison.slowest_rank == comparison.rank_to_inspect == 1


def test_the_rank_that_ended_first_is_to_blame() -> None:
    """The agent of a job kills the other ranks when one dies."""
    killed, culprit = (with_manifest(rank_of(100), finished=False, t0_epoch_ns=start) for start in (2000, 1000))
    comparison = compare_ranks(job(killed, rank_of(100), culprit))
    assert comparison.rank_to_inspect == 2
    assert comparison.ranks[0].ended_epoch_ns - comparison.ranks[2].ended_epoch_ns == 1000


def test_out_of_memory_is_more_important_than_a_killed_rank_or_imbalance() -> None:
    dead = with_manifest(rank_of(100), finished=False)
    oom = rank_of(50, events=[event("oom", None, 95, 1000)])
    assert compare_ranks(job(rank_of(100), dead, oom, rank_of(900))).rank_to_inspect == 2
    assert compare_ranks(job(rank_of(100), dead, rank_of(900))).rank_to_inspect == 1
    assert compare_ranks(job(rank_of(100), rank_of(900))).rank_to_inspect == 1


def test_a_rank_without_a_manifest_is_missing(data_parallel_job: Path, tmp_path: Path) -> None:
    """Its disk was full, or it died before its manifest was written."""
    path = tmp_path / "job.memtrace"
    shutil.copytree(data_parallel_job, path)
    (path / "rank=2" / "manifest.json").unlink()
    comparison = compare_ranks(memtrace.load(path))
    assert [row.rank for row in comparison.ranks] == [0, 1, 3]
    assert comparison.missing_ranks == (2,)


def test_a_rank_with_a_truncated_manifest_is_left_out(data_parallel_job: Path, tmp_path: Path) -> None:
    path = tmp_path / "job.memtrace"
    shutil.copytree(data_parallel_job, path)
    manifest = path / "rank=2" / "manifest.json"
    manifest.write_text(manifest.read_text()[:40])
    trace = memtrace.load(path)
    assert trace.ranks == (0, 1, 3)
    assert any("rank 2 is left out" in note and str(manifest) in note for note in compute_coverage(trace.rank(1)).notes)
    comparison = compare_ranks(trace)
    assert [row.rank for row in comparison.ranks] == [0, 1, 2, 3] and comparison.missing_ranks == ()
    assert str(manifest) in (comparison.ranks[2].problem or "") and comparison.ranks[2].peak_bytes is None
    assert comparison.rank_to_inspect in trace.ranks
    shown = " ".join(CliRunner().invoke(cli, ["ranks", str(path)]).output.split())
    assert "Rank 2: " in shown and "cannot be read" in shown
    checked = CliRunner().invoke(cli, ["check", str(path), "--max-peak", "1TiB"])
    assert checked.exit_code == 1 and "cannot be read" in str(checked.exception)
    for wrong in (lambda: trace.rank(2), lambda: memtrace.load(path / "rank=2")):
        with pytest.raises(TraceError, match="cannot be read"):
            wrong()


def test_missing_and_damaged_ranks_are_listed() -> None:
    class Damaged:
        def __init__(self) -> None:
            self.manifest = Manifest(world_size=4)

        def num_rows(self, table: str) -> int:
            return 1

        def read(self, table: str, columns: tuple[str, ...]) -> list[Any]:
            raise TraceError("events-00000.parquet is damaged")

        def notes(self) -> list[str]:
            return []

    good = with_manifest(rank_of(100), world_size=4)
    comparison = compare_ranks(Trace(None, {0: good._source, 3: Damaged()}))
    assert comparison.missing_ranks == (1, 2)
    assert comparison.ranks[0].peak_bytes == 100
    assert comparison.ranks[1].peak_bytes is None
    assert "damaged" in (comparison.ranks[1].problem or "")


def test_several_snapshots_are_compared_as_ranks() -> None:
    files = [SNAPSHOTS / name for name in ("complete_small.pickle", "synthetic.pickle",
                                           "transformer_training_step.pickle", "expandable_segments.pickle")]  # fmt: skip
    if not all(file.is_file() for file in files):
        pytest.skip("the snapshots of ../shared/data are not here")
    shown = CliRunner().invoke(cli, ["ranks", *map(str, files), "--json"])
    assert shown.exit_code == 0, shown.output
    comparison = json.loads(shown.output)
    alone = [compare_ranks(memtrace.load(file)).ranks[0].peak_bytes for file in files]
    assert [row["peak_bytes"] for row in comparison["ranks"]] == alone
    assert comparison["rank_to_inspect"] == alone.index(max(alone))
