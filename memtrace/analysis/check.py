"""Limits on a trace, made for CI: which are broken, and by which line."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from memtrace.analysis.block_groups import find_owning_modules, group_by_category, group_by_site
from memtrace.analysis.blocks import blocks
from memtrace.analysis.growth import growth
from memtrace.analysis.peak import find_peak
from memtrace.errors import MemtraceError
from memtrace.format.arrays import Array
from memtrace.format.schema import CATEGORIES
from memtrace.trace import Trace

_KEYS: Final = ("peak", "growth", "categories", "modules")


@dataclass(frozen=True)
class Limits:
    """The most that is allowed. Bytes; None: no limit. ``growth`` is of what stays live, a step."""

    peak: int | None = None
    growth: int | None = None
    categories: dict[str, int] = field(default_factory=dict)
    modules: dict[str, int] = field(default_factory=dict)
    """By qualified name; a module counts with all inside it."""

    def __bool__(self) -> bool:
        """Whether there is any limit."""
        return self.peak is not None or self.growth is not None or bool(self.categories) or bool(self.modules)


@dataclass(frozen=True)
class Verdict:
    """One limit and what was found. Bytes; ``found`` None: the trace cannot tell, which does not pass."""

    limit: str
    allowed_bytes: int
    found_bytes: int | None
    site: str | None
    """The line that holds most of it."""

    @property
    def passed(self) -> bool:
        """Whether the limit is kept."""
        return self.found_bytes is not None and self.found_bytes <= self.allowed_bytes

    def as_dict(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        return asdict(self) | {"passed": self.passed}


def read_limits(path: Path, parse: Any) -> Limits:
    """Limits from a JSON file: {"peak": "2GiB", "growth": 0, "categories": {"activation": "1GiB"}, "modules": {...}}.

    ``parse`` makes bytes of what a person writes. MemtraceError where the file cannot be read or says anything else.
    """
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MemtraceError(f"{path} cannot be read as limits: {error}") from error
    if not isinstance(told, dict) or set(told) - set(_KEYS):
        raise MemtraceError(f"{path} must be a JSON object with some of {', '.join(_KEYS)} and nothing else")
    try:
        peak_bytes, growth_bytes = (
            parse(told[name]) if told.get(name) is not None else None for name in ("peak", "growth")
        )
        groups = [told.get(name) or {} for name in ("categories", "modules")]
        if not all(isinstance(group, dict) for group in groups):
            raise ValueError("categories and modules are objects of names and bytes")
        categories, modules = ({str(key): parse(value) for key, value in group.items()} for group in groups)
    except ValueError as error:
        raise MemtraceError(f"{path}: {error}") from error
    return Limits(peak_bytes, growth_bytes, categories, modules)


def check(trace: Trace, limits: Limits) -> list[Verdict]:
    """Each limit with what a single-rank trace has, devices added. MemtraceError for a category that is none."""
    wrong = [name for name in limits.categories if name not in CATEGORIES]
    if wrong:
        raise MemtraceError(f"{wrong[0]!r} is no category; they are {', '.join(CATEGORIES)}")
    verdicts = []
    live = [find_peak(trace, device).live for device in trace.devices]
    if limits.peak is not None:
        found = sum(find_peak(trace, device).requested.bytes for device in trace.devices)
        verdicts.append(Verdict("peak", limits.peak, found, _largest_site(trace, live)))
    if limits.growth is not None:
        grows = growth(trace)
        where = grows.sources[0][0] if grows is not None and grows.sources else None
        verdicts.append(Verdict("growth a step", limits.growth, grows.bytes_per_step if grows else None, where))
    for name, allowed in limits.categories.items():
        mine = [rows[blocks(trace).category[rows] == CATEGORIES.index(name)] for rows in live]
        size = sum(group.bytes for rows in live for group in group_by_category(trace, rows) if group.name == name)
        verdicts.append(Verdict(f"category {name}", allowed, size, _largest_site(trace, mine)))
    verdicts += [_of_module(trace, name, allowed, live) for name, allowed in limits.modules.items()]
    return verdicts


def _of_module(trace: Trace, name: str, allowed: int, live: list[Array]) -> Verdict:
    modules, owner = find_owning_modules(trace, np.arange(len(blocks(trace))))
    inside = [module is not None and (module == name or module.startswith(f"{name}.")) for module in modules]
    if not any(inside):
        told = sorted({module.split(".")[0] for module in modules if module})
        raise MemtraceError(f"no module {name} holds anything in the trace; there are {', '.join(told) or 'none'}")
    mine = [part[np.array(inside)[owner[part]]] for part in live]
    size = sum(int(blocks(trace).size[part].sum()) for part in mine)
    return Verdict(f"module {name}", allowed, size, _largest_site(trace, mine))


def _largest_site(trace: Trace, live: list[Array]) -> str | None:
    totals: dict[str | None, int] = {}
    for part in live:
        for group in group_by_site(trace, part):
            totals[group.name] = totals.get(group.name, 0) + group.bytes
    return max(totals, key=lambda name: totals[name], default=None)
