"""Tracks training steps while the program runs: from the program's marks, otherwise from optimizer steps."""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch

from memtrace.format.schema import SPAN_KINDS
from memtrace.recording.observers import Observer

if TYPE_CHECKING:
    from memtrace.recording.ring import Ring
    from memtrace.recording.step_windows import StepWindows

_STEP: Final = SPAN_KINDS.index("step")


_MAX_WAITING_STEPS: Final = 8


@dataclass
class _Round:
    """The optimizer steps of a thread since its last training step."""

    optimizers: set[int] = field(default_factory=set)
    end_ns: int = 0


class StepTracker:
    """Records a span for every training step.

    Without marks, a step ends with the last optimizer step of a round. A round is over when an optimizer steps that has
    already stepped in it, so a loop with several optimizers (such as a GAN) has one step per round, and the
    micro-batches of gradient accumulation belong to one step. With marks, the first step starts with the recording, and
    steps that were recorded from optimizer steps before the first mark become void.

    Threads that train at the same time have rounds of their own. Their steps are recorded in the order of their ends,
    each from the end of the step before it, so that steps do not overlap.

    Args:
        observer: records the spans.
        ring: is notified of every step; None if all steps are kept.
        max_steps: number of steps after which ``on_limit`` is called; None for no limit.
        number: number of the recording, which goes with its steps to the writer; -1 for the outermost one.
        on_limit: called when ``max_steps`` is reached.
        on_step_end: called at the end of every step.
        on_renumber: called when the first mark voids the steps recorded so far.

    Attributes:
        num_steps: steps of the program so far.
        windows: follows the schedule of the recording; None if all steps are recorded.
        on_recorded: called with the number of each step when it is recorded.
    """

    def __init__(
        self,
        observer: Observer,
        ring: Ring | None,
        max_steps: int | None,
        *,
        number: int,
        on_limit: Callable[[], None],
        on_step_end: Callable[[], None],
        on_renumber: Callable[[], None],
    ) -> None:
        self._observer = observer
        self._ring = ring
        self._max_steps = max_steps
        self._number = number
        self._on_limit = on_limit
        self._on_step_end = on_step_end
        self._on_renumber = on_renumber
        self._has_marks = False
        self._step_start_ns = self._first_start_ns = 0
        self._lock = threading.RLock()
        self._rounds: dict[int, _Round] = {}  # by thread identifier, which a later thread can reuse
        self._thread = threading.local()  # has the attribute "has_stepped" on threads that are known
        self._waiting: list[int] = []  # sorted ends of steps that follow the step of a round that is not over
        self._last_round_size = 1
        self._is_round_known = False
        self._is_closed = False
        self.num_steps = 0
        self.windows: StepWindows | None = None
        self.on_recorded: Callable[[int], None] | None = None

    def start(self) -> None:
        """Begin the first step, where the recording begins later than the observer."""
        self._step_start_ns = self._first_start_ns = self._observer.now()

    def begin(self, *, is_each: bool = False) -> None:
        """Mark the beginning of a step: time before it belongs to no step.

        Args:
            is_each: whether every step is marked so, and not only the first one of a loop.
        """
        self._has_marks = True
        self._forget_rounds()
        if self.windows is not None:
            self.windows.begins_are_marked = is_each
            self.windows.step_begins(self.num_steps)
        self._step_start_ns = self._observer.now()

    def _forget_rounds(self) -> None:
        with self._lock:
            self._rounds.clear()
            self._waiting.clear()

    def mark(self) -> None:
        """Mark the end of a step."""
        if not self._has_marks:
            # Optimizer steps so far belong to the step that ends now.
            self._has_marks = True
            self._forget_rounds()
            if self.num_steps:
                self._step_start_ns, self.num_steps = self._first_start_ns, 0
                if self._ring is not None:
                    self._ring.forget_steps()
                if self.windows is not None:
                    self.windows.renumber()
                self._on_renumber()
        self._end_step(self._observer.now())
        self._check_limit()

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Take note of a finished optimizer step."""
        if self._has_marks:
            return
        with self._lock:
            thread = threading.get_ident()
            current = self._rounds.setdefault(thread, _Round())
            is_new_thread = not hasattr(self._thread, "has_stepped")
            self._thread.has_stepped = True
            if id(optimizer) in current.optimizers or (is_new_thread and current.optimizers):
                self._last_round_size = len(current.optimizers)
                self._is_round_known = True
                insort(self._waiting, current.end_ns)
                current = self._rounds[thread] = _Round()
            current.optimizers.add(id(optimizer))
            current.end_ns = self._observer.now()
            self._end_waiting_steps()
            if self.windows is not None:
                self._follow_schedule(self.windows, current)
            if self.num_steps + 1 == self._max_steps and len(current.optimizers) >= self._last_round_size:
                self.close()
            self._check_limit()

    def _follow_schedule(self, windows: StepWindows, current: _Round) -> None:
        """Let the schedule act where a step has probably ended. It ends for certain in the next step, too late.

        A round is taken to have as many optimizers as the one before it. A recording that starts too early does no
        harm; the first round must therefore be larger to be taken for whole where recording would stop.
        """
        if len(self._rounds) > 1 or self._waiting:
            return
        expected = self._last_round_size
        if windows.is_active and not self._is_round_known:
            expected = windows.num_optimizers()
        if len(current.optimizers) < expected:
            return
        if windows.will_pause(self.num_steps + 1):
            self._record_step(current.end_ns, self.num_steps)
            windows.recorded_early = self.num_steps
        windows.step_begins(self.num_steps + 1)

    def _end_waiting_steps(self) -> None:
        """Record the steps that no step of an unfinished round can precede."""
        if len(self._rounds) > 1 and self._waiting:
            # A thread that has ended, or has not trained for a while, does not continue its round.
            alive = {thread.ident for thread in threading.enumerate()}
            for thread, pending in list(self._rounds.items()):
                if thread not in alive or (
                    len(self._waiting) > _MAX_WAITING_STEPS and pending.end_ns < self._waiting[0]
                ):
                    insort(self._waiting, self._rounds.pop(thread).end_ns)
        first_open_ns = min((pending.end_ns for pending in self._rounds.values()), default=None)
        while self._waiting and (first_open_ns is None or self._waiting[0] <= first_open_ns):
            self._end_step(self._waiting.pop(0))

    def close(self) -> None:
        """Record the steps of the current rounds; called when the recording ends."""
        if not self._has_marks:
            with self._lock:
                for pending in self._rounds.values():
                    insort(self._waiting, pending.end_ns)
                self._rounds.clear()
                self._is_closed = True
                self._end_waiting_steps()

    def _end_step(self, end_ns: int) -> None:
        number, self.num_steps = self.num_steps, self.num_steps + 1
        if self.windows is None:
            self._record_step(end_ns, number)
        else:
            if self.windows.records(number):
                self._record_step(end_ns, number)
            if self.windows.begins_are_marked:
                self.windows.step_ended(self.num_steps)
            elif not self._is_closed:
                self.windows.step_begins(self.num_steps)
        self._step_start_ns = end_ns

    def _record_step(self, end_ns: int, number: int) -> None:
        start_ns = self._step_start_ns
        if self.windows is not None and number != self.windows.first_marked:
            start_ns = max(start_ns, self.windows.start_ns)
            if start_ns > end_ns:  # an interrupt of the program came in between
                return
        self._observer.span(_STEP, self._number, start_ns, end_ns, number)
        if self._ring is not None:
            self._ring.step_began(end_ns)
        self._on_step_end()
        if self.on_recorded is not None:
            self.on_recorded(number)

    def _check_limit(self) -> None:
        if self._max_steps is not None and self.num_steps >= self._max_steps:
            self._on_limit()
