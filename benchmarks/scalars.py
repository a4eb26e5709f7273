"""What logging the memory of each step to TensorBoard and Weights & Biases adds to a recorded training.

    python benchmarks/scalars.py [--rounds 8] [--steps 40] [--observer native]

The same GPT trains in short turns: recorded, and recorded with ``log_scalars`` to each logger that is installed (an
offline run of Weights & Biases). Prints the time per step from entering the recording to its closed file, the median
over the rounds, and the ratio to the recording alone. ``nothing`` is a logger that drops what it gets: its ratio is the
cost of measuring the steps.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch

import memtrace
from memtrace.integrations.scalars import ScalarStream, Sink
from memtrace.recording.options import ObserverKind

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from gpt import GPT

FLUSH_SECONDS = 0.5
"""Shorter than the default, so that turns of some seconds measure and log while they train."""


@contextmanager
def open_nothing(folder: Path) -> Iterator[Sink]:
    yield lambda step, scalars: None


@contextmanager
def open_tensorboard(folder: Path) -> Iterator[Sink]:
    from torch.utils.tensorboard import SummaryWriter

    from memtrace.integrations.tensorboard import writer_sink

    with SummaryWriter(str(folder / "tensorboard")) as writer:
        yield writer_sink(writer)


@contextmanager
def open_wandb(folder: Path) -> Iterator[Sink]:
    import wandb

    from memtrace.integrations.wandb import run_sink

    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    with wandb.init(dir=str(folder), project="benchmark") as run:
        yield run_sink(run, own_rows=True)


LOGGERS = {"nothing": open_nothing, "tensorboard": open_tensorboard, "wandb": open_wandb}


def make_step() -> Callable[[], None]:
    torch.manual_seed(0)
    model = GPT(vocabulary=256, width=128, layers=4, heads=4, length=64)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(256, (8, 65))

    def step() -> None:
        logits = model(tokens[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def step_milliseconds(logger: str | None, num_steps: int, observer: ObserverKind) -> float:
    """Return the milliseconds per step of a recording, closed file included, with a logger or without."""
    step = make_step()
    step()
    with tempfile.TemporaryDirectory() as folder, LOGGERS[logger or "nothing"](Path(folder)) as sink:
        started = time.perf_counter()
        with memtrace.record(f"{folder}/run.memtrace", observer=observer, flush_seconds=FLUSH_SECONDS) as recording:
            if logger is not None:
                ScalarStream(recording, [sink])
            for _ in range(num_steps):
                step()
                recording.step()
        return 1e3 * (time.perf_counter() - started) / num_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="recordings of each kind (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="steps of a recording (default: %(default)s)")
    parser.add_argument("--observer", choices=("native", "dispatch"), default="native")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    installed = [name for name in LOGGERS if name == "nothing" or find_spec(name) is not None]
    times: dict[str | None, list[float]] = {name: [] for name in (None, *installed)}
    for number in range(arguments.rounds + 1):
        for name, values in times.items():
            milliseconds = step_milliseconds(name, arguments.steps, arguments.observer)
            if number:  # the first round imports what the others use
                values.append(milliseconds)
    alone = times[None]
    print(f"{'logger':14} {'step':>10} {'ratio':>7}   ({arguments.steps} steps, {arguments.rounds} rounds)")
    for name, values in times.items():
        ratio = statistics.median(value / bare for value, bare in zip(values, alone, strict=True))
        print(f"{name or 'recording only':14} {statistics.median(values):7.2f} ms {ratio:7.3f}")


if __name__ == "__main__":
    main()
