"""``memtrace summary``: where the memory went, on one screen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from memtrace.cli.arguments import Selection, selects_traces
from memtrace.cli.failure import NO_STACK, moment, print_failure
from memtrace.cli.output import console, escape, plain_table, print_json, working

from memtrace.format.schema import NO_BLOCKS
from memtrace.units import UNKNOWN, format_bytes, format_count, format_duration, format_share

if TYPE_CHECKING:
    from rich.console import Console


@click.command("summary")
@selects_traces
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON; unknown values are null.")
def command(selection: Selection, as_json: bool) -> None:
    """Say on one screen where the memory of TRACE went: what held the peak, and which line put it there.

    TRACE is a *.memtrace folder or a file of another tool; several files are the ranks of one job.
    """
    opened = selection.open(preload="memtrace.analysis.summary")
    from memtrace.analysis.summary import summary

    ranks = opened.ranks
    with working(f"reading {selection.name}"):
        found = {number: summary(opened.rank(number)) for number in ranks}
    if as_json:
        print_json(found[ranks[0]] if len(ranks) == 1 else {"ranks": [{"rank": n, **found[n]} for n in ranks]})
        return
    out = console()
    if len(ranks) > 1:
        _print_ranks(out, found)
    worst = max(
        found,
        key=lambda number: max((peak_bytes(device["peak"]) for device in found[number]["devices"]), default=0),
    )
    print_summary(out, selection.name, found[worst])


def _print_ranks(out: Console, found: dict[int, dict[str, Any]]) -> None:
    table = plain_table("rank", "device", "peak", "at the end", "phase")
    for number, one in found.items():
        for device in one["devices"]:
            peak = device["peak"]
            table.add_row(str(number), device["device"], format_bytes(peak_bytes(peak)),
                          format_bytes(device["live_requested_bytes_at_end"]),
                          str(peak["phase"] or UNKNOWN))  # fmt: skip
    out.print(table)
    out.print("The rank with the highest peak:\n")


def peak_bytes(peak: dict[str, Any]) -> int:
    """The requested bytes of a peak; the allocator's where requests are not told."""
    requested, allocated = peak["requested_bytes"], peak["allocated_bytes"]
    return int(requested if requested is not None else allocated or 0)


def print_summary(out: Console, name: str, found: dict[str, Any]) -> None:
    """Print the summary of one rank."""
    _print_coverage(out, name, found)
    for device in found["devices"]:
        _print_device(out, device)
    for failure in found["out_of_memory"]:
        print_failure(out, failure, name)
    if not found["devices"]:
        out.print("No memory events were recorded.")
    _print_steps(out, found["steps"])
    _print_patterns(out, found["patterns"])
    out.print(f"\nNext: memtrace report {escape(name)} -o report.html", style="dim")


def _print_coverage(out: Console, name: str, found: dict[str, Any]) -> None:
    told, source = found["coverage"], found["source"]
    first, last = told["first_event_ns"], told["last_event_ns"]
    span = f" in {format_duration(last - first)}" if first is not None else ""
    out.print(
        f"[bold]{escape(name)}[/]  {_origin(source)}: {told['num_events']:,} events{span}, "
        f"{format_count(told['num_steps'], 'step')}",
        soft_wrap=True,
    )
    lost = UNKNOWN if told["lost_events"] is None else f"{told['lost_events']:,}"
    out.print(
        f"coverage: lost events {lost}, older than the recording {format_bytes(told['baseline_bytes'])}, of unknown "
        f"category "
        f"at the peak {format_bytes(told['unattributed_bytes'])}, outside the allocator "
        f"{format_bytes(told['outside_allocator_bytes'])}"
    )
    if not told["finished"]:
        why = told["stop_reason"] or "the process died while recording"
        out.print(f"[bold]unfinished[/]: {escape(why)}; the trace ends at its last flush")
    elif told["stop_reason"]:
        out.print(f"ended early: {escape(told['stop_reason'])}")
    for note in told["notes"]:
        out.print(f"note: {escape(note)}")


def _origin(source: dict[str, Any]) -> str:
    if source.get("kind") == "recording":
        return f"recorded by the {source.get('observer') or UNKNOWN} observer"
    return str(source.get("kind") or UNKNOWN).replace("_", " ")


