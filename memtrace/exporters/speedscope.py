"""Flame graphs for speedscope (https://www.speedscope.app): one profile for each device and measure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import IO, Any, Final

import numpy as np

from memtrace.exporters.options import MEASURES
from memtrace.exporters.process_names import rank_title
from memtrace.exporters.stack_samples import MEASURE_TITLES, StackSamples, stack_samples
from memtrace.frames import Frame
from memtrace.trace import Trace
from memtrace.units import format_bytes

_SCHEMA: Final = "https://www.speedscope.app/file-format-schema.json"


def write_speedscope(trace: Trace, file: IO[bytes], measures: Sequence[str] = MEASURES) -> None:
    """Write a single-rank trace as a speedscope file.

    Args:
        trace: the trace.
        file: receives the JSON document.
        measures: those of MEASURES to write; speedscope opens the first one.
    """
    samples = stack_samples(trace)
    frames: dict[Frame, int] = {}
    stacks = [_stack(stack, frames) for stack in samples.stacks]
    profiles = [
        _profile(samples, stacks, device, measure)
        for measure in measures
        for device in trace.devices
        if device in samples.device
    ]
    document = {
        "$schema": _SCHEMA,
        "name": rank_title(trace),
        "exporter": "memtrace",
        "activeProfileIndex": 0,
        "shared": {"frames": [_frame(frame) for frame in frames]},
        "profiles": profiles,
    }
    file.write(json.dumps(document, separators=(",", ":")).encode("ascii"))


def _stack(stack: list[Frame], frames: dict[Frame, int]) -> list[int]:
    """Return the numbers of the frames of a stack, outermost first."""
    return [frames.setdefault(frame, len(frames)) for frame in reversed(stack)]


def _frame(frame: Frame) -> dict[str, Any]:
    content: dict[str, Any] = {"name": frame.function or "?"}
    if frame.file:
        content["file"] = frame.file
    if frame.line > 0:
        content["line"] = frame.line
    return content


def _profile(samples: StackSamples, stacks: list[list[int]], device: str, measure: str) -> dict[str, Any]:
    of_device = np.array([name == device for name in samples.device])
    weight = np.zeros(len(stacks), np.int64)
    np.add.at(weight, samples.stack[of_device], samples.num_bytes[measure][of_device])
    # Similar stacks lie side by side, so that the view in order of samples shows their common frames as one.
    chosen = sorted(np.flatnonzero(weight).tolist(), key=lambda index: stacks[index])
    total = int(weight.sum())
    return {
        "type": "sampled",
        "name": f"{MEASURE_TITLES[measure]}: {device} ({format_bytes(total)})",
        "unit": "bytes",
        "startValue": 0,
        "endValue": total,
        "samples": [stacks[index] for index in chosen],
        "weights": weight[chosen].tolist(),
    }
