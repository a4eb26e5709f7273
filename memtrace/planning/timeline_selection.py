"""Which blocks of a step a change concerns: by category, module, allocation site and size."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from memtrace.analysis.allocation_sites import allocation_sites
from memtrace.analysis.blocks import blocks
from memtrace.errors import MemtraceError
from memtrace.format.arrays import Array
from memtrace.format.schema import CATEGORIES
from memtrace.planning.timeline import Timeline
from memtrace.trace import Trace
from memtrace.units import format_bytes, parse_bytes

_KEYS = ("category", "module", "site", "min", "max")


@dataclass(frozen=True)
class BlockSelection:
    """Blocks that meet all of some conditions; None: any."""

    category: str | None = None
    """One of ``schema.CATEGORIES``."""
    module: str | None = None
    """Pattern of the module that allocated the block, such as ``blocks.*``; submodules are included."""
    site: str | None = None
    """Pattern that occurs in the allocation site, such as ``model.py:12``."""
    min_bytes: int | None = None
    max_bytes: int | None = None

    def describe(self) -> str:
        """Return the conditions as the end of a sentence."""
        parts = [
            f"of category {self.category}" if self.category else "",
            f"of module {self.module}" if self.module else "",
            f"allocated at {self.site}" if self.site else "",
            f"of at least {format_bytes(self.min_bytes)}" if self.min_bytes is not None else "",
            f"of at most {format_bytes(self.max_bytes)}" if self.max_bytes is not None else "",
        ]
        return "blocks " + ", ".join(part for part in parts if part)

    def find(self, trace: Trace, timeline: Timeline) -> Array:
        """Return a mask of the recorded blocks of a timeline that meet the conditions."""
        mask = timeline.block >= 0
        if self.category is not None:
            mask &= timeline.of_category(self.category)
        if self.min_bytes is not None:
            mask &= timeline.size >= self.min_bytes
        if self.max_bytes is not None:
            mask &= timeline.size <= self.max_bytes
        block = np.maximum(timeline.block, 0)
        columns = blocks(trace)
        if self.module is not None:
            mask &= module_mask(trace, columns.module[block], (self.module,))
        if self.site is not None:
            sites, index = allocation_sites(trace, columns.stack[block])
            mask &= np.array([site is not None and self._matches_site(site) for site in sites], bool)[index]
        return mask

    def _matches_site(self, site: str) -> bool:
        assert self.site is not None
        return self.site in site or fnmatchcase(site, f"*{self.site}*")


def module_mask(trace: Trace, module: Array, patterns: tuple[str, ...]) -> Array:
    """Return which name ids of modules match one of the patterns, or are within a module that does."""
    matching = [
        number
        for number in np.unique(module).tolist()
        if number >= 0 and any(matches_module(trace.name(number) or "", pattern) for pattern in patterns)
    ]
    return np.isin(module, matching)


def matches_module(name: str, pattern: str) -> bool:
    """Return whether a module, or one that contains it, matches a pattern such as ``blocks.*``.

    As in paths, a star stands for one part of the name.
    """
    return _compile(pattern).match(name) is not None


def _compile(pattern: str) -> re.Pattern[str]:
    parts = [".*" if part == "**" else re.escape(part).replace(r"\*", "[^.]*") for part in pattern.split(".")]
    return re.compile(r"\.".join(parts) + r"(\.|$)")


def parse_selection(text: str) -> BlockSelection:
    """Parse a selection such as ``category=activation,module=blocks.*,min=1MiB``; a bare word is a category.

    Raises:
        MemtraceError: the text is not a selection.
    """
    values: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        key, value = (key, value) if equals else ("category", key)
        if key not in _KEYS or not value or key in values:
            raise MemtraceError(
                f"{text!r} does not select blocks. Write for example category=activation,module=blocks.*,min=1MiB; "
                f"the conditions are {', '.join(_KEYS)}, each at most once."
            )
        values[key] = value
    check_category(values.get("category"))
    try:
        sizes = {key: parse_bytes(values[key]) if key in values else None for key in ("min", "max")}
    except ValueError as error:
        raise MemtraceError(f"{text!r} does not select blocks: {error}.") from None
    return BlockSelection(values.get("category"), values.get("module"), values.get("site"), sizes["min"], sizes["max"])


def check_category(category: str | None) -> None:
    """Raise MemtraceError if a category is given and does not exist."""
    if category is not None and category not in CATEGORIES:
        raise MemtraceError(f"{category!r} is not a category of blocks. Categories: {', '.join(CATEGORIES)}.")
