"""A pipeline schedule as data: which worker does which action in which slot, and its text form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from memtrace.errors import MemtraceError
from memtrace.pipeline.schedules.actions import Action, parse_action

FLUSH: Final = "flush"  # all micro-batches of a step see the same weights; one update when all are done
STASH: Final = "stash"  # PipeDream: an update after every micro-batch, old versions kept while in use
TWO_BUFFERED: Final = "two-buffered"  # PipeDream-2BW: an update every update_every micro-batches, delayed by one
UPDATES: Final = (FLUSH, STASH, TWO_BUFFERED)

Placement = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Schedule:
    """A table of actions per worker. ``parse(str(schedule)) == schedule``.

    A slot is one column of the table. Slots say only in what order things can be done: how long each action
    takes is a matter of costs (``simulate``).
    """

    name: str
    num_stages: int
    """Stages of the model; several may lie on one worker."""
    num_microbatches: int
    placement: Placement
    """``placement[pipeline][stage]`` is the worker."""
    rows: tuple[tuple[Action, ...], ...]
    """The actions of every worker in their order."""
    slots: tuple[tuple[int, ...], ...]
    """The slot of every action, in the shape of ``rows``."""
    options: Mapping[str, str] = field(default_factory=dict)
    """What the generator was asked for besides the sizes, as text."""
    update: str = FLUSH
    """When weights change, one of UPDATES."""
    update_every: int | None = None
    """Micro-batches of one update, for TWO_BUFFERED."""

    @property
    def num_workers(self) -> int:
        """How many workers the table has rows for."""
        return len(self.rows)

    @property
    def num_actions(self) -> int:
        """How many actions there are on all workers together."""
        return sum(map(len, self.rows))

    @property
    def num_slots(self) -> int:
        """Columns of the table."""
        return 1 + max((row[-1] for row in self.slots if row), default=-1)

    @property
    def asynchronous(self) -> bool:
        """Whether steps flow into each other without a flush."""
        return self.update != FLUSH

    @cached_property
    def replicas(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """(worker, stage) -> the pipelines for which the worker holds a copy of that stage's weights."""
        found: dict[tuple[int, int], tuple[int, ...]] = {}
        for pipeline, workers in enumerate(self.placement):
            for stage, worker in enumerate(workers):
                found[worker, stage] = (*found.get((worker, stage), ()), pipeline)
        return found

    def actions(self) -> Iterator[Action]:
        """All actions, worker by worker: the numbering that simulations use."""
        for row in self.rows:
            yield from row

    def __str__(self) -> str:
        return "\n".join([*_header(self), *_grid(self)]) + "\n"


def _header(schedule: Schedule) -> Iterator[str]:
    options = "".join(f" {key}={value}" for key, value in schedule.options.items())
    yield f"schedule {schedule.name}{options}"
    yield f"stages {schedule.num_stages}"
    yield f"microbatches {schedule.num_microbatches}"
    every = "" if schedule.update_every is None else f" {schedule.update_every}"
    yield f"update {schedule.update}{every}"
    for pipeline, workers in enumerate(schedule.placement):
        yield f"pipeline {pipeline} {' '.join(map(str, workers))}"


def _grid(schedule: Schedule) -> Iterator[str]:
    cells = [
        dict(zip(slots, map(str, row), strict=True)) for row, slots in zip(schedule.rows, schedule.slots, strict=True)
    ]
    width = max((len(text) for row in cells for text in row.values()), default=1)
    digits = len(str(max(schedule.num_workers - 1, 0)))
    for worker, row in enumerate(cells):
        line = " ".join(row.get(slot, ".").ljust(width) for slot in range(schedule.num_slots))
        yield f"worker {worker:>{digits}} | {line}".rstrip()


def parse(text: str) -> Schedule:
    """The schedule that ``text`` shows; MemtraceError names the line that cannot be understood.

    Besides what ``str`` writes, blank lines and comments after ``#`` are allowed. The table is read as it
    stands: ``validate`` says whether it is a schedule that can run.
    """
    words: dict[str, list[list[str]]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        parts = line.partition("#")[0].split()
        if not parts:
            continue
        if parts[0] not in ("schedule", "stages", "microbatches", "update", "pipeline", "worker"):
            raise MemtraceError(f"line {number} of the schedule begins with {parts[0]!r}: {line.strip()!r}")
        words.setdefault(parts[0], []).append(parts[1:])
    try:
        return _assembled(words)
    except (KeyError, IndexError, ValueError) as error:
        raise MemtraceError(f"the schedule's text is incomplete or malformed: {error!r}") from error


def _assembled(words: Mapping[str, Sequence[Sequence[str]]]) -> Schedule:
    (name, *options), update = words["schedule"][0], words.get("update", [[FLUSH]])[0]
    if update[0] not in UPDATES:
        raise ValueError(f"update {update[0]} is none of {', '.join(UPDATES)}")
    rows, slots = [], []
    for expected, (worker, bar, *cells) in enumerate(words["worker"]):
        if int(worker) != expected or bar != "|":
            raise ValueError(f"expected 'worker {expected} |', found 'worker {worker} {bar}'")
        taken = [(slot, parse_action(cell)) for slot, cell in enumerate(cells) if cell != "."]
        slots.append(tuple(slot for slot, _ in taken))
        rows.append(tuple(action for _, action in taken))
    placement = tuple(tuple(map(int, workers)) for _, *workers in words["pipeline"])
    return Schedule(
        name=name,
        num_stages=int(words["stages"][0][0]),
        num_microbatches=int(words["microbatches"][0][0]),
        placement=placement,
        rows=tuple(rows),
        slots=tuple(slots),
        options={key: value for key, _, value in (option.partition("=") for option in options)},
        update=update[0],
        update_every=int(update[1]) if len(update) > 1 else None,
    )
