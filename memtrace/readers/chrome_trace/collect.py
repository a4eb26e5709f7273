"""Picks the events that matter to memory out of a Chrome trace, in one pass, into columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from memtrace.errors import TraceError
from memtrace.readers.fields import MAX_BYTES
from memtrace.readers.tables import Array

MEMORY: Final = "[memory]"
OUT_OF_MEMORY: Final = "[OutOfMemory]"
_NUMBERS: Final = ("Bytes", "Addr", "Total Allocated", "Total Reserved")
UNKNOWN: Final = -1
_MAX_US: Final = (1 << 62) / 1000
_OPERATORS: Final = frozenset({"cpu_op", "Operator"})
_ANNOTATIONS: Final = ("ProfilerStep#", "Optimizer.", "enumerate(DataLoader)#")
# c10::DeviceType, as far as it names devices with memory.
_DEVICE_TYPES: Final = {
    0: "cpu",
    1: "cuda",
    6: "hip",
    9: "xla",
    12: "xpu",
    13: "mps",
    14: "meta",
    15: "hpu",
    19: "mtia",
    20: "privateuseone",
}
_MAX_ODD: Final = 10_000
_WORD: Final = 1 << 64


@dataclass
class Slices:
    """Stretches of time on a thread, one a row: operators, Python functions or annotations."""

    names: list[int] = field(default_factory=list)
    start_ns: list[int] = field(default_factory=list)
    end_ns: list[int] = field(default_factory=list)
    thread: list[int] = field(default_factory=list)
    sequence_nr: list[int] = field(default_factory=list)

    def columns(self) -> tuple[Array, ...]:
        """Names, starts, ends, threads and sequence numbers as arrays."""
        lists = (self.names, self.start_ns, self.end_ns, self.thread, self.sequence_nr)
        return tuple(np.array(values, np.int64) for values in lists)


class Collector:
    """Takes trace events one by one and keeps what a trace of memory needs. Times are ns on the file's clock."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._name_ids: dict[str, int] = {}
        self._threads: dict[str, int] = {}
        self._devices: dict[str, int] = {}
        self.num_events = 0
        self.num_odd = 0
        """Events left out because their time or their numbers are none."""
        self.memory: list[tuple[int, ...]] = []
        """Time, thread, device, signed bytes, address, total allocated, total reserved, has address, has totals."""
        self.out_of_memory: list[tuple[int, int, int, int]] = []
        """Time, thread, device, bytes asked for."""
        self.operators = Slices()
        self.functions = Slices()
        self.annotations = Slices()

    @property
    def names(self) -> list[str]:
        """The names of slices by their ids."""
        return list(self._name_ids)

    @property
    def devices(self) -> list[str]:
        """The devices by their numbers."""
        return list(self._devices)

    @property
    def threads(self) -> int:
        """How many threads were seen."""
        return len(self._threads)

    def add(self, event: Any) -> None:
        """Keep what matters of one event. TraceError for sizes that no machine has."""
        self.num_events += 1
        if not isinstance(event, dict):
            self.num_odd += 1
            if self.num_odd > _MAX_ODD:
                raise TraceError(
                    f"{self._where} holds thousands of trace events that are no records: it is damaged or made up."
                )
            return
        name = event.get("name")
        if name in (MEMORY, OUT_OF_MEMORY):
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
            self.num_odd += 1
            return
        slices.names.append(self._name_ids.setdefault(name, len(self._name_ids)))
        slices.start_ns.append(start)
        slices.end_ns.append(start + max(duration or 0, 1))
        slices.thread.append(thread)
        arguments = event.get("args")
        number = _whole(arguments.get("Sequence number")) if isinstance(arguments, dict) else None
        slices.sequence_nr.append(number if number is not None and 0 <= number < 1 << 62 else UNKNOWN)

    def _add_memory(self, name: str, event: Mapping[str, Any]) -> None:
        arguments = event.get("args")
        time, thread = _nanoseconds(event.get("ts")), self._thread(event)
        if time is None or thread is None or not isinstance(arguments, dict):
            self.num_odd += 1
            return
        size, address, allocated, reserved = (_whole(arguments.get(key)) for key in _NUMBERS)
        if size is None:
            self.num_odd += 1
            return
        for number in (size, allocated, reserved):
            if number is not None and abs(number) > MAX_BYTES:
                raise TraceError(
                    f"{self._where} speaks of more than {MAX_BYTES >> 40} TiB, which no device has: it is damaged or "
                    "made up."
                )
        device = self._device(arguments)
        if name == OUT_OF_MEMORY:
            self.out_of_memory.append((time, thread, device, abs(size)))
        elif size != 0:
            has_address = address is not None and -_WORD // 2 <= address < _WORD
            has_totals = allocated is not None and reserved is not None
            self.memory.append(
                (
                    time,
                    thread,
                    device,
                    size,
                    ((address or 0) + _WORD // 2) % _WORD - _WORD // 2 if has_address else 0,
                    allocated or 0,
                    reserved or 0,
                    has_address,
                    has_totals,
                )
            )

    def _device(self, arguments: Mapping[str, Any]) -> int:
        kind = _whole(arguments.get("Device Type", arguments.get("device_option Type")))
        number = _whole(arguments.get("Device Id", arguments.get("device_option Id")))
        stem = _DEVICE_TYPES.get(kind, f"device{kind}") if kind is not None and 0 <= kind < 256 else "unknown"
        number = number if number is not None and 0 < number < 4096 else 0
        name = stem if stem in ("cpu", "unknown") else f"{stem}:{number}"
        if len(self._devices) >= 127 and name not in self._devices:
            raise TraceError(f"{self._where} speaks of more than 127 devices: it is damaged or made up.")
        return self._devices.setdefault(name, len(self._devices))

    def _thread(self, event: Mapping[str, Any]) -> int | None:
        """A number for (process, thread), which one file may write as numbers here and as texts there; None past what
        the schema can number."""
        pair = event.get("pid"), event.get("tid")
        if not all(isinstance(part, str) or _is_identity(part) for part in pair):
            return None
        key = f"{pair[0]} {pair[1]}"
        number = self._threads.setdefault(key, len(self._threads))
        return number if number < 1 << 15 else None


def _is_identity(value: object) -> bool:
    number = _whole(value)
    return number is not None and abs(number) < _WORD


def _whole(value: object) -> int | None:
    """A whole number; None for everything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _nanoseconds(microseconds: object) -> int | None:
    """Chrome's microseconds, whole or with three decimals, as ns; None for what is no such time."""
    if isinstance(microseconds, int) and abs(microseconds) < _MAX_US:
        return microseconds * 1000
    if isinstance(microseconds, float) and abs(microseconds) < _MAX_US:
        return round(microseconds * 1000)
    return None
