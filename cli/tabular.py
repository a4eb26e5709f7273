"""Results of a command as CSV."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def print_csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Print rows as CSV on stdout under a line of column names; unknown values are empty cells.

    Args:
        columns: Names of the columns, in order; keys of a row that are not among them are left out.
        rows: One mapping per line.
    """
    writer = csv.DictWriter(sys.stdout, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
