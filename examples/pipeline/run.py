"""Train a small GPT with pipeline schedules in several processes, and compare the result with that of one process.

    python examples/pipeline/run.py --schedule chimera --schedule zb-h1 --workers 4 --microbatches 8
    python examples/pipeline/run.py --table my-schedule.txt --record out/pipeline

The script starts its own processes (gloo, on this machine) and prints the largest difference of the gradients of the
last step as JSON; of schedules without a flush (PipeDream, PipeDream-2BW) that of the weights after all steps. With
--record every rank records each schedule to FOLDER/NAME.memtrace; one process that trains the whole model on one
micro-batch per step is recorded to FOLDER/single.memtrace.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # optimizers import it: once here, instead of in every process
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parent))
from executor import Worker
from layers import Sizes, make_layer, make_layers, samples
from reference import make_optimizer, train_with_flush, train_without_flush
from torch_stages import TorchWorker

import memtrace
from memtrace.pipeline.schedules.actions import Action
from memtrace.pipeline.schedules.registry import parse_schedule_choice
from memtrace.pipeline.schedules.schedule import Schedule, parse_schedule

TORCH = "torch-"
WHOLE_MODEL: dict[int, list[list[np.ndarray]]] = {}
"""Gradients of the whole model by layer, for each number of micro-batches. Recordings would count tensors."""


def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def train(rank: int, arguments: argparse.Namespace, port: int, results: Any) -> None:
    """Run one process: its row of every schedule, one schedule after another."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    schedules = tables(arguments)
    dist.init_process_group("gloo", rank=rank, world_size=arguments.workers)
    for name, schedule in schedules.items():
        results[rank, name] = train_schedule(name, schedule, arguments)
        # No memory of this schedule may be left when the next one begins.
        gc.collect()
        dist.barrier()
    dist.destroy_process_group()


def train_schedule(name: str, schedule: Schedule, arguments: argparse.Namespace) -> dict[str, float]:
    """Train some steps with this rank's row, then compare the result with that of the whole model."""
    sizes = arguments.sizes
    bounds = [*first_layers_of(schedule, arguments), sizes.num_layers]

    def make_stage(stage: int) -> nn.Module:
        layers = range(bounds[stage], bounds[stage + 1])
        return nn.Sequential(*(make_layer(number, sizes) for number in layers))

    worker: Worker | TorchWorker
    recording: Any = nullcontext()
    if name.startswith(TORCH):
        worker = TorchWorker(schedule, make_stage, loss, return_outputs=arguments.return_outputs)
    else:
        shape = (arguments.batch, sizes.sequence, sizes.width)
        worker = Worker(schedule, make_stage, loss, lambda stage: shape, make_optimizer=make_optimizer,
                        mark=lambda action: mark(recording, action))  # fmt: skip
    # Without a flush the executor updates the weights within its step, with optimizers of its own.
    optimizers = [] if schedule.asynchronous else [make_optimizer(list(worker.parameters()))]
    if arguments.record:
        recording = memtrace.record(
            arguments.record / f"{name}.memtrace", optimizer=[*optimizers, *getattr(worker, "optimizers", [])]
        )
    with recording:
        for step in range(arguments.steps):
            for optimizer in optimizers:
                optimizer.zero_grad()
            losses = worker.step(
                lambda m, step=step: samples(step, m, arguments.batch, sizes)[:, :-1],
                lambda m, step=step: samples(step, m, arguments.batch, sizes)[:, 1:],
            )
            for optimizer in optimizers:
                optimizer.step()
    worker.close()
    return {"loss": sum(losses)} | compare(worker, schedule, bounds, arguments)


def compare(
    worker: Worker | TorchWorker, schedule: Schedule, bounds: list[int], arguments: argparse.Namespace
) -> dict[str, float]:
    """The largest difference between this rank and the whole model, and the largest of the compared numbers.

    Compares the gradients of the last step; without a flush the weights.
    """
    if schedule.asynchronous:
        layers = train_without_flush(arguments, schedule, bounds, loss)
        whole = [[parameter.detach().numpy() for parameter in layer.parameters()] for layer in layers]
    else:
        whole = gradients_of_whole_model(arguments, schedule.num_microbatches)
    difference = scale = 0.0
    for (_, stage), copy in worker.copies.items():
        expected = [value for layer in whole[bounds[stage] : bounds[stage + 1]] for value in layer]
        for parameter, correct in zip(copy.parameters(), expected, strict=True):
            value = (parameter.detach() if schedule.asynchronous else parameter.grad).numpy()
            difference = max(difference, float(np.abs(value - correct).max()))
            scale = max(scale, float(np.abs(correct).max()))
    return {"largest_difference": difference, "largest_value": scale}


