"""Trains a small GPT through a schedule table in several processes and checks it against one process.

    python examples/pipeline/run.py --schedule chimera --workers 4 --microbatches 8
    python examples/pipeline/run.py --table my-schedule.txt --record run.memtrace

Starts its own processes (gloo, on this machine). With --record every rank records its step into run.memtrace,
and one process that trains the whole model on one micro-batch into run-single.memtrace.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parent))
from executor import Worker
from layers import Sizes, make_layer, make_layers, samples

import memtrace
from memtrace.planning.pipeline.registry import parse_choice
from memtrace.planning.pipeline.table import Schedule, parse


def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def even_cut(num_layers: int, num_stages: int) -> list[int]:
    return [stage * num_layers // num_stages for stage in range(num_stages)]


def train(rank: int, arguments: argparse.Namespace, schedule: Schedule, results: Any) -> None:
    """One process: STEPS steps of its row, then its gradients beside those of the whole model."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(arguments.port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=schedule.num_workers)
    sizes = arguments.sizes
    bounds = [*arguments.cut, sizes.num_layers]

    def make_stage(stage: int) -> nn.Module:
        layers = range(bounds[stage], bounds[stage + 1])
        return nn.Sequential(*(make_layer(number, sizes) for number in layers))

    worker = Worker(schedule, make_stage, loss, lambda stage: (arguments.batch, sizes.sequence, sizes.width))
    optimizer = torch.optim.AdamW(worker.parameters(), lr=1e-3, foreach=False)
    recording = memtrace.record(arguments.record, optimizer=optimizer) if arguments.record else nullcontext()
    with recording:
        for step in range(arguments.steps):
            optimizer.zero_grad()
            losses = worker.step(
                lambda m, step=step: samples(step, m, arguments.batch, sizes)[:, :-1],
                lambda m, step=step: samples(step, m, arguments.batch, sizes)[:, 1:],
            )
            if step < arguments.steps - 1:
                optimizer.step()
    expected = reference(arguments, schedule.num_microbatches)
    largest = 0.0
    scale = 0.0
    for (_, stage), copy in worker.copies.items():
        whole = [p for layer in expected[bounds[stage] : bounds[stage + 1]] for p in layer.parameters()]
        for mine, theirs in zip(copy.parameters(), whole, strict=True):
            largest = max(largest, float((mine.grad - theirs.grad).abs().max()))
            scale = max(scale, float(theirs.grad.abs().max()))
    results[rank] = {
        "loss": sum(losses),
        "largest_difference": largest,
        "largest_gradient": scale,
        "in_flight_peak": worker.in_flight_peak,
    }
    dist.barrier()
    dist.destroy_process_group()


def reference(arguments: argparse.Namespace, num_microbatches: int) -> Sequence[nn.Module]:
    """The layers of the whole model with the gradients of the last step, made in this process alone."""
    layers = make_layers(arguments.sizes)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for step in range(arguments.steps):
        optimizer.zero_grad()
        for m in range(num_microbatches):
            text = samples(step, m, arguments.batch, arguments.sizes)
            (loss(model(text[:, :-1]), text[:, 1:]) / num_microbatches).backward()
        if step < arguments.steps - 1:
            optimizer.step()
    return layers


def record_single(arguments: argparse.Namespace, path: str) -> None:
    """Record one process that trains the whole model on one micro-batch a step."""
    torch.set_num_threads(1)
    model = nn.Sequential(*make_layers(arguments.sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    with memtrace.record(path, model=model, optimizer=optimizer):
        for step in range(4):
            text = samples(step, 0, arguments.batch, arguments.sizes)
            optimizer.zero_grad()
            loss(model(text[:, :-1]), text[:, 1:]).backward()
            optimizer.step()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="dapple", help="such as chimera:f=1,method=doubling")
    parser.add_argument("--table", type=Path, help="a schedule as text instead")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4, help="samples in a micro-batch")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=14, help="transformer blocks, besides embedding and head")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--cut", type=int, nargs="*", help="first layer of every stage; else equal numbers")
    parser.add_argument("--record", metavar="TRACE", help="record every rank, and a single process beside it")
    parser.add_argument("--port", type=int, default=29555)
    arguments = parser.parse_args()
    arguments.sizes = Sizes(arguments.blocks, arguments.width, arguments.sequence)
    return arguments


def main() -> None:
    arguments = parse_arguments()
    if arguments.table:
        schedule = parse(arguments.table.read_text())
    else:
        schedule = parse_choice(arguments.schedule).build(arguments.workers, arguments.microbatches)
    arguments.cut = arguments.cut or even_cut(arguments.sizes.num_layers, schedule.num_stages)
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(train, (arguments, schedule, results), nprocs=schedule.num_workers)
        ranks = [dict(results[rank]) for rank in range(schedule.num_workers)]
    if arguments.record:
        record_single(
            arguments, str(Path(arguments.record).with_name(Path(arguments.record).stem + "-single.memtrace"))
        )
    print(json.dumps({"schedule": schedule.name, "cut": list(arguments.cut), "ranks": ranks}, indent=1))


if __name__ == "__main__":
    main()
