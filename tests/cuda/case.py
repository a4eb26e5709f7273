"""One case of the comparison: a program under a setting, recorded and compared with torch's own history."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

import memtrace
from memtrace.allocator.plan import plan_allocator
from memtrace.errors import MemtraceError
from memtrace.trace import Trace
from tests.cuda.programs import PROGRAMS, Program
from tests.cuda.settings import CONTEXT_BYTES, SETTINGS, Setting, on_null_device
from tests.cuda.torch_history import TorchRecord, enable_history, find_differences
from tests.cuda.training_programs import Run


@dataclass(frozen=True)
class Case:
    """A program under a setting."""

    program: str
    setting: str
    folder: str
    """Where the trace is written."""
    seed: int = 0


@dataclass(frozen=True)
class CaseResult:
    """How a case ended."""

    num_events: int
    differences: list[str]
    """Differences between the trace and torch's history; empty: equal."""
    plan_difference: str | None
    """Why the allocator's model does not reproduce the trace; None: it does."""


def run_case(case: Case) -> CaseResult:
    """Record a program in this process, which has not used CUDA, and compare."""
    program, setting = PROGRAMS[case.program], SETTINGS[case.setting]
    _set_environment(program, setting)
    torch.manual_seed(case.seed)
    torch.backends.cudnn.enabled = not on_null_device()
    record = _record(case, program, setting)
    trace = memtrace.load(case.folder)
    num_events = sum(len(entries) for entries in record.last["device_traces"])
    return CaseResult(num_events, find_differences(trace, record), _plan_difference(trace))


def _set_environment(program: Program, setting: Setting) -> None:
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = setting.allocator
    if on_null_device():
        os.environ["NULLCUDA_DEVICES"] = str(max(setting.num_devices, program.min_devices))
        os.environ["NULLCUDA_CONTEXT"] = str(CONTEXT_BYTES)
        if program.memory_bytes is not None:
            os.environ["NULLCUDA_MEMORY"] = str(CONTEXT_BYTES + program.memory_bytes)
        os.environ.update(setting.null_device)


def _record(case: Case, program: Program, setting: Setting) -> TorchRecord:
    """Record a program; where nothing has to be done before, the recording begins before CUDA is initialised."""
    record = TorchRecord()
    runs = [Run(torch.device("cuda", number), record.mark, case.seed) for number in range(setting.num_devices)]
    if program.prepare is None and program.memory_bytes is None and setting.limit_bytes is None:
        with memtrace.record(case.folder):
            enable_history()
            kept = [_run(program, run, None) for run in runs]
            record.end()
        return record
    enable_history()
    ballast = [_limit_memory(run.device, program, setting) for run in runs]
    states = [program.prepare(run) if program.prepare else None for run in runs]
    record.begin()
    with memtrace.record(case.folder):
        kept = [_run(program, run, state) for run, state in zip(runs, states, strict=True)]
        record.end()
    del ballast, kept
    return record


def _run(program: Program, run: Run, state: Any) -> object:
    """Return what the program keeps; an out-of-memory error ends it, as it would end a training loop."""
    with torch.cuda.device(run.device):
        try:
            return program.run(run, state)
        except torch.OutOfMemoryError:
            return None


def _limit_memory(device: torch.device, program: Program, setting: Setting) -> object:
    """Leave the process as much memory as the case wants; on a real GPU a tensor takes the rest."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    if setting.limit_bytes is not None:
        torch.cuda.set_per_process_memory_fraction(setting.limit_bytes / total_bytes, device)
    if program.memory_bytes is None or on_null_device() or setting.limit_bytes is not None:
        return None
    return torch.empty(max(0, free_bytes - program.memory_bytes), dtype=torch.uint8, device=device)


def _plan_difference(trace: Trace) -> str | None:
    """Return why the model of the allocator does not replay the trace; None: it does, for every device."""
    try:
        plan = plan_allocator(trace, settings=())
    except MemtraceError as error:
        return str(error)
    for device in plan.devices:
        if device.replay is None:
            return f"{device.device}: the trace has no allocator history"
        if not device.replay.is_exact:
            return f"{device.device}: {device.replay.reason}"
        if not device.replay.final_blocks_match:
            return f"{device.device}: blocks and segments after the replay differ"
    return None
