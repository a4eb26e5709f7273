"""Plans of fake tensors: what a step saves is what the real program saves."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from pathlib import Path

import numpy as np
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import memtrace
from memtrace import Trace
from memtrace.analysis.blocks import blocks
from memtrace.planning.offload_candidates import find_step_saves
from memtrace.planning.recompute import recompute_options
from memtrace.planning.recorded_step import choose_step
from tests.programs.planned import PROGRAMS, train


def record(path: Path, *, fake: bool) -> Trace:
    """Train the small CNN, whose batch norms count their calls in scalars."""
    gc.collect()
    with FakeTensorMode() if fake else nullcontext():
        training = PROGRAMS[1].small(3)
        assert any(isinstance(module, nn.BatchNorm2d) for module in training.model.modules())
        with memtrace.record(path, model=training.model, optimizer=training.optimizer):
            train(training)
    return memtrace.load(path)


def test_a_fake_step_can_be_planned_like_the_real_one(tmp_path: Path) -> None:
    real, fake = record(tmp_path / "real.memtrace", fake=False), record(tmp_path / "fake.memtrace", fake=True)
    saved, modules = [], []
    for trace in (real, fake):
        step, found = recompute_options(trace, "cpu", selective=False)
        candidates = find_step_saves(trace, "cpu", step, min_bytes=4096).candidates
        saved.append([(candidates.names[name].module, int(size)) for name, size in zip(
            candidates.name, blocks(trace).size[candidates.block], strict=True)])  # fmt: skip
        modules.append([(option.module, option.saved_bytes) for option in found.options])
    assert sorted(saved[0]) == sorted(saved[1]) and len(saved[0]) > 5
    assert modules[0] == modules[1] and len(modules[0]) > 5
    assert choose_step(fake, "cpu").cost.step_ns is None
    names = fake.columns("ops", "name")["name"]
    assert not any((fake.name(number) or "").startswith("prim::") for number in np.unique(names).tolist())
