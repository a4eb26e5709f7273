"""Imports torch.distributed.pipelining during a recording into ``sys.argv[1]`` and checks that it is left unchanged."""

import sys

import torch  # noqa: F401

import memtrace

with memtrace.record(sys.argv[1]):
    assert not any(name.startswith("torch.distributed.pipelining") for name in sys.modules)
    from torch.distributed.pipelining import schedules, stage

    assert hasattr(stage._PipelineStageBase.forward_one_chunk, "__wrapped__")
    assert hasattr(schedules.PipelineScheduleSingle.step, "__wrapped__")
assert not hasattr(stage._PipelineStageBase.forward_one_chunk, "__wrapped__")
assert not hasattr(stage._PipelineStageBase.backward_one_chunk, "__wrapped__")
assert not hasattr(schedules.PipelineScheduleSingle.step, "__wrapped__")
assert not hasattr(schedules._PipelineSchedule._maybe_compute_loss, "__wrapped__")
assert not any("memtrace" in type(finder).__module__ for finder in sys.meta_path)
