"""``memtrace summary`` and other commands on a large trace: a recorded step of the example GPT, tiled to millions.

Printed beside it, from the same run: reading the event columns it needs and a running sum, alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

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
    table = pq.read_table(part, columns=["time_ns", "kind", "block_id", "size"])
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


def tile(base: Path, target: Path, events: int) -> int:
    """Repeat the steps between the first and the last of ``base`` until there are that many events."""
    target.mkdir(parents=True)
    tables = {
        name: pq.read_table(sorted(base.glob(f"{name}-*.parquet")))
        for name in ("events", "ops", "spans", "labels", "names")
    }
    steps = tables["spans"].filter(pc.equal(pc.cast(tables["spans"]["kind"], pa.string()), "step"))
    starts = steps["start_ns"].to_numpy()
    low, high = int(starts[2]), int(starts[-1])
    time_ns = tables["events"]["time_ns"].to_numpy()
    first, last = np.searchsorted(time_ns, [low, high])
    head, body = tables["events"].slice(0, first), tables["events"].slice(first, last - first)
    block = pc.fill_null(body["block_id"], -1).to_numpy()
    # A block that is made in the body is a new one in every tile; older ones are the same in all.
    made = np.unique(block[np.isin(pc.cast(body["kind"], pa.string()).to_pylist(), ["alloc"])])
    stays = int(pc.max(tables["events"]["block_id"]).as_py()) + 1
    new_number = np.full(stays + 1, -1)
    new_number[made] = np.arange(len(made))
    ops_start = tables["ops"]["start_ns"].to_numpy()
    ops_body = tables["ops"].filter(pa.array((ops_start >= low) & (ops_start < high)))
    num_ops = int(pc.max(tables["ops"]["op_id"]).as_py()) + 1
    spans_start = tables["spans"]["start_ns"].to_numpy()
    spans_body = tables["spans"].filter(pa.array((spans_start >= low) & (spans_start < high)))
    labels_block = tables["labels"]["block_id"].to_numpy()
    labels_body = tables["labels"].filter(pa.array(new_number[labels_block] >= 0))
    num_steps = len(starts) - 3
    tiles = -(-(events - len(head)) // len(body))
    kept_head = {
        "events": head,
        "ops": tables["ops"].filter(pa.array(ops_start < low)),
        "names": tables["names"],
        "spans": tables["spans"].filter(pa.array(spans_start < low)),
        "labels": tables["labels"].filter(pa.array(new_number[labels_block] < 0)),
    }
    writers = {
        name: pq.ParquetWriter(target / f"{name}-00000.parquet", tables[name].schema, compression="zstd")
        for name in tables
    }
    for name, rows in kept_head.items():
        writers[name].write_table(rows)

    def shifted(table: pa.Table, column: str, values: np.ndarray) -> pa.Table:
        place = table.schema.get_field_index(column)
        mask = pc.is_null(table[column]).to_numpy()
        return table.set_column(
            place, table.schema.field(column), pa.array(values, table.schema.field(column).type, mask=mask)
        )

    for number in range(tiles):
        later = number * (high - low)

        def move(values: np.ndarray, number: int = number) -> np.ndarray:
            return np.where(new_number[values] >= 0, stays + number * len(made) + new_number[values], values)

        rows = shifted(body, "time_ns", time_ns[first:last] + later)
        rows = shifted(rows, "block_id", move(block))
        rows = shifted(rows, "op_id", pc.fill_null(body["op_id"], 0).to_numpy() + number * num_ops)
        writers["events"].write_table(rows)
        ops = shifted(ops_body, "start_ns", ops_body["start_ns"].to_numpy() + later)
        writers["ops"].write_table(shifted(ops, "op_id", ops_body["op_id"].to_numpy() + number * num_ops))
        spans = shifted(spans_body, "start_ns", spans_body["start_ns"].to_numpy() + later)
        writers["spans"].write_table(
            shifted(spans, "index", pc.fill_null(spans_body["index"], 0).to_numpy() + number * num_steps)
        )
        writers["labels"].write_table(shifted(labels_body, "block_id", move(labels_body["block_id"].to_numpy())))
    for writer in writers.values():
        writer.close()
    manifest = json.loads((base / "manifest.json").read_text())
    manifest.pop("parts", None)
    (target / "manifest.json").write_text(json.dumps(manifest))
    return len(head) + tiles * len(body)


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
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        trace = Path(name) / "tiled.memtrace"
        events = tile(record_base(Path(name), 34), trace / "rank=0", arguments.events)
        floor = float(subprocess.check_output([sys.executable, "-c", FLOOR, str(trace / "rank=0")], text=True))
        program = str(Path(sys.executable).parent / "memtrace")
        seconds, memory = measured([program, "summary", str(trace)])
        others = {
            arguments: measured([program, *arguments.replace("TRACE", str(trace)).split(), str(trace)])
            for arguments in COMMANDS
        }
    result = {
        "events": events,
        "summary_seconds": seconds,
        "summary_peak_mib": memory,
        "floor_seconds": floor,
        "summary_to_floor": seconds / floor,
        **{f"{command}, seconds": one[0] for command, one in others.items()},
        **{f"{command}, peak MiB": one[1] for command, one in others.items()},
    }
    print(
        json.dumps(result, indent=1)
        if arguments.json
        else "\n".join(f"{key}: {value:,.2f}" for key, value in result.items())
    )


if __name__ == "__main__":
    main()
