"""Commands and windows on a large trace: recorded steps of the example GPT, repeated up to millions of events.

The section ``windows`` compares random windows of 1 % with the whole trace and measures how long they take to open. As
a lower bound for ``memtrace summary`` the same run reads the event columns that it needs and sums them up.

With ``--record-steps`` the trace is the recording of an operator-bound program, whose parts are larger, and only
windows are measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from windows import measure_windows

from memtrace.format.decode import device_names
from memtrace.format.manifest import read_manifest, write_manifest
from memtrace.format.part_writer import PART_ROWS, PartWriter
from memtrace.format.split import split_tables
from memtrace.trace import load

BATCH_ROWS = 1 << 14

COMMANDS = (
    "steps --from-events",
    "steps",
    "access",
    "leaks",
    "findings",
    "diff TRACE",
    "check --max-peak 1TiB",
    "stalls",
)

FLOOR = """
import sys, time, numpy as np, pyarrow.parquet as pq
from pathlib import Path
began = time.perf_counter()
for part in sorted(Path(sys.argv[1]).glob("events-*.parquet")):
    table = pq.read_table(part, columns=["elapsed_ns", "kind", "block_reference", "size"])
    kind = table["kind"].combine_chunks()
    sizes = table["size"].to_numpy()
    np.nancumsum(sizes)
