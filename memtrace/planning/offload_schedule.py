"""When the copies of an offload happen, for given tensors and a given limit of the peak.

The program has one order; copies can only delay it. Copies to the host begin when forward saves a tensor, one at a
time. Forward waits for them only where the limit requires it. Copies back begin in the order in which backward reads
the tensors, also one at a time, and as late as they can without a delay (Capuchin); where that is not possible, as
early as the limit allows. A tensor takes memory until its copy out has ended and nothing else holds it, and again from
the beginning of its copy back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from memtrace.analysis.bandwidth import CopyBandwidths
from memtrace.format.arrays import Array
from memtrace.planning.bus import Bus
from memtrace.planning.offload_problem import OffloadProblem

PREFETCH_MARGIN: Final = 1.5
"""A copy back begins this many times its duration before it is needed, where the limit of the peak allows."""


@dataclass(frozen=True)
class OffloadSchedule:
    """When the copies of the chosen tensors happen; one element per chosen tensor."""

    tensor: Array
    """Positions in the problem's tensors."""
    leave: Array
    """First piece in which the tensor is not in memory."""
    fetch: Array
    """The piece at whose start its copy back begins; equal to ``back``: when backward reads it."""
    level: Array
    """Peak of each piece."""
    added_ns: float
    """How much longer the step takes."""
    to_host_ns: float
    """Time for which the bus is busy in this direction."""
    to_device_ns: float

    @property
    def peak_bytes(self) -> int:
        """Peak of the step."""
        return int(self.level.max())


def schedule_copies(
    problem: OffloadProblem, chosen: Array, limit_bytes: int, bandwidths: CopyBandwidths | None
) -> OffloadSchedule | None:
    """Return the schedule with the least delay whose peak is at most ``limit_bytes``.

    Args:
        problem: The step.
        chosen: Which tensors are offloaded, a mask.
        limit_bytes: Limit of the peak.
        bandwidths: Cost of copies; None: unknown. Then forward waits for every copy out, and copies back begin when
            backward reads the tensor, so that the peak depends on no time.

    Returns:
        None where the limit cannot be reached.
    """
    tensor = np.flatnonzero(chosen)
    free, back = problem.free[tensor], problem.back[tensor]
    level = problem.level(tensor, free, back)
    if (free >= back).any() or int(level.max()) > limit_bytes:
        return None
    if bandwidths is None:
        return OffloadSchedule(tensor, free, back, level, 0.0, 0.0, 0.0)
    early = _Simulation(problem, tensor, limit_bytes, bandwidths, np.zeros(len(tensor), np.int64))
    early.run()
    late = _Simulation(problem, tensor, limit_bytes, bandwidths, _latest_starts(problem, early))
    late.run()
    best = late if late.end_ns <= early.end_ns else early
    return OffloadSchedule(
        tensor=tensor,
        leave=best.leave,
        fetch=best.fetch,
        level=best.level,
        added_ns=best.end_ns - float(problem.piece_ns[-1]),
        to_host_ns=best.bus.to_host.busy_ns,
        to_device_ns=best.bus.to_device.busy_ns,
    )