def _print_device(out: Console, device: dict[str, Any]) -> None:
    peak = device["peak"]
    total = peak_bytes(peak)
    where = ", ".join(
        part for part in (f"step {peak['step']}" if peak["step"] is not None else "", peak["phase"] or "") if part
    )
    on_cpu = device["device"] == "cpu"  # whose allocator keeps no segments
    reserved = "nothing reserved beyond that" if on_cpu else f"reserved {format_bytes(peak['reserved_bytes'])}"
    at = "at the start" if peak["event"] < 0 else moment(peak)
    out.print(f"\n[bold]{device['device']}: peak {format_bytes(total)}[/] {at}{f' ({where})' if where else ''}")
    out.print(
        f"allocated {format_bytes(peak['allocated_bytes'])}, {reserved}; "
        f"live at the end {format_bytes(device['live_requested_bytes_at_end'])}"
    )
    if device["fragmentation"]:
        out.print(_fragmentation_line(device["fragmentation"]))
    table = plain_table("held at the peak by category", "size", "share", "")
    for category, held in sorted(peak["by_category"].items(), key=lambda item: -item[1]):
        table.add_row(
            category, format_bytes(held), format_share(held, total), "#" * round(30 * held / total) if total else ""
        )
    out.print()
    out.print(table)
    for title, key, field in (
        ("line that allocated it", "top_sites", "site"),
        ("module", "top_modules", "module"),
    ):
        if all(row[field] is None for row in peak[key]):
            out.print(f"\n{title}: not told")
            continue
        table = plain_table("size", "share", "blocks", title)
        for row in peak[key][:6]:
            table.add_row(
                format_bytes(row["bytes"]),
                format_share(row["bytes"], total),
                str(row["blocks"]),
                escape(row[field] or _NOWHERE[field]),
            )
        out.print()
        out.print(table)


def _fragmentation_line(told: dict[str, Any]) -> str:
    return (
        f"fragmentation: of {format_bytes(told['reserved_bytes'])} reserved in {told['num_segments']} segments "
        f"{format_bytes(told['free_bytes'])} "
        f"stay free when the most is in use ({format_bytes(told['pinned_bytes'])} kept by live blocks), "
        f"{format_bytes(told['waste_bytes'])} "
        f"are rounding; the largest request that fits is {format_bytes(told['largest_fit_bytes'])}"
    )


_NOWHERE = {
    "site": NO_STACK,
    "module": "(in no module call, or not told)",
}


def _print_steps(out: Console, steps: dict[str, Any]) -> None:
    out.print()
    if steps["count"] is None:
        out.print(f"steps: cannot be told, {NO_BLOCKS}")
        return
    if steps["count"] == 0:
        out.print(
            "steps: none were marked and nothing repeats in the events; mark them with rec.step() or rec.steps(loader)"
        )
        return
    wait = steps["data_wait_share"]
    waits = format_share(wait, 1) if wait is not None else UNKNOWN
    allocations = steps["median_allocations"]
    blocks = UNKNOWN if allocations is None else f"{allocations:,}"
    found = " found in the events alone" if steps["source"] == "events" else ""
    out.print(
        f"[bold]steps[/]: {steps['count']}{found}, median {format_duration(steps['median_duration_ns'])}, "
        f"peak {format_bytes(steps['median_peak_bytes'])} (highest {format_bytes(steps['max_peak_bytes'])}), "
        f"allocates {format_bytes(steps['median_allocated_bytes'])} in {blocks} blocks, "
        f"waits for data {waits}"
    )
    growth = steps["growth_bytes_per_step"]
    if growth is None:
        out.print("growth: too few steps to tell")
    elif growth <= 0:
        out.print("growth: nothing grows from step to step")
    else:
        out.print(f"[bold]growth: {format_bytes(growth)} a step[/] stays live:")
        for row in steps["growth_sources"]:
            out.print(f"    {format_bytes(row['bytes_per_step'])} a step  {escape(row['site'])}")


def _print_patterns(out: Console, told: dict[str, Any]) -> None:
    if told["stability_bytes"] is not None:
        out.print(
            f"pattern: a usual step matches the others in {format_share(told['stability_bytes'], 1)} of its bytes"
        )
    if told["leak_site"]:
        out.print(
            f"[bold]leak: {format_bytes(round(told['leak_bytes_per_step']))} a step[/] at {escape(told['leak_site'])}"
        )
    best = told["finding"]
    if best is not None:
        where = f"{best['pattern']} at {escape(best['site'] or UNKNOWN)}"
        out.print(
            f"[bold]finding: {where}[/]; fixing it lowers the peak to {format_bytes(best['peak_if_fixed_bytes'])}"
        )
    if told["swappable_bytes_at_peak"]:
        out.print(
            f"untouched across the peak, long enough to be swapped: {format_bytes(told['swappable_bytes_at_peak'])}"
        )
