"""Hydra's scheduling of several spilled models on several devices: a simulation of shard units.

A shard unit is the forward or the backward of one shard on one whole mini-batch. A unit is eligible if it is the first
of its model's queue and no other unit of the model runs. A device holds one shard at a time, and with double buffering
also the next one. Source: "Hydra: A System for Large Multi-Model Deep Learning" (technical report, 2022).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from memtrace.errors import MemtraceError
from memtrace.format.arrays import Array
from memtrace.planning.unit_queues import QUEUES, UnitQueue

Policy = Literal["sharded-lrtf", "random", "task-parallel", "model-parallel"]
POLICIES: Final[tuple[Policy, ...]] = ("sharded-lrtf", "task-parallel", "model-parallel", "random")


@dataclass(frozen=True)
class ShardUnit:
    """The forward or the backward of one shard on one mini-batch. Times are in seconds."""

    shard: int
    """Number of the shard in its model. A device that holds the shard does not load it again."""
    compute_s: float
    load_s: float = 0.0
    """Copying the state of the shard to the device."""
    unload_s: float = 0.0
    """Copying what the unit has changed back to host memory."""


@dataclass(frozen=True)
class ModelJob:
    """A model to train: the units of one mini-batch in order, and how many mini-batches there are."""

    name: str
    units: tuple[ShardUnit, ...]
    num_minibatches: int = 1
    """Mini-batches of one epoch."""
    num_epochs: int = 1

    @property
    def num_units(self) -> int:
        """Number of shard units of the whole training."""
        return len(self.units) * self.num_minibatches * self.num_epochs

    @property
    def minibatch_s(self) -> float:
        """Seconds of computation of one mini-batch."""
        return sum(unit.compute_s for unit in self.units)


@dataclass(frozen=True)
class MultiModelSchedule:
    """When and where the shard units of several models run: one element per unit, in order of their start."""

    policy: str
    num_devices: int
    model: Array
    """Position of the model among the jobs."""
    unit: Array
    """Position of the unit in its model's training."""
    device: Array
    start_s: Array
    """Start of the computation."""
    end_s: Array
    makespan_s: float
    """Until the last unit has ended and its results are in host memory."""

    @property
    def utilization(self) -> float:
        """Share of the time of all devices in which they compute."""
        busy_s = float((self.end_s - self.start_s).sum())
        return busy_s / (self.num_devices * self.makespan_s) if self.makespan_s else 0.0


def remaining_seconds(
    *, epochs: int, minibatches_per_epoch: int, minibatches_left: int, minibatch_s: float, current_s: float
) -> float:
    """Return how long a model has to compute: the priority of Sharded-LRTF, ((e - 1) b + c_e - 1) t + c_m.

    Args:
        epochs: e, the epochs that are not finished, including the current one.
        minibatches_per_epoch: b.
        minibatches_left: c_e, the mini-batches of this epoch that are not finished, including the current one.
        minibatch_s: t, seconds of one mini-batch.
        current_s: c_m, seconds left in the current mini-batch.
    """
    return ((epochs - 1) * minibatches_per_epoch + minibatches_left - 1) * minibatch_s + current_s


def lower_bound_seconds(jobs: Sequence[ModelJob], num_devices: int) -> float:
    """Return a time that no schedule can beat: the longest model, or all computation spread evenly over the devices."""
    totals = [job.minibatch_s * job.num_minibatches * job.num_epochs for job in jobs]
    return max([*totals, sum(totals) / num_devices], default=0.0)


