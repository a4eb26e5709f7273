"""Collects the events of a Chrome trace that matter for memory into columns, in one pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from memtrace.errors import TraceError
from memtrace.format.device_types import DEVICE_TYPES
from memtrace.format.schema import MAX_BYTES
from memtrace.readers.tables import Array
from memtrace.units import format_bytes

_MEMORY: Final = "[memory]"
_OUT_OF_MEMORY: Final = "[OutOfMemory]"
_MEMORY_KEYS: Final = ("Bytes", "Addr", "Total Allocated", "Total Reserved")
_UNKNOWN: Final = -1
_MAX_US: Final = (1 << 62) / 1000
_OPERATORS: Final = frozenset({"cpu_op", "Operator"})
_ANNOTATIONS: Final = ("ProfilerStep#", "Optimizer.", "enumerate(DataLoader)#")
_MAX_INVALID: Final = 10_000
_MAX_DEVICES: Final = 127
_MAX_THREADS: Final = 1 << 15
_WORD_RANGE: Final = 1 << 64


@dataclass
class Slices:
    """Slices (complete events): operators, Python functions or annotations; each list has one element per slice."""

    names: list[int] = field(default_factory=list)
    """Indices into ``Collector.names``."""
    start_ns: list[int] = field(default_factory=list)
    end_ns: list[int] = field(default_factory=list)
    thread: list[int] = field(default_factory=list)
    """Numbers of threads in order of first appearance."""
    sequence_nr: list[int] = field(default_factory=list)
    """Sequence numbers of autograd, -1 for none."""

    def columns(self) -> tuple[Array, ...]:
        """Return names, starts, ends, threads and sequence numbers as arrays."""
        lists = (self.names, self.start_ns, self.end_ns, self.thread, self.sequence_nr)
        return tuple(np.array(values, np.int64) for values in lists)


class Collector:
    """Collects trace events one by one. Times are nanoseconds on the clock of the file."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._name_ids: dict[str, int] = {}
        self._threads: dict[str, int] = {}
        self._devices: dict[str, int] = {}
        self.num_invalid = 0
        """Number of events that were ignored because their time or their numbers are not valid."""
        self.memory: list[tuple[int, ...]] = []
        """One row per memory event: time, thread, device, bytes (negative for a free), address, total allocated, total
        reserved, whether it has an address, whether it has totals."""
        self.out_of_memory: list[tuple[int, int, int, int]] = []
        """One row per failed allocation: time, thread, device, requested bytes."""
        self.operators = Slices()
        self.functions = Slices()
        self.annotations = Slices()

    @property
    def names(self) -> list[str]:
        """The names of the slices."""
        return list(self._name_ids)

    @property
    def devices(self) -> list[str]:
        """The names of the devices in order of first appearance."""
        return list(self._devices)

    def add(self, event: Any) -> None:
        """Collect one trace event.

        Raises:
            TraceError: the event has an impossible size, or thousands of events are not JSON objects.
        """
        if not isinstance(event, dict):
            self.num_invalid += 1
            if self.num_invalid > _MAX_INVALID:
                raise TraceError(
                    f"{self._file}: more than {_MAX_INVALID:,} trace events are not JSON objects, so the file is "
                    "damaged. Export it again."
                )
            return
        name = event.get("name")
        if name in (_MEMORY, _OUT_OF_MEMORY):
            self._add_memory(name, event)
        elif event.get("ph") == "X" and isinstance(name, str):
            category = event.get("cat")
            if not isinstance(category, str):
                return
            if category == "user_annotation" or (category in _OPERATORS and name.startswith(_ANNOTATIONS)):
                self._add_slice(self.annotations, name, event)
            elif category in _OPERATORS:
                self._add_slice(self.operators, name, event)
            elif category == "python_function":
                self._add_slice(self.functions, name, event)

    def _add_slice(self, slices: Slices, name: str, event: Mapping[str, Any]) -> None:
        start, duration = _nanoseconds(event.get("ts")), _nanoseconds(event.get("dur"))
        thread = self._thread(event)
        if start is None or thread is None:
            self.num_invalid += 1
            return
        slices.names.append(self._name_ids.setdefault(name, len(self._name_ids)))
        slices.start_ns.append(start)
        slices.end_ns.append(start + max(duration or 0, 1))
        slices.thread.append(thread)
        arguments = event.get("args")
        number = _as_integer(arguments.get("Sequence number")) if isinstance(arguments, dict) else None
        slices.sequence_nr.append(number if number is not None and 0 <= number < 1 << 62 else _UNKNOWN)

    def _add_memory(self, name: str, event: Mapping[str, Any]) -> None:
        arguments = event.get("args")
        time, thread = _nanoseconds(event.get("ts")), self._thread(event)
        if time is None or thread is None or not isinstance(arguments, dict):
            self.num_invalid += 1
            return
        size, address, allocated, reserved = (_as_integer(arguments.get(key)) for key in _MEMORY_KEYS)
        if size is None:
            self.num_invalid += 1
            return
        for number in (size, allocated, reserved):
            if number is not None and abs(number) > MAX_BYTES:
                raise TraceError(
                    f"{self._file}: a memory event has more than {format_bytes(MAX_BYTES)}, which no device has, so "
                    "the file is damaged. Export it again."
                )
        device = self._device(arguments)
        if name == _OUT_OF_MEMORY:
            self.out_of_memory.append((time, thread, device, abs(size)))
        elif size != 0:
            has_address = address is not None and -_WORD_RANGE // 2 <= address < _WORD_RANGE
            has_totals = allocated is not None and reserved is not None
            self.memory.append(
                (
                    time,
                    thread,
                    device,
                    size,
                    ((address or 0) + _WORD_RANGE // 2) % _WORD_RANGE - _WORD_RANGE // 2 if has_address else 0,
                    allocated or 0,
                    reserved or 0,
                    has_address,
                    has_totals,
                )
            )

    def _device(self, arguments: Mapping[str, Any]) -> int:
        kind = _as_integer(arguments.get("Device Type", arguments.get("device_option Type")))
        number = _as_integer(arguments.get("Device Id", arguments.get("device_option Id")))
        stem = DEVICE_TYPES.get(kind, f"device{kind}") if kind is not None and 0 <= kind < 256 else "unknown"
        number = number if number is not None and 0 < number < 4096 else 0
        name = stem if stem in ("cpu", "unknown") else f"{stem}:{number}"
        if len(self._devices) >= _MAX_DEVICES and name not in self._devices:
            raise TraceError(
                f"{self._file}: the file names more than {_MAX_DEVICES} devices, so it is damaged. Export it again."
            )
        return self._devices.setdefault(name, len(self._devices))

    def _thread(self, event: Mapping[str, Any]) -> int | None:
        """Return the number of a thread, or None if the event has none or the schema cannot number that many threads.

        A file can write the same process or thread as a number in one event and as a string in another.
        """
        pair = event.get("pid"), event.get("tid")
        if not all(isinstance(part, str) or _is_thread_id(part) for part in pair):
            return None
        key = f"{pair[0]} {pair[1]}"
        number = self._threads.setdefault(key, len(self._threads))
        return number if number < _MAX_THREADS else None


def _is_thread_id(value: object) -> bool:
    number = _as_integer(value)
    return number is not None and abs(number) < _WORD_RANGE


def _as_integer(value: object) -> int | None:
    """Return ``value`` if it is an integer, None otherwise."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _nanoseconds(microseconds: object) -> int | None:
    """Convert the microseconds of a Chrome trace, integers or with three decimals; None for an invalid time."""
    if isinstance(microseconds, int) and abs(microseconds) < _MAX_US:
        return microseconds * 1000
    if isinstance(microseconds, float) and abs(microseconds) < _MAX_US:
        return round(microseconds * 1000)
    return None
