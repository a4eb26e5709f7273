"""Storages that wait in host memory between forward and backward."""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right, insort
from collections import deque
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from memtrace.execution.host_memory import Copy, HostMemory
from memtrace.execution.moved_storage import storage_bytes
from memtrace.planning.actions import OffloadedTensor


class SavedStorage:
    """A storage that autograd has saved, for as long as a saved tensor refers to it."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        # While this reference lives, no other storage gets the same address.
        self.reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self.num_bytes = storage.nbytes()


class OffloadedStorage(SavedStorage):
    """A saved storage that a plan names: here, on its way out, in host memory, on its way back, or back."""

    def __init__(self, storage: torch.UntypedStorage, node: int, tensor: OffloadedTensor, host: OffloadedStorages):
        super().__init__(storage)
        self.leaves_at = None if tensor.wait_nodes is None else node + tensor.wait_nodes
        self._prefetch_nodes = tensor.prefetch_nodes
        self._first_node = self._last_node = node
        self._host, self._device = host, storage.device
        self._witnesses: list[torch.Tensor] = []
        self._source: torch.UntypedStorage | None = storage
        self._restored: torch.UntypedStorage | None = None
        self._copy_in: Copy | None = None
        self._copy_out: Copy | None = None
        self._buffer = host.memory.allocate(self.num_bytes)
        reference = weakref.ref(self)  # the copy must not keep the storage of a graph that is dropped
        source = storage_bytes(storage)
        self._copy_out = host.memory.copy_out(self._buffer, source, lambda: _leave_if_alive(reference))

    @property
    def begins_back_at(self) -> int:
        """The node of backward at which the copy back begins."""
        return self._last_node + self._prefetch_nodes

    def add(self, tensor: torch.Tensor, node: int) -> None:
        """Take over a saved tensor of this storage: its reference to the storage is dropped with ours."""
        with self._host.lock:
            self._last_node = max(self._last_node, node)
            self._host.expect_prefetch(self.begins_back_at - self._first_node)
            self._witnesses.append(tensor)
            if self.has_left() and self._restored is None:
                self._drop_references()

    def has_left(self) -> bool:
        """Return whether the storage is no longer held here; drop it if its copy has ended."""
        with self._host.lock:
            copy_out = self._copy_out  # None: the copy ended before its start returned
            if self._source is not None and self._restored is None and copy_out is not None and copy_out.is_done():
                copy_out.wait()
                self._drop_references()
            return self._source is None or self._restored is not None

    def leave(self) -> None:
        """Wait for the copy to host memory, and drop the storage."""
        # Without the lock, for which the thread that copies waits when an earlier copy has ended.
        if self._copy_out is not None:
            self._copy_out.wait()
        with self._host.lock:
            if self._source is not None and self._restored is None:
                self._drop_references()

    def fetch(self) -> None:
        """Start the copy back. A storage that is still here stays."""
        with self._host.lock:
            if self._restored is None and self._source is not None:
                self._restored = self._source
            elif self._restored is None:
                with torch.inference_mode(False):
                    target = torch.empty(self.num_bytes, dtype=torch.uint8, device=self._device)
                self._restored = target.untyped_storage()
                self._copy_in = self._host.memory.copy_in(target, self._buffer)

    def restore(self) -> torch.UntypedStorage:
        """Return the storage, after the copy back."""
        self.fetch()
        copy_in = self._copy_in
        if copy_in is not None:
            copy_in.wait()
            self._copy_in = None
        assert self._restored is not None
        return self._restored

    def _drop_references(self) -> None:
        for tensor in self._witnesses:
            # The tensor keeps its version counter, by which changes in place are noticed.
            tensor.data = self._host.placeholder(tensor)
        self._witnesses.clear()
        self._source = None


def _leave_if_alive(reference: weakref.ref[OffloadedStorage]) -> None:
    storage = reference()
    if storage is not None:
        storage.has_left()


class OffloadedStorages:
    """The storages of one device that are in host memory, or on their way there."""

    def __init__(self, memory: HostMemory) -> None:
        self.memory = memory
        self.lock = threading.RLock()
        self._leaving: deque[weakref.ref[OffloadedStorage]] = deque()
        self._due: list[tuple[int, int, weakref.ref[OffloadedStorage]]] = []
        """Storages for whose copies forward waits, in the order of the nodes at which it does."""
        self._away: list[tuple[int, int, weakref.ref[OffloadedStorage]]] = []
        self._num_added = 0
        self._longest_way = 0
        self._placeholders: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def offload(self, storage: torch.UntypedStorage, node: int, tensor: OffloadedTensor) -> OffloadedStorage:
        """Start to copy a storage, which the autograd node ``node`` saves, to host memory.

        Raises:
            MemtraceError or RuntimeError: There is no space in host memory.
        """
        offloaded = OffloadedStorage(storage, node, tensor, self)
        self._num_added += 1
        reference = weakref.ref(offloaded)
        self._leaving.append(reference)
        if offloaded.leaves_at is not None:
            insort(self._due, (offloaded.leaves_at, self._num_added, reference))
        if tensor.prefetch_nodes > 0:
            insort(self._away, (node, self._num_added, reference))
        return offloaded

    def expect_prefetch(self, num_nodes: int) -> None:
        """Note that a copy back begins this many nodes above the node that saved its storage first."""
        self._longest_way = max(self._longest_way, num_nodes)

    def node_saves(self, node: int) -> None:
        """Wait for the copies that the plan wants to have ended when forward has come to this autograd node.

        The peak depends on these waits, so that none of them is left out, whatever the order and the speed of copies.
        """
        while self._due and self._due[0][0] <= node:
            due = self._due.pop(0)[2]()
            if due is not None:
                due.leave()
        while self._leaving:
            storage = self._leaving[0]()
            if storage is not None and not storage.has_left():
                break
            self._leaving.popleft()

    def node_reads(self, node: int) -> None:
        """Start the copies back that are due when backward has come to this autograd node."""
        # Storages that later nodes saved belong to a graph whose backward is not running, or have been read.
        place = bisect_right(self._away, (node, self._num_added + 1))
        while place > 0 and self._away[place - 1][0] >= node - self._longest_way:
            place -= 1
            storage = self._away[place][2]()
            if storage is None:
                del self._away[place]
            elif storage.begins_back_at >= node:
                del self._away[place]
                storage.fetch()

    def placeholder(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an empty tensor of the same type."""
        key = (tensor.dtype, tensor.device)
        if key not in self._placeholders:
            self._placeholders[key] = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return self._placeholders[key]

    def close(self) -> None:
        """Wait for all copies. Storages that are in host memory come back when backward reads them."""
        self.memory.close()
        while self._leaving:
            storage: Any = self._leaving.popleft()()
            if storage is not None:
                storage.has_left()
