"""What the page is made of: one list of sections, each a function from a trace to a figure or a table.

To add to the page, write ``build(trace, device)`` in a module of its own and add a :class:`Section` to
``SECTIONS`` in :mod:`memtrace.dashboards.page`. ``build`` gets a trace of one rank and the name of one of its
devices, and returns

- a plotly ``Figure`` (colours from :mod:`memtrace.dashboards.palette`, no template, names passed through
  :func:`memtrace.dashboards.text.figure_text`, arrays as numpy); ``layout.meta["note"]``, when given, is printed
  under it and says what of the data is shown;
- a :class:`Table`;
- or None when the trace lacks the data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    pass

CellKind = Literal["text", "code", "number", "category", "share"]


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table.

    ``kind`` says how its cells are set: ``number`` to the right, ``code`` in a fixed-width face, ``category`` with
    the colour of the category, ``share`` as a bar (the cell is then a number from 0 to 1).
    """

    title: str
    kind: CellKind = "text"


@dataclass(frozen=True, slots=True)
class Row:
    """The cells of a row, one a column, and the lines that open under it (a stack, innermost line first)."""

    cells: tuple[str | float, ...]
    detail: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Table:
    """Rows ready to print. ``note`` says what of the data is shown; ``detail`` names what opens under a row."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    note: str = ""
    detail: str = "stack"

    @property
    def has_details(self) -> bool:
        """Whether any row opens."""
        return any(row.detail for row in self.rows)


Build = Callable[..., Any]
"""``(trace of one rank, device) -> plotly Figure | Table | None``; plotly ships no types, hence Any.

Sections of all ranks get the whole trace or a ``PipelinePrediction`` instead.
"""


@dataclass(frozen=True, slots=True)
class Section:
    """One part of the page.

    ``anchor`` is its place in the address (``report.html#anchor``), unique on the page; ``explanation`` tells a
    newcomer how to read it; ``absent`` is printed in its place when ``build`` returns None, and when it is empty
    the section is left out; ``columns`` is how many of the page's three columns it takes on a wide screen and
    ``height`` that of its figure in pixels.
    """

    anchor: str
    title: str
    explanation: str
    build: Build
    absent: str = ""
    columns: int = 3
    height: int = 420
