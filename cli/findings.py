"""``memtrace findings``: wasted memory, and how much each fix would save."""

from __future__ import annotations

from dataclasses import asdict, fields
from functools import partial
from typing import TYPE_CHECKING, Final

import click
from memtrace.cli.arguments import Selection, selects_traces
from memtrace.cli.output import console, escape, plain_table, print_json
from memtrace.cli.quantities import BYTES
from memtrace.cli.tabular import print_csv
from memtrace.cli.workers import Workers, takes_workers

from memtrace.analysis.findings import DeviceWaste, Finding, WastedMemory
from memtrace.units import UNKNOWN, format_bytes, format_count

if TYPE_CHECKING:
    from rich.console import Console

RESULT: Final = WastedMemory
"""The type of what ``--json`` prints."""
MAX_ROWS: Final = 12
"""Most findings of each kind of fix on the terminal."""
_KINDS_OF_FIX: Final = (
    (True, "Single-line fixes"),
    (False, "Fixes that need recomputation, offloading or in-place operators"),
)


@click.command("findings")
@selects_traces
@takes_workers
@click.option(
    "--min-bytes",
    type=BYTES,
    help="Leave out findings that waste less than this, such as 1MiB; default: 1 % of the peak.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON; unknown values are null.")
@click.option("--csv", "as_csv", is_flag=True, help="Print one CSV row per finding.")
def command(selection: Selection, workers: Workers, min_bytes: int | None, as_json: bool, as_csv: bool) -> None:
    """Find wasted memory in TRACE and estimate what each fix would save.

    Findings are leaks, retained autograd graphs, unused or redundant allocations, and blocks that are allocated too
    early or freed too late. Each fix is applied to the recorded timeline to compute the new peak. Fixes that change a
    single line are listed first.

    \b
    Examples:
      memtrace findings run.memtrace
      memtrace findings run.memtrace --from-step 900 --to-step 910
    """
    from memtrace.analysis.findings import find_wasted_memory

    trace = selection.open_rank()
    result = workers.ask([(trace, selection.source)], partial(find_wasted_memory, min_bytes=min_bytes))
    if as_json:
        print_json(result)
    elif as_csv:
        rows = ({"device": waste.device} | asdict(finding) for waste in result.devices for finding in waste.findings)
        print_csv(("device", *(field.name for field in fields(Finding))), rows)
    else:
        out = console()
        for waste in result.devices:
            _print_device(out, waste)


def _print_device(out: Console, waste: DeviceWaste) -> None:
    out.print(f"[bold]{waste.device}: {format_bytes(waste.peak_bytes)} peak[/]")
    if waste.peak_if_all_fixed_bytes is None:
        for skipped in waste.skipped_patterns:
            out.print(f"No pattern could be checked: {escape(skipped.reason)}.")
        return
    saving = [finding for finding in waste.findings if finding.saved_bytes]
    limits = []
    if any(finding.is_single_line_fix for finding in saving):
        limits.append(f"All single-line fixes together: {format_bytes(waste.peak_if_all_fixed_bytes)}.")
    if waste.lower_bound_bytes is not None:
        limits.append(f"No schedule can go below {format_bytes(waste.lower_bound_bytes)}.")
    if limits:
        out.print(" ".join(limits))
    for skipped in waste.skipped_patterns:
        out.print(f"Not checked: {', '.join(skipped.patterns)} ({escape(skipped.reason)}).")
    for is_single_line_fix, title in _KINDS_OF_FIX:
        findings = [finding for finding in saving if finding.is_single_line_fix == is_single_line_fix]
        if findings:
            _print_findings(out, title, findings)
    _print_rest(out, waste)
    out.print()


def _print_findings(out: Console, title: str, findings: list[Finding]) -> None:
    """Print a table per pattern, each under the advice on how to fix it."""
    out.print(f"\n[bold]{title}[/]")
    shown = findings[:MAX_ROWS]
    for pattern in dict.fromkeys(finding.pattern for finding in shown):
        rows = [finding for finding in shown if finding.pattern == pattern]
        out.print(f"\n{pattern.capitalize()}: {rows[0].advice}")
        table = plain_table("saves", "new peak", "blocks", "allocation site [module] (category)")
        for row in rows:
            table.add_row(
                f"{'up to ' if row.is_upper_bound else ''}{format_bytes(row.saved_bytes)}",
                format_bytes(row.peak_if_fixed_bytes),
                f"{row.num_blocks:,}",
                escape(f"{_place(row)}{f' [{row.module}]' if row.module else ''} ({_spaced(row.category)})"),
            )
        out.print(table)
    if len(findings) > MAX_ROWS:
        out.print(f"\n{len(findings) - MAX_ROWS} more are in the output of --json and --csv.")


def _print_rest(out: Console, waste: DeviceWaste) -> None:
    """Print how much there is besides the findings that lower the peak."""
    if not waste.findings:
        out.print(f"No wasted memory of {format_bytes(waste.min_bytes)} or more was found.")
        return
    off_peak = [finding.wasted_bytes for finding in waste.findings if not finding.saved_bytes]
    if off_peak:
        out.print(
            f"\n{format_count(len(off_peak), 'finding')} of up to {format_bytes(max(off_peak))} would not lower the "
            "peak; --json and --csv list them."
        )


def _place(finding: Finding) -> str:
    """Return the allocation site, or why it is unknown."""
    reason = f": {finding.no_stack_reason}" if finding.no_stack_reason else ""
    return finding.site or f"{UNKNOWN}{reason}"


def _spaced(category: str) -> str:
    return category.replace("_", " ")
