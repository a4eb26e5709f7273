"""Results of a command as CSV."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from memtrace.text import to_printable

_FORMULA_STARTS: Final = ("=", "+", "-", "@")


def print_csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Print rows as CSV on stdout under a line of column names; unknown values are empty cells.

    Args:
        columns: Names of the columns, in order; keys of a row that are not among them are left out.
        rows: One mapping per line.
    """
    writer = csv.DictWriter(sys.stdout, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)


def _cell(value: Any) -> Any:
    """Return a value of which a terminal shows every character and a spreadsheet takes no text for a formula."""
    if not isinstance(value, str):
        return value
    text = to_printable(value)
    return f"'{text}" if text.startswith(_FORMULA_STARTS) else text
