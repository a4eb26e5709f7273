"""Training a model whose state is several times the memory budget: peaks, step times and losses.

    python benchmarks/spill.py                            # an MLP and a GPT, state 4 times the budget, 10 steps
    python benchmarks/spill.py --program gpt --ratio 6
    python benchmarks/spill.py --bus 1                    # copies at 1 GB/s, as over a bus
    python benchmarks/spill.py --device cuda --program gpt2      # needs a GPU

Each case trains in a process of its own: plainly, spilled without a buffer, and spilled with double buffering. The plan
is made from a recording of the plain run. Peaks are counted twice: by memtrace (requested bytes), and by the kernel, as
anonymous memory of the process above its level before the model was made (sampled every millisecond). Step times are
those of runs without a recorder. Losses must be equal bit by bit.

The host memory of a CPU is the same memory as that of the "device". Copies are so quick that little is left to hide,
and they take bandwidth from the computation beside them. With ``--bus`` every copy takes as long as a bus of this
bandwidth would need; the thread that copies sleeps for the rest of this time. Then step times show what double
buffering hides.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

import memtrace
import memtrace.execution.spill
from memtrace.analysis.bandwidth import bandwidths_from_rates
from memtrace.execution.host_bandwidth import measure_bandwidths
from memtrace.execution.host_memory import Copy, MappedMemory, Pair, ThreadCopy, copy_pairs
from memtrace.planning import SpillPlan, plan_spill, write_plan
from memtrace.planning.recorded_step import choose_step

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.programs.planned import Training, gpt, mlp, on_device, train

PROGRAMS: dict[str, Callable[[int], Training]] = {
    "mlp": lambda steps: mlp(steps, width=512, depth=24, batch=64),
    "gpt": lambda steps: gpt(steps, width=256, layers=12, heads=8, length=64, vocabulary=1024, batch=2),
    "gpt2": lambda steps: gpt(steps, width=768, layers=12, heads=12, length=1024, vocabulary=50257, batch=4),
}


BUFFERS = {"no buffer": 0.0, "buffer 5 %": 0.05, "buffer 25 %": 0.25, "buffer 50 %": 0.5}
"""Shares of the budget."""


class AnonymousMemory:
    """The peak of the anonymous memory of the process while a block runs, by the kernel's count."""

    def __enter__(self) -> AnonymousMemory:
        self.peak_bytes = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stopped.wait(0.001):
            self.peak_bytes = max(self.peak_bytes, anonymous_bytes())


def device_name(device: str) -> str:
    """Return the name that traces use."""
    return "cuda:0" if device == "cuda" else device


