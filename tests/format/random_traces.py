"""Small random traces with everything that windows have to carry: steps, phases, labels, accesses, segments."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa

from memtrace.format import schema
from memtrace.format.manifest import FileCoverage, Manifest, write_manifest
from memtrace.format.split import write_parts
from memtrace.trace import Trace, load
from tests.builders import event

PHASE_NAMES = ("forward", "backward", "optimizer")
Rows = dict[str, list[dict[str, Any]]]


class RandomTrace:
    """Builds the rows of a trace event by event. Times are in small disorder, as between threads."""

    def __init__(self, seed: int, num_steps: int = 4, *, accesses: bool = True) -> None:
        self._random = Random(seed)
        self._accesses = accesses
        self._time = 0
        self._live: list[dict[str, Any]] = []
        self._ranges: list[tuple[int, int]] = []
        self._num_blocks = self._num_ops = 0
        self.rows: Rows = {name: [] for name in ("events", "ops", "spans", "labels")}
        self.rows["names"] = [{"id": i, "kind": "range", "text": text} for i, text in enumerate(PHASE_NAMES)]
        self._events_outside_ops()
        for number in range(num_steps):
            start = self._tick()
            for name in range(len(PHASE_NAMES)):
                begin = self._tick()
                for _ in range(self._random.randint(0, 4)):
                    self._operator(PHASE_NAMES[name])
                self._span("phase", begin, name=name)
                self._events_outside_ops()
            self._span("step", start, index=number)
            if self._random.random() < 0.5:
                self._events_outside_ops()

    def _tick(self) -> int:
        self._time += self._random.randint(1, 3)
        return self._time

    def _span(self, kind: str, start: int, **more: Any) -> None:
        end = self._tick()
        self.rows["spans"].append({"kind": kind, "start_ns": start, "duration_ns": end - start, **more})

    def _event(self, kind: str, block: int | None, size: int | None = None, **more: Any) -> dict[str, Any]:
        time = self._tick() - self._random.choice((0, 0, 0, 2))
        row = event(kind, block, max(time, 0), size, **{"device": "cpu", **more})
        self.rows["events"].append(row)
        return row

    def _begin(self, kind: str, op: int | None) -> None:
        device = self._random.choice(("cpu", "cpu", "cuda:0"))
        row = self._event(kind, self._num_blocks, self._random.randint(1, 999), op_id=op, device=device)
        self._live.append(row)
        self._num_blocks += 1
        for _ in range(self._random.choice((0, 0, 0, 1, 2))):
            category = self._random.choice(("parameter", "gradient", "input", None))
            name = self._random.choice((None, 50 + row["block_id"]))
            self.rows["labels"].append({"block_id": row["block_id"], "category": category, "name": name})

    def _free(self, op: int | None) -> None:
        if self._live:
            row = self._live.pop(self._random.randrange(len(self._live)))
            self._event("free", row["block_id"], row["size"], op_id=op, device=row["device"])

    def _access(self, op: int | None) -> None:
        if self._live and self._accesses:
            row = self._random.choice(self._live)
            self._event(self._random.choice(("read", "read", "write")), row["block_id"], op_id=op, device=row["device"])

    def _operator(self, phase: str) -> None:
        op, start = self._num_ops, self._tick()
        self._num_ops += 1
        for _ in range(self._random.randint(1, 5)):
            action = self._random.random()
            if action < 0.35:
                self._begin("alloc", op)
            elif action < 0.55:
                self._free(op)
            elif action < 0.6:
                self._segment()
            else:
                self._access(op)
        call = {
            "op_id": op,
            "start_ns": start,
            "duration_ns": self._tick() - start,
            "module": self._random.choice((7, 8)),
        }
        call |= {"name": 9, "stack": self._random.choice((None, 11)), "recompute": self._random.random() < 0.1}
        call["phase"] = phase if self._random.random() < 0.85 else self._random.choice((None, "other"))
        self.rows["ops"].append(call)

    def _segment(self) -> None:
        if self._ranges and self._random.random() < 0.4:
            start, size = self._ranges.pop(self._random.randrange(len(self._ranges)))
            if size >= 20 and self._random.random() < 0.5:
                self._ranges += [(start, size // 2)]
                start, size = start + size // 2, size - size // 2
            kind = "segment_unmap"
        else:
            start, size, kind = 1000 * self._time, self._random.randint(10, 99), "segment_map"
            self._ranges.append((start, size))
        self._event(kind, None, size, address=start, device="cuda:0")

    def _events_outside_ops(self) -> None:
        for _ in range(self._random.randint(0, 3)):
            action = self._random.random()
            if action < 0.3:
                self._begin("baseline", None)
            elif action < 0.6:
                self._begin("alloc", None)
            elif action < 0.8:
                self._free(None)
            else:
                self._access(None)


def tables_of(rows: Rows) -> dict[str, pa.Table]:
    """Return the rows as Arrow tables."""
    return {
        name: pa.Table.from_pylist(
            [{column.name: row.get(column.name) for column in schema.TABLES[name]} for row in table],
            schema=schema.arrow_schema(name),
        )
        for name, table in rows.items()
    }


def manifest_of(rows: Rows) -> Manifest:
    """Return a manifest that says whether the rows have accesses."""
    has_accesses = any(row["kind"] in ("read", "write") for row in rows["events"])
    return Manifest(coverage=FileCoverage(lost_events=0, has_accesses=has_accesses))


def in_memory(rows: Rows, num_events: int | None = None, manifest: Manifest | None = None) -> Trace:
    """Return a trace of the first ``num_events`` events."""
    return Trace.from_tables(manifest or manifest_of(rows), tables_of({**rows, "events": rows["events"][:num_events]}))


def on_disk(rows: Rows, folder: Path, starts: list[int]) -> Trace:
    """Return a trace in parts that begin at some rows of events."""
    (folder / "rank=0").mkdir(parents=True)
    parts = write_parts(tables_of(rows), folder / "rank=0", starts)
    write_manifest(folder / "rank=0", replace(manifest_of(rows), parts=parts))
    return load(folder)
