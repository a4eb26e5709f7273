"""Settings of the CUDA caching allocator, written as in `PYTORCH_CUDA_ALLOC_CONF`.

Source: the option tables of torch 2.13 (`c10/core/AllocatorConfig.h`, `c10/cuda/CUDAAllocatorConfig.h`), and trials of
what its parser accepts and rejects. Every torch 2 reads `PYTORCH_CUDA_ALLOC_CONF`. torch 2.9 and later also read
`PYTORCH_ALLOC_CONF`; in torch 2.13 the older name wins where both are set.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from memtrace.allocator.rules import (
    LARGE_SEGMENT_BYTES,
    MIB,
    MIN_LARGE_ALLOC_BYTES,
    NO_LIMIT,
    TORCH,
    Int64Array,
    Rules,
    device_request_size,
    round_size,
    round_sizes,
    segment_size,
)
from memtrace.errors import MemtraceError

VARIABLE: Final = "PYTORCH_CUDA_ALLOC_CONF"
NUM_ROUNDUP_INTERVALS: Final = 16  # powers of two from 1 MiB to 32 GiB; smaller requests share the first

_IGNORED_KEYS: Final = (
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
    "graph_capture_record_stream_reuse",
    "throw_on_cudamalloc_oom",
)


class SettingError(MemtraceError):
    """An allocator setting that PyTorch rejects or that the model does not support."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """One configuration of the allocator; the defaults are PyTorch's. `parse(str(settings)) == settings`."""

    expandable_segments: bool = False
    """Grow one virtual range for each pool and stream instead of allocating separate segments."""
    max_split_bytes: int | None = None
    """Blocks of at least this size are never split; None: no limit."""
    roundup_power2_divisions: tuple[int, ...] = ()
    """Divisions between two powers of two to which requests are rounded, one for each interval; (): off."""
    garbage_collection_threshold: float = 0.0
    """Fraction of the allowed memory above which unused segments are released; 0: off."""
    memory_fraction: float | None = None
    """Fraction of the device that the process may use (`per_process_memory_fraction`); None: no limit."""
    large_segment_bytes: int = LARGE_SEGMENT_BYTES
    """Segment for requests above 1 MiB and below 10 MiB, and page of large expandable segments."""
    max_non_split_rounding_bytes: int | None = None
    """Most by which a block that is never split may exceed its request; None: `large_segment_bytes`."""

    def __str__(self) -> str:
        """Return the text that PyTorch reads; empty for the defaults."""
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
        if self.large_segment_bytes != LARGE_SEGMENT_BYTES:
            parts.append(f"large_segment_size_mb:{self.large_segment_bytes // MIB}")
        if self.max_non_split_rounding_bytes is not None:
            parts.append(f"max_non_split_rounding_mb:{self.max_non_split_rounding_bytes // MIB}")
        return ",".join(parts)

    @property
    def name(self) -> str:
        """The text that PyTorch reads; `default` for the defaults."""
        return str(self) or "default"

    @property
    def environment_setting(self) -> str:
        """The environment variable to put before the command; an empty value means that it is unset."""
        return f"{VARIABLE}={self}"

    @property
    def collects_garbage(self) -> bool:
        """Whether garbage collection takes effect, which requires a memory fraction in every torch 2."""
        return self.garbage_collection_threshold > 0 and self.memory_fraction is not None

    @property
    def effective_max_rounding_bytes(self) -> int:
        """Most by which a block that is never split may exceed its request."""
        rounding = self.max_non_split_rounding_bytes
        return self.large_segment_bytes if rounding is None else rounding

    def round_size(self, requested: int, rules: Rules = TORCH) -> int:
        """Return the bytes that a request counts for under these settings."""
        return round_size(requested, self.roundup_power2_divisions, rules)

    def round_sizes(self, requested: Int64Array, rules: Rules = TORCH) -> Int64Array:
        """Apply `round_size` to an array of requests."""
        return round_sizes(requested, self.roundup_power2_divisions, rules)

    def device_request_size(self, requested: int, rules: Rules = TORCH) -> int:
        """Return the bytes that the device must give for a request that no free block serves."""
        return device_request_size(
            self.round_size(requested, rules),
            expandable_segments=self.expandable_segments,
            large_segment_bytes=self.large_segment_bytes,
            rules=rules,
        )

    def segment_size(self, requested: int, rules: Rules = TORCH) -> int:
        """Return the size of the segment for a request, by which a memory fraction is judged."""
        rounded = self.round_size(requested, rules)
        return segment_size(rounded, large_segment_bytes=self.large_segment_bytes, rules=rules)

    def with_memory_limit(self, allowed_bytes: int, device_bytes: int) -> AllocatorSettings:
        """Return the settings with the memory fraction that allows some bytes of a device, with as few digits as do."""
        if self.memory_fraction is not None and int(self.memory_fraction * device_bytes) == allowed_bytes:
            return self
        share = allowed_bytes / device_bytes
        rounded = (round(share, digits) for digits in range(1, 17))
        fraction = next((f for f in rounded if int(f * device_bytes) == allowed_bytes), share)
        return replace(self, memory_fraction=fraction)

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """Parse `key:value,key:value`; `default` or an empty text stands for the defaults.

        Raises:
            SettingError: a version of PyTorch rejects the text, or the model does not support it.
        """
        text = text.removeprefix(VARIABLE + "=").removeprefix("PYTORCH_ALLOC_CONF=")
        pairs = [] if text.strip() in ("", "default") else _split_pairs(text)
        for key, _ in pairs:
            if key not in (*_PARSERS, *_IGNORED_KEYS, "backend") and not key.startswith("pinned_"):
                raise SettingError(f"unknown allocator setting {key!r}. Known settings: {', '.join(_PARSERS)}.")
        settings = cls._from_pairs(pairs)
        settings.check()
        return settings

    @classmethod
    def _from_pairs(cls, pairs: list[tuple[str, str]]) -> AllocatorSettings:
        values: dict[str, Any] = {}
        for key, value in pairs:
            if key in _PARSERS:
                field, parse = _PARSERS[key]
                values[field] = parse(key, value)
            elif key == "backend" and value != "native":
                raise SettingError(f"backend:{value} is a different allocator. Only backend:native can be simulated.")
        return cls(**values)

    def check(self) -> None:
        """Raise SettingError where a value is out of bounds or two settings contradict each other."""
        split, large = self.max_split_bytes, self.large_segment_bytes
        if large <= MIN_LARGE_ALLOC_BYTES:
            raise SettingError(f"large_segment_size_mb:{large // MIB} is too small: it must be above 10.")
        if split is not None and (split <= LARGE_SEGMENT_BYTES or split < large):
            smallest = max(LARGE_SEGMENT_BYTES // MIB + 1, large // MIB)
            raise SettingError(f"max_split_size_mb:{split // MIB} is too small: it must be at least {smallest}.")
        rounding = self.max_non_split_rounding_bytes
        if rounding is not None and rounding < large:
            raise SettingError(
                f"max_non_split_rounding_mb:{rounding // MIB} is too small: it must be at least {large // MIB}."
            )

    @classmethod
    def from_snapshot(cls, recorded: Mapping[str, Any] | None) -> AllocatorSettings:
        """Return the settings in a snapshot's `allocator_settings`; the defaults where it has none (before torch 2.3).

        Whatever PyTorch accepted when it recorded the snapshot is accepted, including unknown keys and lower bounds;
        values of a wrong type count as absent.
        """
        if not recorded:
            return cls()
        for key in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "last_allocator_settings"):
            if recorded.get(key):
                return cls._from_pairs(_split_pairs(str(recorded[key])))
        split = recorded.get("max_split_size", -1)
        threshold = recorded.get("garbage_collection_threshold", 0.0)
        divisions = recorded.get("roundup_power2_divisions")
        counts = tuple(divisions.values()) if isinstance(divisions, Mapping) else ()
        is_rounding = all(isinstance(count, int) for count in counts) and any(count > 1 for count in counts)
        return cls(
            expandable_segments=recorded.get("expandable_segments") in (True, 1),
            max_split_bytes=split if isinstance(split, int) and 0 < split < NO_LIMIT else None,
            roundup_power2_divisions=counts if is_rounding else (),
            garbage_collection_threshold=float(threshold) if isinstance(threshold, int | float) else 0.0,
        )


