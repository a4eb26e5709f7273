"""``memtrace findings``: memory that is there without need, and what mending it would save."""

from __future__ import annotations

import click
from memtrace.cli.arguments import Selection, selects_traces
from memtrace.cli.output import console, plain_table, print_json
from memtrace.cli.quantities import BYTES
from memtrace.cli.tabular import print_csv
from rich.console import Console
from rich.markup import escape

from memtrace.analysis.findings import FIELDS, DeviceFindings
from memtrace.units import UNKNOWN, format_bytes, format_count


@click.command("findings")
@selects_traces
@click.option("--min-bytes", type=BYTES, help="Leave out what holds less at any time; default a 1,000th of the peak.")
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON; unknown values are null.")
@click.option("--csv", "as_csv", is_flag=True, help="Print the findings as CSV.")
def command(selection: Selection, min_bytes: int | None, as_json: bool, as_csv: bool) -> None:
    """Name memory of TRACE that is there without need, and the peak that would result without it.

    Each is mended on the recorded timeline, and the peak replayed. What moving or deleting a line mends stands first;
    what takes recomputing, swapping or working in place stands behind.
    """
    from memtrace.analysis.findings import findings

    one = selection.open_rank()
    found = [findings(one, device, min_bytes=min_bytes) for device in one.devices]
    if as_json:
        print_json({"devices": [device.as_dict() for device in found]})
    elif as_csv:
        rows = ({"device": device.device} | row.as_dict() for device in found for row in device.findings)
        print_csv(("device", *FIELDS), rows)
    else:
        out = console()
        for device in found:
            _print_device(out, device)


def _print_device(out: Console, device: DeviceFindings) -> None:
    out.print(f"[bold]{device.device}: peak {format_bytes(device.peak_bytes)}[/]")
    if device.peak_if_all_mended_bytes is not None:
        lowest = device.lower_bound_bytes
        bound = (
            "" if lowest is None else f"; one operator touches {format_bytes(lowest)} at most: no order is below that"
        )
        out.print(f"{format_bytes(device.peak_if_all_mended_bytes)} if all were mended that a line mends{bound}")
    for reason in device.not_judged:
        out.print(f"not judged: {escape(reason)}")
    for mechanism, title in ((False, "a line mends it"), (True, "it takes recomputing, swapping or working in place")):
        rows = [row for row in device.findings if row.needs_mechanism == mechanism and row.saved_bytes]
        if not rows:
            continue
        table = plain_table("saves", "peak then", "at once", "blocks", f"{title}: what, where")
        for row in rows[:12]:
            what = (row.name or row.pattern).replace("_", " ")
            table.add_row(format_bytes(row.saved_bytes), format_bytes(row.peak_if_mended_bytes),
            format_bytes(row.bytes), f"{row.num_blocks:,}",
                          escape(f"{what}: {row.site or UNKNOWN} ({row.category})"))  # fmt: skip
        out.print()
        out.print(table)
        for what, advice in dict.fromkeys((row.name or row.pattern, row.advice) for row in rows[:3]):
            out.print(f"try, {what.replace('_', ' ')}: {advice}", soft_wrap=True)
    elsewhere = [row.bytes for row in device.findings if not row.saved_bytes]
    if elsewhere:
        out.print(f"\n{format_count(len(elsewhere), 'finding')} of up to {format_bytes(max(elsewhere))} at other "
                  f"moments than the "
                  "peak, which save nothing of it: --json and --csv list them")  # fmt: skip
    elif not device.findings and device.peak_if_all_mended_bytes is not None:
        out.print("nothing found")
    out.print()
