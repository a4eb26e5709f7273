"""Tracks training steps while the program runs: from the program's marks, otherwise from optimizer steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import torch

from memtrace.format.schema import SPAN_KINDS
from memtrace.recording.observers import Observer

if TYPE_CHECKING:
    from memtrace.recording.ring import Ring

_STEP: Final = SPAN_KINDS.index("step")


class StepTracker:
    """Records a span for every training step.

    Without marks, a step ends with the last optimizer step of a round. A round is over when an optimizer steps that has
    already stepped in it, so a loop with several optimizers (such as a GAN) has one step per round, and the
    micro-batches of gradient accumulation belong to one step. With marks, the first step starts with the recording, and
    steps that were recorded from optimizer steps before the first mark become void.

    Args:
        observer: records the spans.
        ring: is notified of every step; None if all steps are kept.
        max_steps: number of steps after which ``on_limit`` is called; None for no limit.
        on_limit: called when ``max_steps`` is reached.
        on_step_end: called at the end of every step.
        on_renumber: called when the first mark voids the steps recorded so far.
    """

    def __init__(
        self,
        observer: Observer,
        ring: Ring | None,
        max_steps: int | None,
        *,
        on_limit: Callable[[], None],
        on_step_end: Callable[[], None],
        on_renumber: Callable[[], None],
    ) -> None:
        self._observer = observer
        self._ring = ring
        self._max_steps = max_steps
        self._on_limit = on_limit
        self._on_step_end = on_step_end
        self._on_renumber = on_renumber
        self._has_marks = False
        self._step_start_ns = 0
        self._round: set[int] = set()
        self._round_end_ns = 0
        self._last_round_size = 1
        self.num_steps = 0

    def begin(self) -> None:
        """Mark the beginning of a loop of marked steps: time before it belongs to no step."""
        self._has_marks = True
        self._round.clear()
        self._step_start_ns = self._observer.now()

    def mark(self) -> None:
        """Mark the end of a step."""
        if not self._has_marks:
            # Optimizer steps so far belong to the step that ends now.
            self._has_marks = True
            self._round.clear()
            if self.num_steps:
                self._step_start_ns = self.num_steps = 0
                if self._ring is not None:
                    self._ring.forget_steps()
                self._on_renumber()
        self._end_step(self._observer.now())
        self._check_limit()

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Take note of a finished optimizer step."""
        if self._has_marks:
            return
        if id(optimizer) in self._round:
            self._last_round_size = len(self._round)
            self._end_step(self._round_end_ns)
            self._round.clear()
        self._round.add(id(optimizer))
        self._round_end_ns = self._observer.now()
        if self.num_steps + 1 == self._max_steps and len(self._round) >= self._last_round_size:
            self.close()
            self._check_limit()

    def close(self) -> None:
        """Record the step of the current round; called when the recording ends."""
        if self._round and not self._has_marks:
            self._end_step(self._round_end_ns)
            self._round.clear()

    def _end_step(self, end_ns: int) -> None:
        self._observer.span(_STEP, -1, self._step_start_ns, end_ns, self.num_steps)
        self._step_start_ns = end_ns
        self.num_steps += 1
        if self._ring is not None:
            self._ring.step_began(end_ns)
        self._on_step_end()

    def _check_limit(self) -> None:
        if self._max_steps is not None and self.num_steps >= self._max_steps:
            self._on_limit()
