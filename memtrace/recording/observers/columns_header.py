"""The C++ structs of the columns that the native observer fills, generated from the schema when it is built."""

from __future__ import annotations

from typing import Final

from memtrace.format.schema import OBSERVED_TABLES, batch_dtypes, find_column

HEADER_NAME: Final = "columns.h"
_CPP_TYPES: Final = {"i8": "int64_t", "i4": "int32_t", "i2": "int16_t", "i1": "int8_t"}


def columns_header() -> str:
    """Return the text of ``columns.h``: for each table ``<table>_columns`` with one vector per column."""
    lines = [
        "// Generated from memtrace/format/schema.py by memtrace/recording/observers/columns_header.py.",
        "#pragma once",
        "",
        "#include <cstddef>",
        "#include <cstdint>",
        "#include <vector>",
        "",
        "namespace memtrace {",
        "",
        "// Values of a column: never null; null where they are -1; the same, left out where all are null; 0 and 1.",
        "enum class ColumnForm { known, nullable, optional, boolean };",
    ]
    for table in OBSERVED_TABLES:
        dtypes = batch_dtypes(table)
        first = next(iter(dtypes))
        lines += ["", f"struct {table}_columns {{"]
        lines += [f"  std::vector<{_CPP_TYPES[dtype]}> {name};" for name, dtype in dtypes.items()]
        lines += ["", f"  size_t num_rows() const {{ return {first}.size(); }}"]
        lines += ["  void reserve(size_t rows) {", *(f"    {name}.reserve(rows);" for name in dtypes), "  }"]
        lines += ["  template <typename Visit>", "  void each(Visit&& visit) {"]
        lines += [f'    visit("{table}.{name}", {name}, ColumnForm::{_form(table, name)});' for name in dtypes]
        lines += ["  }", "};"]
    return "\n".join([*lines, "", "}  // namespace memtrace", ""])


def _form(table: str, name: str) -> str:
    column = find_column(table, name)
    if column.dtype == "bool":
        return "boolean"
    if column.null is None:
        return "known"
    # A batch without allocated sizes states that they are the requested ones, so it does not leave them out as null.
    return "nullable" if column.is_required or name == "allocated_size" else "optional"
