"""Where the tables of one rank come from: the protocol, and tables in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from memtrace.format.manifest import Manifest
from memtrace.format.schema import TABLES

if TYPE_CHECKING:
    import pyarrow as pa


class Source(Protocol):
    """The tables of one rank."""

    @property
    def manifest(self) -> Manifest:
        """The manifest of the rank."""
        ...

    def num_rows(self, table: str) -> int:
        """Return how many rows ``table`` has; 0 where it is absent."""
        ...

    def read(self, table: str, columns: tuple[str, ...]) -> list[pa.Table]:
        """Return the parts of ``table`` in order, each with those of ``columns`` that it has."""
        ...

    def notes(self) -> list[str]:
        """Return sentences about the files that a reader of the trace should see."""
        ...

    def with_manifest(self, manifest: Manifest) -> Source:
        """Return the same tables with another manifest: a rank gets its number in a job."""
        ...

    def surroundings(self, start_ns: int | None, end_ns: int | None) -> Source:
        """Return the smallest run of whole parts around a window; None is an open end."""
        ...

    def read_steps(self, first: int, last: int) -> list[pa.Table]:
        """Return rows of ``spans`` among which are all steps with numbers from ``first`` to ``last``."""
        ...

    def read_spans_after(self, number: int) -> tuple[int, list[pa.Table]]:
        """Return the number of the last part of ``spans``, and the rows of those with larger numbers than ``number``.

        A span is in one part only, the one that was open when it ended.
        """
        ...

    def part_numbers(self) -> list[int]:
        """Return the numbers of the parts of ``events``, in order."""
        ...

    def part(self, number: int) -> Source:
        """Return one part, opened by its keyframe."""
        ...

    def read_stored(self, table: str, number: int, columns: tuple[str, ...]) -> list[pa.Table]:
        """Return the rows of ``table`` that were written with one part, without what its keyframe stands for."""
        ...

    def order_ns(self, number: int) -> int | None:
        """Return the largest time of all events before a part; None where the trace is one part."""
        ...


class MemoryTables:
    """Tables in memory, such as a reader of files returns: one part."""

    def __init__(self, manifest: Manifest, tables: Mapping[str, pa.Table]) -> None:
        unknown = sorted(set(tables) - set(TABLES))
        if unknown:
            raise ValueError(f"not a table of a trace: {', '.join(unknown)} (tables: {', '.join(TABLES)})")
        self.manifest = manifest
        self._tables = dict(tables)

    def num_rows(self, table: str) -> int:
        """Return how many rows ``table`` has; 0 where it is absent."""
        return self._tables[table].num_rows if table in self._tables else 0

    def read(self, table: str, columns: tuple[str, ...]) -> list[pa.Table]:
        """Return the table as one part."""
        if table not in self._tables:
            return []
        whole = self._tables[table]
        return [whole.select([name for name in columns if name in whole.column_names])]

    def notes(self) -> list[str]:
        """Return nothing: there are no files."""
        return []

    def with_manifest(self, manifest: Manifest) -> MemoryTables:
        """Return the same tables with another manifest."""
        return MemoryTables(manifest, self._tables)

    def surroundings(self, start_ns: int | None, end_ns: int | None) -> MemoryTables:
        """Return the tables themselves: they are one part."""
        return self

    def read_steps(self, first: int, last: int) -> list[pa.Table]:
        """Return the table ``spans``."""
        return self.read("spans", STEP_COLUMNS)

    def read_spans_after(self, number: int) -> tuple[int, list[pa.Table]]:
        """Return the table ``spans``, which is part 0."""
        return 0, self.read("spans", SPAN_COLUMNS) if number < 0 else []

    def part_numbers(self) -> list[int]:
        """Return one number: the tables are one part."""
        return [0]

    def part(self, number: int) -> MemoryTables:
        """Return the tables themselves."""
        return self

    def read_stored(self, table: str, number: int, columns: tuple[str, ...]) -> list[pa.Table]:
        """Return the table as one part."""
        return self.read(table, columns)

    def order_ns(self, number: int) -> None:
        """Return None: the tables are one part."""


SPAN_COLUMNS = ("kind", "name", "start_ns", "duration_ns", "index")
"""The columns of ``spans`` that say what a span is and where it lies."""

STEP_COLUMNS = ("kind", "start_ns", "duration_ns", "index")
"""The columns of ``spans`` that say where a step lies."""
