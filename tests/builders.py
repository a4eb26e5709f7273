"""Small traces made by hand: a list of rows becomes a Trace."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from memtrace.format import schema
from memtrace.format.manifest import FileCoverage, Manifest
from memtrace.trace import Trace


def trace_of(**tables: list[dict[str, Any]]) -> Trace:
    """A single-rank trace of tables as lists of rows; columns left out are null, names get ids of their own."""
    for name, rows in tables.items():
        unknown = {key for row in rows for key in row} - {column.name for column in schema.TABLES[name]}
        assert not unknown, f"not columns of {name}: {unknown}"
    made = {
        name: pa.Table.from_pylist(
            [{column.name: row.get(column.name) for column in schema.TABLES[name]} for row in rows],
            schema=schema.arrow_schema(name),
        )
        for name, rows in tables.items()
    }
    return Trace.from_tables(Manifest(coverage=FileCoverage(lost_events=0)), made)


def with_manifest(trace: Trace, **changes: Any) -> Trace:
    """Return a single-rank trace in memory with another manifest."""
    manifest = replace(trace.manifest, **changes)
    return Trace(trace.path, {manifest.rank: trace._source.with_manifest(manifest)}, trace.unreadable)


def event(kind: str, block: int | None, time: int, size: int | None = None, **more: Any) -> dict[str, Any]:
    row = {"kind": kind, "block_id": block, "time_ns": time, "size": size, "device": "cpu", **more}
    if size is not None and "allocated_size" not in more:
        row["allocated_size"] = size
    return row


def op(number: int, phase: str, **more: Any) -> dict[str, Any]:
    return {"op_id": number, "phase": phase, "start_ns": 0, "duration_ns": 1, "recompute": False, **more}


def step(index: int, start: int, duration: int) -> dict[str, Any]:
    return {"kind": "step", "index": index, "start_ns": start, "duration_ns": duration}


def copied_job(recorded: Path, folder: Path, num_ranks: int) -> Path:
    """A trace of many ranks: copies of the only rank of a recorded trace."""
    for rank in range(num_ranks):
        target = folder / f"rank={rank}"
        shutil.copytree(recorded / "rank=0", target)
        manifest = json.loads((target / "manifest.json").read_text())
        (target / "manifest.json").write_text(json.dumps({**manifest, "rank": rank, "world_size": num_ranks}))
    return folder
