"""``memtrace summary`` of traces of up to 1,000,000,000 events: time, memory, and speed-up by worker processes.

The traces repeat recorded steps of the example GPT (``benchmarks/analysis.py``): a part of whole steps is written once,
and again with later numbers. Memory is the resident memory of the command and its workers together, sampled while it
runs. Modules are compiled before, as they are where a package is installed.
"""

from __future__ import annotations

import argparse
import compileall
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import memtrace.cli
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from analysis import record_base, tile
from serve import resident_mib

from memtrace.format.manifest import read_manifest, write_manifest
from memtrace.format.part_files import ORDER_KEY, PartFiles, part_name
from memtrace.format.part_writer import PART_ROWS, encode_part
from memtrace.format.schema import arrow_schema
from memtrace.trace import load

TEMPLATE = 3
"""The part that is repeated: the live set is steady from the second one on."""
NUM_STEPS = 20
"""Recorded steps: so many events as a part of a recording has."""
TABLES = ("live", "events", "ops", "spans", "labels")
SAMPLE_SECONDS = 0.1


@dataclass(frozen=True)
class Shifts:
    """By how much numbers grow from one part to the next."""

    num_older: int
    """Blocks with smaller numbers are the same in all parts."""
    time_ns: int
    block_id: int
    op_id: int
    step: int


def read_part(folder: PartFiles, table: str, number: int) -> pa.Table:
    rows = folder.read(table, number, tuple(arrow_schema(table).names))
    return rows.cast(arrow_schema(table)).unify_dictionaries()


def largest(rows: pa.Table, column: str) -> int:
    return int(pc.max(rows[column]).as_py())


def find_shifts(base: Path, template: PartFiles) -> Shifts:
    """Compare two neighboring parts."""

    def difference(table: str, column: str) -> int:
        earlier, later = (read_part(template, table, number) for number in (TEMPLATE - 1, TEMPLATE))
        return largest(later, column) - largest(earlier, column)

    return Shifts(
        num_older=largest(load(base).arrow_table("events"), "block_id") + 1,
        time_ns=difference("events", "time_ns"),
        block_id=difference("events", "block_id"),
        op_id=difference("ops", "op_id"),
        step=difference("spans", "index"),
    )


def shifted(table: pa.Table, column: str, change: np.ndarray | int) -> pa.Table:
    place = table.schema.get_field_index(column)
    values = pc.add(table[column].combine_chunks(), pa.array(np.broadcast_to(change, len(table)).astype(np.int64)))
    return table.set_column(place, table.schema.field(column), pc.cast(values, table.schema.field(column).type))


def shift_part(name: str, table: pa.Table, shifts: Shifts, times: int) -> pa.Table:
    """The rows of a part that comes ``times`` parts later."""
    if name in ("events", "labels", "live"):
        block = pc.fill_null(table["block_id"], -1).to_numpy()
        moves = (block >= shifts.num_older) * times
        table = shifted(table, "block_id", moves * shifts.block_id)
    if name == "events":
        table = shifted(shifted(table, "time_ns", times * shifts.time_ns), "op_id", times * shifts.op_id)
    elif name == "live":
        for column, change in (("time_ns", shifts.time_ns), ("order_ns", shifts.time_ns), ("op_id", shifts.op_id),
                               ("op_start_ns", shifts.time_ns), ("step", shifts.step)):  # fmt: skip
            table = shifted(table, column, moves * change)
    elif name == "ops":
        table = shifted(shifted(table, "op_id", times * shifts.op_id), "start_ns", times * shifts.time_ns)
    elif name == "spans":
        table = shifted(shifted(table, "index", times * shifts.step), "start_ns", times * shifts.time_ns)
    return table


def write_later_parts(template: Path, target: Path, shifts: Shifts, numbers: range) -> None:
    files = PartFiles(template)
    tables = {name: read_part(files, name, TEMPLATE) for name in TABLES}
    newest, order_ns = largest(read_part(files, "events", TEMPLATE - 1), "block_id"), files.order_ns(TEMPLATE)
    for number in numbers:
        times = number - TEMPLATE
        rows = {name: shift_part(name, table, shifts, times) for name, table in tables.items()}
        keyframe = {name: pc.fill_null(rows["live"][name], -1).to_numpy() for name in ("block_id", "address")}
        for name in TABLES:
            order = {ORDER_KEY: str(order_ns + times * shifts.time_ns).encode()} if name == "live" else {}
            content = encode_part(name, rows[name], newest + times * shifts.block_id, keyframe, order)
            (target / part_name(name, number)).write_bytes(content)


