"""One action of a pipeline schedule and its text form."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from memtrace.errors import MemtraceError

FORWARD: Final = "F"
BACKWARD: Final = "B"  # the gradients of inputs and of weights together
INPUT_BACKWARD: Final = "I"  # the gradient of the stage's input alone
WEIGHT_BACKWARD: Final = "W"  # the gradients of the weights alone, after INPUT_BACKWARD
KINDS: Final = (FORWARD, BACKWARD, INPUT_BACKWARD, WEIGHT_BACKWARD)

_TEXT = re.compile(r"([FBIW])(\d+)\.(\d+)([ab]?)(?:@(\d+))?(&?)")
_HALVES = ("a", "b")


class Action(NamedTuple):
    """What a worker does in one slot. ``parse_action(str(action)) == action``.

    The text is kind, stage, dot, micro-batch, then what is not the default: ``a`` or ``b`` for one half of
    the micro-batch, ``@1`` for pipeline 1, ``&`` for "overlapped with the next action of this worker":
    ``F0.3``, ``B2.5b@1``, ``F7.4&``.
    """

    kind: str
    """One of KINDS."""
    stage: int
    microbatch: int
    """Numbered from 0 over the whole step; every micro-batch goes through one pipeline."""
    pipeline: int = 0
    """Which way through the workers (``Schedule.placement``): Chimera's down and up pipelines, for
    instance."""
    half: int | None = None
    """0 or 1: this backward runs on one half of the micro-batch (Chimera's backward halving)."""
    overlapped: bool = False
    """It runs together with the next action of its worker as one unit (DualPipe's F&B)."""

    def __str__(self) -> str:
        half = "" if self.half is None else _HALVES[self.half]
        pipeline = f"@{self.pipeline}" if self.pipeline else ""
        return f"{self.kind}{self.stage}.{self.microbatch}{half}{pipeline}{'&' if self.overlapped else ''}"


def parse_action(text: str) -> Action:
    """The action that ``text`` names; MemtraceError where it names none."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise MemtraceError(
            f"{text!r} is not an action: write kind, stage, dot, micro-batch, such as F0.3, B2.5@1 or W1.0"
        )
    kind, stage, microbatch, half, pipeline, overlapped = match.groups()
    return Action(
        kind,
        int(stage),
        int(microbatch),
        int(pipeline or 0),
        _HALVES.index(half) if half else None,
        bool(overlapped),
    )
