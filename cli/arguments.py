"""What every command that reads traces accepts: the traces, a rank of them, and a window of steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

import click
from memtrace.cli.feedback import FEEDBACK
from memtrace.cli.output import open_traces

if TYPE_CHECKING:
    from memtrace.engine import TraceSource
    from memtrace.trace import Trace

RANK: Final = click.option("--rank", type=int, help="Rank to analyze, for traces of several ranks.")
WINDOW: Final = (
    click.option("--from-step", type=click.IntRange(min=0), help="First step to analyze.  [default: first recorded]"),
    click.option("--to-step", type=click.IntRange(min=0), help="Last step to analyze.  [default: last recorded]"),
)


@dataclass(frozen=True)
class Selection:
    """The traces named on the command line, and which rank and steps of them to analyze."""

    paths: tuple[str, ...]
    """Trace folders or files; several are the ranks of one job."""
    rank: int | None = None
    """None: not given."""
    from_step: int | None = None
    """First step of the window; None: the first recorded."""
    to_step: int | None = None
    """Last step of the window, included; None: the last recorded."""

    @property
    def name(self) -> str:
        """The traces as the user named them."""
        return " ".join(self.paths)

    def open(self, work_during_read: Callable[[], object] | None = None) -> Trace:
        """Open the traces: all ranks or the selected one, and of each rank the window of steps.

        Args:
            work_during_read: called once while another process reads a file, to use the time.
        """
        trace = open_traces(self.paths, work_during_read)
        return self._window(trace if self.rank is None else trace.rank(self.rank))

    def open_rank(self) -> Trace:
        """Open the selected rank, or the first one with a note on stderr where there are several."""
        trace = open_traces(self.paths)
        if self.rank is None and len(trace.ranks) > 1:
            FEEDBACK.note(f"showing rank {trace.ranks[0]} of {len(trace.ranks)}; select another with --rank")
        return self._window(trace.rank(trace.ranks[0] if self.rank is None else self.rank))

    @property
    def source(self) -> TraceSource:
        """How workers open the traces."""
        from memtrace.engine import TraceSource

        return TraceSource.of(self.paths, self.rank, self.from_step, self.to_step)

    def _window(self, trace: Trace) -> Trace:
        if self.from_step is None and self.to_step is None:
            return trace
        from memtrace.analysis.windows import step_window

        return step_window(trace, self.from_step, self.to_step)


def selects_traces(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command: argument TRACE..., options --rank, --from-step and --to-step, passed as one ``Selection``."""

    @click.argument("traces", metavar="TRACE...", nargs=-1, required=True, type=click.Path())
    @RANK
    @WINDOW[0]
    @WINDOW[1]
    @wraps(command)
    def with_selection(
        traces: Sequence[str], rank: int | None, from_step: int | None, to_step: int | None, **options: Any
    ) -> Any:
        if from_step is not None and to_step is not None and from_step > to_step:
            raise click.UsageError(f"--from-step {from_step} is greater than --to-step {to_step}.")
        return command(selection=Selection(tuple(traces), rank, from_step, to_step), **options)

    return with_selection