print(time.perf_counter() - began)
"""


def record_base(folder: Path, steps: int) -> Path:
    sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
    import torch
    from gpt import GPT, synthetic_text, train_step

    import memtrace

    model = GPT(width=64, layers=4, length=32)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with memtrace.record(folder / "base.memtrace"):
        for _ in range(steps):
            train_step(model, optimizer, synthetic_text(4, 32))
    return folder / "base.memtrace" / "rank=0"


def record_operator_bound(folder: Path, steps: int) -> Path:
    from overhead import operator_bound

    import memtrace

    step = operator_bound()
    for name, count in (("base", 12), ("recorded", steps)):
        with memtrace.record(folder / f"{name}.memtrace"):
            for _ in range(count):
                step()
    return folder / "recorded.memtrace"


def tile(base: Path, target: Path, num_events: int, *, whole_tiles: bool = False) -> int:
    """Repeat the steps between the second and the last of ``base`` until there are that many events, in many parts.

    With ``whole_tiles`` every part but the first has the same number of repetitions.
    """
    target.mkdir(parents=True)
    recorded = load(base)
    tables = {name: recorded.arrow_table(name) for name in ("events", "ops", "spans", "labels", "names")}
    steps = tables["spans"].filter(pc.equal(pc.cast(tables["spans"]["kind"], pa.string()), "step"))
    starts = steps["start_ns"].to_numpy()
    low, high = int(starts[2]), int(starts[-1])
    time_ns = tables["events"]["time_ns"].to_numpy()
    first, last = np.searchsorted(time_ns, [low, high])
    head, body = tables["events"].slice(0, first), tables["events"].slice(first, last - first)
    block = pc.fill_null(body["block_id"], -1).to_numpy()
    # A block that is allocated in the body is a new one in every tile; older blocks are the same in all tiles.
    allocated = np.unique(block[np.isin(pc.cast(body["kind"], pa.string()).to_pylist(), ["alloc"])])
    num_older = int(pc.max(tables["events"]["block_id"]).as_py()) + 1
    new_number = np.full(num_older + 1, -1)
    new_number[allocated] = np.arange(len(allocated))
    kind = np.array(pc.cast(body["kind"], pa.string()).to_pylist())
    successor = successors(block, kind, pc.fill_null(body["size"], -1).to_numpy(), new_number)
    ops_start = tables["ops"]["start_ns"].to_numpy()
    ops_body = tables["ops"].filter(pa.array((ops_start >= low) & (ops_start < high)))
    num_ops = int(pc.max(tables["ops"]["op_id"]).as_py()) + 1
    spans_start = tables["spans"]["start_ns"].to_numpy()
    spans_body = tables["spans"].filter(pa.array((spans_start >= low) & (spans_start < high)))
    labels_block = tables["labels"]["block_id"].to_numpy()
    labels_body = tables["labels"].filter(pa.array(new_number[labels_block] >= 0))
    num_steps = len(starts) - 3
    num_tiles = -(-(num_events - len(head)) // len(body))
    devices = device_names([tables["events"]])
    writer = PartWriter(target, devices)

    def append(rows: dict[str, pa.Table]) -> None:
        starts = range(0, rows["events"].num_rows, BATCH_ROWS)
        for batch, columns in split_tables({**rows, "names": tables["names"]}, devices, starts):
            names = batch.pop("names", None)
            writer.append(batch if names is None or writer.num_events else {**batch, "names": names}, columns)
            if writer.rows_in_part >= PART_ROWS and not whole_tiles:
                writer.flush()

    append(
        {
            "events": head,
            "ops": tables["ops"].filter(pa.array(ops_start < low)),
            "spans": tables["spans"].filter(pa.array(spans_start < low)),
            "labels": tables["labels"].filter(pa.array(new_number[labels_block] < 0)),
        }
    )

    def shifted(table: pa.Table, column: str, values: np.ndarray) -> pa.Table:
        place = table.schema.get_field_index(column)
        mask = pc.is_null(table[column]).to_numpy()
        return table.set_column(
            place, table.schema.field(column), pa.array(values, table.schema.field(column).type, mask=mask)
        )

    for number in range(num_tiles):
        later = number * (high - low)

        def move(values: np.ndarray, number: int = number) -> np.ndarray:
            moved = num_older + number * len(allocated) + new_number[values]
            earlier = num_older + (number - 1) * len(allocated) + successor[values]
            kept = np.where((successor[values] >= 0) & (number > 0), earlier, values)
            return np.where(new_number[values] >= 0, moved, kept)

        rows = shifted(body, "time_ns", time_ns[first:last] + later)
        rows = shifted(rows, "block_id", move(block))
        ops = shifted(ops_body, "start_ns", ops_body["start_ns"].to_numpy() + later)
        spans = shifted(spans_body, "start_ns", spans_body["start_ns"].to_numpy() + later)
        append(
            {
                "events": shifted(rows, "op_id", pc.fill_null(body["op_id"], 0).to_numpy() + number * num_ops),
                "ops": shifted(ops, "op_id", ops_body["op_id"].to_numpy() + number * num_ops),
                "spans": shifted(spans, "index", pc.fill_null(spans_body["index"], 0).to_numpy() + number * num_steps),
                "labels": shifted(labels_body, "block_id", move(labels_body["block_id"].to_numpy())),
            }
        )
        if whole_tiles and (number + 1) % max(1, PART_ROWS // len(body)) == 0:
            writer.flush()
    writer.flush()
    manifest = read_manifest(base / "manifest.json")
    write_manifest(target, replace(manifest, num_events=writer.num_events, parts=writer.parts))
    return writer.num_events


def successors(block: np.ndarray, kind: np.ndarray, size: np.ndarray, new_number: np.ndarray) -> np.ndarray:
    """Return for each block that is older than the tiled steps and freed in them the one that they leave in its place.

    The next tile frees that one; otherwise every tile would free the same blocks again.
    """
    freed = np.flatnonzero((kind == "free") & (new_number[block] < 0))
    allocs = np.flatnonzero(kind == "alloc")
    left = allocs[~np.isin(block[allocs], block[kind == "free"])]
    result = np.full(len(new_number), -1)
    for num_bytes in np.unique(size[freed]):
        old, new = freed[size[freed] == num_bytes], left[size[left] == num_bytes]
        assert len(old) <= len(new), "the recorded steps are not steady"
        result[block[old]] = new_number[block[new[: len(old)]]]
    return result


def measured(command: list[str]) -> tuple[float, float]:
    """Seconds and the most resident MiB of a command."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        raise RuntimeError(f"{command} failed")
    return time.perf_counter() - began, usage.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=10_000_000)
    parser.add_argument("--only-windows", action="store_true", help="Skip the commands.")
    parser.add_argument("--record-steps", type=int, metavar="N", help="Record N operator-bound steps instead.")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.record_steps:
            trace = record_operator_bound(folder, arguments.record_steps)
            result["events"] = load(trace).num_rows("events")
            result["parts"] = len(list((trace / "rank=0").glob("events-*.parquet")))
        else:
            trace = folder / "tiled.memtrace"
            result["events"] = tile(record_base(folder, 34), trace / "rank=0", arguments.events)
        result["windows"] = measure_windows(trace, folder / "base.memtrace")
        if not arguments.only_windows and not arguments.record_steps:
            result |= measure_commands(trace)
    if arguments.json:
        print(json.dumps(result, indent=1))
        return
    for key, value in result.items():
        print(f"{key}:" if isinstance(value, dict) else f"{key}: {value:,.2f}")
        for inner, number in value.items() if isinstance(value, dict) else ():
            print(f"    {inner}: {number:,.3f}")


def measure_commands(trace: Path) -> dict[str, object]:
    """Seconds and memory of ``memtrace summary`` and of other commands."""
    floor = float(subprocess.check_output([sys.executable, "-c", FLOOR, str(trace / "rank=0")], text=True))
    program = str(Path(sys.executable).parent / "memtrace")
    seconds, memory = measured([program, "summary", str(trace)])
    result: dict[str, object] = {
        "summary_seconds": seconds,
        "summary_peak_mib": memory,
        "floor_seconds": floor,
        "summary_to_floor": seconds / floor,
    }
    for command in COMMANDS:
        seconds, memory = measured([program, *command.replace("TRACE", str(trace)).split(), str(trace)])
        result[f"{command}, seconds"], result[f"{command}, peak MiB"] = seconds, memory
    return result


if __name__ == "__main__":
    main()
