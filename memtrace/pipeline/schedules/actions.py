"""Actions of a pipeline schedule and their text form."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from memtrace.errors import MemtraceError

FORWARD: Final = "F"
BACKWARD: Final = "B"
"""A whole backward: gradients of the stage's input and of its weights."""
INPUT_BACKWARD: Final = "I"
"""The first half of a split backward: the gradient of the stage's input."""
WEIGHT_BACKWARD: Final = "W"
"""The second half of a split backward: the gradients of the stage's weights."""
KINDS: Final = (FORWARD, BACKWARD, INPUT_BACKWARD, WEIGHT_BACKWARD)

_TEXT = re.compile(r"([FBIW])(\d+)\.(\d+)([ab]?)(?:@(\d+))?(&?)")
_HALVES = ("a", "b")


class Action(NamedTuple):
    """One computation of a worker; ``parse_action(str(action)) == action``.

    The text form is the kind, the stage, a dot and the micro-batch, then what differs from the default: ``a`` or ``b``
    for one half of the micro-batch, ``@1`` for pipeline 1, ``&`` for "overlapped with the worker's next action".
    Examples: ``F0.3``, ``B2.5b@1``, ``F7.4&``.
    """

    kind: str
    """One of KINDS."""
    stage: int
    microbatch: int
    """Numbered from 0 within the step; every micro-batch passes through one pipeline."""
    pipeline: int = 0
    """The path through the workers (``Schedule.placement``), for example Chimera's down or up pipeline."""
    half: int | None = None
    """0 or 1: the backward runs on this half of the micro-batch (Chimera's backward halving)."""
    overlapped: bool = False
    """Whether the action runs together with the worker's next action as one unit (DualPipe's F&B)."""

    def __str__(self) -> str:
        half = "" if self.half is None else _HALVES[self.half]
        pipeline = f"@{self.pipeline}" if self.pipeline else ""
        return f"{self.kind}{self.stage}.{self.microbatch}{half}{pipeline}{'&' if self.overlapped else ''}"


def parse_action(text: str) -> Action:
    """Parse the text form of an action.

    Raises:
        MemtraceError: ``text`` is not an action.
    """
    match = _TEXT.fullmatch(text)
    if match is None:
        raise MemtraceError(
            f"invalid action {text!r}; write kind, stage, dot, micro-batch, for example F0.3, B2.5@1 or W1.0"
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
