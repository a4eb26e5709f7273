"""``memtrace steps``: where the steps are, how alike they are, and what differs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import click
from memtrace.cli.arguments import Selection, selects_traces
from memtrace.cli.output import console, missing_blocks_reason, plain_table, print_json
from memtrace.cli.tabular import print_csv
from rich.console import Console
from rich.markup import escape

from memtrace.units import UNKNOWN, format_bytes, format_count, format_duration, format_share


@click.command("steps")
@selects_traces
@click.option("--from-events", is_flag=True, help="Ignore marks and optimizers: find the steps in the events alone.")
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON; unknown values are null.")
@click.option("--csv", "as_csv", is_flag=True, help="Print one line a step.")
def command(selection: Selection, from_events: bool, as_json: bool, as_csv: bool) -> None:
    """Find the steps of TRACE, with or without marks, and tell whether they are alike."""
    from memtrace.analysis.stability import pattern_as_dict

    one = selection.open_rank()
    found = pattern_as_dict(one, from_events)
    if as_json:
        print_json(found)
    elif as_csv:
        bounds, even = found["boundaries_ns"], {row["step"]: row for row in found["stability"]["by_step"]}
        print_csv(
            ("step", "start_ns", "end_ns", "events", "bytes", "roles"),
            ({"start_ns": a, "end_ns": b, **even.get(n, {}), "step": n}
             for n, (a, b) in enumerate(pairwise(bounds))),
        )  # fmt: skip
    elif reason := missing_blocks_reason(one):
        console().print(f"[bold]{escape(selection.name)}[/]: steps {reason}")
    else:
        _print(console(), selection.name, found)


_SOURCES = {"marks": "as marked by the program or its optimizer", "events": "found in the events alone"}


def _print(out: Console, name: str, found: dict[str, Any]) -> None:
    if not found["iterative"]:
        out.print(
            f"[bold]{escape(name)}[/]: not iterative. Nothing repeats often enough to call it steps "
            f"(confidence {found['confidence']:.2f})."
        )
        return
    bounds = found["boundaries_ns"]
    lasts = sorted(b - a for a, b in pairwise(bounds))[found["num_steps"] // 2] if bounds else None
    out.print(
        f"[bold]{escape(name)}[/]: {format_count(found['num_steps'], 'step')}, {_SOURCES[found['source']]}; a usual "
        f"one has "
        f"{found['period_events']:,} events and takes {format_duration(lasts)}"
    )
    if found["source"] == "events":
        out.print(f"confidence {found['confidence']:.2f}, by the beat of {found['method']}")
    if found["agreement"] is not None:
        out.print(
            f"check: the events alone give {format_share(found['agreement'], 1)} of the marked "
            f"boundaries{_shifted(found)}"
        )
    law = found["law"]
    if law:
        fit = "in every step after warm-up" if law["exact"] else "in the usual step; some differ"
        out.print(f"allocations = {law['constant']:,} + {law['per_step']:,} x steps, {fit}")
    even = found["stability"]
    if even["roles"] is not None:
        shares = ", ".join(f"{format_share(even[what], 1)} of {what}" for what in ("events", "bytes", "roles"))
        out.print(f"stability after warm-up: a usual step matches the others in {shares}")
    odd = [row for row in even["by_step"] if row["bytes"] < 0.99]
    if odd:
        steps = ", ".join(f"{row['step']} ({format_share(row['bytes'], 1)})" for row in odd[:8])
        out.print(f"steps that differ (bytes that match): {steps}{f' and {len(odd) - 8} more' if len(odd) > 8 else ''}")
    _print_differences(out, found["differences"])


def _shifted(found: dict[str, Any]) -> str:
    """That a steady shift explains most of what does not agree: an update of averages after the optimizer, say."""
    shift, agrees = found["shift_events"], found["shifted_agreement"]
    if not shift or agrees < 0.5:
        return ""
    where = f"{format_count(abs(shift), 'event')} {'later' if shift > 0 else 'earlier'}"
    return f", and {format_share(agrees, 1)} of them a steady {where} (frees not counted)"


_HOW = (("missing", "missing in"), ("extra", "only in"), ("other_size", "other size in"),
        ("other_accesses", "other accesses in"))  # fmt: skip


def _print_differences(out: Console, differences: list[dict[str, Any]]) -> None:
    if not differences:
        return
    table = plain_table("roles that differ", "usual size", "how")
    for one in differences:
        how = [f"{text} {_steps(one[key])}" for key, text in _HOW if one[key]]
        table.add_row(escape(one["site"]), format_bytes(one["bytes"]) if one["bytes"] >= 0 else UNKNOWN, "; ".join(how))
    out.print()
    out.print(table)


def _steps(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"step {numbers[0]}"
    return f"{len(numbers)} steps ({', '.join(map(str, numbers[:3]))}{', ...' if len(numbers) > 3 else ''})"