def _split_pairs(text: str) -> list[tuple[str, str]]:
    parts = re.split(r",(?![^\[]*\])", re.sub(r"\s", "", text))
    pairs = [part.partition(":") for part in parts if part]
    for key, colon, value in pairs:
        if not (key and colon and value):
            raise SettingError(f"invalid allocator setting {key + colon!r}: write key:value.")
    return [(key, value) for key, _, value in pairs]


def _parse_bool(key: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise SettingError(f"{key}:{value} is invalid: PyTorch accepts only True or False, with a capital letter.")
    return value == "True"


def _parse_mib(key: str, value: str) -> int:
    if not value.isdecimal() or int(value) * MIB >= 1 << 63:
        raise SettingError(f"{key}:{value} is invalid: it must be a whole number of MiB.")
    return int(value) * MIB


def _parse_threshold(key: str, value: str) -> float:
    number = _parse_float(key, value)
    if not 0 < number < 1:
        raise SettingError(f"{key}:{value} is invalid: it must be between 0 and 1.")
    return number


def _parse_fraction(key: str, value: str) -> float | None:
    number = _parse_float(key, value)
    if not 0 <= number <= 1:
        raise SettingError(f"{key}:{value} is invalid: it must be between 0 and 1.")
    return number if number < 1 else None  # the whole device is no limit, and does not enable garbage collection


def _parse_float(key: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise SettingError(f"{key}:{value} is invalid: it must be a number.") from None


def _parse_divisions(key: str, value: str) -> tuple[int, ...]:
    if not value.startswith("["):
        divisions = [_parse_power_of_two(key, value)] * NUM_ROUNDUP_INTERVALS
    else:
        divisions = _parse_division_list(key, value)
    return tuple(divisions) if any(d > 1 for d in divisions) else ()


def _parse_division_list(key: str, value: str) -> list[int]:
    """Parse `[64:8,256:4,>:1]`: the first entry also covers smaller sizes, `>` all sizes above the last entry."""
    divisions = [0] * NUM_ROUNDUP_INTERVALS
    last = 0
    if not value.endswith("]"):
        raise SettingError(f"{key}:{value} is invalid: the list has no closing bracket.")
    for number, item in enumerate(part for part in value.strip("[]").split(",") if part):
        size, _, text = item.partition(":")
        count = 0 if text == "0" else _parse_power_of_two(key, text)
        if size == ">":
            divisions[last + 1 :] = [count] * len(divisions[last + 1 :])
            continue
        last = min(_parse_power_of_two(key, size).bit_length() - 1, NUM_ROUNDUP_INTERVALS - 1)
        if number == 0:
            divisions[:last] = [count] * last
        divisions[last] = count
    return divisions


def _parse_power_of_two(key: str, text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number == 0 or number & (number - 1):
        raise SettingError(f"{key}: {text!r} is invalid: it must be a power of two.")
    return number


def _format_divisions(divisions: tuple[int, ...]) -> str:
    if len(set(divisions)) == 1:
        return str(divisions[0])
    first = next(i for i, count in enumerate(divisions) if count != divisions[0]) - 1
    last = next(i for i in reversed(range(len(divisions))) if divisions[i] != divisions[-1])
    entries = ",".join(f"{1 << i}:{divisions[i]}" for i in range(first, last + 1))
    return f"[{entries},>:{divisions[-1]}]"


_PARSERS: Final[dict[str, tuple[str, Callable[[str, str], Any]]]] = {
    "expandable_segments": ("expandable_segments", _parse_bool),
    "max_split_size_mb": ("max_split_bytes", _parse_mib),
    "roundup_power2_divisions": ("roundup_power2_divisions", _parse_divisions),
    "garbage_collection_threshold": ("garbage_collection_threshold", _parse_threshold),
    "per_process_memory_fraction": ("memory_fraction", _parse_fraction),
    "large_segment_size_mb": ("large_segment_bytes", _parse_mib),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _parse_mib),
}
assert {field for field, _ in _PARSERS.values()} == {field.name for field in fields(AllocatorSettings)}
