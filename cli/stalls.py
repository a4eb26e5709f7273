"""``memtrace stalls``: time that training spends waiting for data."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Final

import click
from memtrace.cli.arguments import Selection, selects_traces
from memtrace.cli.output import console, plain_table, print_json
from memtrace.cli.quantities import BYTES
from memtrace.cli.tabular import print_csv
from memtrace.cli.workers import Workers, takes_workers

from memtrace.analysis.cache_share import CacheWhatIf, DataSource
from memtrace.analysis.stalls import DataStalls, StallBreakdown, StepWait
from memtrace.errors import MemtraceError
from memtrace.units import format_count, format_duration, format_share

if TYPE_CHECKING:
    from rich.console import Console

    from memtrace.engine.comparisons import OpenTrace

RESULT: Final = DataStalls
"""The type of what ``--json`` prints."""
MAX_ROWS: Final = 20
"""Most steps on the terminal: those that wait longest."""


@click.command("stalls")
@selects_traces
@takes_workers
@click.option("--synthetic", type=click.Path(), help="Trace of the same job on data generated in memory.")
@click.option("--cached", type=click.Path(), help="Trace of the same job with all data cached.")
@click.option("--cache-share", "shares", type=click.FloatRange(0, 1), multiple=True, metavar="SHARE",
              help="Predict steps with this share of the data set cached, from 0 to 1; repeatable.")  # fmt: skip
@click.option("--step-bytes", type=BYTES, help="Data that one step reads (e.g. 28MiB), with both bandwidths.")
@click.option("--storage-bandwidth", type=BYTES, help="Bytes per second from storage (e.g. 200MB).")
@click.option("--memory-bandwidth", type=BYTES, help="Bytes per second from the cache (e.g. 10GB).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; unknown values are null.")
@click.option("--csv", "as_csv", is_flag=True, help="Print one CSV row per step.")
def command(
    selection: Selection,
    workers: Workers,
    synthetic: str | None,
    cached: str | None,
    shares: tuple[float, ...],
    step_bytes: int | None,
    storage_bandwidth: int | None,
    memory_bandwidth: int | None,
    as_json: bool,
    as_csv: bool,
) -> None:
    """Show how long the steps of TRACE wait for data.

    Given three recordings, the stall is broken down into fetching (from storage) and preprocessing (decoding,
    augmenting): TRACE, recorded with an empty cache, --cached and --synthetic. Recordings with device_time=True are
    measured on the GPU, where a wait is the time without work; others on the host. The steps are then also predicted
    for a cache that holds a share of the data set.

    \b
    Examples:
      memtrace stalls run.memtrace
      memtrace stalls cold.memtrace --cached hot.memtrace --synthetic ram.memtrace
    """
    from memtrace.engine.comparisons import measure_data_stalls

    if (synthetic is None) != (cached is None):
        missing = "--synthetic" if synthetic is None else "--cached"
        raise MemtraceError(f"{missing} is missing: --synthetic and --cached must be given together")
    if shares and cached is None:
        raise MemtraceError("--cache-share needs the recordings --synthetic and --cached.")
    source = _data_source(step_bytes, storage_bandwidth, memory_bandwidth)
    if source is not None and cached is None:
        raise MemtraceError("--step-bytes needs the recordings --synthetic and --cached.")
    recording = _open(selection)
    others = [None if path is None else _open(selection, path) for path in (synthetic, cached)]
    with workers.engine(*recording) as engine:
        result = measure_data_stalls(engine, recording, others[0], others[1], shares, source)
    if as_json:
        print_json(result)
    elif as_csv:
        print_csv([field.name for field in fields(StepWait)], map(asdict, result.steps))
    else:
        _print(console(), result)


def _data_source(step_bytes: int | None, storage: int | None, memory: int | None) -> DataSource | None:
    given = (step_bytes, storage, memory)
    if given == (None, None, None):
        return None
    if step_bytes is None or storage is None or memory is None:
        raise MemtraceError("--step-bytes, --storage-bandwidth and --memory-bandwidth must be given together.")
    return DataSource(step_bytes, storage, memory)


def _open(selection: Selection, path: str | None = None) -> OpenTrace:
    """Open the selected rank of the traces of a selection, or of another path; return how workers open it as well."""
    chosen = selection if path is None else replace(selection, paths=(path,))
    return chosen.open_rank(), chosen.source


def _print(out: Console, result: DataStalls) -> None:
    num_steps = format_count(len(result.steps), "step")
    if not result.steps:
        out.print("The trace has no steps. Mark them with rec.step() or rec.steps(loader).")
        return
    if result.wait_share is None:
        out.print(f"{num_steps}, median {format_duration(result.median_duration_ns)}; time waiting for data: unknown.")
        out.print("Waits are recorded for a DataLoader and for loaders that are passed to rec.steps(loader).")
        out.print(result.clock_note)
    else:
        out.print(f"[bold]{num_steps} spend {format_share(result.wait_share)} of their time waiting for data[/]")
        out.print(
            f"Median step: {format_duration(result.median_duration_ns)}, of which "
            f"{format_duration(result.median_wait_ns)} waiting for data"
        )
        out.print(result.clock_note)
        _print_steps(out, result)
    if result.breakdown is not None:
        _print_breakdown(out, result.breakdown)
    if result.cache is not None:
        _print_cache(out, result.cache)


def _print_steps(out: Console, result: DataStalls) -> None:
    by_device = result.clock == "device"
    table = plain_table("step", "duration", "waiting", "share", *(["waiting on the host"] if by_device else []))
    for row in sorted(result.steps, key=lambda row: -(row.data_wait_ns or 0))[:MAX_ROWS]:
        table.add_row(
            str(row.step),
            format_duration(row.duration_ns),
            format_duration(row.data_wait_ns),
            format_share(row.data_wait_ns, row.duration_ns),
            *([format_duration(row.host_wait_ns)] if by_device else []),
        )
    out.print()
    out.print(table)
    if len(result.steps) > MAX_ROWS:
        out.print(f"The {MAX_ROWS} steps that wait longest; --json and --csv list all {len(result.steps):,}.")


def _print_breakdown(out: Console, breakdown: StallBreakdown) -> None:
    table = plain_table("median step", f"duration ({breakdown.clock} time)", "")
    table.add_row("synthetic data", format_duration(breakdown.synthetic_ns), "")
    table.add_row("cached data", format_duration(breakdown.cached_ns), "")
    table.add_row("cold cache", format_duration(breakdown.cold_ns), "")
    table.add_row("prep stall", format_duration(breakdown.prep_stall_ns), "cached - synthetic (preprocessing)")
    table.add_row("fetch stall", format_duration(breakdown.fetch_stall_ns), "cold - cached (fetching from storage)")
    out.print()
    out.print(table)


def _print_cache(out: Console, cache: CacheWhatIf) -> None:
    reasons = {"ingestion": "computing", "prep": "preprocessing", "supply": "reading"}
    table = plain_table("cached share", "reading", "step", "as slow as")
    for step in cache.steps:
        table.add_row(
            format_share(step.share),
            format_duration(step.supply_ns),
            format_duration(step.step_ns),
            reasons[step.limit],
        )
    out.print()
    out.print(table)
    if cache.enough_share is None:
        out.print("Reading limits the steps even if all data is cached.")
    elif cache.enough_share == 0:
        out.print("Reading does not limit the steps, whatever is cached.")
    else:
        out.print(f"Reading no longer limits the steps if {format_share(cache.enough_share)} of the data are cached.")
    if cache.is_fetch_measured:
        out.print(
            "Reading is taken as the fetch stall; where it overlaps with computing it takes longer. Give --step-bytes "
            "and both bandwidths to predict it.",
            style="dim",
        )