def gradients_of_whole_model(arguments: argparse.Namespace, num_microbatches: int) -> list[list[np.ndarray]]:
    """The gradients of each layer in the last step of the whole model; computed once for all schedules."""
    if num_microbatches not in WHOLE_MODEL:
        layers = train_with_flush(arguments, num_microbatches, loss)
        WHOLE_MODEL[num_microbatches] = [
            [parameter.grad.numpy().copy() for parameter in layer.parameters()] for layer in layers
        ]
    return WHOLE_MODEL[num_microbatches]


def mark(recording: Any, action: Action) -> AbstractContextManager[object]:
    """Mark an action of our executor; memtrace marks the actions of torch's stages itself."""
    return recording if isinstance(recording, nullcontext) else recording.action(str(action))


def tables(arguments: argparse.Namespace) -> dict[str, Schedule]:
    """The schedules to run, by a name that is valid as a file name."""
    if arguments.table:
        schedule = parse_schedule(arguments.table.read_text())
        return {schedule.name: schedule}
    built = {}
    for text in arguments.schedule or ["1f1b"]:
        name = text.replace(":", "-").replace("=", "-").replace(",", "-")
        built[name] = parse_schedule_choice(text.removeprefix("torch:")).build(
            arguments.workers, arguments.microbatches
        )
    return built


def first_layers_of(schedule: Schedule, arguments: argparse.Namespace) -> list[int]:
    """The first layer of every stage: --partition where it has as many stages, else equal numbers of layers."""
    if len(arguments.partition or ()) == schedule.num_stages:
        return arguments.partition
    return [stage * arguments.sizes.num_layers // schedule.num_stages for stage in range(schedule.num_stages)]


def record_single(arguments: argparse.Namespace, path: Path) -> None:
    """Record one process that trains the whole model on one micro-batch per step."""
    torch.set_num_threads(1)
    model = nn.Sequential(*make_layers(arguments.sizes))
    optimizer = make_optimizer(list(model.parameters()))
    with memtrace.record(path, model=model, optimizer=optimizer):
        for step in range(4):
            text = samples(step, 0, arguments.batch, arguments.sizes)
            optimizer.zero_grad()
            loss(model(text[:, :-1]), text[:, 1:]).backward()
            optimizer.step()


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--schedule",
        action="append",
        help="e.g. chimera:f=1,method=doubling, or torch:gpipe for that of torch; repeatable; default: 1f1b",
    )
    parser.add_argument("--table", type=Path, help="read the schedule from a text file")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4, help="samples per micro-batch")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=14, help="transformer blocks in addition to embedding and head")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=256, help="vocabulary: width of the model output")
    parser.add_argument(
        "--return-outputs", action="store_true", help="let torch's schedules merge and return the model outputs"
    )
    parser.add_argument(
        "--partition", type=int, nargs="*", help="first layer of every stage; default: equal numbers of layers"
    )
    parser.add_argument(
        "--record", type=Path, metavar="FOLDER", help="record every rank, and one process with the whole model"
    )
    arguments = parser.parse_args()
    arguments.sizes = Sizes(arguments.blocks, arguments.width, arguments.sequence, arguments.vocabulary)
    if arguments.table:
        schedule = parse_schedule(arguments.table.read_text())
        arguments.workers, arguments.microbatches = schedule.num_workers, schedule.num_microbatches
    return arguments


def free_port() -> int:
    """A port that is free at the moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def main() -> None:
    """Run all schedules and print the comparison."""
    arguments = parse_arguments()
    names = list(tables(arguments))
    with mp.Manager() as manager:
        results = manager.dict()
        mp.start_processes(train, (arguments, free_port(), results), nprocs=arguments.workers, start_method="fork")
        differences = {name: [results[rank, name] for rank in range(arguments.workers)] for name in names}
    if arguments.record:
        record_single(arguments, arguments.record / "single.memtrace")
    print(json.dumps(differences, indent=1))


if __name__ == "__main__":
    main()
