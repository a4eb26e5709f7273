"""Gradients that no optimizer uses: what freezing the parameters saves, and gradients that are used after all."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from memtrace.analysis.findings import Finding
from memtrace.analysis.unused_gradients import _reaches_needed
from tests.analysis.program_waste import is_saved, waste_of

PATTERN = "unused gradients"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(128)
        self.mlp = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = x + self.mlp(self.norm(x))
        return mixed


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(64, 128)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


class Probe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = Backbone(), nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.backbone(x))  # the unfrozen backbone
        return logits


def unused_gradients_of(program: Callable[[], None], folder: Path) -> list[Finding]:
    """Return the findings of unused gradients in a program, of those that save nothing too."""
    return [finding for finding in waste_of(program, folder).findings if finding.pattern == PATTERN]


def train_head(is_frozen: bool) -> None:
    model = Probe()
    model.backbone.requires_grad_(not is_frozen)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(torch.randn(256, 64)), torch.randint(10, (256,)))
        loss.backward()
        optimizer.step()


def test_freezing_a_backbone_that_the_optimizer_does_not_have_saves_what_is_predicted(tmp_path: Path) -> None:
    waste = waste_of(lambda: train_head(is_frozen=False), tmp_path / "unfrozen")
    (finding,) = [finding for finding in waste.findings if finding.pattern == PATTERN]
    frozen = waste_of(lambda: train_head(is_frozen=True), tmp_path / "frozen")
    assert is_saved(finding, waste, frozen)
    assert not any(finding.pattern == PATTERN for finding in frozen.findings)
    assert finding.module == "Probe.backbone"
    lines, first = inspect.getsourcelines(Probe)
    (number,) = (first + offset for offset, line in enumerate(lines) if "the unfrozen backbone" in line)
    assert finding.site is not None and finding.site.endswith(f":{number} Probe.forward")


def distil(is_teacher_frozen: bool) -> None:
    teacher = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 32))
    teacher.requires_grad_(not is_teacher_frozen)
    student = nn.Linear(64, 32)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    for _ in range(4):
        x = torch.randn(128, 64)
        goal = teacher(x)
        optimizer.zero_grad()
        F.kl_div(F.log_softmax(student(x), 1), F.softmax(goal, 1), reduction="batchmean").backward()
        optimizer.step()


def test_a_teacher_through_which_the_loss_runs_is_found(tmp_path: Path) -> None:
    waste = waste_of(lambda: distil(is_teacher_frozen=False), tmp_path / "trained")
    frozen = waste_of(lambda: distil(is_teacher_frozen=True), tmp_path / "frozen")
    (finding,) = [finding for finding in waste.findings if finding.pattern == PATTERN]
    assert is_saved(finding, waste, frozen)


def train(model: nn.Module, use: Callable[[], None], *, num_backwards: int = 1) -> Callable[[], None]:
    def program() -> None:
        other = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        for _ in range(4):
            for _ in range(num_backwards):
                model(torch.randn(64, 128)).square().mean().backward()
            other(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            use()
            optimizer.zero_grad()

    return program


def test_gradients_that_the_program_applies_itself_are_used(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 64))

    def use() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.1)
        model.zero_grad()

    assert unused_gradients_of(train(model, use), tmp_path) == []


def test_gradients_that_an_optimizer_uses_later_are_used(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 64))
    own = torch.optim.SGD(model.parameters(), lr=0.1)

    def use() -> None:
        own.step()
        own.zero_grad()

    assert unused_gradients_of(train(model, use, num_backwards=2), tmp_path) == []


def test_a_graph_through_which_the_gradient_of_an_input_runs_is_needed(tmp_path: Path) -> None:
    def program() -> None:
        network = nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 64)).requires_grad_(False)
        image = nn.Parameter(torch.randn(64, 128))
        optimizer = torch.optim.SGD([image], lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            network(image).square().mean().backward()
            optimizer.step()

    assert unused_gradients_of(program, tmp_path) == []


def test_the_gradient_of_an_input_of_the_size_of_a_weight_is_not_that_of_a_parameter(tmp_path: Path) -> None:
    def program() -> None:
        critic = nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 1))
        optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
        for _ in range(4):
            x = torch.randn(256, 128, requires_grad=True)
            (gradient,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
            ((gradient.norm(dim=1) - 1).square().mean() + critic(x).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert unused_gradients_of(program, tmp_path) == []


def test_gradients_in_a_program_without_an_optimizer_are_not_judged(tmp_path: Path) -> None:
    def program() -> None:
        model = nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 64))
        for _ in range(4):
            model(torch.randn(64, 128)).square().mean().backward()
            model.zero_grad()

    assert unused_gradients_of(program, tmp_path) == []


def train_generator(is_critic_frozen: bool) -> None:
    generator, critic = nn.Linear(16, 128), nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 1))
    of_generator, of_critic = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, critic))
    for _ in range(4):
        critic(torch.randn(16, 128)).mean().backward()
        of_critic.step()
        of_critic.zero_grad()
        critic.requires_grad_(not is_critic_frozen)
        critic(generator(torch.randn(256, 16))).mean().backward()
        of_generator.step()
        of_generator.zero_grad()
        critic.requires_grad_(True)
        critic.zero_grad()


def test_of_a_graph_that_is_needed_only_the_gradients_of_its_weights_are_unused(tmp_path: Path) -> None:
    waste = waste_of(lambda: train_generator(is_critic_frozen=False), tmp_path / "trained")
    frozen = waste_of(lambda: train_generator(is_critic_frozen=True), tmp_path / "frozen")
    (finding,) = [finding for finding in waste.findings if finding.pattern == PATTERN]
    assert is_saved(finding, waste, frozen)
    assert not any(finding.pattern == PATTERN for finding in frozen.findings)


@st.composite
def data_flows(draw: st.DrawFn) -> tuple[list[int], list[int], list[bool], list[bool]]:
    """Accesses of operators in order: the block, the operator and whether it reads; and which blocks are removable."""
    num_blocks = draw(st.integers(1, 8))
    accesses = draw(st.lists(st.tuples(st.integers(0, num_blocks - 1), st.integers(0, 7), st.booleans()), max_size=30))
    removable = draw(st.lists(st.booleans(), min_size=num_blocks, max_size=num_blocks))
    block, op, is_read = map(list, zip(*accesses, strict=True)) if accesses else ([], [], [])
    return block, op, is_read, removable


@settings(max_examples=100, deadline=None)
@given(data_flows())
def test_what_is_needed_equals_a_fixpoint(flow: tuple[list[int], list[int], list[bool], list[bool]]) -> None:
    block, op, is_read, removable = flow
    needed_blocks = {number for number, can_go in enumerate(removable) if not can_go}
    needed_ops: set[int] = set()
    for _ in range(len(removable) + 8):
        accesses = list(zip(block, op, is_read, strict=True))
        needed_ops |= {call for b, call, reads in accesses if not reads and b in needed_blocks}
        needed_blocks |= {b for b, call, reads in accesses if reads and call in needed_ops}
    columns = (np.array(block, np.int64), np.array(op, np.int64), np.array(is_read, bool), np.array(removable, bool))
    reached = _reaches_needed(*columns, 8)
    assert set(np.flatnonzero(reached[: len(removable)]).tolist()) == needed_blocks
    assert set(np.flatnonzero(reached[len(removable) :]).tolist()) == needed_ops
