"""The settings of CUDA's caching allocator, as `PYTORCH_CUDA_ALLOC_CONF` writes them.

Source: the option tables of torch 2.13 (`c10/core/AllocatorConfig.h`, `c10/cuda/CUDAAllocatorConfig.h`) and
what its parser accepts and refuses, tried one by one. `PYTORCH_CUDA_ALLOC_CONF` is read by every torch 2;
torch 2.9 and later read `PYTORCH_ALLOC_CONF` too, and torch 2.13 lets the older name win where both are set.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from memtrace.errors import MemtraceError

MIB: Final = 1 << 20
VARIABLE: Final = "PYTORCH_CUDA_ALLOC_CONF"
NUM_ROUNDUP_INTERVALS: Final = 16  # powers of two from 1 MiB to 32 GiB; smaller requests share the first

_NO_EFFECT: Final = (
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
    "graph_capture_record_stream_reuse",
    "throw_on_cudamalloc_oom",
)


class SettingError(MemtraceError):
    """An allocator setting that torch would refuse, or that the model does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One configuration of the allocator; the defaults are torch's. `parse(str(settings)) == settings`."""

    expandable_segments: bool = False
    """Grow one virtual range for each pool and stream instead of asking for separate segments."""
    max_split_bytes: int | None = None
    """Blocks of this size and above are never split; None: every block may be."""
    roundup_power2_divisions: tuple[int, ...] = ()
    """Divisions between two powers of two that requests are rounded to, one for each interval; (): off."""
    garbage_collection_threshold: float = 0.0
    """Share of the allowed memory above which unused segments are given back; 0: off."""
    memory_fraction: float | None = None
    """Share of the device the process may take (`per_process_memory_fraction`); None: no limit set."""
    large_segment_bytes: int = 20 * MIB
    """Segment taken for requests above 1 MiB and below 10 MiB, and page of large expandable segments."""
    max_non_split_rounding_bytes: int | None = None
    """How much longer a block that is never split may be than its request; None: `large_segment_bytes`."""

    def __str__(self) -> str:
        """The text torch reads; empty for the defaults."""
        parts = []
        if self.expandable_segments:
            parts.append("expandable_segments:True")
        if self.max_split_bytes is not None:
            parts.append(f"max_split_size_mb:{self.max_split_bytes // MIB}")
        if self.roundup_power2_divisions:
            parts.append(f"roundup_power2_divisions:{_format_divisions(self.roundup_power2_divisions)}")
        if self.garbage_collection_threshold:
            parts.append(f"garbage_collection_threshold:{self.garbage_collection_threshold:g}")
        if self.memory_fraction is not None:
            parts.append(f"per_process_memory_fraction:{self.memory_fraction:g}")
        if self.large_segment_bytes != 20 * MIB:
            parts.append(f"large_segment_size_mb:{self.large_segment_bytes // MIB}")
        if self.max_non_split_rounding_bytes is not None:
            parts.append(f"max_non_split_rounding_mb:{self.max_non_split_rounding_bytes // MIB}")
        return ",".join(parts)

    @property
    def name(self) -> str:
        """The text torch reads, `default` for the defaults."""
        return str(self) or "default"

    @property
    def ready_line(self) -> str:
        """What to paste before the command; empty value: unset the variable."""
        return f"{VARIABLE}={self}"

    @property
    def collects_garbage(self) -> bool:
        """Garbage collection works only where a memory fraction is set too (every torch 2)."""
        return self.garbage_collection_threshold > 0 and self.memory_fraction is not None

    @classmethod
    def parse(cls, text: str) -> Settings:
        """Read `key:value,key:value`; `default` or nothing are the defaults.

        SettingError where torch would refuse, in any of its versions.
        """
        text = text.removeprefix(VARIABLE + "=").removeprefix("PYTORCH_ALLOC_CONF=")
        pairs = [] if text.strip() in ("", "default") else _pairs(text)
        for key, _ in pairs:
            if key not in (*_READERS, *_NO_EFFECT, "backend") and not key.startswith("pinned_"):
                raise SettingError(f"unknown allocator setting {key!r}; known: {', '.join(_READERS)}")
        settings = cls._of(pairs)
        settings.check()
        return settings

    @classmethod
    def _of(cls, pairs: list[tuple[str, str]]) -> Settings:
        values: dict[str, Any] = {}
        for key, value in pairs:
            if key in _READERS:
                field, read = _READERS[key]
                values[field] = read(key, value)
            elif key == "backend" and value != "native":
                raise SettingError(f"backend:{value} is another allocator; only the native one is modelled")
        return cls(**values)

    def check(self) -> None:
        """SettingError where two settings contradict each other or a bound is broken."""
        split, large = self.max_split_bytes, self.large_segment_bytes
        if large <= 10 * MIB:
            raise SettingError(f"large_segment_size_mb:{large // MIB} is too small: it must be above 10")
        if split is not None and (split <= 20 * MIB or split < large):
            least = max(21, large // MIB)
            raise SettingError(f"max_split_size_mb:{split // MIB} is too small: it must be at least {least}")
        rounding = self.max_non_split_rounding_bytes
        if rounding is not None and rounding < large:
            raise SettingError(f"max_non_split_rounding_mb:{rounding // MIB} is too small: at least {large // MIB}")

    @classmethod
    def from_snapshot(cls, recorded: Mapping[str, Any] | None) -> Settings:
        """The settings a snapshot's `allocator_settings` tells; the defaults where it tells none (before torch 2.3).

        What torch took then is taken here, newer keys and lower bounds included.
        """
        if not recorded:
            return cls()
        for key in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "last_allocator_settings"):
            if recorded.get(key):
                return cls._of(_pairs(str(recorded[key])))
        split = int(recorded.get("max_split_size", -1))
        divisions = tuple(int(v) for v in dict(recorded.get("roundup_power2_divisions") or {}).values())
        return cls(
            expandable_segments=bool(recorded.get("expandable_segments", False)),
            max_split_bytes=split if 0 < split < 1 << 62 else None,
            roundup_power2_divisions=divisions if any(d > 1 for d in divisions) else (),
            garbage_collection_threshold=float(recorded.get("garbage_collection_threshold", 0.0)),
        )


