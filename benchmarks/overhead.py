"""What recording costs the recorded program, in the best step and on average, beside torch.profiler and memray.

    python benchmarks/overhead.py [--rounds 15] [--steps 500] [--average-rounds 5] [--device cpu]

``best``: windows of a few steps alternate between the modes; the best step of each window counts, and the median over
the rounds of the ratios of neighboring windows is printed, because the speed of a machine drifts.

``fastest``: the ratio of the fifth percentiles of all steps in those windows. What else a machine does makes steps
slower and never faster.

``average``: whole runs of ``--steps`` steps from before entering the recording to the closed file, each against the
mean of the runs without recording before and after it, so that drift cancels out. Median, smallest and largest ratio of
the wall time, of the processor time of the training thread and of that of the process. ``writer_seconds`` is the
processor time that a run adds on other threads.

torch.profiler (memory, shapes and stacks, written as JSON) and memray (with native stacks, in a process of its own,
where it is installed) run for fewer steps in the same session; ``added_ms_a_step`` compares all tools.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

import memtrace

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from gpt import GPT, synthetic_text, train_step

Step = Callable[[], object]


def operator_bound() -> Step:
    torch.set_num_threads(1)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    data = torch.randn(2, 16, 64)

    def step() -> None:
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def realistic(device: str) -> Step:
    if device == "cpu":
        model, batch, length, dtype = GPT(width=512, layers=8, heads=8, length=256), 4, 256, torch.float32
    else:
        model, batch, length, dtype = GPT(50304, 768, 12, 12, 512), 8, 512, torch.bfloat16
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    text = synthetic_text(batch, length).to(device)

    def step() -> None:
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            train_step(model, optimizer, text)
        if device != "cpu":
            torch.cuda.synchronize()

    return step


def step_times(step: Step, steps: int, around: AbstractContextManager[object]) -> list[float]:
    times = []
    with around:
        for _ in range(steps):
            began = time.perf_counter()
            step()
            times.append(time.perf_counter() - began)
    return times


def ratios(step: Step, rounds: int, steps: int, folder: Path) -> dict[str, dict[str, float]]:
    """Return the ratios ``best`` and ``fastest`` by mode; 'nothing' compares plain with plain, which is noise."""
    modes: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "nothing": nullcontext,
        "no_stacks": lambda: memtrace.record(folder / "a.memtrace", stacks=False),
        "stacks": lambda: memtrace.record(folder / "b.memtrace"),
    }
    names = (*modes, "after")
    ratio_by_mode: dict[str, list[float]] = {name: [] for name in names}
    times_by_mode: dict[str, list[float]] = {name: [] for name in names}
    all_plain: list[float] = []
    for _ in range(rounds):
        for name, around in modes.items():
            plain = step_times(step, steps, nullcontext())
            times = step_times(step, steps, around())
            ratio_by_mode[name].append(min(times) / min(plain))
            times_by_mode[name] += times
            all_plain += plain
        times = step_times(step, steps, nullcontext())
        ratio_by_mode["after"].append(min(times) / min(plain))
        times_by_mode["after"] += times
        clear(folder)
    return {
        "best": {name: statistics.median(values) for name, values in ratio_by_mode.items()},
        "fastest": {
            name: fifth_percentile(times) / fifth_percentile(all_plain) for name, times in times_by_mode.items()
        },
    }


def fifth_percentile(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[0]


@dataclass(frozen=True)
class Run:
    """A whole run of some steps, from before entering the recording to the closed file."""

    wall_s: float
    thread_s: float
    """Processor time of the training thread."""
    process_s: float
    """Processor time of all threads."""

    @property
    def others_s(self) -> float:
        """Processor time of the other threads."""
        return self.process_s - self.thread_s

    def mean(self, other: Run) -> Run:
        return Run(
            (self.wall_s + other.wall_s) / 2,
            (self.thread_s + other.thread_s) / 2,
            (self.process_s + other.process_s) / 2,
        )


def whole_run(step: Step, steps: int, around: AbstractContextManager[object]) -> Run:
    gc.collect()
    wall, thread, process = time.perf_counter(), time.thread_time(), time.process_time()
    with around:
        for _ in range(steps):
            step()
    return Run(time.perf_counter() - wall, time.thread_time() - thread, time.process_time() - process)


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "smallest": min(values), "largest": max(values)}


def averages(step: Step, rounds: int, steps: int, folder: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Return by mode the ratios of whole runs to those without recording before and after them."""
    modes: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "nothing": nullcontext,
        "no_stacks": lambda: memtrace.record(folder / "d.memtrace", stacks=False),
        "stacks": lambda: memtrace.record(folder / "e.memtrace"),
    }
    pairs: dict[str, list[tuple[Run, Run]]] = {name: [] for name in modes}
    before = whole_run(step, steps, nullcontext())
    for _ in range(rounds):
        for name, around in modes.items():
            run = whole_run(step, steps, around())
            clear(folder)
            after = whole_run(step, steps, nullcontext())
            pairs[name].append((before.mean(after), run))
            before = after
    return {
        name: {
            "wall": spread([run.wall_s / plain.wall_s for plain, run in runs]),
            "training_thread": spread([run.thread_s / plain.thread_s for plain, run in runs]),
            "process": spread([run.process_s / plain.process_s for plain, run in runs]),
            "writer_seconds": spread([run.others_s - plain.others_s for plain, run in runs]),
        }
        for name, runs in pairs.items()
    }


