"""Cuts tables in memory into parts, so that a trace read from a file opens by windows as a recording does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from memtrace.format import arrays
from memtrace.format.arrays import Array
from memtrace.format.decode import decode_columns, device_names
from memtrace.format.encode import select_rows
from memtrace.format.keyframes import PartColumns
from memtrace.format.manifest import PartRanges
from memtrace.format.part_writer import PART_ROWS, PartWriter
from memtrace.format.schema import PHASES, RANK_TABLES, SPAN_KINDS, TABLES

if TYPE_CHECKING:
    import pyarrow as pa

Tables = Mapping[str, "pa.Table"]
_SPLIT_TABLES = ("events", "ops", "labels", "spans")
_PHASE = SPAN_KINDS.index("phase")


def write_parts(tables: Tables, folder: Path, starts: Sequence[int] | None = None) -> dict[str, PartRanges]:
    """Write the tables of one rank to ``folder`` as parts.

    Args:
        tables: tables of the schema; absent ones are empty.
        folder: the folder of the rank.
        starts: first row of ``events`` of each part; None: parts of PART_ROWS events.

    Returns:
        The numbers of the parts of each table.
    """
    devices = device_names(list(tables.values()))
    writer = PartWriter(folder, devices)
    for part, columns in split_tables(tables, devices, starts):
        writer.append(part, columns)
        writer.flush()
    return writer.parts


def split_tables(
    tables: Tables, devices: Sequence[str], starts: Sequence[int] | None = None
) -> Iterator[tuple[dict[str, pa.Table], PartColumns]]:
    """Cut tables into parts; see ``write_parts``. Yields the rows of each part as tables and as numpy columns.

    As in a recording, an operator call goes with the last event that refers to it, a label with its block, a span with
    its end.
    """
    columns = {
        name: decode_columns(name, [tables[name]], [column.name for column in TABLES[name]], devices)
        for name in _SPLIT_TABLES
        if name in tables
    }
    num_events = len(columns["events"]["kind"]) if "events" in columns else 0
    edges = np.array([*(starts if starts is not None else range(0, max(num_events, 1), PART_ROWS)), num_events])
    part_of = _parts_of_rows(tables, columns, edges)
    phases = _phase_names(tables, columns)
    op_ids, event_op_ids = (columns.get(name, {}).get("op_id", np.empty(0, np.int64)) for name in ("ops", "events"))
    first_part = _part_of_event(event_op_ids, op_ids, edges, first=True)
    spanning = np.flatnonzero(first_part < part_of["ops"]) if "ops" in part_of else np.empty(0, np.int64)
    # Rows of most tables are few beside events: sorting them by part is cheap, and keeps their order within a part.
    order = {name: np.argsort(parts, kind="stable") for name, parts in part_of.items()}
    bounds = {name: np.searchsorted(np.sort(parts), np.arange(len(edges))) for name, parts in part_of.items()}
    for number in range(len(edges) - 1):
        part: dict[str, pa.Table] = {}
        rows: dict[str, Mapping[str, Array]] = {}
        for name, table in tables.items():
            if name in RANK_TABLES:
                if number == 0:
                    part[name] = table
                continue
            if name == "events":
                chosen = np.arange(edges[number], edges[number + 1])
                part[name] = table.slice(edges[number], edges[number + 1] - edges[number])
            else:
                chosen = order[name][bounds[name][number] : bounds[name][number + 1]]
                part[name] = select_rows(table, chosen)
            if name == "ops":
                # The keyframe must know a call from its first event on, not from the part that stores it.
                chosen = np.union1d(chosen, spanning[first_part[spanning] <= number])
                chosen = chosen[part_of["ops"][chosen] >= number]
            if name in columns:
                rows[name] = {column: values[chosen] for column, values in columns[name].items()}
        empty: dict[str, Array] = {}
        yield (
            part,
            PartColumns(
                events=rows.get("events", empty),
                ops=rows.get("ops", empty),
                labels=rows.get("labels", empty),
                spans=rows.get("spans", empty),
                phase_of_name=phases,
            ),
        )


def _part_of_event(keys: Array, ids: Array, edges: Array, *, first: bool = False) -> Array:
    """Return the part of the first or last event that refers to each id, the last part where there is none.

    Args:
        keys: the id to which each row of ``events`` refers.
        ids: the ids to look for.
        edges: first row of each part, and the number of rows.
        first: whether the first event counts; otherwise the last.
    """
    last = len(edges) - 2
    used, rows = np.unique(keys if first else keys[::-1], return_index=True)
    rows = rows if first else len(keys) - 1 - rows
    if not len(used):
        return np.full(len(ids), last)
    places = np.minimum(np.searchsorted(used, ids), len(used) - 1)
    part = np.searchsorted(edges, rows[places], side="right") - 1
    return np.where(used[places] == ids, np.minimum(part, last), last)


def _parts_of_rows(tables: Tables, columns: Mapping[str, Mapping[str, Array]], edges: Array) -> dict[str, Array]:
    """Return the number of the part in which each row of each table goes."""
    last = len(edges) - 2
    events = columns.get("events", {})
    time = np.maximum.accumulate(events["time_ns"]) if len(events.get("time_ns", ())) else np.zeros(1, np.int64)
    end_ns = time[np.clip(edges[1:] - 1, 0, len(time) - 1)]

    def part_at(times: Array) -> Array:
        return np.minimum(np.searchsorted(end_ns, times, side="left"), last)

    def part_of_event(key: str, ids: Array, *, first: bool = False) -> Array:
        return _part_of_event(events.get(key, np.empty(0, np.int64)), ids, edges, first=first)

    parts = {}
    for name, table in tables.items():
        if name == "ops":
            ops = columns["ops"]
            referenced = np.isin(ops["op_id"], events.get("op_id", np.empty(0)))
            parts[name] = np.where(referenced, part_of_event("op_id", ops["op_id"]), part_at(ops["start_ns"]))
        elif name == "labels":
            parts[name] = part_of_event("block_id", columns["labels"]["block_id"], first=True)
        elif name == "spans":
            parts[name] = part_at(columns["spans"]["start_ns"] + columns["spans"]["duration_ns"])
        elif name == "counters":
            parts[name] = part_at(arrays.integers([table.column("time_ns")], np.int64))
        elif name == "device_times":
            parts[name] = part_of_event("op_id", arrays.integers([table.column("op_id")], np.int64))
    return parts


def _phase_names(tables: Tables, columns: Mapping[str, Mapping[str, Array]]) -> dict[int, int]:
    """Return the phase codes by names.id of the names of spans of kind phase."""
    if "spans" not in columns or "names" not in tables:
        return {}
    used = np.unique(columns["spans"]["name"][columns["spans"]["kind"] == _PHASE])
    ids = arrays.integers([tables["names"].column("id")], np.int32)
    texts = {int(ids[row]): tables["names"].column("text")[row].as_py() for row in np.flatnonzero(np.isin(ids, used))}
    return {identity: PHASES.index(text) for identity, text in texts.items() if text in PHASES}