def _pairs(text: str) -> list[tuple[str, str]]:
    parts = re.split(r",(?![^\[]*\])", re.sub(r"\s", "", text))
    pairs = [part.partition(":") for part in parts if part]
    for key, colon, value in pairs:
        if not (key and colon and value):
            raise SettingError(f"cannot read the allocator setting {key + colon!r}: write key:value")
    return [(key, value) for key, _, value in pairs]


def _read_bool(key: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise SettingError(f"{key}:{value}: torch takes True or False, so written")
    return value == "True"


def _read_mib(key: str, value: str) -> int:
    if not value.isdecimal() or int(value) * MIB >= 1 << 63:
        raise SettingError(f"{key}:{value}: a whole number of MiB is needed")
    return int(value) * MIB


def _read_threshold(key: str, value: str) -> float:
    number = _read_float(key, value)
    if not 0 < number < 1:
        raise SettingError(f"{key}:{value} must lie between 0 and 1")
    return number


def _read_fraction(key: str, value: str) -> float | None:
    number = _read_float(key, value)
    if not 0 <= number <= 1:
        raise SettingError(f"{key}:{value} must lie between 0 and 1")
    return number if number < 1 else None  # the whole device is no limit, and switches nothing on


def _read_float(key: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise SettingError(f"{key}:{value}: a number is needed") from None


def _read_divisions(key: str, value: str) -> tuple[int, ...]:
    if not value.startswith("["):
        divisions = [_power_of_two(key, value)] * NUM_ROUNDUP_INTERVALS
    else:
        divisions = _read_division_list(key, value)
    return tuple(divisions) if any(d > 1 for d in divisions) else ()


def _read_division_list(key: str, value: str) -> list[int]:
    """`[64:8,256:4,>:1]`: the first entry holds for smaller sizes too, `>` for all above the last."""
    divisions = [0] * NUM_ROUNDUP_INTERVALS
    last = 0
    if not value.endswith("]"):
        raise SettingError(f"{key}:{value}: the list lacks its closing bracket")
    for number, item in enumerate(part for part in value.strip("[]").split(",") if part):
        size, _, text = item.partition(":")
        count = 0 if text == "0" else _power_of_two(key, text)
        if size == ">":
            divisions[last + 1 :] = [count] * len(divisions[last + 1 :])
            continue
        last = min(_power_of_two(key, size).bit_length() - 1, NUM_ROUNDUP_INTERVALS - 1)
        if number == 0:
            divisions[:last] = [count] * last
        divisions[last] = count
    return divisions


def _power_of_two(key: str, text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number == 0 or number & (number - 1):
        raise SettingError(f"{key}: {text!r} must be a power of two")
    return number


def _format_divisions(divisions: tuple[int, ...]) -> str:
    if len(set(divisions)) == 1:
        return str(divisions[0])
    first = next(i for i, count in enumerate(divisions) if count != divisions[0]) - 1
    last = next(i for i in reversed(range(len(divisions))) if divisions[i] != divisions[-1])
    named = ",".join(f"{1 << i}:{divisions[i]}" for i in range(first, last + 1))
    return f"[{named},>:{divisions[-1]}]"


_READERS: Final[dict[str, tuple[str, Callable[[str, str], Any]]]] = {
    "expandable_segments": ("expandable_segments", _read_bool),
    "max_split_size_mb": ("max_split_bytes", _read_mib),
    "roundup_power2_divisions": ("roundup_power2_divisions", _read_divisions),
    "garbage_collection_threshold": ("garbage_collection_threshold", _read_threshold),
    "per_process_memory_fraction": ("memory_fraction", _read_fraction),
    "large_segment_size_mb": ("large_segment_bytes", _read_mib),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _read_mib),
}
assert {field for field, _ in _READERS.values()} == {field.name for field in fields(Settings)}
