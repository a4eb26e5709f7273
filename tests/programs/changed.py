"""Training programs that run with and without a change, so that a what-if can be compared with a second real run.

As a program it trains under FSDP2 on the CPU: ``python -m tests.programs.changed FOLDER '{"model": "gpt", ...}'``.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import memtrace
from memtrace.analysis.attribution import step_rows
from memtrace.analysis.blocks import blocks
from memtrace.analysis.counterfactual import END_OF_TRACE
from memtrace.analysis.event_codes import KIND
from memtrace.format.arrays import Array
from memtrace.format.schema import CATEGORIES
from memtrace.planning.plan import StepCost
from memtrace.planning.recorded_step import RecordedStep
from memtrace.planning.timeline import TICKS_PER_ROW, build_timeline
from memtrace.trace import Trace

Batch = tuple[torch.Tensor, torch.Tensor]
NUM_TOKENS = 500


@dataclass(frozen=True)
class Setup:
    """A model and how it is trained."""

    model: str
    """``mlp``, ``cnn`` or ``gpt``."""
    batch: int = 8
    optimizer: str = "sgd"
    """A key of ``OPTIMIZERS``."""
    implementation: str = "for-loop"
    autocast: bool = False
    num_microbatches: int = 1
    num_ranks: int = 1
    width: int = 64
    """Size of the model."""
    num_steps: int = 3


class _Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide_norm, self.up, self.down = (
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        wide: torch.Tensor = x + self.down(functional.gelu(self.up(self.wide_norm(x))))
        return wide


class _Gpt(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(NUM_TOKENS, width), nn.Embedding(32, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, NUM_TOKENS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h)
        logits: torch.Tensor = self.head(self.norm(h))
        return logits


def _mlp(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(4 * width, 8 * width), nn.ReLU(), nn.Linear(8 * width, 8 * width), nn.ReLU(), nn.Linear(8 * width, 12)
    )


def _cnn(width: int) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, width // 4), (width // 4, width // 2), (width // 2, width)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * width, 12))


MODELS: dict[str, Callable[[int], nn.Module]] = {"mlp": _mlp, "cnn": _cnn, "gpt": _Gpt}
UNITS = {"mlp": ("0", "2", "4"), "cnn": ("0", "4", "8", "13"), "gpt": ("blocks.*",)}
"""Modules that FSDP wraps besides the model."""
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters, **options: torch.optim.SGD(parameters, lr=0.01, **options),
    "sgd-momentum": lambda parameters, **options: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, **options),
    "sgd-nesterov": lambda parameters, **options: torch.optim.SGD(
        parameters, lr=0.01, momentum=0.9, nesterov=True, **options
    ),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adamw-amsgrad": lambda parameters, **options: torch.optim.AdamW(parameters, amsgrad=True, **options),
    "nadam": torch.optim.NAdam,
    "adamax": torch.optim.Adamax,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
}


def make_optimizer(name: str, implementation: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer by the name that memtrace has for it."""
    options = {"fused": True} if implementation == "fused" else {"foreach": implementation == "foreach"}
    return OPTIMIZERS[name](parameters, **options)


def make_batch(setup: Setup, size: int) -> Batch:
    """Return a batch of random data."""
    if setup.model == "gpt":
        return torch.randint(NUM_TOKENS, (size, 32)), torch.randint(NUM_TOKENS, (size, 32))
    shape = (size, 4 * setup.width) if setup.model == "mlp" else (size, 3, 16, 16)
    return torch.randn(shape), torch.randint(12, (size,))


def record_training(setup: Setup, path: Path) -> Trace:
    """Train and record, and return the trace."""
    gc.collect()  # blocks of earlier tests must not be freed during this recording
    torch.manual_seed(0)
    model = MODELS[setup.model](setup.width)
    _train(setup, model, path)
    trace = memtrace.load(path)
    return trace.rank(trace.ranks[0])


def _train(setup: Setup, model: nn.Module, path: Path | None) -> None:
    optimizer = make_optimizer(setup.optimizer, setup.implementation, list(model.parameters()))
    recording = nullcontext() if path is None else memtrace.record(path, model=model, optimizer=optimizer)
    with recording as rec:
        for _ in range(setup.num_steps):
            optimizer.zero_grad()
            for _ in range(setup.num_microbatches):
                _accumulate(setup, model)
            optimizer.step()
            if rec is not None:
                rec.step()


