"""Where commands analyze traces: options --workers and --scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

import click
from memtrace.cli.feedback import FEEDBACK

if TYPE_CHECKING:
    from memtrace.engine import Engine, EngineOptions, TraceSource
    from memtrace.trace import Trace

OPTIONS: Final = (
    click.option("--workers", type=click.IntRange(min=1), metavar="N", envvar="MEMTRACE_WORKERS",
                 help="Worker processes; 1 analyzes in this process.  [default: one per core for large traces]"),
    click.option("--scheduler", metavar="ADDRESS", envvar="DASK_SCHEDULER_ADDRESS",
                 help="Scheduler of a Dask cluster to analyze on, such as tcp://10.0.0.1:8786."),
)  # fmt: skip


@dataclass(frozen=True)
class Workers:
    """What analyzes the traces of a command."""

    num_processes: int | None
    """Number of worker processes; None: as many as suit the trace."""
    scheduler: str | None
    """Address of a Dask scheduler; None: this machine."""

    @property
    def options(self) -> EngineOptions:
        """The options of the engine."""
        from memtrace.engine import EngineOptions

        return EngineOptions(self.num_processes, self.scheduler)

    def engine(self, trace: Trace, source: TraceSource) -> Engine:
        """Return the engine for a trace; it shows progress, and its workers end when its block ends."""
        from memtrace.engine import choose_engine
        from memtrace.engine.heap import keep_freed_memory

        keep_freed_memory()
        with FEEDBACK.paused():  # workers are forked where there is no other thread
            return choose_engine(self.options, trace, source, FEEDBACK.begin)

    def ask(self, traces: list[tuple[Trace, TraceSource]], function: Callable[..., Any], *arguments: object) -> Any:
        """Return the result of a function of some open traces and further arguments."""
        with self.engine(*traces[0]) as engine:
            return engine.ask(traces, function, *arguments)


def takes_workers(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command: options --workers and --scheduler, passed as one ``Workers``."""

    @OPTIONS[0]
    @OPTIONS[1]
    @wraps(command)
    def with_workers(workers: int | None, scheduler: str | None, **options: Any) -> Any:
        return command(workers=Workers(workers, scheduler), **options)

    return with_workers
