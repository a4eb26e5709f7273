"""``memtrace plan spill``: the printed plan, the proof, and schedules of several models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from memtrace.cli import cli

from memtrace.planning import read_plan
from memtrace.planning.actions import Spill
from tests.cli.runner import run_memtrace

PROGRAM = """
import sys
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(int(sys.argv[1]))))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(6):
    optimizer.zero_grad()
    model(torch.randn(8, 128)).pow(2).mean().backward()
    optimizer.step()
"""
BUDGET = "512KiB"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that trains a model of as many layers as its argument says; 256 KiB of state each."""
    path = tmp_path_factory.mktemp("program") / "train.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture(scope="module")
def traces(program: Path) -> tuple[Path, ...]:
    """Traces of two models, one larger than the other."""
    paths = tuple(program.parent / f"depth-{depth}.memtrace" for depth in (4, 6))
    for depth, path in zip((4, 6), paths, strict=True):
        assert run_memtrace("record", "-o", path, program, str(depth)).returncode == 0
    return paths


def run(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(cli, ["plan", "spill", *map(str, arguments)])


def test_the_plan_is_printed_and_written(traces: tuple[Path, ...], tmp_path: Path) -> None:
    result = run(traces[0], "--budget", BUDGET, "--buffer", "5%", "--d2h", "6", "--h2d", "6", "-o", tmp_path / "p.json")
    assert result.exit_code == 0, result.output
    for text in ("Spill the model in", "with a buffer of 25.6", "times the budget of", "Without double buffering"):
        assert text in " ".join(result.output.split())
    (action,) = read_plan(tmp_path / "p.json").actions
    assert isinstance(action, Spill)
    assert action.buffer_bytes == int(0.05 * (512 << 10))


def test_schedules_of_several_models_are_compared(traces: tuple[Path, ...]) -> None:
    options = ("--budget", BUDGET, "--d2h", "6", "--h2d", "6", "--devices", "2")
    printed = run(*traces, *options)
    assert printed.exit_code == 0, printed.output
    lines = printed.output.splitlines()
    rows = [line for line in lines if line.startswith(("   0  ", "   1  "))]
    assert len(rows) == 2
    assert all(len(line) <= 80 for line in rows)
    assert set("".join(row[6:] for row in rows)) <= {"A", "B", "."}
    report = json.loads(run(*traces, *options, "--json").output)
    assert [model["name"] for model in report["models"]] == ["depth-4", "depth-6"]
    makespans = {policy["policy"]: policy["makespan_s"] for policy in report["policies"]}
    assert min(makespans.values()) >= report["lower_bound_s"] * (1 - 1e-9)
    assert makespans["sharded-lrtf"] < makespans["model-parallel"]


def test_the_optimum_is_computed_for_few_units(traces: tuple[Path, ...]) -> None:
    result = run(
        *traces, "--budget", "1MiB", "--d2h", "6", "--h2d", "6", "--devices", "2", "--minibatches", "2", "--json"
    )
    policies = {policy["policy"]: policy for policy in json.loads(result.output)["policies"]}
    assert policies["optimum"]["gap"] is not None


@pytest.mark.slow
def test_the_plan_is_proved(program: Path) -> None:
    result = run("--budget", BUDGET, "--prove", f"{program} 6", "--json")
    assert result.exit_code == 0, result.output
    proof = json.loads(result.output)
    assert proof["num_losses"] == proof["num_equal_losses"] == 6
    assert proof["measured"]["peak_bytes"] <= 512 << 10
    assert proof["plan"]["recorded"]["peak_bytes"] > 1 << 20


def test_a_budget_that_is_too_small_is_an_error(traces: tuple[Path, ...]) -> None:
    done = run_memtrace("plan", "spill", traces[0], "--budget", "1KiB")
    assert done.returncode == 2
    assert "the layer Sequential.0 alone needs" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--budget", "1MiB", "--buffer", "200%"), "write 5%"),
        (("--budget", "1MiB", "--d2h", "3"), "given together"),
        (("--budget", "1MiB", "--devices", "2", "-o", "plan.json"), "cannot be combined"),
        ((), "--budget"),
    ],
)
def test_errors_name_what_is_wrong(traces: tuple[Path, ...], options: tuple[str, ...], message: str) -> None:
    result = run(traces[0], *options)
    assert result.exit_code == 2
    assert message in result.output
