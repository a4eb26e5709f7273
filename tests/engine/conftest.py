from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from memtrace.engine.processes import Processes
from memtrace.format.manifest import write_manifest
from memtrace.format.schema import TABLES
from memtrace.format.split import write_parts
from tests.analysis.test_by_part import rows_with_segments
from tests.format.agreement import random_starts
from tests.format.random_traces import manifest_of, tables_of
from tests.pipeline.test_recorded_actions import unit_time_trace


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    with Processes(2) as runner:
        yield runner


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of three ranks, each a trace of several parts."""
    folder = tmp_path_factory.mktemp("engine") / "job.memtrace"
    for rank in range(3):
        rows = rows_with_segments(rank, 6)
        (folder / f"rank={rank}").mkdir(parents=True)
        starts = random_starts(Random(rank), len(rows["events"]))
        parts = write_parts(tables_of(rows), folder / f"rank={rank}", starts)
        manifest = replace(manifest_of(rows), parts=parts, rank=rank, world_size=3, num_events=len(rows["events"]))
        write_manifest(folder / f"rank={rank}", manifest)
    return folder


@pytest.fixture(scope="session")
def pipeline_job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of four pipeline stages that run 1F1B."""
    folder, job = tmp_path_factory.mktemp("pipeline") / "job.memtrace", unit_time_trace("1f1b", 4, 8, steps=2)
    for rank in job.ranks:
        trace = job.rank(rank)
        (folder / f"rank={rank}").mkdir(parents=True)
        parts = write_parts(
            {table: trace.arrow_table(table) for table in TABLES if table != "live"}, folder / f"rank={rank}"
        )
        manifest = replace(trace.manifest, parts=parts, rank=rank, world_size=4, num_events=trace.num_rows("events"))
        write_manifest(folder / f"rank={rank}", manifest)
    return folder


@pytest.fixture
def damaged(tmp_path: Path) -> Callable[[Path, int], Path]:
    """A function that copies a job and damages the events of one of its ranks."""

    def damage(job: Path, rank: int) -> Path:
        copy = tmp_path / job.name
        shutil.copytree(job, copy)
        (copy / f"rank={rank}" / "events-00000.parquet").write_bytes(b"PAR1 but not for long")
        return copy

    return damage
