"""Tables fit every width, and lose no text."""

from __future__ import annotations

import io

from hypothesis import given, settings
from hypothesis import strategies as st
from memtrace.cli.output import plain_table
from memtrace.cli.safe_console import SafeConsole
from memtrace.cli.tables import MIN_KEY_CHARS

NUMBERS = st.integers(0, 10**9).map(lambda number: f"{number:,}")
TEXTS = st.lists(st.text("abcdef_.:", min_size=1, max_size=18), min_size=1, max_size=8).map(" ".join)


def render(headers: list[str], rows: list[list[str]], width: int) -> list[str]:
    table, out = plain_table(*headers), io.StringIO()
    for row in rows:
        table.add_row(*row)
    SafeConsole(file=out, width=width, highlight=False).print(table)
    return out.getvalue().splitlines()


@settings(deadline=None, max_examples=30)
@given(st.data(), st.integers(1, 9), st.integers(MIN_KEY_CHARS + 20, 120))
def test_no_line_is_too_long_and_no_word_is_lost(data: st.DataObject, num_numbers: int, width: int) -> None:
    headers = ["site", *(f"column {number}" for number in range(num_numbers)), "details of it"]
    cells = st.tuples(TEXTS, *[NUMBERS] * num_numbers, TEXTS).map(list)
    rows = data.draw(st.lists(cells, max_size=4))
    lines = render(headers, rows, width)
    assert all(len(line) <= width and line == line.rstrip() for line in lines)
    printed = "".join("".join(lines).split())
    for text in [*headers, *(cell for row in rows for cell in row)]:
        for word in text.split():
            assert word in printed or len(word) > MIN_KEY_CHARS


def test_a_narrow_terminal_continues_the_columns_in_a_further_table() -> None:
    headers = ["rank", "peak", "parameter", "gradient", "activation"]
    lines = render(headers, [["0", "1.66 GiB", "478 MiB", "1.54 GiB", "1,002 MiB"]], 34)
    assert lines == [
        "rank      peak  parameter",
        "0     1.66 GiB    478 MiB",
        "",
        "rank  gradient  activation",
        "0     1.54 GiB  1,002 MiB",
    ]


def test_a_last_column_without_room_goes_below_its_row() -> None:
    headers = ["at peak", "block", "intervals", "median", "allocation site"]
    row = ["32.0 MiB", "4.00 MiB", "167", "379 ms", "examples/gpt.py:45 Block.forward"]
    assert render(headers, [row], 50) == [
        "at peak      block  intervals  median",
        "    allocation site",
        "32.0 MiB  4.00 MiB        167  379 ms",
        "    examples/gpt.py:45 Block.forward",
    ]


def test_a_long_name_continues_behind_its_punctuation() -> None:
    row = ["chimera:f=2,method=doubling", "1.82 s", "157 MiB"]
    assert render(["schedule", "step", "peak"], [row], 40) == [
        "schedule           step  peak",
        "chimera:f=2,     1.82 s  157 MiB",
        "method=doubling",
    ]


def test_brackets_in_headers_are_no_markup() -> None:
    assert render(["saves", "site [module]"], [["1 B", "x"]], 80)[0] == "saves  site [module]"