def anonymous_bytes() -> int:
    """Resident memory of this process that no file backs."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


class BusMemory(MappedMemory):
    """Host memory behind a bus that makes one copy at a time in each direction."""

    def __init__(self, gb_per_s: float) -> None:
        super().__init__()
        self._gb_per_s = gb_per_s
        self._directions = {to_host: ThreadPoolExecutor(1) for to_host in (True, False)}

    def copy_many(self, pairs: Sequence[Pair], *, to_host: bool, overlaps: bool) -> Copy:
        """Copy in the time that the bus would need."""

        def copy(pairs: list[Pair]) -> None:
            end_s = time.perf_counter() + sum(source.nbytes for _, source in pairs) / (self._gb_per_s * 1e9)
            copy_pairs(pairs)
            time.sleep(max(0.0, end_s - time.perf_counter()))

        return ThreadCopy(self._directions[to_host].submit(copy, list(pairs)))


def run_case(
    name: str, steps: int, device: str, plan: Path | None, trace: Path | None, bus_gb_per_s: float | None
) -> dict[str, Any]:
    """Train once in this process; with ``trace`` under memtrace, else timed and counted by the kernel."""
    if bus_gb_per_s is not None:
        memtrace.execution.spill.host_memory_for = lambda device: BusMemory(bus_gb_per_s)
    torch.set_num_threads(1)
    train(mlp(1, width=8, depth=1, batch=2))  # loads what torch imports at the first step
    before = anonymous_bytes()
    case = on_device(PROGRAMS[name](steps), device)
    torch.manual_seed(1)
    applied: AbstractContextManager[Any] = nullcontext()
    if plan is not None:
        applied = memtrace.apply(plan, case.model, case.optimizer)
    recorded: AbstractContextManager[Any] = nullcontext()
    losses, times_s = [], []
    with applied:
        if trace is not None:
            recorded = memtrace.record(trace, model=case.model, optimizer=case.optimizer, stacks=False)
        with recorded, AnonymousMemory() as anonymous:
            for batch in case.batches:
                start_s = time.perf_counter()
                case.optimizer.zero_grad()
                loss = case.loss(case.model, batch)
                loss.backward()
                case.optimizer.step()
                losses.append(loss.item())
                del loss
                times_s.append(time.perf_counter() - start_s)
    return {
        "losses": [value.hex() for value in losses],
        "step_s": statistics.median(times_s[2:]),
        "anonymous_bytes": anonymous.peak_bytes - before,
    }


def in_process(*arguments: str) -> dict[str, Any]:
    """Run a case in a process whose allocator gives freed memory back at once."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, __file__, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure(name: str, label: str, plan: SpillPlan | None, arguments: argparse.Namespace, folder: Path) -> list[str]:
    """Run a case twice, with and without memtrace, and return a row of the table."""
    words = ["--device", arguments.device, "--case", name, str(arguments.steps)]
    if arguments.bus is not None:
        words = ["--bus", str(arguments.bus), *words]
    file = folder / f"{name}-{label}.json"
    if plan is not None:
        write_plan(plan.plan, file)
        words.append(str(file))
    trace = folder / f"{name}-{label}.memtrace"
    plain = in_process(*words)
    recorded = in_process(*words, *([] if plan else [""]), str(trace))
    peak_bytes = choose_step(memtrace.load(trace), device_name(arguments.device)).cost.peak_bytes
    EXPECTED.setdefault(name, plain["losses"])
    equal = plain["losses"] == recorded["losses"] == EXPECTED[name]
    PLAIN_S.setdefault(name, plain["step_s"])
    mib = 1 << 20
    predicted = "" if plan is None else f"{plan.plan.predicted.peak_bytes / mib:.1f}"
    planned_s = "" if plan is None or not plan.plan.predicted.step_ns else f"{plan.plan.predicted.step_ns / 1e9:.2f}"
    return [
        name, label, predicted, f"{peak_bytes / mib:.1f}", f"{plain['anonymous_bytes'] / mib:.1f}", planned_s,
        f"{plain['step_s']:.2f}", f"{plain['step_s'] / PLAIN_S[name]:.2f} x", "equal" if equal else "DIFFERENT",
    ]  # fmt: skip


EXPECTED: dict[str, list[str]] = {}
PLAIN_S: dict[str, float] = {}


def main() -> None:
    """Print one table for every program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", choices=PROGRAMS, action="append")
    parser.add_argument("--ratio", type=float, default=4.0, help="training state / budget")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--bus", type=float, metavar="GB/S", help="bandwidth of an emulated bus")
    parser.add_argument("--case", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        name, steps, *paths = arguments.case
        plan, trace = [Path(path) if path else None for path in (*paths, "", "")[:2]]
        print(json.dumps(run_case(name, int(steps), arguments.device, plan, trace, arguments.bus)))
        return
    header = [
        "program",
        "run",
        "predicted MiB",
        "memtrace MiB",
        "kernel MiB",
        "predicted s",
        "step s",
        "price",
        "losses",
    ]
    bus = arguments.bus
    bandwidths = measure_bandwidths(device_name(arguments.device)) if bus is None else bandwidths_from_rates(bus, bus)
    with tempfile.TemporaryDirectory(prefix="memtrace-spill-") as folder:
        for name in arguments.program or ("mlp", "gpt"):
            rows = [measure(name, "plain", None, arguments, Path(folder))]
            trace = memtrace.load(Path(folder) / f"{name}-plain.memtrace")
            state_bytes = 4 * sum(parameter.nbytes for parameter in PROGRAMS[name](1).model.parameters())
            budget = int(state_bytes / arguments.ratio)
            for label, share in BUFFERS.items():
                buffer_bytes = int(budget * share)
                plan = plan_spill(trace, budget_bytes=budget, buffer_bytes=buffer_bytes, bandwidths=bandwidths)
                rows.append(measure(name, f"{label}, {len(plan.shards)} shards", plan, arguments, Path(folder)))
            print(
                f"\n{name}: state {state_bytes / 2**20:.0f} MiB, budget {budget / 2**20:.0f} MiB, "
                f"{arguments.steps} steps"
            )
            widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
            for row in [header, *rows]:
                print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