def schedule_models(
    jobs: Sequence[ModelJob],
    num_devices: int,
    policy: Policy = "sharded-lrtf",
    *,
    double_buffered: bool = True,
    seed: int = 0,
) -> MultiModelSchedule:
    """Simulate the training of several models on equal devices.

    Without double buffering a device loads a shard, computes and unloads it, one after the other. With it, the next
    shard is loaded and the last one is unloaded while a shard computes; copies of one direction follow each other.

    Args:
        jobs: The models.
        num_devices: Number of devices.
        policy: ``sharded-lrtf`` (the model with the longest remaining time first), ``random``, ``task-parallel`` (a
            model stays on one device until it is trained) or ``model-parallel`` (one model at a time, its shards spread
            over the devices).
        double_buffered: Whether copies overlap computation.
        seed: Of the policy ``random``.

    Raises:
        MemtraceError: There is no device, or a model has no units.
    """
    if num_devices < 1:
        raise MemtraceError(f"{num_devices} devices: pass at least one.")
    empty = [job.name for job in jobs if not job.num_units]
    if empty:
        raise MemtraceError(f"{empty[0]} has no shard units: give it units, mini-batches and epochs.")
    return _Simulation(jobs, num_devices, policy, double_buffered, seed).run()


class _Device:
    """What one device holds, and when its copies are finished."""

    def __init__(self) -> None:
        self.resident: tuple[int, int] | None = None
        """(model, shard) in the memory of the device."""
        self.preloaded: tuple[int, int] | None = None
        self.load_end_s = 0.0
        self.unload_end_s = 0.0
        self.compute_end_s = 0.0
        self.model = -1
        """The model whose unit runs; -1: none."""
        self.reserved = -1
        """The model whose shard is being preloaded; -1: none."""


