"""The blocks of a device with their texts and call stacks, packed for the explorer (``templates/explorer.js``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from memtrace.dashboards.delta_encoding import encode_columns
from memtrace.dashboards.text import name_text

from memtrace.analysis.block_accesses import has_accesses
from memtrace.analysis.block_catalog import BlockCatalog, catalog_blocks
from memtrace.units import format_bytes, format_count

if TYPE_CHECKING:
    from memtrace.trace import Trace

MAX_BLOCKS: Final = 150_000
MAX_STACKS: Final = 4000
"""Most call stacks on the page; those of the blocks with the most bytes."""
MAX_FRAMES: Final = 60
_COLUMNS: Final = ("block", "begin_row", "end_row", "size", "category", "phase", "step", "num_reads", "num_writes",
                   "name", "operator", "module", "site", "stack")  # fmt: skip


@dataclass(frozen=True)
class EncodedBlocks:
    """The blocks of a payload."""

    packed: dict[str, Any]
    """Packed columns: those of `BlockCatalog`, and ``begin_us`` and ``end_us`` (-1: unknown)."""
    texts: dict[str, Any]
    """What the columns index: ``names``, ``operators``, ``modules``, ``sites`` (empty: unknown), ``stacks``
    (frames of a call stack, innermost first) and ``frames``; and ``has_accesses``."""
    note: str
    """Which blocks are left out."""


def encode_blocks(trace: Trace, device: str) -> EncodedBlocks:
    """Return the largest blocks of a device."""
    catalog = catalog_blocks(trace, device, MAX_BLOCKS)
    columns = {name: getattr(catalog, name) for name in _COLUMNS}
    columns["begin_us"] = np.where(catalog.begin_ns >= 0, catalog.begin_ns // 1000, -1)
    columns["end_us"] = np.where(catalog.end_ns >= 0, catalog.end_ns // 1000, -1)
    stacks, frames = _encode_stacks(trace, catalog)
    texts = {
        "names": _encode_texts(catalog.names),
        "operators": _encode_texts(catalog.operators),
        "modules": _encode_texts(catalog.modules),
        "sites": _encode_texts(catalog.sites),
        "stacks": stacks,
        "frames": frames,
        "has_accesses": has_accesses(trace),
    }
    return EncodedBlocks(encode_columns(columns), texts, _left_out_note(catalog))


def _encode_texts(texts: Sequence[str | None]) -> list[str]:
    """Return texts for the page; empty: unknown."""
    return ["" if text is None else name_text(text) for text in texts]


def _encode_stacks(trace: Trace, catalog: BlockCatalog) -> tuple[dict[int, list[int]], list[dict[str, Any]]]:
    """Return frames by index of the stack (innermost first) as indices into the list of distinct frames."""
    weight = np.bincount(catalog.stack, weights=catalog.size, minlength=len(catalog.stacks))
    numbers: dict[tuple[str, bool], int] = {}
    encoded: dict[int, list[int]] = {}
    for index in np.argsort(-weight, kind="stable")[:MAX_STACKS].tolist():
        frames = trace.frames(catalog.stacks[index])[:MAX_FRAMES]
        texts = [
            (name_text(f"{frame.file}:{frame.line} {frame.function}"), not trace.code_owner.is_library(frame))
            for frame in frames
        ]
        encoded[index] = [numbers.setdefault(text, len(numbers)) for text in texts]
    return encoded, [{"text": text, "own": is_own} for text, is_own in numbers]


def _left_out_note(catalog: BlockCatalog) -> str:
    if len(catalog) == catalog.num_blocks:
        return ""
    return (
        f"The blocks are the {len(catalog):,} largest of {format_count(catalog.num_blocks, 'block')}, each "
        f"{format_bytes(int(catalog.size.min()))} or larger."
    )
