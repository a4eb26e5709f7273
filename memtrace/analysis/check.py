"""Memory limits for CI: which of them a trace exceeds, and which allocation site holds most of the memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from memtrace.analysis.block_groups import find_owning_modules, group_by_site
from memtrace.analysis.blocks import blocks
from memtrace.analysis.growth import measure_growth
from memtrace.analysis.peak import find_peak
from memtrace.display import Displayed
from memtrace.errors import MemtraceError
from memtrace.format.arrays import Array
from memtrace.format.schema import CATEGORIES
from memtrace.format.storage import AnyPath
from memtrace.trace import Trace
from memtrace.units import parse_bytes

_KEYS: Final = ("peak", "growth", "categories", "modules")


@dataclass(frozen=True)
class MemoryLimits:
    """The most bytes that a trace may use. None: no limit."""

    peak_bytes: int | None = None
    """Requested bytes live at the same time, summed over the devices."""
    growth_bytes_per_step: int | None = None
    """Increase of the live bytes from the end of one step to the end of the next."""
    category_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes at the peak by category."""
    module_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes at the peak by qualified module name, submodules included."""

    @property
    def is_empty(self) -> bool:
        """Whether there is no limit at all."""
        has_total = self.peak_bytes is not None or self.growth_bytes_per_step is not None
        return not (has_total or self.category_bytes or self.module_bytes)


@dataclass(frozen=True)
class LimitCheck:
    """One limit compared with one rank of a trace."""

    rank: int
    """The rank that is checked."""
    limit: str
    """``peak``, ``growth per step``, ``category NAME`` or ``module NAME``."""
    limit_bytes: int
    """The most bytes that are allowed."""
    actual_bytes: int | None
    """None: the trace does not record it, so the check fails."""
    passed: bool
    """Whether the actual bytes are known and within the limit."""
    site: str | None
    """The allocation site that holds most of the memory; None: unknown."""


@dataclass(frozen=True)
class LimitReport(Displayed):
    """All limits compared with all ranks of a trace."""

    passed: bool
    """Whether every limit holds on every rank."""
    limits: tuple[LimitCheck, ...]
    """One check per rank and limit."""


def read_limits(path: AnyPath) -> MemoryLimits:
    """Return the limits in a JSON file.

    The file holds an object with any of these keys; sizes are bytes or texts such as ``"2GiB"``:
    ``{"peak": "2GiB", "growth": 0, "categories": {"activation": "1GiB"}, "modules": {"GPT.head": "512MiB"}}``.

    Raises:
        MemtraceError: the file cannot be read, or it does not hold limits.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MemtraceError(f"{path}: cannot read the limits: {error.strerror or error}") from error
    except ValueError as error:
        raise MemtraceError(f"{path}: invalid JSON: {error}") from error
    if not isinstance(document, dict):
        raise MemtraceError(f"{path}: expected a JSON object with the keys {', '.join(_KEYS)}")
    unknown = sorted(set(document) - set(_KEYS))
    if unknown:
        raise MemtraceError(f"{path}: unknown key {unknown[0]!r}; the keys are {', '.join(_KEYS)}")
    try:
        return MemoryLimits(
            peak_bytes=_optional_bytes(document.get("peak")),
            growth_bytes_per_step=_optional_bytes(document.get("growth")),
            category_bytes=_bytes_by_name("categories", document.get("categories")),
            module_bytes=_bytes_by_name("modules", document.get("modules")),
        )
    except ValueError as error:
        raise MemtraceError(f"{path}: {error}") from error


def _optional_bytes(value: object) -> int | None:
    return None if value is None else _bytes(value)


