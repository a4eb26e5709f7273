"""Step time with recording relative to without, and the total time that recording adds, compared with torch.profiler.

Windows of a few steps alternate between the modes. The best step of each window counts, and the median over the rounds
of the ratios of neighboring windows is printed, because the speed of a machine drifts.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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


def best_step(step: Step, steps: int, around: AbstractContextManager[object]) -> float:
    best = float("inf")
    with around:
        for _ in range(steps):
            began = time.perf_counter()
            step()
            best = min(best, time.perf_counter() - began)
    return best


def ratios(step: Step, rounds: int, steps: int, folder: Path) -> dict[str, float]:
    """Return the median ratios to a plain window next to each; 'nothing' compares plain with plain, which is noise."""
    modes: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "nothing": nullcontext,
        "no_stacks": lambda: memtrace.record(folder / "a.memtrace", stacks=False),
        "stacks": lambda: memtrace.record(folder / "b.memtrace"),
    }
    ratio_by_mode: dict[str, list[float]] = {name: [] for name in (*modes, "after")}
    for _ in range(rounds):
        for name, around in modes.items():
            plain = best_step(step, steps, nullcontext())
            ratio_by_mode[name].append(best_step(step, steps, around()) / plain)
        ratio_by_mode["after"].append(best_step(step, steps, nullcontext()) / plain)
    return {name: statistics.median(values) for name, values in ratio_by_mode.items()}


def profiler(folder: Path) -> AbstractContextManager[object]:
    def export(profile: torch.profiler.profile) -> None:
        profile.export_chrome_trace(str(folder / "profile.json"))

    return torch.profiler.profile(profile_memory=True, record_shapes=True, with_stack=True, on_trace_ready=export)


def added_in_all(step: Step, steps: int, folder: Path) -> dict[str, float]:
    """Return the seconds that recording some steps adds, including its start, stop and writing; medians of three."""
    whole: dict[str, list[float]] = {"plain": [], "memtrace": [], "profiler": []}
    for _ in range(3):
        for name in whole:
            around: AbstractContextManager[object] = nullcontext()
            if name == "memtrace":
                around = memtrace.record(folder / "c.memtrace")
            elif name == "profiler":
                around = profiler(folder)
            began = time.perf_counter()
            with around:
                for _ in range(steps):
                    step()
            whole[name].append(time.perf_counter() - began)
            # The next run should not pay for what the profiler leaves behind.
            del around
            gc.collect()
    plain = statistics.median(whole.pop("plain"))
    return {name: statistics.median(values) - plain for name, values in whole.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--steps", type=int, default=8, help="Steps of a window.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result: dict[str, object] = {"torch": torch.__version__, "device": arguments.device}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.device == "cpu":
            step = operator_bound()
            for _ in range(20):
                step()
            result["operator_bound"] = ratios(step, arguments.rounds, arguments.steps, folder)
            added = added_in_all(step, 100, folder)
            result["added_in_all_seconds"] = added
            result["added_memtrace_to_profiler"] = added["memtrace"] / added["profiler"]
            torch.set_num_threads(2)
        step = realistic(arguments.device)
        step()
        result["realistic"] = ratios(step, max(3, arguments.rounds // 3), 3, folder)
    if arguments.json:
        print(json.dumps(result, indent=1))
        return
    for name, values in result.items():
        print(f"{name}: {values if not isinstance(values, dict) else ''}")
        for key, value in values.items() if isinstance(values, dict) else ():
            print(f"    {key:12} {value:.3f}")


if __name__ == "__main__":
    main()