class _Simulation:
    def __init__(
        self, jobs: Sequence[ModelJob], num_devices: int, policy: Policy, double_buffered: bool, seed: int
    ) -> None:
        self._jobs, self._policy = jobs, policy
        self._devices = [_Device() for _ in range(num_devices)]
        self._buffered = double_buffered
        self._preloads = double_buffered and any(unit.load_s for job in jobs for unit in job.units)
        self._next_unit = [0] * len(jobs)
        self._num_units = [job.num_units for job in jobs]
        self._left_in_minibatch = [
            np.cumsum([unit.compute_s for unit in job.units][::-1])[::-1].tolist() for job in jobs
        ]
        self._minibatch_s = [job.minibatch_s for job in jobs]
        self._running: list[tuple[float, int]] = []
        self._idle_devices: deque[int] = deque(range(num_devices))
        self._queue: UnitQueue = QUEUES[policy](seed)
        self._log: list[tuple[float, float, int, int, int]] = []

    def run(self) -> MultiModelSchedule:
        for model in range(len(self._jobs)):
            self._queue.add(model, self._remaining(model))
        self._start_idle_devices(0.0)
        while self._running:
            now, number = heapq.heappop(self._running)
            self._complete(number, now)
            while self._running and self._running[0][0] == now:
                self._complete(heapq.heappop(self._running)[1], now)
            self._start_idle_devices(now)
        return self._schedule()

    def _complete(self, number: int, now: float) -> None:
        device = self._devices[number]
        model, device.model = device.model, -1
        self._idle_devices.append(number)
        if self._next_unit[model] < self._num_units[model]:
            keep = self._policy == "task-parallel" or device.reserved == model
            if keep:
                device.reserved = model
            else:
                self._queue.add(model, self._remaining(model))

    def _start_idle_devices(self, now: float) -> None:
        if self._policy == "model-parallel":
            self._start_model_parallel(now)
            return
        # Devices whose next model is chosen come first, so that no other device takes it.
        for chosen in (True, False):
            for _ in range(len(self._idle_devices)):
                number = self._idle_devices.popleft()
                device = self._devices[number]
                model = device.reserved if chosen else self._take_model()
                if model < 0:
                    self._idle_devices.append(number)
                    continue
                device.reserved = -1
                self._start(number, model, now)

    def _take_model(self) -> int:
        """The model that the policy chooses; one that a busy device has reserved where no other is left; -1: none."""
        if self._queue:
            return self._queue.take()
        for device in self._devices:
            # A reserved model that the device itself runs is not eligible.
            if device.model >= 0 and device.reserved not in (-1, device.model):
                model, device.reserved = device.reserved, -1
                return model
        return -1

    def _start_model_parallel(self, now: float) -> None:
        if len(self._idle_devices) < len(self._devices) or not self._queue:
            return
        model = self._queue.take()
        shard = self._unit(model).shard
        number = shard * len(self._devices) // (1 + max(unit.shard for unit in self._jobs[model].units))
        self._idle_devices.remove(number)
        self._start(number, model, now)

    def _unit(self, model: int) -> ShardUnit:
        units = self._jobs[model].units
        return units[self._next_unit[model] % len(units)]

    def _remaining(self, model: int) -> float:
        job, done = self._jobs[model], self._next_unit[model]
        minibatch, place = divmod(done, len(job.units))
        epoch, in_epoch = divmod(minibatch, job.num_minibatches)
        return remaining_seconds(
            epochs=job.num_epochs - epoch,
            minibatches_per_epoch=job.num_minibatches,
            minibatches_left=job.num_minibatches - in_epoch,
            minibatch_s=self._minibatch_s[model],
            current_s=self._left_in_minibatch[model][place],
        )

    def _start(self, number: int, model: int, now: float) -> None:
        device, unit = self._devices[number], self._unit(model)
        start = max(now, self._load(device, (model, unit.shard), unit.load_s, now))
        end = start + unit.compute_s
        self._log.append((start, end, model, self._next_unit[model], number))
        self._next_unit[model] += 1
        device.model = model
        self._reserve(device, start)
        following = self._unit(model).shard if self._next_unit[model] < self._num_units[model] else -1
        stays = device.reserved in (-1, model) and following == unit.shard
        if not stays:
            device.unload_end_s = max(device.unload_end_s, end) + unit.unload_s
        device.compute_end_s = end if self._buffered or stays else device.unload_end_s
        heapq.heappush(self._running, (device.compute_end_s, number))

    def _load(self, device: _Device, shard: tuple[int, int], load_s: float, now: float) -> float:
        """Return when the shard is on the device."""
        if device.resident == shard:
            return now
        if device.preloaded != shard:
            device.load_end_s = max(device.load_end_s, now) + load_s
        device.resident, device.preloaded = shard, None
        return device.load_end_s

    def _reserve(self, device: _Device, now: float) -> None:
        """Choose the next model of a device and load its shard while the current one computes."""
        if not self._preloads or self._policy == "model-parallel":
            return
        model = device.model
        continues = self._next_unit[model] < self._num_units[model]
        if self._policy == "task-parallel":
            device.reserved = model if continues else self._take_model()
        elif continues and (not self._queue or self._queue.prefers(model, self._remaining(model))):
            device.reserved = model
        else:
            device.reserved = self._queue.take() if self._queue else -1
        if device.reserved >= 0:
            unit = self._unit(device.reserved)
            if (device.reserved, unit.shard) != device.resident:
                device.preloaded = (device.reserved, unit.shard)
                device.load_end_s = max(device.load_end_s, now) + unit.load_s

    def _schedule(self) -> MultiModelSchedule:
        self._log.sort()
        columns = np.array(self._log, np.float64).reshape(-1, 5).T
        last = max((max(device.compute_end_s, device.unload_end_s) for device in self._devices), default=0.0)
        return MultiModelSchedule(
            policy=self._policy,
            num_devices=len(self._devices),
            model=columns[2].astype(np.int64),
            unit=columns[3].astype(np.int64),
            device=columns[4].astype(np.int64),
            start_s=columns[0],
            end_s=columns[1],
            makespan_s=last,
        )


def compare_policies(
    jobs: Sequence[ModelJob], num_devices: int, *, double_buffered: bool = True
) -> tuple[MultiModelSchedule, ...]:
    """Return the schedules of all policies, in the order of ``POLICIES``."""
    run: Callable[[Policy], MultiModelSchedule] = lambda policy: schedule_models(  # noqa: E731
        jobs, num_devices, policy, double_buffered=double_buffered
    )
    return tuple(map(run, POLICIES))
