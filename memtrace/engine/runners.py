"""Where tasks run: the protocol, and this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Final, Protocol, TypeVar

from memtrace.errors import MemtraceError

T = TypeVar("T")
R = TypeVar("R")

MAX_ATTEMPTS: Final = 3
"""How often a task is started whose worker dies."""


class WorkerError(MemtraceError):
    """The workers that ran a task died, or the cluster cannot be reached."""


class Runner(Protocol):
    """Runs a function on many tasks."""

    @property
    def num_workers(self) -> int:
        """Number of tasks that run at the same time."""
        ...

    @property
    def is_local(self) -> bool:
        """Whether tasks run in this process, on traces that are already open."""
        ...

    def map(self, function: Callable[[T], R], tasks: Sequence[T]) -> Iterator[R | WorkerError]:
        """Yield the result of each task, in the order of the tasks.

        A task whose workers die again and again gives a ``WorkerError`` instead.

        Args:
            function: a function that can be pickled; what it raises is raised here.
            tasks: values that can be pickled.
        """
        ...

    def close(self) -> None:
        """End the workers."""
        ...

    def __enter__(self) -> Runner: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class InProcess:
    """Runs tasks one after another in this process."""

    num_workers = 1
    is_local = True

    def map(self, function: Callable[[T], R], tasks: Sequence[T]) -> Iterator[R | WorkerError]:
        """Yield the result of each task."""
        return map(function, tasks)

    def close(self) -> None:
        """Do nothing: there are no workers."""

    def __enter__(self) -> InProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def describe_death(num_attempts: int) -> str:
    """Return why a task has no result."""
    return (
        f"its worker process died {num_attempts} times: it was killed, or ran out of memory. Use fewer workers "
        "(--workers 1), or a machine with more memory"
    )
