"""Workers of a Dask cluster (the extra ``memtrace[cluster]``)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final, TypeVar

from memtrace.engine.runners import MAX_ATTEMPTS, WorkerError, describe_death
from memtrace.errors import MemtraceError

if TYPE_CHECKING:
    from distributed import Client, Future

T = TypeVar("T")
R = TypeVar("R")

_AHEAD: Final = 4
"""Tasks for each thread of the cluster that run, or wait to, before the earlier results have been taken."""
CONNECT_SECONDS: Final = 30


class Cluster:
    """Runs tasks on a Dask cluster, whose scheduler gives the tasks of workers that die to others.

    Args:
        address: address of the scheduler, such as ``tcp://10.0.0.1:8786``.

    Raises:
        MemtraceError: dask is not installed, or the scheduler does not answer.
    """

    is_local = False

    def __init__(self, address: str) -> None:
        try:
            from distributed import Client
        except ImportError:
            raise MemtraceError(
                "a Dask cluster needs the package distributed. Install it with: pip install 'memtrace[cluster]'"
            ) from None
        try:
            self._client: Client = Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
        except (OSError, TimeoutError, ValueError) as error:
            raise MemtraceError(
                f"the Dask scheduler {address} does not answer ({type(error).__name__}). Check the address; "
                "'dask scheduler' prints it when it starts."
            ) from None

    @property
    def num_workers(self) -> int:
        """Number of tasks that the cluster runs at the same time."""
        return max(1, int(sum(self._client.nthreads().values())))

    def map(self, function: Callable[[T], R], tasks: Sequence[T]) -> Iterator[R | WorkerError]:
        """Yield the result of each task, in the order of the tasks."""
        from distributed.scheduler import KilledWorker

        waiting: deque[Future] = deque()
        submitted = 0
        try:
            while submitted < len(tasks) or waiting:
                while submitted < len(tasks) and len(waiting) < _AHEAD * self.num_workers:
                    # The same task can be asked again of other data at the same path.
                    waiting.append(self._client.submit(function, tasks[submitted], pure=False))
                    submitted += 1
                future = waiting.popleft()
                try:
                    result: R | WorkerError = future.result()
                except KilledWorker:
                    result = WorkerError(describe_death(MAX_ATTEMPTS))
                future.release()
                yield result
        finally:
            for future in waiting:
                future.cancel()

    def close(self) -> None:
        """Disconnect from the cluster, which goes on."""
        self._client.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
