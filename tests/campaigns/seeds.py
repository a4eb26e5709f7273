"""Small valid traces that the campaign mutates: one of each kind that memtrace writes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

import memtrace
from memtrace.format.manifest import Manifest, TraceSource, write_manifest
from memtrace.format.split import write_parts
from memtrace.planning.actions import Offload, OffloadedTensor, Recompute, Spill
from memtrace.planning.plan import Plan, StepCost, write_plan
from memtrace.readers import read_job
from memtrace.readers.import_job import write_trace
from tests.builders import event, op, step
from tests.format.random_traces import RandomTrace, Rows, on_disk, tables_of
from tests.readers.snapshot_maker import random_history

MIB = 1 << 20


def make_seeds(folder: Path) -> dict[str, Path]:
    """Write the seeds to ``folder`` and return their paths by name."""
    paths = {}
    for name, write in _WRITERS.items():
        paths[name] = folder / f"{name}.memtrace"
        write(paths[name])
    return paths


def make_plan_seed(path: Path) -> Path:
    """Write a plan with an action of each kind and return its path."""
    tensors = (OffloadedTensor("net.0", 0, MIB, 3, 5), OffloadedTensor("", 1, 7, None, 0))
    actions = (
        Recompute(("net.0", "net.1"), ("aten::addmm",)),
        Offload(tensors, "cpu"),
        Spill((("net.0",), ("net.1", "net.2")), MIB),
    )
    write_plan(Plan("cpu", actions, StepCost(9 * MIB, 10**6), StepCost(5 * MIB, None), ("An assumption.",), "a"), path)
    return path


def _recording(path: Path) -> None:
    """Three steps of Adam, recorded by the observer that needs no compiler."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters())
    with memtrace.record(path, observer="dispatch", stack_min_bytes=0) as recording:
        for _ in recording.steps(range(6)):
            model(torch.randn(8, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def _parts(path: Path) -> None:
    """A CPU and a CUDA device, accesses and segments, in four parts with keyframes."""
    rows = RandomTrace(5, num_steps=12).rows
    _name_everything(rows)
    third = len(rows["events"]) // 4
    on_disk(rows, path, [0, third, 2 * third, 3 * third])


def _name_everything(rows: Rows) -> None:
    rows["names"] += [
        {"id": 7, "kind": "module", "text": "model.encoder"},
        {"id": 8, "kind": "module", "text": "model.decoder"},
        {"id": 9, "kind": "operator", "text": "aten::mm"},
        {"id": 10, "kind": "frame", "text": "/home/user/train.py\t12\tforward"},
        {"id": 11, "kind": "stack", "frames": [10, 12]},
        {"id": 12, "kind": "frame", "text": "/home/user/main.py\t3\t<module>"},
    ]
    rows["names"] += [{"id": number, "kind": "tensor", "text": f"layer.{number}.weight"} for number in range(50, 90)]


def _snapshot(path: Path) -> None:
    """An imported CUDA snapshot: segments, pending frees, an out-of-memory error."""
    maker = random_history(3, 150)
    snapshot = maker.snapshot()
    snapshot["device_traces"][0].append(
        {
            "action": "oom",
            "size": 99 * MIB,
            "device_free": 5 * MIB,
            "stream": 0,
            "frames": [],
            "time_us": maker.clock_us,
        }
    )
    file = path.with_suffix(".pickle")
    file.write_bytes(pickle.dumps(snapshot))
    write_trace(read_job([file]), path, overwrite=False)
    file.unlink()


def _leak(path: Path) -> None:
    """A leak, a site per step that grows, and waits for data."""
    names = [
        {"id": 0, "kind": "operator", "text": "aten::empty"},
        {"id": 1, "kind": "module", "text": "net"},
        {"id": 2, "kind": "frame", "text": "/home/user/leak.py\t7\tappend"},
        {"id": 3, "kind": "stack", "frames": [2]},
    ]
    events, spans, ops = [], [], []
    for number in range(12):
        start = 1000 * number
        ops.append(op(2 * number, "forward", name=0, module=1, stack=3, start_ns=start + 10))
        ops.append(op(2 * number + 1, "backward", name=0, module=1, stack=3, start_ns=start + 20))
        events += [
            event("alloc", 2 * number, start + 10, 2 * MIB, op_id=2 * number, address=4096 * number + 4096),
            event("alloc", 2 * number + 1, start + 20, MIB, op_id=2 * number + 1, address=2**40),
            event("read", 2 * number, start + 25, op_id=2 * number + 1),
            event("free", 2 * number + 1, start + 30, MIB),
        ]
        spans += [step(number, start, 900), {"kind": "data_wait", "start_ns": start + 1, "duration_ns": 5}]
    _write(path / "rank=0", {"events": events, "ops": ops, "spans": spans, "names": names}, Manifest())


def _ranks(path: Path) -> None:
    """Two pipeline stages with actions, each a rank."""
    kinds = [{"id": number, "kind": "range", "text": text} for number, text in enumerate(_ACTIONS)]
    for rank in (0, 1):
        events, spans, ops = [], [], []
        for number in range(len(_ACTIONS) * 3):
            start = 100 * number + 50 * rank
            ops.append(op(number, "forward" if number % 2 == 0 else "backward", name=0, start_ns=start + 1))
            events.append(event("alloc", number, start + 2, MIB + number, op_id=number))
            if number:
                events.append(event("free", number - 1, start + 3, MIB + number - 1))
            spans.append({"kind": "action", "name": number % len(_ACTIONS), "start_ns": start, "duration_ns": 60})
        spans += [step(number, 100 * len(_ACTIONS) * number, 100 * len(_ACTIONS)) for number in range(3)]
        manifest = Manifest(rank=rank, rank_is_known=True, world_size=2)
        _write(path / f"rank={rank}", {"events": events, "ops": ops, "spans": spans, "names": kinds}, manifest)


_ACTIONS = ("F0.0", "B0.0", "F0.1", "B0.1")


def _totals(path: Path) -> None:
    """Totals by category without blocks or times, as a memory timeline has them."""
    events = [event("alloc", number, number, 1000 + number) for number in range(20)]
    events += [event("free", number, 20 + number, 1000 + number) for number in range(10)]
    coverage = replace(Manifest().coverage, has_times=False, has_blocks=False)
    _write(path / "rank=0", {"events": events}, Manifest(source=TraceSource("memory_timeline"), coverage=coverage))


def _write(folder: Path, rows: Rows, manifest: Manifest) -> None:
    folder.mkdir(parents=True)
    write_manifest(folder, replace(manifest, parts=write_parts(tables_of(rows), folder)))


_WRITERS: dict[str, Callable[[Path], None]] = {
    "recording": _recording,
    "parts": _parts,
    "snapshot": _snapshot,
    "leak": _leak,
    "ranks": _ranks,
    "totals": _totals,
}