def _accumulate(setup: Setup, model: nn.Module) -> None:
    inputs, targets = make_batch(setup, setup.batch // setup.num_microbatches)
    with torch.autocast("cpu", torch.bfloat16, enabled=setup.autocast):
        logits = model(inputs)
        loss = functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
    (loss / setup.num_microbatches).backward()


def _train_rank(rank: int, setup: Setup, folder: Path) -> None:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    store = distributed.FileStore(str(folder / "store"), setup.num_ranks)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=setup.num_ranks)
    mesh = init_device_mesh("cpu", (setup.num_ranks,))
    torch.manual_seed(0)
    model = MODELS[setup.model](setup.width)
    for pattern in UNITS[setup.model]:
        parent, _, last = pattern.rpartition(".")
        modules = model.get_submodule(parent).children() if last == "*" else [model.get_submodule(pattern)]
        for module in modules:
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    _train(setup, model, folder / "run.memtrace" if rank == 0 else None)
    distributed.barrier()
    distributed.destroy_process_group()


def record_sharded(setup: Setup, folder: Path, timeout_s: float) -> Trace:
    """Train under FSDP2 in processes of its own and return the trace of rank 0."""
    import subprocess

    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.programs.changed", str(folder), json.dumps(asdict(setup))]
    subprocess.run(command, check=True, timeout=timeout_s, capture_output=True, cwd=Path(__file__).parents[2])
    trace = memtrace.load(folder / "run.memtrace")
    return trace.rank(trace.ranks[0])


def sharded_peaks(trace: Trace) -> list[int]:
    """Return the peak of each step but the first, as if Gloo released its memory when it no longer needs it.

    Gloo holds buffers of its own during a collective and references to the tensors of the program. It releases both on
    threads of its own, which can be much later on a busy machine. What these threads free counts until its last use.
    """
    columns, rows = blocks(trace), step_rows(trace)
    ends = _ends_without_delay(trace)
    peaks = []
    for place in range(1, len(rows.number)):
        first, end = int(rows.first_row[place]), int(rows.end_row[place])
        step = RecordedStep(place, first, end, 0, 0, StepCost(0, None))
        timeline = build_timeline(trace, "cpu", step, columns.size)
        everything = np.ones(len(timeline), bool)
        peaks.append(timeline.cut(everything, end=ends[timeline.block] * TICKS_PER_ROW).peak_bytes)
    return peaks


def _ends_without_delay(trace: Trace) -> Array:
    """Return for each block the row of its free, or the one after its last use where a thread of Gloo freed it."""
    columns, events = blocks(trace), trace.columns("events", "kind", "block_id", "thread")
    is_use = np.isin(events["kind"], [KIND["alloc"], KIND["read"], KIND["write"]]) & (events["block_id"] >= 0)
    last_use = np.full(len(columns), -1, np.int64)
    np.maximum.at(last_use, events["block_id"][is_use], np.flatnonzero(is_use))
    threads, counts = np.unique(trace.columns("ops", "thread")["thread"], return_counts=True)
    main = threads[int(counts.argmax())]
    free = np.where(columns.free_event >= 0, columns.free_event, END_OF_TRACE).astype(np.int64)
    by_gloo = (columns.free_event >= 0) & (events["thread"][columns.free_event] != main)
    of_gloo = np.isin(columns.op_name, [n for n in set(columns.op_name.tolist()) if _is_collective(trace, n)])
    return np.where((by_gloo | of_gloo) & (last_use >= 0), np.minimum(free, last_use + 1), free)


def _is_collective(trace: Trace, name: int) -> bool:
    return (trace.name(name) or "").startswith("c10d::")


def unused_baseline_bytes(trace: Trace) -> int:
    """Older blocks that the recorded program does not use: other tests have left them in this process.

    Only blocks that stay until the end: a garbage collection can free others before the step that counts.
    """
    table = blocks(trace)
    is_unused = (table.alloc_event < 0) & (table.num_reads + table.num_writes == 0) & (table.free_event < 0)
    return int(table.size[is_unused & (table.category == CATEGORIES.index("unknown"))].sum())


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    chosen = Setup(**json.loads(sys.argv[2]))
    torch.multiprocessing.spawn(_train_rank, (chosen, Path(sys.argv[1])), nprocs=chosen.num_ranks)
