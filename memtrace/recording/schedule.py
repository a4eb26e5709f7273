"""Schedules: which training steps are recorded (``memtrace.record(schedule=..., every=...)``)."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, cast

import torch
from torch.profiler import ProfilerAction

from memtrace.errors import MemtraceError
from memtrace.recording.hook_errors import describe_error

logger = logging.getLogger("memtrace")

ScheduleFunction = Callable[[int], object]
"""Takes the number of a step, from 0; returns a ``torch.profiler.ProfilerAction``, or whether to record the step."""

FIRST_STEPS: Final = 2
"""Steps that ``every`` records at the beginning: the first one allocates the optimizer state, the second does not."""
_ACTIVE: Final = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
_PROFILER_OPTIONS: Final = ("skip_first", "wait", "warmup", "active", "repeat")


class StepSchedule:
    """Asks a schedule about every step once, in order.

    A schedule that fails, or that answers with something else, never reaches the program: nothing more is recorded, and
    one warning reports it.

    Args:
        function: the schedule.
    """

    def __init__(self, function: ScheduleFunction) -> None:
        self._function = function
        self._has_failed = False

    def is_active(self, step: int) -> bool:
        """Return whether to record a step."""
        if self._has_failed:
            return False
        try:
            action = self._function(step)
        except Exception as error:
            return self._fail(step, f"it raised {describe_error(error)}")
        if type(action) is bool:
            return action
        if type(action) is ProfilerAction:
            return action in _ACTIVE
        return self._fail(
            step, f"it returned a {type(action).__name__} instead of a torch.profiler.ProfilerAction or a bool"
        )

    def _fail(self, step: int, reason: str) -> bool:
        self._has_failed = True
        with suppress(Exception):  # a handler of the program's
            logger.warning(
                "memtrace: no step is recorded from step %d on, training continues: the schedule failed, %s",
                step,
                reason,
            )
        return False


def choose_schedule(schedule: object, every: int | None) -> tuple[ScheduleFunction | None, str | None]:
    """Return the schedule that the options of ``memtrace.record`` ask for, and its description; None: all steps.

    Raises:
        MemtraceError: an option is out of range, or both are given.
    """
    if schedule is not None and every is not None:
        raise MemtraceError("schedule and every exclude each other; pass one of them")
    if every is not None:
        if type(every) is not int or every < 1:
            raise MemtraceError(f"every={every!r} is out of range; pass a number of steps from 1, or None")
        return (lambda step: step < FIRST_STEPS or step % every == 0), f"every={every}"
    if schedule is None:
        return None, None
    if not callable(schedule):
        raise MemtraceError(
            f"schedule is a {type(schedule).__name__}; pass a function from the number of a step to whether it is "
            "recorded, such as torch.profiler.schedule(wait=97, warmup=1, active=2)"
        )
    return cast(ScheduleFunction, schedule), _describe(schedule)


def _describe(schedule: Any) -> str:
    """Describe a schedule for the manifest: that of torch.profiler by its options, any other by its name."""
    name = getattr(schedule, "__qualname__", type(schedule).__qualname__)
    if getattr(schedule, "__module__", None) == "torch.profiler.profiler" and inspect.isfunction(schedule):
        with suppress(Exception):
            values = inspect.getclosurevars(schedule).nonlocals
            return ", ".join(f"{option}={values[option]}" for option in _PROFILER_OPTIONS)
    return name if isinstance(name, str) else type(schedule).__name__


def parse_schedule(text: str) -> ScheduleFunction:
    """Return the ``torch.profiler.schedule`` that a text such as ``wait=97,warmup=1,active=2`` describes.

    Raises:
        MemtraceError: the text is not of that form, or torch refuses it.
    """
    options: dict[str, int] = {}
    for item in text.split(","):
        name, _, value = item.strip().partition("=")
        if name not in _PROFILER_OPTIONS or name in options or not value.isdecimal():
            raise MemtraceError(
                f"schedule {text!r}: {item.strip()!r} is not understood; write numbers of steps such as "
                f"wait=97,warmup=1,active=2 (names: {', '.join(_PROFILER_OPTIONS)})"
            )
        options[name] = int(value)
    if not options.get("active"):
        raise MemtraceError(f"schedule {text!r} records no step; add active=1 or more")
    arguments: dict[str, int] = {"wait": 0, "warmup": 0} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the lack of a warm-up, which recordings do not need
        return cast(ScheduleFunction, torch.profiler.schedule(**arguments))