def clear(folder: Path) -> None:
    for trace in folder.glob("*.memtrace"):
        shutil.rmtree(trace)


def bytes_an_event(step: Step, steps: int, folder: Path) -> float:
    with memtrace.record(folder / "size.memtrace"):
        for _ in range(steps):
            step()
    rank = folder / "size.memtrace" / "rank=0"
    size = sum(part.stat().st_size for part in rank.glob("*.parquet"))
    num_events = json.loads((rank / "manifest.json").read_text())["num_events"]
    clear(folder)
    return float(size / num_events)


def profiler(folder: Path) -> AbstractContextManager[object]:
    def export(profile: torch.profiler.profile) -> None:
        profile.export_chrome_trace(str(folder / "profile.json"))

    return torch.profiler.profile(profile_memory=True, record_shapes=True, with_stack=True, on_trace_ready=export)


def added_ms_a_step(step: Step, steps: int, folder: Path) -> dict[str, float]:
    """Return the milliseconds that each tool adds to a step, its start, stop and writing included; medians of three."""
    whole: dict[str, list[float]] = {"plain": [], "memtrace": [], "profiler": []}
    for _ in range(3):
        for name in whole:
            around: AbstractContextManager[object] = nullcontext()
            if name == "memtrace":
                around = memtrace.record(folder / "c.memtrace")
            elif name == "profiler":
                around = profiler(folder)
            whole[name].append(whole_run(step, steps, around).wall_s)
            # The next run should not pay for what the profiler leaves behind.
            del around
            clear(folder)
    plain = statistics.median(whole.pop("plain"))
    return {name: 1e3 * (statistics.median(values) - plain) / steps for name, values in whole.items()}


def memray_run(steps: int, target: str) -> None:
    """The process that memray is measured in: prints seconds without and with it, in turns."""
    import memray

    step = operator_bound()
    for _ in range(20):
        step()
    for number in range(3):
        plain = whole_run(step, steps, nullcontext())
        tracker = memray.Tracker(f"{target}-{number}.bin", native_traces=True)
        print(plain.wall_s, whole_run(step, steps, tracker).wall_s, flush=True)


def memray_added_ms(steps: int, folder: Path) -> float | None:
    """Return the milliseconds that memray adds to an operator-bound step; None where it is not installed."""
    if find_spec("memray") is None:
        return None
    command = [sys.executable, __file__, "--steps", str(steps), "--memray-run", str(folder / "memray")]
    lines = subprocess.check_output(command, text=True).splitlines()
    pairs = [tuple(map(float, line.split())) for line in lines]
    return 1e3 * statistics.median(tracked - plain for plain, tracked in pairs) / steps


def measure_operator_bound(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    step = operator_bound()
    for _ in range(20):
        step()
    added: dict[str, float | None] = {**added_ms_a_step(step, 100, folder)}
    added["memray"] = memray_added_ms(100, folder)
    return {
        **ratios(step, arguments.rounds, arguments.best_steps, folder),
        "average": averages(step, arguments.average_rounds, arguments.steps, folder),
        "bytes_an_event": bytes_an_event(step, arguments.steps, folder),
        "added_ms_a_step": added,
    }


def measure_realistic(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    step = realistic(arguments.device)
    step()
    return {
        **ratios(step, max(3, arguments.rounds // 3), 3, folder),
        "average": averages(step, arguments.average_rounds, max(3, arguments.steps // 25), folder),
    }


def print_result(value: object, name: str = "", depth: int = 0) -> None:
    if isinstance(value, dict):
        if name:
            print(f"{'    ' * depth}{name}:")
        for key, inner in value.items():
            print_result(inner, key, depth + bool(name))
        return
    number = f"{value:.3f}" if isinstance(value, float) else value
    print(f"{'    ' * depth}{name:16} {'not installed' if value is None else number}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25, help="Rounds of the best step.")
    parser.add_argument("--best-steps", type=int, default=8, help="Steps of a window of the best step.")
    parser.add_argument("--steps", type=int, default=500, help="Steps of a whole run.")
    parser.add_argument("--average-rounds", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", choices=("operator_bound", "realistic"), help="Measure one of the two programs.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--memray-run", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memray_run:
        memray_run(arguments.steps, arguments.memray_run)
        return
    result: dict[str, object] = {"torch": torch.__version__, "device": arguments.device}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.device == "cpu" and arguments.only != "realistic":
            result["operator_bound"] = measure_operator_bound(arguments, folder)
            torch.set_num_threads(2)
        if arguments.only != "operator_bound":
            result["realistic"] = measure_realistic(arguments, folder)
    if arguments.json:
        print(json.dumps(result, indent=1))
    else:
        print_result(result)


if __name__ == "__main__":
    main()
