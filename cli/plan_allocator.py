"""``memtrace plan allocator``: predicts reserved memory under other settings of the CUDA caching allocator."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Final

import click
from memtrace.cli.arguments import Selection, selects_traces
from memtrace.cli.feedback import FEEDBACK
from memtrace.cli.output import console, plain_table, print_json
from memtrace.cli.quantities import BYTES
from rich.markup import escape

from memtrace.allocator.plan import AllocatorPlan
from memtrace.units import format_bytes, format_count

if TYPE_CHECKING:
    from memtrace.cli.tables import PlainTable

    from memtrace.allocator.plan import CapacityEstimate, DeviceAllocatorPlan
    from memtrace.allocator.replay import ReplayResult
    from memtrace.allocator.settings import AllocatorSettings
    from memtrace.allocator.what_if import AllocatorPrediction
    from memtrace.trace import Trace

RESULT: Final = AllocatorPlan
LEGEND: Final = (
    "Peak: most memory reserved. Change: against the recorded settings. Unused: reserved but not "
    "allocated at the peak. +/-: error of the prediction."
)


@click.command("allocator")
@selects_traces
@click.option(
    "--setting",
    "texts",
    multiple=True,
    metavar="KEY:VALUE[,...]",
    help="Setting to simulate, written as in PYTORCH_CUDA_ALLOC_CONF. May be repeated; default: a sweep.",
)
@click.option("--sweep", is_flag=True, help="Simulate a sweep of common settings in addition to --setting.")
@click.option(
    "--capacity",
    type=BYTES,
    help="Memory that the device gives to the process, e.g. 24GiB; default: estimated from the trace.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON; unknown values are null.")
def command(selection: Selection, texts: tuple[str, ...], sweep: bool, capacity: int | None, as_json: bool) -> None:
    """Predict reserved memory under other CUDA allocator settings.

    Replays the requests of TRACE in a model of the CUDA caching allocator. The replay under the recorded settings is
    compared with the recording; predictions are made only if it is exact. For a trace without CUDA memory, the command
    estimates what a GPU would reserve for the same requests.

    \b
    Examples:
      memtrace plan allocator snapshot.pickle --capacity 24GiB
      memtrace plan allocator run.memtrace --setting max_split_size_mb:64 --sweep
    """
    from memtrace.allocator.settings import AllocatorSettings

    requested = [AllocatorSettings.parse(text) for text in texts]
    trace = selection.open_rank()
    plan = _make_plan(trace, _settings_to_simulate(requested, sweep, capacity), capacity)
    if as_json:
        print_json(plan)
        return
    for device in plan.devices:
        _print_device(device)
    if not plan.devices:
        console().print("The trace has no memory events.")


def _settings_to_simulate(
    requested: list[AllocatorSettings], sweep: bool, capacity: int | None
) -> list[AllocatorSettings] | None:
    """Return the settings to simulate; None: the default sweep."""
    from memtrace.allocator.settings import AllocatorSettings
    from memtrace.allocator.what_if import GC_SWEEP, SWEEP

    if not requested:
        return None
    texts = SWEEP + (GC_SWEEP if capacity is not None else ()) if sweep else ()
    return requested + [settings for settings in map(AllocatorSettings.parse, texts) if settings not in requested]


def _make_plan(trace: Trace, settings: list[AllocatorSettings] | None, capacity: int | None) -> AllocatorPlan:
    from memtrace.allocator.plan import plan_allocator

    num_simulated = count(1)
    return plan_allocator(
        trace,
        settings,
        capacity=capacity,
        progress=lambda: FEEDBACK.begin(f"simulating settings: {next(num_simulated)} done"),
    )


def _print_device(plan: DeviceAllocatorPlan) -> None:
    out = console()
    out.print(plan.device, style="bold")
    for line in (_replay_line(plan.replay), _capacity_line(plan.capacity), *(f"Note: {note}" for note in plan.notes)):
        out.print(escape(line))
    if plan.predictions:
        out.print()
        out.print(_settings_table(plan))
        out.print(LEGEND, style="dim")
        out.print()
    for sentence in plan.advice:
        out.print(escape(sentence))
    if plan.suggestion is not None:
        # A setting can be pasted only if it stays on one line.
        out.print(f"    {escape(plan.suggestion.environment_setting)}", style="cyan", soft_wrap=True)
    out.print()


def _replay_line(replay: ReplayResult | None) -> str:
    if replay is None:
        return "Replay: not possible, because the trace has no CUDA allocator history."
    return (
        f"Replay: {'exact' if replay.is_exact else 'NOT exact'}. "
        f"{replay.num_allocations_exact:,} of {format_count(replay.num_allocations, 'allocation')} at the "
        "recorded address, "
        f"{replay.num_segment_events_exact:,} of {format_count(replay.num_segment_events, 'segment event')} predicted, "
        f"peak reserved {format_bytes(replay.peak_reserved_bytes)} "
        f"(recorded {format_bytes(replay.recorded_peak_reserved_bytes)}), "
        f"final blocks {'match' if replay.final_blocks_match else 'do not match'}."
    )


def _capacity_line(capacity: CapacityEstimate) -> str:
    if capacity.stated_bytes is not None:
        return f"Capacity: {format_bytes(capacity.stated_bytes)}, from --capacity."
    if capacity.low_bytes is None or capacity.high_bytes is None:
        if capacity.device_bytes is not None:
            return (
                f"Capacity: less than {format_bytes(capacity.device_bytes)}, the memory of the device: contexts and "
                "other processes need a part. Pass --capacity to see which settings fit."
            )
        return "Capacity: unknown. Pass --capacity to see which settings fit."
    estimate = ""
    if capacity.estimate_bytes is not None:
        estimate = (
            f" About {format_bytes(capacity.estimate_bytes)}, from the free memory reported when a request failed."
        )
    return (
        f"Capacity: {format_bytes(capacity.low_bytes)} to {format_bytes(capacity.high_bytes)}, from the requests "
        f"that the device served and refused.{estimate}"
    )


def _settings_table(plan: DeviceAllocatorPlan) -> PlainTable:
    """Return the table of predictions, without columns that are zero or unknown in every row: it fits 80 columns."""
    predictions = plan.predictions
    has_spread = any(prediction.spread_bytes for prediction in predictions)
    has_fits = any(prediction.fits_at_low is not None for prediction in predictions)
    headers = ["Setting", "Peak", "Change", "+/-", "Unused", "Fits"]
    shown = [True, True, True, has_spread, True, has_fits]
    table = plain_table(*(header for header, is_shown in zip(headers, shown, strict=True) if is_shown))
    for prediction in predictions:
        name = prediction.setting.replace(",", ",\n")
        if prediction.is_recorded and plan.replay is not None:
            name += " (recorded)"
        cells = [
            name,
            format_bytes(prediction.peak_reserved_bytes),
            _format_change(prediction),
            format_bytes(prediction.spread_bytes),
            format_bytes(prediction.unused_at_peak_bytes),
            _format_fits(prediction),
        ]
        table.add_row(*(cell for cell, is_shown in zip(cells, shown, strict=True) if is_shown))
    return table


def _format_change(prediction: AllocatorPrediction) -> str:
    change = prediction.change_bytes
    if change is None or prediction.is_recorded:
        return ""
    return ("+" if change > 0 else "") + format_bytes(change)


def _format_fits(prediction: AllocatorPrediction) -> str:
    if prediction.fits is not None:
        return "yes" if prediction.fits else "no"
    return "maybe" if prediction.fit_rank else "unknown"