def repeat(base: Path, target: Path, num_events: int, workers: int) -> int:
    """Write a trace of about so many events; return how many."""
    template = target.parent / "template" / "rank=0"
    if not template.exists():
        # A part has whole repetitions, at least one.
        tile(base, template, (TEMPLATE + 2) * max(PART_ROWS, load(base).num_rows("events")), whole_tiles=True)
    files = PartFiles(template)
    shifts = find_shifts(base, files)
    target.mkdir(parents=True)
    for path in template.iterdir():
        if "-" not in path.name or path.name.startswith("names") or int(path.stem[-5:]) <= TEMPLATE:
            shutil.copy(path, target / path.name)
    rows = [files.num_rows("events", number) for number in range(TEMPLATE + 1)]
    num_parts = TEMPLATE + 1 + max(0, -(-(num_events - sum(rows)) // rows[-1]))
    later = range(TEMPLATE + 1, num_parts)
    size = -(-len(later) // max(1, 8 * workers)) or 1
    with ProcessPoolExecutor(workers) as pool:
        chunks = [later[first : first + size] for first in range(0, len(later), size)]
        for each in [pool.submit(write_later_parts, template, target, shifts, chunk) for chunk in chunks]:
            each.result()
    total = sum(rows) + len(later) * rows[-1]
    manifest = read_manifest(template / "manifest.json")
    parts = {**(manifest.parts or {}), **dict.fromkeys(TABLES, ((0, num_parts - 1),))}
    write_manifest(target, replace(manifest, num_events=total, parts=parts))
    return total


@dataclass(frozen=True)
class Measurement:
    """What ``memtrace summary`` took."""

    seconds: float
    cpu_seconds: float
    """Processor time of the command and its workers."""
    mib: float
    """The most resident memory of the command and its workers together."""
    answer: object
    """What ``--json`` prints."""


def cpu_seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measured(trace: Path, workers: int) -> Measurement:
    """Run ``memtrace summary`` on a trace."""
    command = [sys.executable, "-m", "memtrace.cli", "summary", str(trace), "--workers", str(workers), "--json"]
    began, began_cpu, highest = time.perf_counter(), cpu_seconds_of_children(), 0.0
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output)
        while process.poll() is None:
            with suppress(OSError):  # it has just ended
                highest = max(highest, resident_mib(process.pid))
            time.sleep(SAMPLE_SECONDS)
        seconds = time.perf_counter() - began
        if process.returncode:
            raise RuntimeError(f"{command} failed")
        output.seek(0)
        return Measurement(seconds, cpu_seconds_of_children() - began_cpu, highest, json.load(output))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, nargs="+", default=[10_000_000, 100_000_000, 1_000_000_000])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--folder", type=Path, help="Folder for the traces (7 GB for 1,000,000,000 events).")
    parser.add_argument("--writers", type=int, default=2, help="Processes that write the traces.")
    arguments = parser.parse_args()
    for package in (memtrace, memtrace.cli):
        compileall.compile_dir(Path(package.__file__).parent, quiet=1)
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        base = record_base(folder, NUM_STEPS)
        for num_events in arguments.events:
            trace = folder / "long.memtrace"
            began = time.perf_counter()
            total = repeat(base, trace / "rank=0", num_events, arguments.writers)
            size = sum(path.stat().st_size for path in (trace / "rank=0").iterdir())
            print(f"{total:,} events, {size / total:.2f} bytes each, written in {time.perf_counter() - began:,.0f} s",
                  flush=True)  # fmt: skip
            runs: list[Measurement] = []
            for workers in arguments.workers:
                run = measured(trace, workers)
                runs.append(run)
                print(f"    workers {workers}: {run.seconds:,.2f} s ({runs[0].seconds / run.seconds:.2f}x), "
                      f"processors {run.cpu_seconds:,.2f} s, {total / run.cpu_seconds / 1e6:.2f} M events/s and core, "
                      f"peak {run.mib:,.0f} MiB", flush=True)  # fmt: skip
            if any(run.answer != runs[0].answer for run in runs):
                raise RuntimeError("the answers differ")
            shutil.rmtree(trace)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