def _bytes(value: object) -> int:
    """Return a number of bytes: a JSON number, or a text with a unit."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    return parse_bytes(str(value))


def _bytes_by_name(key: str, value: Any) -> dict[str, int]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f'{key!r} must be an object of names and sizes, such as {{"name": "1GiB"}}')
    return {name: _bytes(size) for name, size in value.items()}


def check_limits(trace: Trace, limits: MemoryLimits, *, rank: int | None = None) -> LimitReport:
    """Return how a trace compares with memory limits.

    Args:
        trace: the trace of one or several ranks.
        limits: the limits, which apply to every rank.
        rank: check only this rank; by default all ranks are checked.

    Raises:
        MemtraceError: a limit names an unknown category or module, or a rank of the trace cannot be read.
    """
    check_categories(limits)
    # A rank that cannot be read must not pass: opening it raises the error that says why.
    ranks = sorted({*trace.ranks, *trace.unreadable}) if rank is None else [rank]
    checks = tuple(check for number in ranks for check in _check_rank(number, trace.rank(number), limits))
    return LimitReport(all(check.passed for check in checks), checks)


def check_categories(limits: MemoryLimits) -> None:
    """Raise MemtraceError where a limit names a category that does not exist."""
    for name in limits.category_bytes:
        if name not in CATEGORIES:
            raise MemtraceError(f"unknown category {name!r}; the categories are {', '.join(CATEGORIES)}")


def _check_rank(rank: int, trace: Trace, limits: MemoryLimits) -> list[LimitCheck]:
    live = [find_peak(trace, device).live for device in trace.devices]
    checks = []
    if limits.peak_bytes is not None:
        peak_bytes = sum(find_peak(trace, device).requested.bytes for device in trace.devices)
        checks.append(_compare(rank, "peak", limits.peak_bytes, peak_bytes, _largest_site(trace, live)))
    if limits.growth_bytes_per_step is not None:
        grows = measure_growth(trace)
        site = grows.sources[0].site if grows is not None and grows.sources else None
        actual = grows.bytes_per_step if grows is not None else None
        checks.append(_compare(rank, "growth per step", limits.growth_bytes_per_step, actual, site))
    for category, limit in limits.category_bytes.items():
        members = [part[blocks(trace).category[part] == CATEGORIES.index(category)] for part in live]
        checks.append(_check_blocks(rank, f"category {category}", limit, trace, members))
    for module, limit in limits.module_bytes.items():
        members = _blocks_of_module(trace, module, live)
        checks.append(_check_blocks(rank, f"module {module}", limit, trace, members))
    return checks


def _check_blocks(rank: int, name: str, limit_bytes: int, trace: Trace, live: list[Array]) -> LimitCheck:
    """Return the check of the total size of ``live``, the blocks of each device."""
    actual = sum(int(blocks(trace).size[part].sum()) for part in live)
    return _compare(rank, name, limit_bytes, actual, _largest_site(trace, live))


def _compare(rank: int, name: str, limit_bytes: int, actual_bytes: int | None, site: str | None) -> LimitCheck:
    passed = actual_bytes is not None and actual_bytes <= limit_bytes
    return LimitCheck(rank, name, limit_bytes, actual_bytes, passed, site)


def _blocks_of_module(trace: Trace, module: str, live: list[Array]) -> list[Array]:
    """Return those of the live blocks of each device that belong to a module or its submodules."""
    modules, owner = find_owning_modules(trace, np.arange(len(blocks(trace))))
    is_inside = np.array([name is not None and (name == module or name.startswith(f"{module}.")) for name in modules])
    if not is_inside.any():
        known = ", ".join(sorted({name.split(".")[0] for name in modules if name})) or "none"
        raise MemtraceError(f"no block of the trace belongs to module {module!r}; top-level modules: {known}")
    return [part[is_inside[owner[part]]] for part in live]


def _largest_site(trace: Trace, live: list[Array]) -> str | None:
    """Return the allocation site that holds most bytes of ``live``, the blocks of each device."""
    totals: dict[str | None, int] = {}
    for part in live:
        for group in group_by_site(trace, part):
            totals[group.name] = totals.get(group.name, 0) + group.bytes
    return max(totals, key=lambda site: totals[site], default=None)
