"""Registry of schedules: names, options, and which of them suit given sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from memtrace.errors import MemtraceError
from memtrace.pipeline.schedules.bidirectional import CHIMERA_METHODS, chimera, gems
from memtrace.pipeline.schedules.dualpipe import dualpipe, dualpipe_v
from memtrace.pipeline.schedules.interleaved import interleaved
from memtrace.pipeline.schedules.schedule import Schedule
from memtrace.pipeline.schedules.unidirectional import gpipe, one_forward_one_backward, pipedream, pipedream_2bw
from memtrace.pipeline.schedules.zero_bubble import zb_h1, zb_h2, zb_v

Option = int | str


@dataclass(frozen=True, slots=True)
class ScheduleFamily:
    """A schedule by name: its generator and its options."""

    name: str
    build: Callable[..., Schedule]
    """The generator: takes the number of workers, the number of micro-batches and the options by name."""
    options: Mapping[str, type[int] | type[str]] = field(default_factory=dict)
    chunks: int = 1
    """Stages per worker in one copy of the model; the option ``chunks`` overrides it."""
    free_running: bool = False
    """Whether each worker begins its next step when its own work is done: its optimizer does not wait for the other
    workers (post-validation in the Zero Bubble paper)."""


SCHEDULE_FAMILIES: Final[dict[str, ScheduleFamily]] = {
    family.name: family
    for family in (
        ScheduleFamily("gpipe", gpipe),
        ScheduleFamily("1f1b", one_forward_one_backward),
        ScheduleFamily("pipedream", pipedream),
        ScheduleFamily("pipedream-2bw", pipedream_2bw, {"update_every": int}),
        ScheduleFamily("gems", gems),
        ScheduleFamily("chimera", chimera, {"f": int, "method": str}),
        ScheduleFamily("interleaved", interleaved, {"chunks": int}, chunks=2),
        ScheduleFamily("zb-h1", zb_h1, free_running=True),
        ScheduleFamily("zb-h2", zb_h2, free_running=True),
        ScheduleFamily("zb-v", zb_v, chunks=2, free_running=True),
        ScheduleFamily("dualpipe", dualpipe),
        ScheduleFamily("dualpipe-v", dualpipe_v, chunks=2),
    )
}
_ALIASES: Final = {"dapple": "1f1b", "2bw": "pipedream-2bw", "dualpipev": "dualpipe-v", "zbv": "zb-v"}


@dataclass(frozen=True, slots=True)
class ScheduleChoice:
    """A schedule family with options; ``parse_schedule_choice(str(choice)) == choice``."""

    family: ScheduleFamily
    options: Mapping[str, Option] = field(default_factory=dict)

    @property
    def chunks(self) -> int:
        """Stages per worker in one copy of the model."""
        return int(self.options.get("chunks", self.family.chunks))

    def build(self, num_workers: int, num_microbatches: int) -> Schedule:
        """Build the schedule.

        Raises:
            MemtraceError: the schedule does not exist for these sizes.
        """
        if num_workers < 1 or num_microbatches < 1 or self.chunks < 1:
            raise MemtraceError("a schedule needs at least one worker, one micro-batch and one chunk")
        return self.family.build(num_workers, num_microbatches, **self.options)

    def __str__(self) -> str:
        options = ",".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.family.name}:{options}" if options else self.family.name


def parse_schedule_choice(text: str) -> ScheduleChoice:
    """Parse a schedule name with options, such as ``1f1b`` or ``chimera:f=2,method=doubling``; case is ignored.

    Raises:
        MemtraceError: the name or an option is unknown, or the value of an option is invalid.
    """
    name, _, rest = text.strip().lower().replace("_", "-").partition(":")
    family = SCHEDULE_FAMILIES.get(_ALIASES.get(name, name))
    if family is None:
        raise MemtraceError(f"unknown schedule {name!r}; choose one of {', '.join(SCHEDULE_FAMILIES)}")
    options: dict[str, Option] = {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        key = key.strip().replace("-", "_")
        if key not in family.options:
            known = ", ".join(family.options) or "none"
            raise MemtraceError(f"schedule {family.name} has no option {key!r} (options: {known})")
        options[key] = _option(family, key, value.strip())
    return ScheduleChoice(family, options)


def _option(family: ScheduleFamily, key: str, value: str) -> Option:
    if family.options[key] is str:
        return value
    if not value.isdecimal() or not int(value):
        raise MemtraceError(f"schedule {family.name}: {key} must be a whole number above 0, got {value!r}")
    return int(value)


def all_schedule_choices(num_workers: int, num_microbatches: int) -> Iterator[ScheduleChoice]:
    """Every family with every option that makes a difference for these sizes."""
    for family in SCHEDULE_FAMILIES.values():
        if family.name != "chimera":
            yield ScheduleChoice(family, {"chunks": 2} if "chunks" in family.options else {})
    quotient = max(num_workers // 2, 1)
    for f in (divisor for divisor in range(1, quotient + 1) if quotient % divisor == 0):
        for method in CHIMERA_METHODS:
            # With fewer than two full units doubling equals direct; with less than one unit halving does.
            min_units = {"direct": 0, "doubling": 2, "halving": 1}[method]
            if num_microbatches >= min_units * num_workers:
                yield ScheduleChoice(SCHEDULE_FAMILIES["chimera"], {"f": f, "method": method})


def build_schedule(name: str, num_workers: int, num_microbatches: int, **options: Any) -> Schedule:
    """Build a schedule by name (see ``parse_schedule_choice``), with further options by keyword."""
    choice = parse_schedule_choice(name)
    return ScheduleChoice(choice.family, {**choice.options, **options}).build(num_workers, num_microbatches)
