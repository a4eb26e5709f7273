"""Maps analyses over the ranks of a job and over the parts of a long trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Final, TypeVar

from memtrace.analysis.rank_results import RankAnalyzer, rank_arguments
from memtrace.engine.processes import Processes, default_workers
from memtrace.engine.runners import InProcess, Runner, WorkerError
from memtrace.engine.sources import TraceSource
from memtrace.errors import MemtraceError
from memtrace.format.storage import is_of_this_process, to_path
from memtrace.trace import Trace

R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")

MIN_EVENTS_FOR_WORKERS: Final = 4_000_000
"""Smaller traces are analyzed sooner than processes start."""
MIN_RANKS_FOR_WORKERS: Final = 16
MAX_QUICK_PARTS: Final = 256
"""Most parts of which this process reads what is quick to read, while worker processes start."""
Progress = Callable[[str], None]


@dataclass(frozen=True)
class EngineOptions:
    """Where analyses run."""

    workers: int | None = None
    """Number of worker processes; 1: this process; None: as many as the machine has cores and memory for, for large
    traces."""
    scheduler: str | None = None
    """Address of the scheduler of a Dask cluster; None: on this machine."""


@dataclass(frozen=True)
class RankError:
    """A rank that cannot be analyzed, and why."""

    rank: int
    reason: str


@dataclass(frozen=True)
class RankTask:
    """A rank to analyze, and with which arguments."""

    trace: Trace
    """The open trace that has the rank."""
    number: int
    """The rank."""
    source: TraceSource
    """How workers open the trace."""
    arguments: tuple[Any, ...] = ()
    """Further arguments of the function, which can be hashed and pickled."""


@dataclass(frozen=True)
class _Failure:
    """What went wrong in a task, as a value: errors of one rank must not end the others."""

    reason: str


def _answer(task: tuple[Callable[..., R], Sequence[TraceSource], tuple[Any, ...]]) -> R | _Failure:
    """Run a function on traces in a worker."""
    function, sources, arguments = task
    try:
        return function(*(source.open() for source in sources), *arguments)
    except MemtraceError as error:
        return _Failure(str(error))


def _answer_here(function: Callable[..., R], task: RankTask) -> R | _Failure:
    """Run a function on a rank of an open trace."""
    try:
        return function(task.trace.rank_to_read(task.number), *task.arguments)
    except MemtraceError as error:
        return _Failure(str(error))


def _answer_part(source: TraceSource, function: Callable[[Trace, T], S], task: T) -> S | _Failure:
    return _answer((function, [source], (task,)))


class Engine:
    """Runs analyses with a runner. It is a context manager: its workers end with it."""

    def __init__(self, runner: Runner, on_progress: Progress | None = None) -> None:
        self.runner = runner
        self._on_progress = on_progress or (lambda _: None)

    def map_ranks(
        self,
        trace: Trace,
        source: TraceSource,
        function: Callable[..., S],
        *arguments: object,
        task: str,
        ranks: Sequence[int] | None = None,
        each: Mapping[int, tuple[Any, ...]] | None = None,
    ) -> Iterator[tuple[int, S | RankError]]:
        """Yield for each rank of a trace its number and the result of a function, in the order of the ranks.

        Args:
            trace: the trace, with the window of steps that the source names.
            source: how workers open it.
            function: a module-level function of a single-rank trace and the arguments.
            arguments: further arguments, which can be pickled.
            task: what is done, for progress.
            ranks: some of the ranks; None: all.
            each: further arguments of each rank; ranks that are absent are left out.
        """
        further = rank_arguments(trace, ranks, each)
        tasks = [RankTask(trace, number, source, (*arguments, *more)) for number, more in further.items()]
        for rank_task, answer in zip(tasks, self._run(function, tasks, task), strict=True):
            yield rank_task.number, answer

    def _run(self, function: Callable[..., S], tasks: Sequence[RankTask], name: str) -> Iterator[S | RankError]:
        """Yield the result of each task in order.

        A single task runs in this process unless there is a cluster: what is read for it serves the next question.
        """
        if self.runner.is_local or (isinstance(self.runner, Processes) and len(tasks) == 1):
            answers: Iterator[Any] = map(partial(_answer_here, function), tasks)
        else:
            sources = [task.source.only(task.trace, task.number) for task in tasks]
            answers = self.runner.map(
                _answer, [(function, [source], task.arguments) for source, task in zip(sources, tasks, strict=True)]
            )
        for place, task in enumerate(tasks):
            if len(tasks) > 1:
                self._on_progress(f"{name}: rank {task.number} ({place + 1} of {len(tasks)})")
            answer = next(answers)
            yield RankError(task.number, _reason(answer)) if isinstance(answer, _Failure | WorkerError) else answer

    def analyze(
        self,
        trace: Trace,
        function: Callable[..., Any],
        *arguments: Any,
        source: TraceSource,
        task: str,
        ranks: Sequence[int] | None = None,
        each: Mapping[int, tuple[Any, ...]] | None = None,
    ) -> Trace:
        """Compute results of ranks as tasks: see ``memtrace.analysis.rank_results.RankAnalyzer``.

        Args:
            trace: the trace.
            function: a module-level function of a single-rank trace and the arguments.
            arguments: hashable arguments.
            source: how workers open the trace.
            task: what is done, for progress.
            ranks: some of the ranks; None: all.
            each: further arguments of each rank; ranks that are absent are not analyzed.
        """
        further = rank_arguments(trace, ranks, each)
        tasks = [RankTask(trace, number, source, (*arguments, *more)) for number, more in further.items()]
        errors = {error.rank: error.reason for _, error in self.compute(function, tasks, task)}
        return trace.without_ranks(errors)

    def compute(
        self, function: Callable[..., Any], tasks: Sequence[RankTask], name: str
    ) -> list[tuple[RankTask, RankError]]:
        """Compute results of ranks of one or several traces; ``Trace.rank_result`` then returns them.

        Args:
            function: a module-level function of a single-rank trace and the arguments of the task.
            tasks: the ranks; those whose result is known take no time.
            name: what is done, for progress.

        Returns:
            The tasks of the ranks that cannot be read, and why.
        """
        missing = [task for task in tasks if not task.trace.has_rank_result(task.number, function, *task.arguments)]
        errors = []
        for task, answer in zip(missing, self._run(function, missing, name), strict=True):
            if isinstance(answer, RankError):
                errors.append((task, answer))
            else:
                task.trace.keep_rank_result(task.number, answer, function, *task.arguments)
        return errors

    def analyzer(self, source: TraceSource) -> RankAnalyzer:
        """Return what computes results of the ranks of a trace that workers open in this way."""
        return partial(self.analyze, source=source)

    def ask(self, traces: Sequence[tuple[Trace, TraceSource]], function: Callable[..., S], *arguments: object) -> S:
        """Return the result of a function of some traces and further arguments.

        It is computed in this process, which has the traces open, unless there is a cluster.

        Args:
            traces: open traces, and how workers open them.
            function: a module-level function.
            arguments: further arguments, which can be pickled.

        Raises:
            MemtraceError: what the function raised.
        """
        if self.runner.is_local or isinstance(self.runner, Processes):
            return function(*(trace for trace, _ in traces), *arguments)
        sources = [source.only(trace) for trace, source in traces]
        (answer,) = self.runner.map(_answer, [(function, sources, arguments)])
        if isinstance(answer, _Failure | WorkerError):
            raise MemtraceError(_reason(answer))
        return answer

    def run_parts(self, source: TraceSource, trace: Trace, analysis: Any, task: str) -> Any:
        """Return the result of an analysis of the parts of one rank.

        Args:
            source: how workers open the trace.
            trace: the trace of one rank.
            analysis: ``partial``, ``merge`` and ``finish``: see ``memtrace.analysis.by_part``.
            task: what is done, for progress.

        Raises:
            MemtraceError: a part cannot be read.
        """
        tasks: Sequence[Any] = analysis.tasks(trace)
        is_quick = analysis.is_quick and len(trace.part_numbers) <= MAX_QUICK_PARTS
        is_here = False
        if isinstance(self.runner, Processes) and not self.runner.is_forked:
            self.runner.start(_import_passes)  # beside what is read here
            is_here = is_quick
        if is_here:
            states: Iterator[Any] = (analysis.partial(trace, each) for each in tasks)
        else:
            states = self.map_parts(source, trace, analysis.partial, tasks)
        state, is_first = None, True
        for number, each in enumerate(states, 1):
            state = each if is_first else analysis.merge(state, each)
            is_first = False
            self._on_progress(f"{task}: {100 * number // len(tasks)} %")
        return analysis.finish(state)

    def map_parts(
        self, source: TraceSource, trace: Trace, function: Callable[[Trace, T], S], tasks: Sequence[T]
    ) -> Iterator[S]:
        """Yield the result of a function of the trace of one rank and of each of some tasks, in the order of the tasks.

        Args:
            source: how workers open the trace.
            trace: the trace of one rank.
            function: a module-level function.
            tasks: such as numbers of parts; values that can be pickled.

        Raises:
            MemtraceError: a part cannot be read.
        """
        if self.runner.is_local:
            yield from (function(trace, each) for each in tasks)
            return
        for answer in self.runner.map(partial(_answer_part, source.only(trace), function), tasks):
            if isinstance(answer, _Failure | WorkerError):
                raise MemtraceError(_reason(answer))
            yield answer

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.runner.close()


def _reason(answer: _Failure | WorkerError) -> str:
    return answer.reason if isinstance(answer, _Failure) else str(answer)


def choose_engine(
    options: EngineOptions, trace: Trace, source: TraceSource, on_progress: Progress | None = None
) -> Engine:
    """Return the engine for a trace: what the options say, else worker processes for large traces.

    Args:
        options: where to run.
        trace: the trace.
        source: how workers open it.
        on_progress: called with what is being done.
    """
    if options.scheduler is not None:
        from memtrace.engine.cluster import Cluster

        return Engine(Cluster(options.scheduler), on_progress)
    num_workers = options.workers
    if any(is_of_this_process(to_path(path)) for path in source.paths):
        num_workers = 1
    if num_workers is None:
        num_workers = default_workers() if _is_large(trace, source) else 1
    if num_workers == 1:
        return Engine(InProcess(), on_progress)
    processes = Processes(num_workers)
    processes.fork()
    return Engine(processes, on_progress)


def _import_passes(_: int) -> None:
    """Import in a new worker what tasks on long traces need."""
    import memtrace.analysis.by_part.passes  # noqa: F401


def _is_large(trace: Trace, source: TraceSource) -> bool:
    """Return whether a trace is analyzed sooner by worker processes, which open it themselves."""
    if not all(to_path(path).is_dir() for path in source.paths):
        return False  # files of other tools are in the memory of this process
    if len(trace.ranks) >= MIN_RANKS_FOR_WORKERS:
        return True
    return sum(rank.manifest.num_events or 0 for rank in trace.each_rank()) >= MIN_EVENTS_FOR_WORKERS
