"""Marks of a pipeline's actions: by hand, and of torch's stages by themselves, whenever they are imported."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import memtrace
from memtrace.errors import MemtraceError

LATE_IMPORT = """
import sys
import torch, memtrace
with memtrace.record(sys.argv[1]):
    assert not any(name.startswith("torch.distributed.pipelining") for name in sys.modules)
    from torch.distributed.pipelining import stage, schedules
    assert hasattr(stage._PipelineStageBase.forward_one_chunk, "__wrapped__")
    assert hasattr(schedules.PipelineScheduleSingle.step, "__wrapped__")
assert not hasattr(stage._PipelineStageBase.forward_one_chunk, "__wrapped__")
assert not hasattr(stage._PipelineStageBase.backward_one_chunk, "__wrapped__")
assert not hasattr(schedules.PipelineScheduleSingle.step, "__wrapped__")
assert not hasattr(schedules._PipelineSchedule._maybe_compute_loss, "__wrapped__")
assert not any("memtrace" in type(finder).__module__ for finder in sys.meta_path)
"""


def actions(trace: memtrace.Trace) -> list[str | None]:
    spans = trace.spans
    return [trace.name(int(name)) for name in spans[spans["kind"] == "action"].sort_values("start_ns")["name"]]


@pytest.mark.parametrize("observer", ["native", "dispatch"])
def test_hand_written_pipelines_say_what_they_are_at(tmp_path, observer, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    model = torch.nn.Linear(8, 8)
    with memtrace.record(tmp_path / "run.memtrace", observer=observer) as rec:
        with rec.microbatch(0):
            out = model(torch.randn(4, 8))
        with rec.stage(1, pipeline=1):
            with rec.microbatch(5):
                model(torch.randn(4, 8))
            with rec.stage(2), rec.microbatch(6, "input_backward"):
                pass
            with rec.microbatch(5, "weight_backward"):
                pass
        with rec.microbatch(0, "backward"):
            out.sum().backward()
        with rec.action("B2.5a@1"):
            pass
    trace = memtrace.load(tmp_path / "run.memtrace")
    # Without a stage around it, a micro-batch is of the stage with the rank's number.
    assert actions(trace) == ["F3.0", "F1.5@1", "I2.6", "W1.5@1", "B3.0", "B2.5a@1"]


def test_marks_of_an_inner_recording_go_to_the_outer_one(tmp_path):
    with (
        memtrace.record(tmp_path / "outer.memtrace"),
        memtrace.record(tmp_path / "inner.memtrace") as inner,
        inner.stage(4),
        inner.microbatch(1),
    ):
        torch.ones(10).sum()
    assert actions(memtrace.load(tmp_path / "outer.memtrace")) == ["F4.1"]


def test_marks_do_nothing_once_the_recording_is_over(tmp_path):
    with memtrace.record(tmp_path / "run.memtrace", max_steps=1) as rec:
        rec.step()
        with rec.microbatch(0):
            pass
    with rec.microbatch(1):
        pass
    assert actions(memtrace.load(tmp_path / "run.memtrace")) == []


def test_a_direction_that_does_not_exist_is_refused(tmp_path):
    with (
        memtrace.record(tmp_path / "run.memtrace") as rec,
        pytest.raises(MemtraceError, match="sideways"),
        rec.microbatch(0, "sideways"),
    ):
        pass


def test_a_stage_inside_its_micro_batch_is_refused(tmp_path):
    """The micro-batch would have been of the stage that the rank's number says."""
    with memtrace.record(tmp_path / "t.memtrace") as rec:
        with pytest.raises(MemtraceError, match="stands around"), rec.microbatch(0), rec.stage(1):
            pass
        with rec.stage(1), rec.microbatch(0):
            pass


def test_stages_that_are_imported_later_are_marked_and_left_as_they_were(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LATE_IMPORT, str(tmp_path / "run.memtrace")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
