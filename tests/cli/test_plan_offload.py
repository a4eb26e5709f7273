"""``memtrace plan offload``: the printed plan, its file, and a proof; offloads in ``memtrace plan auto``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from memtrace.cli import cli

from memtrace.planning import read_plan
from memtrace.planning.actions import Offload
from tests.builders import trace_of
from tests.cli.runner import run_memtrace

PROGRAM = """
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
layers = [layer for _ in range(6) for layer in (torch.nn.Linear(64, 64), torch.nn.Tanh())]
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(1024, 64)).pow(2).mean().backward()
    optimizer.step()
"""
RATES = ("--d2h", "1", "--h2d", "1")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("program") / "train.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture(scope="module")
def trace(program: Path) -> Path:
    path = program.parent / "run.memtrace"
    run_memtrace("record", "-o", str(path), str(program))
    return path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["plan", *arguments])


def test_the_tensors_are_listed_and_written(trace: Path, tmp_path: Path) -> None:
    result = run("offload", str(trace), *RATES, "-o", str(tmp_path / "plan.json"))
    assert result.exit_code == 0, result.output
    plan = read_plan(tmp_path / "plan.json")
    (action,) = plan.actions
    assert isinstance(action, Offload)
    assert "256 KiB" in result.output and "Copy back begins" in result.output
    assert plan.predicted.peak_bytes < plan.recorded.peak_bytes


def test_a_target_that_cannot_be_reached_is_an_error(trace: Path) -> None:
    result = run_memtrace("plan", "offload", str(trace), *RATES, "--target-peak", "1KiB")
    assert result.returncode == 2
    assert "the least peak it can reach is" in " ".join(result.stderr.split())


def test_a_trace_without_memory_events_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memtrace.cli.arguments.open_traces", lambda paths: trace_of())
    assert "the trace has no memory events" in str(run("offload", "run.memtrace", *RATES).exception)


def test_a_proof_measures_at_most_the_predicted_peak(program: Path) -> None:
    result = run_memtrace("plan", "offload", *RATES, "--json", "--prove", str(program))
    proof = json.loads(result.stdout)
    assert proof["peak_error"] <= 0.03
    assert proof["num_losses"] == proof["num_equal_losses"] == 5


def test_auto_considers_offloads_if_bandwidths_are_given(trace: Path) -> None:
    fronts = [run("auto", str(trace), *rates, "--apply-only", "--json") for rates in ((), ("--d2h", "9", "--h2d", "9"))]
    kinds = [
        {action["kind"] for option in json.loads(result.output)["front"] for action in option["actions"]}
        for result in fronts
    ]
    assert "offload" not in kinds[0]
    assert "offload" in kinds[1]
