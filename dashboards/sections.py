"""What a section of the page consists of.

To extend the page, write a build function in a module of its own and add a :class:`Section` to
:mod:`memtrace.dashboards.contents`. A build function returns

- a plotly ``Figure`` (colors from :mod:`memtrace.dashboards.palette`, no template, names passed through
  :func:`memtrace.dashboards.text.figure_text`, arrays as NumPy arrays); the page prints ``layout.meta["note"]``, if
  any, below the figure: it states which part of the data the figure shows;
- a :class:`Table`;
- or None where the trace lacks the data.

Instead of a build function, a section can name a :data:`Widget`.

A build function computes nothing: it draws what :mod:`memtrace.analysis` returns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

CellKind = Literal["text", "code", "number", "category", "share", "link", "sentence"]


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table."""

    title: str
    kind: CellKind = "text"
    """``number``: aligned to the right; ``code``: fixed-width font; ``category``: with the color of the category;
    ``share``: as a bar, for a cell that is a number from 0 to 1; ``link``: for a cell that is a :class:`Link`;
    ``sentence``: text that is wide enough to be read on a narrow screen."""


@dataclass(frozen=True, slots=True)
class Link:
    """A cell that leads to another part of the page."""

    text: str
    fragment: str = ""
    """Part of the address after ``#``, such as ``view=3-cuda-0``; empty: the page lacks this part."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table."""

    cells: tuple[str | float | Link, ...]
    """One cell per column."""
    detail: tuple[str, ...] = ()
    """Lines that unfold below the row, such as a call stack, innermost frame first."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table with formatted cells."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    note: str = ""
    """Which part of the data the table shows."""
    detail: str = "stack"
    """Label of the button that unfolds the details of a row."""

    @property
    def has_details(self) -> bool:
        """Whether any row has details."""
        return any(row.detail for row in self.rows)


Widget = Literal["tracks", "explorer"]
"""A part of the page that its own scripts draw from the payload of the view (:mod:`memtrace.dashboards.payload`)."""

Build = Callable[..., Any]
"""``(single-rank trace, device) -> plotly Figure | Table | None``; plotly ships no types, hence Any.

Sections of a whole job get the trace of all ranks, and sections of a prediction get the prediction.
"""


@dataclass(frozen=True, slots=True)
class Section:
    """A section of the page."""

    anchor: str
    """Unique part of the address: ``report.html#anchor``."""
    title: str
    explanation: str
    """How to read the section, for a newcomer."""
    build: Build | Widget
    absent: str = ""
    """Text for a section without content; the page leaves out the section where the text is empty."""
    columns: int = 3
    """Number of the page's three columns that the section takes on a wide screen."""
    height: int = 420
    """Height of the figure in pixels."""
    takes_options: bool = False
    """Whether the build function takes the ``AnalysisOptions`` of the user as its last argument."""
