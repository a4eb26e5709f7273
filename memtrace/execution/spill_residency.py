"""Which shards of a spilled model are on the device, and when they come and go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from memtrace.execution.moved_storage import MovedStorage, StorageMover, find_storages


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

    def collect_gradients(self) -> None:
        """Find the gradients that backward has allocated, and forget those that the program has dropped."""
        current = {id(grad): grad for parameter in self.parameters if (grad := parameter.grad) is not None}
        self.gradients = [moved for moved in self.gradients if any(id(tensor) in current for tensor in moved.tensors)]
        for moved in self.gradients:
            for tensor in moved.tensors:
                current.pop(id(tensor), None)
        self.gradients += find_storages(filter(is_movable, current.values()))


def is_movable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has plain memory: no sparse layout, no subclass that computes in its own way."""
    is_plain = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return is_plain and tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0


class Residency:
    """Moves shards so that one of them is on the device, and what is on its way fits a buffer.

    Args:
        shards: The shards in the order of their forward.
        mover: Moves storages.
        buffer_bytes: Most bytes of the device that copies of other shards use while one computes; 0: no copy overlaps
            computation.
    """

    def __init__(self, shards: Sequence[Shard], mover: StorageMover, buffer_bytes: int) -> None:
        self.shards = tuple(shards)
        self.mover = mover
        self._buffer_bytes = buffer_bytes
        self._current: int | None = None
        self._following: tuple[MovedStorage, ...] = ()
        self._outgoing: list[MovedStorage] = []
        self._incoming: list[MovedStorage] = []

    @property
    def current(self) -> int | None:
        """The shard on the device; None: none."""
        return self._current

    @property
    def is_moving(self) -> bool:
        """Whether copies to host memory are under way, which the next shard waits for."""
        return bool(self._outgoing)

    def use(self, number: int, following: int | None = None, *, updates: bool = False) -> None:
        """Put a shard on the device, and all others in host memory.

        Args:
            number: The shard.
            following: The shard that computes next, which is loaded as far as the buffer has room; None: none.
            updates: Whether the optimizer updates the shards, which needs gradients and optimizer state as well.
        """
        wanted = self._wanted(number, updates)
        self._following = () if following is None else self._wanted(following, updates)
        if self._current == number and all(moved.is_loaded for moved in wanted):
            self.go_on()
            return
        with self.mover.reusing([*wanted, *self._first_that_fit(self._following)]):
            if self._current != number:
                self._leave(keep=wanted)
            self._current = number
            self.mover.load(wanted)
            self._incoming = [moved for moved in self._incoming if moved.incoming is not None]
            self._load_following()

    def go_on(self) -> None:
        """Free what has been copied to host memory, and load the next shard into the room that is left."""
        if self._outgoing or self._following:
            with self.mover.reusing(self._first_that_fit(self._following)):
                self._load_following()

    def _load_following(self) -> None:
        if not self._buffer_bytes:
            return
        self._finish_storing([moved for moved in self._outgoing if moved.is_stored])
        used = sum(moved.num_bytes for moved in (*self._outgoing, *self._incoming))
        chosen = self._first_that_fit(self._following, used)
        self.mover.start_loading(chosen)
        self._incoming += chosen
        if len(chosen) == len(self._following):
            self._following = ()

    def _first_that_fit(self, storages: Iterable[MovedStorage], used_bytes: int = 0) -> list[MovedStorage]:
        """Return the first storages in host memory that fit the buffer beside bytes that are used."""
        chosen = []
        for moved in storages:
            if moved.is_loaded or moved.incoming is not None:
                continue
            used_bytes += moved.num_bytes
            if used_bytes > self._buffer_bytes:
                break
            chosen.append(moved)
        return chosen

    def _wanted(self, number: int, updates: bool) -> tuple[MovedStorage, ...]:
        shard = self.shards[number]
        return (*shard.storages, *shard.gradients, *shard.state) if updates else shard.storages

    def _leave(self, keep: Sequence[MovedStorage] = ()) -> None:
        """Move the current shard to host memory, except storages that the next one shares."""
        if self._current is None:
            return
        shard, kept = self.shards[self._current], set(map(id, keep))
        shard.collect_gradients()
        self.store(moved for moved in (*shard.storages, *shard.gradients, *shard.state) if id(moved) not in kept)
        self._current = None

    def store(self, storages: Iterable[MovedStorage]) -> None:
        """Move storages to host memory: in the background as far as the buffer has room, the others at once.

        What has been loaded in advance does not count: it is part of the shard that computes next.
        """
        room = self._buffer_bytes - sum(moved.num_bytes for moved in self._outgoing)
        now: list[MovedStorage] = []
        in_background: list[MovedStorage] = []
        for moved in storages:
            if not moved.is_loaded or moved.outgoing is not None:
                continue
            size = moved.num_bytes if moved.is_changed else 0
            (in_background if size <= room else now).append(moved)
            room -= size if size <= room else 0
        self._finish_storing(self.mover.start_storing(now, overlaps=False))
        self._outgoing += self.mover.start_storing(in_background)

    def _finish_storing(self, storages: Sequence[MovedStorage]) -> None:
        self.mover.finish_storing(storages)
        self._outgoing = [moved for moved in self._outgoing if moved.outgoing is not None]

    def empty(self) -> None:
        """Move everything to host memory, and wait until it is there."""
        self._stop_loading()
        self._leave()
        for number in range(len(self.shards)):
            self._current = number
            self._leave()
        self._finish_storing(self._outgoing)

    def restore(self) -> None:
        """Put everything back on the device."""
        self._stop_loading()
        self._outgoing, self._current = [], None
        for number, shard in enumerate(self.shards):
            shard.collect_gradients()
            self.mover.load(self._wanted(number, updates=True))

    def _stop_loading(self) -> None:
        self.mover.cancel_loading(self._incoming)
        self._incoming, self._following = [], ()