class _Simulation:
    """The step from its start to its end, with copies. Arrays have an element for each chosen tensor."""

    def __init__(
        self, problem: OffloadProblem, tensor: Array, limit_bytes: int, bandwidths: CopyBandwidths, not_before: Array
    ) -> None:
        self.tensor, self.problem = tensor, problem
        self.leave, self.fetch = problem.free[tensor].copy(), problem.back[tensor].copy()
        self.arrive_ns = np.zeros(len(tensor))
        self.clock_ns = np.zeros(len(problem.piece_bytes))
        # As if every copy out took no time; tensors that are late are added to the pieces in which they still are.
        self.level = problem.level(tensor, self.leave, self.fetch)
        self.bus = Bus(bandwidths)
        self.end_ns = 0.0
        self._limit_bytes = limit_bytes
        self._not_before = not_before.tolist()
        self._size, self._node = problem.size[tensor].tolist(), problem.node[tensor].tolist()
        self._free, self._back = problem.free[tensor].tolist(), problem.back[tensor].tolist()
        self._can_prefetch = problem.prefetch_pieces().tolist()
        self._leaving: dict[int, float] = {}  # when the copies out end, in the order of their ends
        self._to_fetch = np.argsort(-problem.back[tensor], kind="stable").tolist()

    def run(self) -> None:
        """Run the step, which keeps the limit: it waits for as many copies as that takes."""
        ready = self.problem.ready[self.tensor].tolist()
        to_save = sorted(range(len(ready)), key=ready.__getitem__, reverse=True)
        to_read = list(self._to_fetch)
        base_ns = self.problem.piece_ns.tolist()
        delay_ns = 0.0
        for piece in range(len(self.problem.piece_bytes)):
            now = base_ns[piece] + delay_ns
            while to_save and ready[to_save[-1]] <= piece:
                number = to_save.pop()
                self._leaving[number] = self.bus.to_host.copy(self._size[number], now)
            self._keep_late(piece, now)
            now = self._let_leave(piece, now)
            self._fetch_due(piece, now)
            self._prefetch(piece, now)
            while to_read and self._back[to_read[-1]] <= piece:
                now = max(now, float(self.arrive_ns[to_read.pop()]))
            self.clock_ns[piece] = now
            delay_ns = now - base_ns[piece]
        self.end_ns = base_ns[-1] + delay_ns

    def _keep_late(self, piece: int, now: float) -> None:
        """Keep the tensors that backward reads now and whose copies have not ended: they never leave."""
        late = [number for number, end_ns in self._leaving.items() if self._back[number] <= piece and end_ns > now]
        for number in late:
            del self._leaving[number]
            self._to_fetch.remove(number)
            self.leave[number] = self._back[number]

    def _let_leave(self, piece: int, now: float) -> float:
        """Drop the tensors whose copies have ended; wait for others while the piece would exceed the limit."""
        late_bytes = sum(self._size[number] for number in self._leaving if self._free[number] <= piece)
        for number, end_ns in list(self._leaving.items()):
            is_late = self._free[number] <= piece
            if end_ns > now and self.level[piece] + late_bytes > self._limit_bytes:
                now = end_ns  # copies end in the order in which they began, so that all before it have ended too
            if end_ns > now:
                break
            del self._leaving[number]
            self.leave[number] = max(piece, self._free[number])
            late_bytes -= self._size[number] if is_late else 0
        self.level[piece] += late_bytes
        return now

    def _fetch_due(self, piece: int, now: float) -> None:
        """Begin the copies back of what backward reads now."""
        while self._to_fetch and self._back[self._to_fetch[-1]] <= piece:
            number = self._to_fetch.pop()
            self.arrive_ns[number] = self.bus.to_device.copy(self._size[number], now)

    def _prefetch(self, piece: int, now: float) -> None:
        """Begin copies back in the order of their reads, as far as the limit allows."""
        while self._to_fetch and self._can_prefetch[piece]:
            number = self._to_fetch[-1]
            has_left = number not in self._leaving and self.leave[number] < piece and self._not_before[number] <= piece
            until = self._back[number]
            if not has_left or self.problem.piece_node[piece] < self._node[number]:
                return
            if int(self.level[piece:until].max()) + self._size[number] > self._limit_bytes:
                return
            self._to_fetch.pop()
            self.level[piece:until] += self._size[number]
            self.fetch[number] = piece
            self.arrive_ns[number] = self.bus.to_device.copy(self._size[number], now)


def _latest_starts(problem: OffloadProblem, early: _Simulation) -> Array:
    """Return the last piece in which each copy back can begin so that it is not later than in ``early``.

    Source: Capuchin (ASPLOS 2020): the copy begins at the last access before SwapInStart, one copy at a time.
    """
    latest: Array = early.fetch.copy()
    pieces = np.flatnonzero(problem.prefetch_pieces())
    if not len(pieces):
        return latest
    next_start_ns, next_piece = np.inf, len(problem.piece_bytes)
    for number in np.argsort(-problem.back[early.tensor], kind="stable").tolist():
        copy_ns = early.bus.to_device.copy_ns(int(problem.size[early.tensor[number]]))
        read_ns = float(early.clock_ns[problem.back[early.tensor[number]]])
        start_ns = min(read_ns, next_start_ns) - copy_ns
        place = int(np.searchsorted(early.clock_ns[pieces], start_ns - (PREFETCH_MARGIN - 1) * copy_ns, side="right"))
        piece = int(pieces[place - 1]) if place else 0
        latest[number] = min(max(piece, int(early.fetch[number])), next_piece)
        next_start_ns, next_piece = start_ns, int(latest[number])
    return latest
