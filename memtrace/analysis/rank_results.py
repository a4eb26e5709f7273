"""Results of every rank of a job, and what computes them.

An analysis of a job reads a rank through ``Trace.rank_result``, which computes the result where it is missing. Whoever
has worker processes computes the results beforehand (``memtrace.engine``), so that analyses of jobs read no events.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from memtrace.errors import MemtraceError
from memtrace.trace import Trace


@dataclass(frozen=True)
class UnreadableRank:
    """A rank that cannot be read."""

    rank: int
    reason: str
    """What is wrong with it, in a sentence."""


class RankAnalyzer(Protocol):
    """Computes results of the ranks of a job before they are needed, in this process or in others."""

    def __call__(
        self,
        trace: Trace,
        function: Callable[..., Any],
        *arguments: Any,
        task: str,
        ranks: Sequence[int] | None = None,
        each: Mapping[int, tuple[Any, ...]] | None = None,
    ) -> Trace:
        """Return the trace with the results of ranks, which ``Trace.rank_result`` returns, without unreadable ranks.

        Args:
            trace: the trace of a job, or of one rank.
            function: a module-level function of a single-rank trace and the arguments.
            arguments: hashable arguments.
            task: what is done, for progress.
            ranks: some of the ranks; None: all.
            each: further arguments of each rank, after the others; ranks that are absent are not analyzed.

        Raises:
            MemtraceError: no rank can be read.
        """
        ...


def analyze_here(
    trace: Trace,
    function: Callable[..., Any],
    *arguments: Any,
    task: str,
    ranks: Sequence[int] | None = None,
    each: Mapping[int, tuple[Any, ...]] | None = None,
) -> Trace:
    """Compute results in this process: see ``RankAnalyzer``."""
    problems = {
        number: _compute(trace, number, function, *arguments, *more)
        for number, more in rank_arguments(trace, ranks, each).items()
    }
    return trace.without_ranks({number: problem for number, problem in problems.items() if problem is not None})


def _compute(trace: Trace, number: int, function: Callable[..., Any], *arguments: Any) -> str | None:
    """Compute the result of a rank; return what is wrong where it cannot be read."""
    try:
        trace.rank_result(number, function, *arguments)
    except MemtraceError as error:
        return str(error)
    return None


def rank_arguments(
    trace: Trace, ranks: Sequence[int] | None, each: Mapping[int, tuple[Any, ...]] | None
) -> dict[int, tuple[Any, ...]]:
    """Return the ranks to analyze, with the further arguments of each."""
    wanted = set(trace.ranks if ranks is None else ranks)
    return {number: () if each is None else each[number] for number in trace.ranks
            if number in wanted and (each is None or number in each)}  # fmt: skip


def find_unreadable_ranks(trace: Trace) -> tuple[UnreadableRank, ...]:
    """Return the ranks of a trace that are left out because they cannot be read."""
    return tuple(UnreadableRank(number, reason) for number, reason in sorted(trace.unreadable.items()))
