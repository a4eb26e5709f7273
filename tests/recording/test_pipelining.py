"""Actions of pipeline schedules: marked in hand-written pipelines and detected in torch's stages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import memtrace
from memtrace.errors import MemtraceError
from tests.recording.helpers import PROGRAMS


def actions(trace: memtrace.Trace) -> list[str | None]:
    spans = trace.spans
    return [trace.name(int(name)) for name in spans[spans["kind"] == "action"].sort_values("start_ns")["name"]]


@pytest.mark.parametrize("observer", ["native", "dispatch"])
def test_actions_of_a_hand_written_pipeline(tmp_path: Path, observer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    model = torch.nn.Linear(8, 8)
    with memtrace.record(tmp_path / "run.memtrace", observer=observer) as recording:
        with recording.microbatch(0):
            out = model(torch.randn(4, 8))
        with recording.stage(1, pipeline=1):
            with recording.microbatch(5):
                model(torch.randn(4, 8))
            with recording.stage(2), recording.microbatch(6, "input_backward"):
                pass
            with recording.microbatch(5, "weight_backward"):
                pass
        with recording.microbatch(0, "backward"):
            out.sum().backward()
        with recording.action("B2.5a@1"):
            pass
    trace = memtrace.load(tmp_path / "run.memtrace")
    # Outside of a stage, a micro-batch belongs to the stage with the number of the rank.
    assert actions(trace) == ["F3.0", "F1.5@1", "I2.6", "W1.5@1", "B3.0", "B2.5a@1"]


def test_marks_of_an_inner_recording_go_to_the_outer_one(tmp_path: Path) -> None:
    with (
        memtrace.record(tmp_path / "outer.memtrace"),
        memtrace.record(tmp_path / "inner.memtrace") as inner,
        inner.stage(4),
        inner.microbatch(1),
    ):
        torch.ones(10).sum()
    assert actions(memtrace.load(tmp_path / "outer.memtrace")) == ["F4.1"]


def test_marks_have_no_effect_after_the_recording(tmp_path: Path) -> None:
    with memtrace.record(tmp_path / "run.memtrace", max_steps=1) as recording:
        recording.step()
        with recording.microbatch(0):
            pass
    with recording.microbatch(1):
        pass
    assert actions(memtrace.load(tmp_path / "run.memtrace")) == []


def test_an_unknown_direction_is_refused(tmp_path: Path) -> None:
    with (
        memtrace.record(tmp_path / "run.memtrace") as recording,
        pytest.raises(MemtraceError, match="sideways"),
        recording.microbatch(0, "sideways"),  # type: ignore[arg-type]
    ):
        pass


def test_a_stage_inside_a_micro_batch_is_refused(tmp_path: Path) -> None:
    """The micro-batch would belong to the stage with the number of the rank."""
    with memtrace.record(tmp_path / "t.memtrace") as recording:
        with pytest.raises(MemtraceError, match="is inside"), recording.microbatch(0), recording.stage(1):
            pass
        with recording.stage(1), recording.microbatch(0):
            pass


def test_torch_stages_imported_during_a_recording_are_marked_and_restored(tmp_path: Path) -> None:
    command = [sys.executable, PROGRAMS / "import_pipelining_late.py", tmp_path / "run.memtrace"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
