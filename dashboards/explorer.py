"""The blocks of a device with their texts, call stacks, accesses and source lines, packed for the explorer.

Most blocks of a training run are alike: they differ in time and address only. What they have in common is a *kind*, a
row of a small table, so that a block takes a few bytes on the page. ``templates/block_columns.js`` is the inverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from memtrace.dashboards.delta_encoding import encode_columns
from memtrace.dashboards.source_lines import SourceOptions, collect_source_lines
from memtrace.dashboards.stack_encoding import build_frame_tree, encode_frames
from memtrace.dashboards.text import name_text
from memtrace.dashboards.text_encoding import encode_json

from memtrace.analysis.attribution import op_column
from memtrace.analysis.block_accesses import group_accesses_by_block, has_accesses
from memtrace.analysis.block_catalog import BlockCatalog, LeftOutBlocks, catalog_blocks, sum_left_out
from memtrace.analysis.peak import find_peak
from memtrace.format.schema import PHASES
from memtrace.units import format_bytes, format_count

if TYPE_CHECKING:
    from memtrace.dashboards.source_lines import SourceLines

    from memtrace.format.arrays import Array
    from memtrace.frames import Frame
    from memtrace.trace import Trace

MAX_BLOCKS: Final = 500_000
MIN_BLOCKS: Final = 100
MAX_ACCESSES: Final = 400_000
MAX_CHARS: Final = 6_000_000
"""Most characters that the blocks of a page take; it has fewer of them where they do not fit."""
_ACCESS_SHARE: Final = 0.25
"""Share of those for the accesses."""
_CHARS_PER_LEFT_OUT_POINT: Final = 1500
"""The sums over the blocks that are left out take about a hundredth of the characters."""
_KIND_COLUMNS: Final = (
    "size", "allocated_size", "stream", "category", "is_labeled", "is_likely", "phase", "num_reads", "num_writes",
    "name", "operator", "module", "stack", "no_stack_reason", "free_operator", "free_module", "free_phase",
)  # fmt: skip


@dataclass(frozen=True)
class EncodedBlocks:
    """The blocks of a payload."""

    packed: dict[str, Any]
    """Packed columns: ``blocks``, their ``kinds``, ``accesses``, ``left_out`` (`LeftOutBlocks`), ``stacks`` (site and
    node in the tree of frames) and ``frame_tree`` (parent and frame); and ``block_texts``, what the columns index, as
    packed JSON."""
    plain: dict[str, Any]
    """``has_accesses`` and ``num_blocks``, of which the payload may have fewer."""
    place: Array
    """Index of each block in ``blocks(trace)``."""
    note: str
    """What is left out, and what to know about the source lines."""


def encode_blocks(
    trace: Trace, device: str, max_chars: int = MAX_CHARS, *, sources: SourceOptions | None = None
) -> EncodedBlocks:
    """Return the blocks of a device, the largest where not all fit.

    Args:
        trace: A single-rank trace, or a window of one.
        device: One of ``trace.devices``.
        max_chars: Most characters of the result.
        sources: Which source lines to add; None: none.
    """
    accesses_chars = int(max_chars * _ACCESS_SHARE) if has_accesses(trace) else 0
    catalog, packed, sources_note = _encode_most(trace, device, max_chars - accesses_chars, sources)
    accesses, access_note = _encode_accesses(trace, catalog, accesses_chars)
    max_points = max_chars // _CHARS_PER_LEFT_OUT_POINT
    packed |= {"accesses": accesses, "left_out": _encode_left_out(trace, device, catalog, max_points)}
    note = " ".join(filter(None, (_left_out_note(catalog), access_note, sources_note)))
    plain = {"has_accesses": has_accesses(trace), "num_blocks": catalog.num_blocks}
    return EncodedBlocks(packed, plain, catalog.place, note)


def _encode_most(
    trace: Trace, device: str, max_chars: int, sources: SourceOptions | None
) -> tuple[BlockCatalog, dict[str, Any], str]:
    """Return the most blocks that fit with their texts, largest first, and a note about the source lines."""
    catalog = catalog_blocks(trace, device, MAX_BLOCKS)
    while True:
        texts, note = _encode_texts(trace, catalog, sources)
        # Fewer blocks have hardly fewer texts, so the columns must fit beside them.
        left = max(max_chars - _count_chars(texts), max_chars // 2)
        fitting, columns = _encode_fitting(trace, device, catalog, left)
        if len(fitting) < len(catalog):
            texts, note = _encode_texts(trace, fitting, sources)
        if _count_chars(columns) + _count_chars(texts) <= max_chars or len(fitting) <= MIN_BLOCKS:
            return fitting, {**columns, **texts}, note
        catalog = catalog_blocks(trace, device, len(fitting) // 2)


def _encode_fitting(
    trace: Trace, device: str, catalog: BlockCatalog, max_chars: int
) -> tuple[BlockCatalog, dict[str, Any]]:
    """Return the columns of a catalog, with fewer blocks where they do not fit."""
    while True:
        columns = _encode_columns(catalog)
        num_chars = _count_chars(columns)
        if num_chars <= max_chars or len(catalog) <= MIN_BLOCKS:
            return catalog, columns
        catalog = catalog_blocks(trace, device, int(len(catalog) * min(0.8, 0.95 * max_chars / num_chars)))


def _count_chars(packed: dict[str, Any]) -> int:
    return sum(len(table.get("data") or table["json"]) for table in packed.values())


def _encode_texts(trace: Trace, catalog: BlockCatalog, sources: SourceOptions | None) -> tuple[dict[str, Any], str]:
    """Return the call stacks and texts of a catalog, and a note about the source lines."""
    tree = build_frame_tree(trace, catalog.stacks)
    weight = np.bincount(catalog.stack, weights=catalog.size, minlength=len(catalog.stacks))
    lines = collect_source_lines(
        trace, _frames_by_weight(trace, catalog, weight), sources or SourceOptions(is_enabled=False)
    )
    sites, site = _distinct_texts(catalog.stack_sites)
    texts = {
        "names": _page_texts(catalog.names),
        "operators": _page_texts(catalog.operators),
        "modules": _page_texts(catalog.modules),
        "sites": _page_texts(sites),
        "no_stack_reasons": catalog.no_stack_reasons,
        "phase_names": PHASES,
        "frames": encode_frames(trace, tree.frames),
        "sources": _page_sources(lines),
    }
    packed = {
        "stacks": encode_columns({"node": tree.node_of_stack, "site": site}),
        "frame_tree": encode_columns({"parent": tree.parent, "frame": tree.frame}),
        "block_texts": encode_json(texts),
    }
    return packed, lines.note


def _encode_columns(catalog: BlockCatalog) -> dict[str, Any]:
    columns = {name: getattr(catalog, name).astype(np.int64) for name in _KIND_COLUMNS}
    first, kind = find_kinds(columns)
    begin_us = np.where(catalog.begin_ns >= 0, catalog.begin_ns // 1000, -1)
    end_us = np.where(catalog.end_ns >= 0, catalog.end_ns // 1000, -1)
    is_timed = (begin_us >= 0) & (end_us >= 0)
    blocks = {
        "block": catalog.block,
        "kind": kind,
        "begin_row": catalog.begin_row,
        "live_rows": catalog.end_row - catalog.begin_row,
        "begin_us": begin_us,
        # Lifetimes are small numbers and repeat; times of frees are not and do not.
        "end": np.where(is_timed, end_us - begin_us, end_us),
        "step": catalog.step,
        "free_steps": np.where(catalog.free_step >= 0, catalog.free_step - catalog.step, -2),
        "address": catalog.address,
    }
    return {
        "blocks": encode_columns(blocks),
        "kinds": encode_columns({name: values[first] for name, values in columns.items()}),
    }


def find_kinds(columns: dict[str, Array]) -> tuple[Array, Array]:
    """Return the first row of each distinct row of some columns, and for each row the index of its kind.

    Kinds have the order of their first rows.
    """
    import pandas as pd

    key = np.zeros(len(next(iter(columns.values()))), np.int64)
    for values in columns.values():
        codes, distinct = pd.factorize(values)
        key = key * len(distinct) + codes
        key = pd.factorize(key)[0].astype(np.int64)
    # Kinds are numbered in the order of their first rows.
    return np.flatnonzero(np.diff(np.maximum.accumulate(key), prepend=-1) > 0), key


def _encode_accesses(trace: Trace, catalog: BlockCatalog, max_chars: int) -> tuple[dict[str, Any], str]:
    """Return the accesses of the largest blocks whose accesses fit, grouped by block in the order of the catalog."""
    accesses = group_accesses_by_block(trace)
    num_accesses = accesses.num_accesses(catalog.place)
    largest_first = np.argsort(-catalog.size, kind="stable")
    total, max_accesses = int(num_accesses.sum()), MAX_ACCESSES
    while True:
        fits = np.cumsum(num_accesses[largest_first]) <= max_accesses
        index = np.sort(largest_first[fits])
        packed = _encode_accesses_of(trace, catalog, index)
        num_shown = int(num_accesses[index].sum())
        if len(packed["data"]) <= max_chars or not num_shown:
            break
        max_accesses = num_shown // 2
    if num_shown == total:
        return packed, ""
    return packed, f"The accesses are those of the largest blocks, {num_shown:,} of {total:,}."


def _encode_accesses_of(trace: Trace, catalog: BlockCatalog, index: Array) -> dict[str, Any]:
    accesses = group_accesses_by_block(trace)
    place = catalog.place[index]
    count = accesses.num_accesses(place)
    within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    rows = np.repeat(accesses.offset[place], count) + within
    event = accesses.event[rows]
    operator = op_column(trace, accesses.op[rows], "name").astype(np.int64)
    known = {text: number for number, text in enumerate(catalog.operators)}
    ids, inverse = np.unique(operator, return_inverse=True)
    number = np.array([known.get(trace.name(int(identity)), -1) for identity in ids], np.int64)
    return encode_columns(
        {
            "index": np.repeat(index, count),
            "row": event,
            "time_us": trace.columns("events", "time_ns")["time_ns"][event] // 1000,
            "operator": number[inverse] if len(ids) else inverse,
            "is_read": accesses.is_read[rows].astype(np.int64),
        }
    )


def _encode_left_out(trace: Trace, device: str, catalog: BlockCatalog, max_points: int) -> dict[str, Any]:
    if len(catalog) == catalog.num_blocks:
        return encode_columns({field.name: np.empty(0, np.int64) for field in fields(LeftOutBlocks)})
    num_rows = trace.num_rows("events")
    evenly = np.linspace(0, num_rows - 1, min(num_rows, max_points)).astype(np.int64)
    rows = np.unique(np.append(evenly, max(0, find_peak(trace, device).requested.event)))
    return encode_columns(vars(sum_left_out(trace, device, catalog, rows)))


def _frames_by_weight(trace: Trace, catalog: BlockCatalog, weight: Array) -> list[Frame]:
    """Return the frames of the stacks, those of the stacks with the most bytes first."""
    ids: dict[int, None] = {}
    for index in np.argsort(-weight, kind="stable").tolist():
        ids.update(dict.fromkeys(trace.frame_ids(catalog.stacks[index])))
    return [trace.frame(identity) for identity in ids]


def _distinct_texts(texts: Sequence[str | None]) -> tuple[tuple[str | None, ...], Array]:
    distinct = tuple(dict.fromkeys(texts))
    number = {text: index for index, text in enumerate(distinct)}
    return distinct, np.array([number[text] for text in texts], np.int64)


def _page_texts(texts: Sequence[str | None]) -> list[str]:
    """Return texts for the page; empty: unknown."""
    return ["" if text is None else name_text(text) for text in texts]


def _page_sources(lines: SourceLines) -> dict[str, Any]:
    """Return source lines by the text that the page has for the file."""
    return {
        "excerpts": {name_text(file): pieces for file, pieces in lines.excerpts.items()},
        "newer": [name_text(file) for file in lines.newer_files],
    }


def _left_out_note(catalog: BlockCatalog) -> str:
    if len(catalog) == catalog.num_blocks:
        return ""
    return (
        f"The blocks are the {len(catalog):,} largest of {format_count(catalog.num_blocks, 'block')}, each "
        f"{format_bytes(int(catalog.size.min()))} or larger."
    )
