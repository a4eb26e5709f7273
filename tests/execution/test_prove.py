"""The proof of a plan: two recorded runs of one program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from memtrace.cli import cli

from memtrace import MemtraceError, Plan, Trace
from memtrace.execution.losses import read_losses, write_losses
from memtrace.execution.prove import prove_plan
from memtrace.planning.plan import StepCost, write_plan
from memtrace.planning.recorded_step import choose_step

PROGRAM = """
import sys
import torch

torch.manual_seed(0)
if "--random" in sys.argv:
    torch.seed()
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    optimizer.zero_grad()
    model(torch.randn(32, 64)).pow(2).mean().backward()
    optimizer.step()
"""


def keep_everything(trace: Trace) -> Plan:
    """The plan that changes nothing: its second run must cost what the first one cost."""
    cost = choose_step(trace, "cpu").cost
    return Plan("cpu", (), cost, cost)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


def test_a_plan_that_changes_nothing_is_proved_exactly(program: Path, tmp_path: Path) -> None:
    proof = prove_plan([str(program)], keep_everything, tmp_path / "proof")
    assert proof.peak_error == 0
    assert proof.step_error is not None
    assert (proof.num_losses, proof.num_equal_losses) == (6, 6)


@pytest.mark.slow
def test_losses_of_a_program_without_a_seed_differ(program: Path, tmp_path: Path) -> None:
    proof = prove_plan([str(program), "--random"], keep_everything, tmp_path / "proof")
    assert proof.num_losses == 6
    assert proof.num_equal_losses < 6


def test_a_program_that_fails_is_reported_with_its_last_words(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text("raise SystemExit('no data')")
    with pytest.raises(MemtraceError, match=r"exit code 1: .*no data"):
        prove_plan([str(program)], keep_everything, tmp_path / "proof")


def test_losses_are_written_bit_by_bit(tmp_path: Path) -> None:
    weight = torch.tensor([0.1, 0.2], requires_grad=True)
    backward = torch.autograd.backward
    with write_losses(tmp_path / "losses.json"):
        weight.sum().backward()
        (weight * 3).backward(torch.ones(2))  # not a loss
        torch.autograd.backward(weight.prod())
    assert [float.fromhex(loss) for loss in read_losses(tmp_path / "losses.json")] == [
        weight.sum().item(),
        weight.prod().item(),
    ]
    assert torch.autograd.backward is backward


def test_record_refuses_a_plan_that_cannot_be_read(program: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "plan.json"
    damaged.write_text("{}")
    result = CliRunner().invoke(cli, ["record", "-o", str(tmp_path / "run"), "--apply", str(damaged), str(program)])
    assert isinstance(result.exception, MemtraceError)
    assert "is not a plan" in str(result.exception)
    assert not (tmp_path / "run").exists()


def test_record_applies_a_plan(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, losses = tmp_path / "plan.json", tmp_path / "losses.json"
    write_plan(Plan("cpu", (), StepCost(1, None), StepCost(1, None)), plan)
    monkeypatch.setattr("sys.argv", ["memtrace"])
    monkeypatch.setattr("sys.path", ["."])
    arguments = ["record", "-o", str(tmp_path / "run"), "--apply", str(plan), "--losses", str(losses), str(program)]
    assert CliRunner().invoke(cli, arguments).exit_code == 0
    assert len(json.loads(losses.read_text())) == 6
