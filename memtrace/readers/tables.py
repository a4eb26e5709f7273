"""From numpy columns to the Arrow tables of a trace, and the table of names on the way."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from memtrace.format.schema import FORMAT_VERSION, NAME_KINDS, TABLES, arrow_schema

if TYPE_CHECKING:
    import pyarrow as pa

Array = np.ndarray[Any, np.dtype[Any]]

MAX_TEXT: Final = 4096
# Escape sequences in a file name would reach the user's terminal, marks of direction would turn its line around; tabs
# and newlines separate our own fields.
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass(frozen=True)
class Text:
    """A column of a closed vocabulary: ``codes`` into ``vocabulary``, -1 for null."""

    codes: Array
    vocabulary: Sequence[str]


@dataclass(frozen=True)
class Known:
    """A column of numbers with nulls: ``values`` where ``known``."""

    values: Array
    known: Array


def make_table(name: str, num_rows: int, columns: Mapping[str, Array | Text | Known]) -> pa.Table:
    """The table ``name`` of the schema from its columns; a column that is not given is null in every row."""
    import pyarrow as pa

    schema = arrow_schema(name)
    unknown = set(columns) - set(schema.names)
    if unknown:
        raise ValueError(f"not columns of {name}: {', '.join(sorted(unknown))}")
    arrays = []
    for field in schema:
        given = columns.get(field.name)
        if given is None:
            arrays.append(pa.nulls(num_rows, field.type))
        elif isinstance(given, Text):
            codes = _primitive(given.codes.astype(np.int8), given.codes >= 0, pa.int8())
            arrays.append(pa.DictionaryArray.from_arrays(codes, _strings(given.vocabulary)))
        elif isinstance(given, Known):
            arrays.append(_primitive(given.values, given.known, field.type))
        else:
            arrays.append(_primitive(given, None, field.type))
    return pa.Table.from_arrays(arrays, schema=schema)


# Arrays are made from buffers because ``pyarrow.array`` imports pandas, which costs more than reading most files.


def _primitive(values: Array, known: Array | None, kind: pa.DataType) -> pa.Array:
    """An Arrow array of numbers or booleans."""
    import pyarrow as pa

    if pa.types.is_boolean(kind):
        data = np.packbits(values.astype(bool), bitorder="little")
    else:
        data = np.ascontiguousarray(values, kind.to_pandas_dtype())
    return pa.Array.from_buffers(kind, len(values), [_validity(known), pa.py_buffer(data)])


def _validity(known: Array | None) -> pa.Buffer | None:
    import pyarrow as pa

    if known is None or bool(known.all()):
        return None
    return pa.py_buffer(np.packbits(known, bitorder="little"))


def _strings(texts: Sequence[str | None]) -> pa.Array:
    import pyarrow as pa

    encoded = [b"" if text is None else text.encode() for text in texts]
    buffers = [_validity(_present(texts)), _offsets(encoded), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(texts), buffers)


def _lists(lists: Sequence[Sequence[int] | None]) -> pa.Array:
    import pyarrow as pa

    present = [() if item is None else item for item in lists]
    values = np.fromiter(chain.from_iterable(present), np.int32)
    buffers = [_validity(_present(lists)), _offsets(present)]
    return pa.Array.from_buffers(
        pa.list_(pa.int32()), len(lists), buffers, children=[_primitive(values, None, pa.int32())]
    )


def _present(items: Sequence[object]) -> Array:
    return np.fromiter((item is not None for item in items), bool, len(items))


def _offsets(items: Sequence[Sequence[Any] | bytes]) -> pa.Buffer:
    import pyarrow as pa

    offsets = np.zeros(len(items) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, items), np.int64, len(items)), out=offsets[1:])
    if offsets[-1] >= 2**31:
        raise MemoryError("more names than a trace can hold")
    return pa.py_buffer(offsets.astype(np.int32))


def clean(text: object) -> str:
    """``text`` as one printable line of bounded length: what a file says may be hostile."""
    # A nested value is not spelled out: that can take longer than the universe has.
    spelled = text if isinstance(text, str) else f"<{type(text).__name__}>"
    line = _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", spelled[: MAX_TEXT + 1])
    return line if len(line) <= MAX_TEXT else line[:MAX_TEXT] + "..."


class Names:
    """The table of names as it grows: equal texts, frames and stacks share one id."""

    def __init__(self) -> None:
        self._ids: dict[tuple[str, Any], int] = {}
        self._entries: list[tuple[str, Any]] = []

    def text(self, kind: str, text: object) -> int:
        """The id of a text of one of NAME_KINDS (but a stack)."""
        return self._id(kind, clean(text))

    def frame(self, file: object, line: object, function: object) -> int:
        """The id of a frame. A line that is no number counts as 0."""
        number = line if isinstance(line, int) and 0 <= line < 2**31 else 0
        return self._id("frame", f"{clean(file)}\t{number}\t{clean(function)}")

    def stack(self, frames: Iterable[int]) -> int:
        """The id of a stack of frames, innermost first; -1 where there are none."""
        key = tuple(frames)
        return self._id("stack", key) if key else -1

    def value(self, identity: int) -> Any:
        """The text of an id; for a stack its frames' ids."""
        return self._entries[identity][1]

    def table(self) -> pa.Table:
        """The table ``names``."""
        import pyarrow as pa

        schema = arrow_schema("names")
        kinds = np.array([NAME_KINDS.index(kind) for kind, _ in self._entries], np.int8)
        columns = {
            "id": _primitive(np.arange(len(kinds)), None, pa.int32()),
            "kind": pa.DictionaryArray.from_arrays(_primitive(kinds, None, pa.int8()), _strings(NAME_KINDS)),
            "text": _strings([value if kind != "stack" else None for kind, value in self._entries]),
            "frames": _lists([value if kind == "stack" else None for kind, value in self._entries]),
        }
        return pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema)

    def _id(self, kind: str, value: Any) -> int:
        key = (kind, value)
        number = self._ids.setdefault(key, len(self._entries))
        if number == len(self._entries):
            self._entries.append(key)
        return number


def new_manifest(kind: str, file: str, t0_epoch_ns: int | None) -> dict[str, Any]:
    """A manifest for what a reader found; the reader fills in devices, versions and coverage."""
    from memtrace import __version__

    return {
        "format": "memtrace",
        "format_version": FORMAT_VERSION,
        "memtrace_version": __version__,
        "source": {"kind": kind, "observer": None, "file": file},
        "rank": 0,
        "world_size": 1,
        "finished": True,
        "stop_reason": None,
        "t0_epoch_ns": t0_epoch_ns,
        "versions": {},
        "devices": {},
        "options": {},
        "command": [],
        "coverage": {"lost_events": None, "dropped_events": None, "notes": []},
    }


def empty_tables() -> dict[str, pa.Table]:
    """Every table of a trace without rows."""
    return {name: make_table(name, 0, {}) for name in TABLES}


def amount(num_bytes: int) -> str:
    """Bytes for a sentence: exact, and in binary units where that helps."""
    if num_bytes < 1024:
        return f"{num_bytes} bytes"
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    raise AssertionError(num_bytes)
