"""Every schedule by name, with its options, and which of them suit given sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from memtrace.errors import MemtraceError
from memtrace.pipeline.schedules.bidirectional import METHODS, chimera, gems
from memtrace.pipeline.schedules.dualpipe import dualpipe, dualpipe_v
from memtrace.pipeline.schedules.interleaved import interleaved
from memtrace.pipeline.schedules.schedule import Schedule
from memtrace.pipeline.schedules.unidirectional import dapple, gpipe, pipedream, pipedream_2bw
from memtrace.pipeline.schedules.zero_bubble import zb_h1, zb_h2, zb_v

Option = int | str


@dataclass(frozen=True, slots=True)
class Family:
    """A schedule by name: how to make it and what it can be asked."""

    name: str
    build: Callable[..., Schedule]
    """Takes the number of workers, the number of micro-batches and the options by name."""
    meaning: str
    options: Mapping[str, type[int] | type[str]] = field(default_factory=dict)
    chunks: int = 1
    """Stages of the model on each worker, in one copy; the option ``chunks`` overrides it."""
    free_running: bool = False
    """Each worker begins its next step when its own work is done: the optimizer does not wait for all others
    (the Zero Bubble paper's post-validation)."""


FAMILIES: Final[dict[str, Family]] = {
    family.name: family
    for family in (
        Family("gpipe", gpipe, "all forwards, then all backwards"),
        Family("dapple", dapple, "one forward, one backward, with a flush (1F1B)"),
        Family("pipedream", pipedream, "1F1B without flush, a weight version for each micro-batch in flight"),
        Family("pipedream-2bw", pipedream_2bw, "1F1B without flush, two weight versions", {"update_every": int}),
        Family("gems", gems, "two copies of the model, one micro-batch in flight"),
        Family("chimera", chimera, "2f pipelines in both directions", {"f": int, "method": str}),
        Family("interleaved", interleaved, "1F1B over several chunks a worker", {"chunks": int}, chunks=2),
        Family("zb-h1", zb_h1, "weight gradients fill bubbles, the memory of 1F1B", free_running=True),
        Family("zb-h2", zb_h2, "no bubbles between steps, twice the memory of 1F1B", free_running=True),
        Family("zb-v", zb_v, "no bubbles, two chunks a worker in a V", chunks=2, free_running=True),
        Family("dualpipe", dualpipe, "two copies, forwards and backwards overlap"),
        Family("dualpipe-v", dualpipe_v, "DualPipe over one copy, two chunks a worker in a V", chunks=2),
    )
}
_ALIASES: Final = {"1f1b": "dapple", "2bw": "pipedream-2bw", "dualpipev": "dualpipe-v", "zbv": "zb-v"}


@dataclass(frozen=True, slots=True)
class Choice:
    """A family and what it is asked. ``parse_choice(str(choice)) == choice``."""

    family: Family
    options: Mapping[str, Option] = field(default_factory=dict)

    @property
    def chunks(self) -> int:
        """Stages of the model on each worker, in one copy."""
        return int(self.options.get("chunks", self.family.chunks))

    def build(self, num_workers: int, num_microbatches: int) -> Schedule:
        """The table; MemtraceError says why there is none for these sizes."""
        if num_workers < 1 or num_microbatches < 1 or self.chunks < 1:
            raise MemtraceError("a schedule needs at least one worker, one micro-batch and one chunk")
        return self.family.build(num_workers, num_microbatches, **self.options)

    def __str__(self) -> str:
        options = ",".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.family.name}:{options}" if options else self.family.name


def parse_choice(text: str) -> Choice:
    """The choice that ``text`` names, such as ``dapple`` or ``chimera:f=2,method=doubling``.

    Names ignore case, ``1f1b`` is dapple. MemtraceError names what is unknown and what there is.
    """
    name, _, rest = text.strip().lower().replace("_", "-").partition(":")
    family = FAMILIES.get(_ALIASES.get(name, name))
    if family is None:
        raise MemtraceError(f"unknown schedule {name!r}: choose all or of {', '.join(FAMILIES)}")
    options: dict[str, Option] = {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        key = key.strip().replace("-", "_")
        if key not in family.options:
            known = ", ".join(family.options) or "none"
            raise MemtraceError(f"{family.name} has no option {key!r}; its options: {known}")
        options[key] = _option(family, key, value.strip())
    return Choice(family, options)


def _option(family: Family, key: str, value: str) -> Option:
    if family.options[key] is str:
        return value
    if not value.isdecimal() or not int(value):
        raise MemtraceError(f"{family.name}'s {key} must be a whole number above 0, not {value!r}")
    return int(value)


def all_choices(num_workers: int, num_microbatches: int) -> Iterator[Choice]:
    """Every family, with every option that makes a difference for these sizes."""
    for family in FAMILIES.values():
        if family.name != "chimera":
            yield Choice(family, {"chunks": 2} if "chunks" in family.options else {})
    quotient = max(num_workers // 2, 1)
    for f in (divisor for divisor in range(1, quotient + 1) if quotient % divisor == 0):
        for method in METHODS:
            # Below two full units doubling is the direct schedule, below one unit halving is.
            units = {"direct": 0, "doubling": 2, "halving": 1}[method]
            if num_microbatches >= units * num_workers:
                yield Choice(FAMILIES["chimera"], {"f": f, "method": method})


def build(name: str, num_workers: int, num_microbatches: int, **options: Any) -> Schedule:
    """The schedule of that name (as in ``parse_choice``), with its options by keyword."""
    choice = parse_choice(name)
    return Choice(choice.family, {**choice.options, **options}).build(num_workers, num_microbatches)
