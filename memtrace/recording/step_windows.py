"""Follows a schedule from step to step: pauses the recording between the steps that are to be recorded."""

from __future__ import annotations

from typing import Protocol

from memtrace.recording.schedule import StepSchedule


class Pausable(Protocol):
    """A recording that can be paused."""

    @property
    def is_paused(self) -> bool:
        """Whether nothing is observed at the moment."""

    def pause(self) -> None:
        """Stop observing; nothing if paused already."""

    @property
    def resumed_ns(self) -> int:
        """Time from which on everything was observed after the last pause."""

    def resume(self) -> None:
        """Observe again; nothing if not paused."""

    def must_observe(self) -> bool:
        """Whether to observe whatever the schedule says."""

    def num_optimizers(self) -> int:
        """Number of the optimizers of the process."""


class StepWindows:
    """The windows of a scheduled recording: the time between a resumption and the next pause.

    Args:
        schedule: is asked once about each step.
        recording: is paused and resumed.

    Attributes:
        begins_are_marked: whether the program marks the beginning of every step, so that windows begin there.
        first_marked: number of the first marked step, which takes the place of steps of optimizers; -1: none. It is
            recorded even if it contains a pause.
        recorded_early: number of a step that was recorded at its probable end, before it ended for certain; -1: none.
    """

    def __init__(self, schedule: StepSchedule, recording: Pausable) -> None:
        self.begins_are_marked = False
        self.recorded_early = -1
        self.first_marked = -1
        self._schedule = schedule
        self._recording = recording
        self._decided = -1
        self._is_wanted = True
        self._first_whole_step = 0
        self._optimizers: list[int] = []

    @property
    def is_active(self) -> bool:
        """Whether events are being recorded."""
        return not self._recording.is_paused

    @property
    def start_ns(self) -> int:
        """Time at which the current window began."""
        return self._recording.resumed_ns

    def num_optimizers(self) -> int:
        """Return the number of the optimizers of the process when a step first ended."""
        if not self._optimizers:
            self._optimizers.append(self._recording.num_optimizers())
        return self._optimizers[0]

    def records(self, step: int) -> bool:
        """Return whether to record a step that has ended: it was observed whole, and is not recorded yet."""
        is_whole = self.is_active and step >= self._first_whole_step and step != self.recorded_early
        return is_whole or step == self.first_marked

    def will_pause(self, following: int) -> bool:
        """Return whether the recording pauses before the step ``following``."""
        return self.is_active and not self._wants(following)

    def step_begins(self, step: int) -> None:
        """Pause or resume at the beginning of a step."""
        if self._wants(step):
            if self._recording.is_paused:
                self._first_whole_step = step
                self._recording.resume()
        elif not self._recording.is_paused:
            self._recording.pause()

    def step_ended(self, following: int) -> None:
        """Pause at the end of a step, if the following one is not recorded. It begins later."""
        if self.will_pause(following):
            self._recording.pause()

    def renumber(self) -> None:
        """Ask about the steps anew, from step 0 on: the program marks its own."""
        self._decided, self.recorded_early, self.first_marked = -1, -1, 0

    def _wants(self, step: int) -> bool:
        """Return whether to record a step, as the schedule says, or because something else needs the events."""
        while self._decided < step:  # a schedule may count
            self._decided += 1
            self._is_wanted = self._schedule.is_active(self._decided)
        return self._is_wanted or self._recording.must_observe()
