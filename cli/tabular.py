"""Rows of a command as CSV on stdout."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def print_csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """One line a row under a line of names; unknown is empty."""
    writer = csv.DictWriter(sys.stdout, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
