"""Three planted defects, what memtrace finds of them, and the peak predicted and measured once they are mended.

    python examples/defects.py

A never-used buffer, validation losses kept with their graphs, and gradients that are zeroed instead of freed.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn

import memtrace

STEPS = 12


def make_model() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.ReLU())))


def validate(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(128, 512)).square().mean()


def train(path: Path, *, mended: bool, steps: int = STEPS) -> None:
    torch.manual_seed(0)
    with memtrace.record(path):
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters())
        scratch = None if mended else torch.zeros(1 << 20)
        losses = []
        for _ in range(steps):
            model(torch.randn(512, 512)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=mended)
            losses.append(validate(model).detach() if mended else validate(model))
        del scratch


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    from memtrace.analysis.counterfactual import Absences, peak_without
    from memtrace.analysis.findings import findings
    from memtrace.analysis.peak import find_peak

    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder) / "before.memtrace", mended=False)
        train(Path(folder) / "after.memtrace", mended=True)
        trace = memtrace.load(Path(folder) / "before.memtrace")
        before = findings(trace, "cpu")
        after = find_peak(memtrace.load(Path(folder) / "after.memtrace"), "cpu").requested.bytes
    for one in before.findings[:6]:
        print(f"{one.name or one.pattern:36} {one.site or 'unknown':36} saves {one.saved_bytes / 2**20:6.2f} MiB")
    planted = before.findings[:3]
    predicted = peak_without(trace, "cpu", Absences.joined([one.absences for one in planted]))
    print(f"peak {before.peak_bytes / 2**20:.2f} MiB")
    told = f"predicted {predicted / 2**20:.2f} MiB, measured {after / 2**20:.2f} MiB ({predicted / after - 1:+.2%})"
    print(f"with the first three mended: {told}")
    print(f"one operator touches {(before.lower_bound_bytes or 0) / 2**20:.2f} MiB at most: no order is below that")


if __name__ == "__main__":
    main()
