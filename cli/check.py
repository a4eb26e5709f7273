"""``memtrace check``: limits on a trace, made for CI."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from memtrace.cli.arguments import Selection, selects_traces
from memtrace.cli.output import console, plain_table, print_json
from memtrace.cli.quantities import BYTES_OR_ZERO
from memtrace.cli.tabular import print_csv
from rich.markup import escape

from memtrace.errors import MemtraceError
from memtrace.units import UNKNOWN, format_bytes


@click.command("check")
@selects_traces
@click.option("--max-peak", type=BYTES_OR_ZERO, help="Most requested bytes live at once, devices added.")
@click.option("--max-growth", type=BYTES_OR_ZERO, help="Most bytes by which a step may leave more live than the last.")
@click.option("--max-category", multiple=True, metavar="NAME=BYTES", help="Most held at the peak; repeat for more.")
@click.option("--max-module", multiple=True, metavar="NAME=BYTES", help="The same of a module with all in it.")
@click.option("--limits", type=click.Path(path_type=Path), help="The same in a JSON file.")
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON.")
@click.option("--csv", "as_csv", is_flag=True, help="Print the same as CSV.")
def command(
    selection: Selection,
    max_peak: int | None,
    max_growth: int | None,
    max_category: tuple[str, ...],
    max_module: tuple[str, ...],
    limits: Path | None,
    as_json: bool,
    as_csv: bool,
) -> None:
    """Check TRACE against limits. Exit code 1 where one is broken, with the line that holds most of it; 0 where all are
    kept; 2 where the trace or a limit cannot be read.
    """
    from memtrace.analysis.check import Limits, check, read_limits

    told = read_limits(limits, _bytes) if limits is not None else Limits()
    wanted = Limits(
        told.peak if max_peak is None else max_peak,
        told.growth if max_growth is None else max_growth,
        told.categories | _pairs(max_category),
        told.modules | _pairs(max_module),
    )
    if not wanted:
        raise MemtraceError("nothing to check: give --max-peak, --max-growth, --max-category, --max-module or --limits")
    opened = selection.open()
    # A rank that cannot be opened has not kept its limits: the error that it raises below is the answer.
    ranks = sorted({*opened.ranks, *opened.unreadable}) if selection.rank is None else [selection.rank]
    rows = [{"rank": n} | verdict.as_dict() for n in ranks for verdict in check(opened.rank(n), wanted)]
    passed = all(row["passed"] for row in rows)
    if as_json:
        print_json({"passed": passed, "limits": rows})
    elif as_csv:
        print_csv(("rank", "limit", "allowed_bytes", "found_bytes", "passed", "site"), rows)
    else:
        table = plain_table("", "rank", "found", "allowed", "limit: line that holds most of it")
        for row in rows:
            where = escape(f"{row['limit']}: {row['site'] or UNKNOWN}")
            table.add_row("ok" if row["passed"] else "BROKEN", str(row["rank"]), format_bytes(row["found_bytes"]),
                          format_bytes(row["allowed_bytes"]), where)  # fmt: skip
        console().print(table)
    sys.exit(0 if passed else 1)


def _bytes(value: object) -> int:
    try:
        return BYTES_OR_ZERO.convert(str(value), None, None)  # a number of JSON may be negative too
    except click.UsageError as error:
        raise ValueError(error.message) from None


def _pairs(texts: tuple[str, ...]) -> dict[str, int]:
    pairs = {}
    for text in texts:
        name, equals, value = text.rpartition("=")
        if not equals or not name:
            raise MemtraceError(f"{text!r} is no NAME=BYTES, such as activation=1GiB")
        try:
            pairs[name] = _bytes(value)
        except ValueError as error:
            raise MemtraceError(f"{text!r}: {error}") from None
    return pairs
