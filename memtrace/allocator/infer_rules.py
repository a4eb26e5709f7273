"""Finding the rules a history was recorded by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from memtrace.allocator.history import History, check
from memtrace.allocator.replay import Prepared, Replay, prepare, replay
from memtrace.allocator.rules import TORCH, TORCH_2_13, Rules
from memtrace.allocator.segment_order import creation_order


def reproduce(history: History) -> tuple[Prepared, Replay]:
    """Take a history apart and replay it by the rules of the torch that recorded it.

    Those are the first of `candidate_rules` that replay it exactly; where none does, the attempt that came
    closest.
    TraceError where a size is one that no device can have.
    """
    check(history)
    closest: tuple[Prepared, Replay] | None = None
    for rules in candidate_rules(history):
        for prepared in _attempts(history, rules):
            result = replay(prepared)[0]
            if result.is_exact:
                return prepared, result
            if closest is None or result.allocations_exact > closest[1].allocations_exact:
                closest = prepared, result
    assert closest is not None
    return closest


def _attempts(history: History, rules: Rules) -> Iterator[Prepared]:
    """Ways to fill in what the history leaves open, likeliest first."""
    prepared = prepare(history, rules)
    yield prepared
    if prepared.start.num_misplaced:
        return
    if rules.tie == "creation":
        prepared = replace(prepared, start=replace(prepared.start, created=creation_order(prepared)))
        yield prepared
    # Without stacks an empty_cache right before a request for a segment passes for a refusal, and makes the
    # device look smaller than it is.
    if (history.by_program[prepared.runs.first] == -1).any() and not prepared.is_cued:
        yield replace(prepared, is_cued=True)


def candidate_rules(history: History) -> tuple[Rules, ...]:
    """The rules to try, likeliest first: torch 2.13 changed how blocks of one size are ordered."""
    version = (history.torch or "0").split("+")[0].split(".")
    numbers = tuple(int(part) for part in version[:2] if part.isdigit())
    return (TORCH_2_13, TORCH) if numbers >= (2, 12) else (TORCH, TORCH_2_13)
