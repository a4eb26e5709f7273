"""Which shards of a spilled model are on the device, and when they come and go."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memtrace.execution.host_memory import HostMemory
from memtrace.execution.moved_storage import MovedStorage, move_storages


class Shard:
    """The parameters of consecutive layers, with the gradients and the optimizer state that they have at the moment."""

    def __init__(self, parameters: Sequence[torch.Tensor], storages: Sequence[MovedStorage]) -> None:
        self.parameters = tuple(parameters)
        self.storages = tuple(storages)
        """Storages of the parameters. Shards that share parameters share storages."""
        self.gradients: list[MovedStorage] = []
        self.state_of: dict[int, list[MovedStorage]] = {}
        """Optimizer state by the id of the optimizer."""

    @property
    def state(self) -> list[MovedStorage]:
        """The state that all optimizers have for the shard."""
        return [moved for state in self.state_of.values() for moved in state]

    def collect_gradients(self, memory: HostMemory) -> None:
        """Find the gradients that backward has allocated, and forget those that the program has dropped."""
        current = {id(grad): grad for parameter in self.parameters if (grad := parameter.grad) is not None}
        self.gradients = [moved for moved in self.gradients if any(id(tensor) in current for tensor in moved.tensors)]
        for moved in self.gradients:
            for tensor in moved.tensors:
                current.pop(id(tensor), None)
        self.gradients += move_storages(filter(is_movable, current.values()), memory)


def is_movable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has plain memory: no sparse layout, no subclass that computes in its own way."""
    is_plain = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return is_plain and tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0


class Residency:
    """Moves shards so that one of them is on the device, and what is on its way fits a buffer.

    Args:
        shards: The shards in the order of their forward.
        memory: The host memory.
        buffer_bytes: Most bytes of the device that copies of other shards use while one computes; 0: no copy overlaps
            computation.
    """

    def __init__(self, shards: Sequence[Shard], memory: HostMemory, buffer_bytes: int) -> None:
        self.shards = tuple(shards)
        self.memory = memory
        self._buffer_bytes = buffer_bytes
        self._current: int | None = None
        self._outgoing: list[MovedStorage] = []
        self._incoming: list[MovedStorage] = []

    @property
    def current(self) -> int | None:
        """The shard on the device; None: none."""
        return self._current

    def use(self, number: int, following: int | None = None, *, updates: bool = False) -> None:
        """Put a shard on the device, and all others in host memory.

        Args:
            number: The shard.
            following: The shard that computes next, which is loaded as far as the buffer has room; None: none.
            updates: Whether the optimizer updates the shards, which needs gradients and optimizer state as well.
        """
        wanted = self._wanted(number, updates)
        if self._current != number or not all(moved.is_loaded for moved in wanted):
            if self._current != number:
                self._leave(keep=wanted)
            self._current = number
            for moved in wanted:
                moved.load()
            self._incoming = [moved for moved in self._incoming if moved.is_loading]
        self._continue([] if following is None else self._wanted(following, updates))

    def _wanted(self, number: int, updates: bool) -> tuple[MovedStorage, ...]:
        shard = self.shards[number]
        return (*shard.storages, *shard.gradients, *shard.state) if updates else shard.storages

    def _continue(self, following: Sequence[MovedStorage]) -> None:
        """Free what has been copied to host memory, and load the next shard into the room that is left."""
        for moved in [moved for moved in self._outgoing if moved.is_stored]:
            moved.finish_storing()
            self._outgoing.remove(moved)
        used = self._in_flight_bytes()
        for moved in following:
            if moved.is_loaded or moved.is_loading:
                continue
            if used + moved.num_bytes > self._buffer_bytes:
                break
            moved.start_loading()
            self._incoming.append(moved)
            used += moved.num_bytes

    def _in_flight_bytes(self) -> int:
        return sum(moved.num_bytes for moved in (*self._outgoing, *self._incoming))

    def _leave(self, keep: Sequence[MovedStorage] = ()) -> None:
        """Move the current shard to host memory, except storages that the next one shares."""
        if self._current is None:
            return
        shard, kept = self.shards[self._current], set(map(id, keep))
        shard.collect_gradients(self.memory)
        for moved in (*shard.storages, *shard.gradients, *shard.state):
            if id(moved) not in kept:
                self.store(moved)
        self._current = None

    def store(self, moved: MovedStorage) -> None:
        """Move a storage to host memory, in the background as far as the buffer has room."""
        if not moved.is_loaded:
            return
        if moved.start_storing():
            self._outgoing.append(moved)
        while self._outgoing and self._in_flight_bytes() > self._buffer_bytes:
            self._outgoing.pop(0).finish_storing()

    def empty(self) -> None:
        """Move everything to host memory, and wait until it is there."""
        for moved in self._incoming:
            moved.cancel_loading()
        self._incoming = []
        self._leave()
        for number in range(len(self.shards)):
            self._current = number
            self._leave()
        for moved in self._outgoing:
            moved.finish_storing()
        self._outgoing = []

    def restore(self) -> None:
        """Put everything back on the device."""
        for moved in self._incoming:
            moved.cancel_loading()
        self._incoming, self._outgoing, self._current = [], [], None
        for number, shard in enumerate(self.shards):
            shard.collect_gradients(self.memory)
            for moved in self._wanted(number, updates=True):
                moved.load()
