"""Tables of results that stay readable at every width: nothing is cut off.

A table that is too wide for the terminal wraps its last column; where that leaves too little room, the last column goes
below each row. Columns that still do not fit continue in a further table, which repeats the first column.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

GAP: Final = 2
"""Blanks between columns."""
MIN_TEXT_CHARS: Final = 32
"""Least width to which the last column is narrowed before it goes below the rows."""
MIN_KEY_CHARS: Final = 20
"""Least width to which the first column is narrowed."""
PUNCTUATION: Final = ",:/._-"
"""Where a word that is too long for its column is continued on the next line."""
INDENT: Final = 4
"""Blanks in front of a last column that stands below the rows."""


class PlainTable:
    """A table without borders: first and last column aligned to the left, the others to the right."""

    def __init__(self, headers: Sequence[str]) -> None:
        self._headers = tuple(headers)
        self._rows: list[tuple[str, ...]] = []

    def add_row(self, *cells: str) -> None:
        """Add a row of rich markup; cells that are left out are empty."""
        assert len(cells) <= len(self._headers)
        self._rows.append((*cells, *[""] * (len(self._headers) - len(cells))))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Yield the lines of the table."""
        from rich.text import Text

        headers = tuple(Text(header, style="bold") for header in self._headers)
        rows = [tuple(map(console.render_str, row)) for row in self._rows]
        yield from _Layout(options.max_width, headers, rows).lines()


class _Layout:
    """Places the cells of a table in lines of a width."""

    def __init__(self, width: int, headers: tuple[Text, ...], rows: list[tuple[Text, ...]]) -> None:
        self._width = width
        self._headers, self._rows = headers, rows
        self._last = len(headers) - 1
        self._natural = [max(_text_width(row[column]) for row in (headers, *rows)) for column in range(len(headers))]

    def lines(self) -> Iterator[Text]:
        """Yield the lines of the table, or of the tables into which it is divided."""
        columns, widths = list(range(len(self._headers))), list(self._natural)
        has_last_below = False
        if self._total(columns, widths) > self._width:
            room = self._width - self._total(columns[:-1], widths) - GAP
            if room >= min(MIN_TEXT_CHARS, widths[self._last]):
                widths[self._last] = room
            elif widths[self._last] > MIN_TEXT_CHARS // 2:
                has_last_below = True
                columns.pop()
        excess = self._total(columns, widths) - self._width
        if excess > 0:
            room = max(widths[0] - excess, min(MIN_KEY_CHARS, widths[0]))
            keys = [part for row in (self._headers, *self._rows) for part in self._wrap(row[0], room)]
            widths[0] = max(part.cell_len for part in keys)
        groups = self._group(columns, widths)
        for number, group in enumerate(groups):
            is_last_group = number == len(groups) - 1
            if number:
                yield self._blank()
            for row in (self._headers, *self._rows):
                yield from self._row_lines(row, group, widths)
                if has_last_below and is_last_group and row[self._last].plain:
                    yield from self._below(row[self._last])

    def _group(self, columns: list[int], widths: list[int]) -> list[list[int]]:
        """Divide columns into tables that fit, each with the first column."""
        groups = [columns[:1]]
        for column in columns[1:]:
            if len(groups[-1]) > 1 and self._total([*groups[-1], column], widths) > self._width:
                groups.append(columns[:1])
            groups[-1].append(column)
        return groups

    def _row_lines(self, row: tuple[Text, ...], columns: list[int], widths: list[int]) -> Iterator[Text]:
        cells = [self._wrap(row[column], widths[column]) for column in columns]
        for number in range(max(map(len, cells))):
            line = self._blank()
            for column, cell in zip(columns, cells, strict=True):
                text = cell[number] if number < len(cell) else self._blank()
                padding = " " * (widths[column] - text.cell_len)
                is_left = column in (0, self._last)
                line.append_text(text).append(padding) if is_left else line.append(padding).append_text(text)
                line.append(" " * GAP)
            line.rstrip()
            yield line

    def _below(self, text: Text) -> Iterator[Text]:
        for part in self._wrap(text, self._width - INDENT):
            yield self._blank().append(" " * INDENT).append_text(part)

    def _wrap(self, text: Text, width: int) -> list[Text]:
        """Return the lines of a cell."""
        lines = [part for line in text.split("\n") for part in line.divide(_line_ends(line.plain, width))]
        for line in lines:
            line.rstrip()
        return lines or [text]

    @staticmethod
    def _total(columns: list[int], widths: list[int]) -> int:
        return sum(widths[column] for column in columns) + GAP * max(len(columns) - 1, 0)

    @staticmethod
    def _blank() -> Text:
        from rich.text import Text

        return Text()


def _line_ends(text: str, width: int) -> list[int]:
    """Return where to break a text: behind blanks; a word that is too long behind its punctuation, else anywhere."""
    from rich.cells import cell_len

    ends, start = [], 0
    while cell_len(text[start:]) > width:
        room = text[start : start + width]
        while cell_len(room) > width:
            room = room[:-1]
        is_at_word_end = text[start + len(room)] == " "
        blank = len(room) + 1 if is_at_word_end else room.rfind(" ") + 1
        length = blank or max(room.rfind(mark) for mark in PUNCTUATION) + 1 or max(len(room), 1)
        start += length
        ends.append(start)
    return ends


def _text_width(text: Text) -> int:
    return max((line.cell_len for line in text.split("\n")), default=0)
