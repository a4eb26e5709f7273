"""What the commands say of files that cannot tell everything: unknown, never 0, and the same in every command."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from click.testing import CliRunner
from making import Maker
from memtrace.cli import cli
from memtrace.dashboards.steps import steps_figure

import memtrace


def said(*arguments: object) -> str:
    found = CliRunner().invoke(cli, list(map(str, arguments)))
    assert found.exit_code == 0, found.output
    return found.output


@pytest.fixture
def three_steps(tmp_path: Path) -> Path:
    """A snapshot whose annotations name three steps of an optimizer and no wait for data."""
    maker, ranges = Maker(), []
    for _ in range(3):
        maker.free(maker.alloc(1000))
        for stage in ("START", "END"):
            maker.clock_us += 1
            ranges.append({"name": "Optimizer.step#SGD.step", "stage": stage, "device": 0, "time_us": maker.clock_us})
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(maker.snapshot() | {"external_annotations": ranges}))
    return path


def test_a_file_that_names_no_waits_for_data_is_not_said_to_have_none(three_steps: Path) -> None:
    assert "waits for data unknown" in " ".join(said("summary", three_steps).split())
    assert "0.0 %" not in (text := said("stalls", three_steps)) and "3 steps" in text
    told = json.loads(said("stalls", three_steps, "--json"))
    assert told["share"] is None and told["median_wait_ns"] is None and told["median_duration_ns"] > 0
    assert [row["data_wait_ns"] for row in told["steps"]] == [None] * 3
    assert said("stalls", three_steps, "--csv").splitlines()[1].endswith(",")
    figure = steps_figure(memtrace.load(three_steps), "cuda:0")
    assert figure is not None and [trace.name for trace in figure.data if trace.type == "bar"] == ["duration"]
