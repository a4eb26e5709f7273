"""``memtrace check``: compare a trace with memory limits, for CI."""

from __future__ import annotations

import sys
from dataclasses import asdict, fields
from typing import Final

import click
from memtrace.cli.arguments import Selection, selects_traces
from memtrace.cli.output import console, escape, plain_table, print_json
from memtrace.cli.paths import PathOrUrl
from memtrace.cli.quantities import BYTES_OR_ZERO
from memtrace.cli.tabular import print_csv
from memtrace.cli.workers import Workers, takes_workers

from memtrace.analysis.check import LimitCheck, LimitReport, MemoryLimits
from memtrace.errors import MemtraceError
from memtrace.format.storage import AnyPath
from memtrace.units import format_bytes, format_count, parse_bytes

RESULT: Final = LimitReport
"""The type of what ``--json`` prints."""


@click.command("check")
@selects_traces
@takes_workers
@click.option("--max-peak", type=BYTES_OR_ZERO, help="Maximum peak memory, such as 20GiB, summed over the devices.")
@click.option("--max-growth", type=BYTES_OR_ZERO, help="Maximum growth of live memory per step, such as 1MiB.")
@click.option(
    "--max-category",
    multiple=True,
    metavar="NAME=BYTES",
    help="Maximum memory of a category at the peak, such as activation=8GiB; repeatable.",
)
@click.option(
    "--max-module",
    multiple=True,
    metavar="NAME=BYTES",
    help="Maximum memory of a module and its submodules at the peak, such as GPT.head=1GiB; repeatable.",
)
@click.option(
    "--limits",
    type=PathOrUrl(),
    help="JSON file with limits under peak, growth, categories and modules; the options above take precedence.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON; unknown values are null.")
@click.option("--csv", "as_csv", is_flag=True, help="Print one CSV row per rank and limit.")
def command(
    selection: Selection,
    workers: Workers,
    max_peak: int | None,
    max_growth: int | None,
    max_category: tuple[str, ...],
    max_module: tuple[str, ...],
    limits: AnyPath | None,
    as_json: bool,
    as_csv: bool,
) -> None:
    """Compare TRACE with memory limits, for CI.

    Every rank is checked. The exit code is 0 if all limits hold, 1 if a limit is exceeded or cannot be checked, and 2
    if the trace or a limit cannot be read.

    \b
    Example:
      memtrace check run.memtrace --max-peak 20GiB --max-growth 0
    """
    from memtrace.analysis.check import check_categories, read_limits
    from memtrace.engine.questions import check_ranks

    from_file = read_limits(limits) if limits is not None else MemoryLimits()
    wanted = MemoryLimits(
        peak_bytes=from_file.peak_bytes if max_peak is None else max_peak,
        growth_bytes_per_step=from_file.growth_bytes_per_step if max_growth is None else max_growth,
        category_bytes={**from_file.category_bytes, **_named_bytes("--max-category", max_category)},
        module_bytes={**from_file.module_bytes, **_named_bytes("--max-module", max_module)},
    )
    if wanted.is_empty:
        raise MemtraceError(
            "no limits given; pass --max-peak, --max-growth, --max-category, --max-module or a file with --limits"
        )
    check_categories(wanted)
    trace = selection.open()
    with workers.engine(trace, selection.source) as engine:
        report = check_ranks(engine, trace, selection.source, wanted, selection.rank)
    if as_json:
        print_json(report)
    elif as_csv:
        print_csv([field.name for field in fields(LimitCheck)], map(asdict, report.limits))
    else:
        _print_report(report)
    sys.exit(0 if report.passed else 1)


def _print_report(report: LimitReport) -> None:
    out = console()
    has_ranks = len({check.rank for check in report.limits}) > 1
    names = [f"rank {check.rank}, {check.limit}" if has_ranks else check.limit for check in report.limits]
    table = plain_table("result", "actual", "limit", "check")
    for name, check in zip(names, report.limits, strict=True):
        table.add_row(_status(check), format_bytes(check.actual_bytes), format_bytes(check.limit_bytes), escape(name))
    out.print(table)
    if report.passed:
        out.print("\nAll checks passed.")
        return
    failed = [(name, check) for name, check in zip(names, report.limits, strict=True) if not check.passed]
    out.print(f"\n[bold]{len(failed)} of {format_count(len(report.limits), 'check')} failed.[/]")
    for name, check in failed:
        if check.site is not None:
            out.print(f"Largest allocation site ({escape(name)}): {escape(check.site)}")


def _status(check: LimitCheck) -> str:
    if check.passed:
        return "ok"
    return "UNKNOWN" if check.actual_bytes is None else "EXCEEDED"


def _named_bytes(option: str, texts: tuple[str, ...]) -> dict[str, int]:
    """Return the bytes by name of texts such as ``activation=8GiB``."""
    sizes = {}
    for text in texts:
        name, separator, size = text.rpartition("=")
        if not separator or not name:
            raise MemtraceError(f"{option} {text}: expected NAME=BYTES, such as activation=1GiB")
        try:
            sizes[name] = parse_bytes(size)
        except ValueError as error:
            raise MemtraceError(f"{option} {text}: {error}") from None
    return sizes
