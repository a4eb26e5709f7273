"""Finds the training steps while they run: from the program's marks, else from optimizer steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import torch

from memtrace.format.schema import SPAN_KINDS
from memtrace.recording.observers import Observer

if TYPE_CHECKING:
    from memtrace.recording.ring import Ring

_STEP: Final = SPAN_KINDS.index("step")


class StepFinder:
    """Writes a span for every step.

    Without marks a step ends where the last optimizer of a round ended: a round is over when an optimizer steps that
    has stepped in it already, so that loops with several optimizers (a GAN's) count one step a round. Gradient
    accumulation makes one step of its micro-batches. With ``mark`` the program says it itself: its first step is
    everything since the recording began, and ``numbered_anew`` hears when others are written already: they are void.
    """

    def __init__(
        self,
        observer: Observer,
        ring: Ring | None,
        max_steps: int | None,
        reached: Callable[[], None],
        step_ended: Callable[[], None],
        numbered_anew: Callable[[], None],
    ) -> None:
        self._observer = observer
        self._ring = ring
        self._max_steps = max_steps
        self._reached = reached
        self._step_ended = step_ended
        self._numbered_anew = numbered_anew
        self._marked = False
        self._start = 0
        self._round: set[int] = set()
        self._round_end = 0
        self._usual_round = 1
        self.num_steps = 0

    def begin(self) -> None:
        """The program says that a loop of marked steps begins here: what came before belongs to no step."""
        self._marked = True
        self._round.clear()
        self._start = self._observer.now()

    def mark(self) -> None:
        """The program says that a step ends here."""
        if not self._marked:
            # What optimizers did so far belongs to the step that ends here.
            self._marked = True
            self._round.clear()
            if self.num_steps:
                self._start = self.num_steps = 0
                if self._ring is not None:
                    self._ring.forget_steps()
                self._numbered_anew()
        self._end_step(self._observer.now())
        self._check_limit()

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has finished a step."""
        if self._marked:
            return
        if id(optimizer) in self._round:
            self._usual_round = len(self._round)
            self._end_step(self._round_end)
            self._round.clear()
        self._round.add(id(optimizer))
        self._round_end = self._observer.now()
        if self.num_steps + 1 == self._max_steps and len(self._round) >= self._usual_round:
            self.close()
            self._check_limit()

    def close(self) -> None:
        """Write the round that is still open; called when the recording ends."""
        if self._round and not self._marked:
            self._end_step(self._round_end)
            self._round.clear()

    def _end_step(self, end_ns: int) -> None:
        self._observer.span(_STEP, -1, self._start, end_ns, self.num_steps)
        self._start = end_ns
        self.num_steps += 1
        if self._ring is not None:
            self._ring.step_began(end_ns)
        self._step_ended()

    def _check_limit(self) -> None:
        if self._max_steps is not None and self.num_steps >= self._max_steps:
            self._reached()
