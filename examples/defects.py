"""Three deliberate memory defects: what memtrace finds, and whether the predicted savings are right.

    python examples/defects.py

The defects are a buffer that is never used, validation losses that are stored with their autograd graphs, and gradients
that are set to zero instead of freed. The program is recorded with and without the defects; the peak that memtrace
predicts from the first recording is compared with the peak of the second.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn

import memtrace

NUM_STEPS = 12
NUM_DEFECTS = 3


def make_model() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.ReLU())))


def validate(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.randn(128, 512)).square().mean()
    return loss


def train(path: Path, *, fixed: bool, num_steps: int = NUM_STEPS) -> None:
    """Record a training run to ``path``, with the defects or with all of them fixed."""
    torch.manual_seed(0)
    with memtrace.record(path):
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters())
        unused_buffer = None if fixed else torch.zeros(1 << 20)
        losses = []
        for _ in range(num_steps):
            model(torch.randn(512, 512)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=fixed)
            losses.append(validate(model).detach() if fixed else validate(model))
        del unused_buffer


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    from memtrace.analysis import find_device_waste, predict_peak_with_fixes
    from memtrace.units import format_bytes

    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder) / "defects.memtrace", fixed=False)
        train(Path(folder) / "fixed.memtrace", fixed=True)
        trace = memtrace.load(Path(folder) / "defects.memtrace")
        waste = find_device_waste(trace, "cpu")
        measured = find_device_waste(memtrace.load(Path(folder) / "fixed.memtrace"), "cpu").peak_bytes
    for finding in waste.findings[:6]:
        print(f"{finding.pattern:32} {finding.site or 'unknown':40} saves {format_bytes(finding.saved_bytes):>8}")
    predicted = predict_peak_with_fixes(trace, waste, waste.findings[:NUM_DEFECTS])
    print(f"Peak with the defects: {format_bytes(waste.peak_bytes)}")
    print(
        f"Peak with the first {NUM_DEFECTS} findings fixed: predicted {format_bytes(predicted)}, "
        f"measured {format_bytes(measured)} (error {predicted / measured - 1:+.2%})"
    )
    print(f"No schedule can go below {format_bytes(waste.lower_bound_bytes)}.")


if __name__ == "__main__":
    main()
