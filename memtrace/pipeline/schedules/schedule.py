"""Pipeline schedules as data: which worker runs which action in which slot, and the text form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from memtrace.errors import MemtraceError
from memtrace.pipeline.schedules.actions import Action, parse_action

FLUSH: Final = "flush"
"""All micro-batches of a step use the same weights; one update when all of them are done."""
STASH: Final = "stash"
"""PipeDream: an update after every micro-batch; old versions are kept while in use."""
TWO_BUFFERED: Final = "two-buffered"
"""PipeDream-2BW: an update every ``update_every`` micro-batches, delayed by one update."""
UPDATES: Final = (FLUSH, STASH, TWO_BUFFERED)

Placement = tuple[tuple[int, ...], ...]
"""``placement[pipeline][stage]`` is the worker that holds the stage."""


@dataclass(frozen=True)
class Schedule:
    """A table of actions per worker; ``parse_schedule(str(schedule)) == schedule``.

    A slot is one column of the table. Slots give an order, not times: durations come from the costs of the stages when
    the schedule is simulated.
    """

    name: str
    num_stages: int
    """Stages of the model; a worker may hold several."""
    num_microbatches: int
    placement: Placement
    rows: tuple[tuple[Action, ...], ...]
    """The actions of every worker in their order."""
    slots: tuple[tuple[int, ...], ...]
    """The slot of every action, in the shape of ``rows``."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of the generator besides the sizes, as text."""
    update: str = FLUSH
    """When weights are updated: one of UPDATES."""
    update_every: int | None = None
    """Micro-batches per update, for TWO_BUFFERED."""

    @property
    def num_workers(self) -> int:
        """Rows of the table."""
        return len(self.rows)

    @property
    def num_actions(self) -> int:
        """Number of actions of all workers together."""
        return sum(map(len, self.rows))

    @property
    def num_slots(self) -> int:
        """Columns of the table."""
        return 1 + max((row[-1] for row in self.slots if row), default=-1)

    @property
    def asynchronous(self) -> bool:
        """Whether steps follow each other without a flush."""
        return self.update != FLUSH

    @cached_property
    def replicas(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """(worker, stage) -> the pipelines for which the worker holds a copy of the stage's weights."""
        copies: dict[tuple[int, int], tuple[int, ...]] = {}
        for pipeline, workers in enumerate(self.placement):
            for stage, worker in enumerate(workers):
                copies[worker, stage] = (*copies.get((worker, stage), ()), pipeline)
        return copies

    def actions(self) -> Iterator[Action]:
        """All actions worker by worker, the order in which simulations number them."""
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


def parse_schedule(text: str) -> Schedule:
    """Parse the text form of a schedule.

    Blank lines and comments after ``#`` are ignored. The table is not validated; see ``validation.validate_schedule``.

    Raises:
        MemtraceError: a line is invalid, or one is missing.
    """
    words: dict[str, list[list[str]]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        parts = line.partition("#")[0].split()
        if not parts:
            continue
        if parts[0] not in ("schedule", "stages", "microbatches", "update", "pipeline", "worker"):
            raise MemtraceError(f"schedule, line {number}: unknown keyword {parts[0]!r} in {line.strip()!r}")
        words.setdefault(parts[0], []).append(parts[1:])
    try:
        return _assembled(words)
    except (KeyError, IndexError, ValueError) as error:
        raise MemtraceError(f"incomplete or malformed schedule: {error!r}") from error


def _assembled(words: Mapping[str, Sequence[Sequence[str]]]) -> Schedule:
    (name, *options), update = words["schedule"][0], words.get("update", [[FLUSH]])[0]
    if update[0] not in UPDATES:
        raise ValueError(f"update {update[0]}: choose one of {', '.join(UPDATES)}")
    rows, slots = [], []
    for expected, (worker, bar, *cells) in enumerate(words["worker"]):
        if int(worker) != expected or bar != "|":
            raise ValueError(f"expected 'worker {expected} |', got 'worker {worker} {bar}'")
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
