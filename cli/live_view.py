"""What ``memtrace live`` shows of recordings at one moment: a screen, or lines for a pipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from memtrace.cli.output import escape, fact_table, plain_table

from memtrace.categories import CATEGORY_LABELS
from memtrace.units import UNKNOWN, format_bytes, format_count, format_duration, format_long_duration, format_share

if TYPE_CHECKING:
    from memtrace.cli.live import WatchedDevice
    from rich.console import Group

    from memtrace.analysis.live import LiveMeasures
    from memtrace.analysis.live_recording import LiveRecording
    from memtrace.format.live_status import LiveSample

_BARS: Final = "▁▂▃▄▅▆▇█"
_MAX_SPARK: Final = 60
_STATES: Final = {
    "running": "recording",
    "finished": "ended",
    "stopped": "the process ended before the recording did",
    "unknown": "nothing recorded for some seconds",
}


def draw_screen(
    name: str, recordings: Mapping[int, LiveRecording], devices: Sequence[WatchedDevice], width: int
) -> Group:
    """Return the screen: a line for each rank, a table of the devices, and the fullest device in detail."""
    from rich.console import Group

    heads = [_head(name, rank, recording, len(recordings) > 1) for rank, recording in recordings.items()]
    parts: list[object] = [*heads]
    if len(devices) > 1:
        parts += ["", _device_table(devices)]
    if devices:
        parts += ["", _detail(max(devices, key=_fullness), width)]
    return Group(*parts)  # type: ignore[arg-type]


def _head(name: str, rank: int, recording: LiveRecording, with_rank: bool) -> str:
    status = recording.status
    of_rank = f", rank {rank}" if with_rank else ""
    head = f"[bold]{escape(name)}[/]{of_rank}: {_STATES[recording.state]}"
    if status is None:
        return head if recording.state != "running" else f"{head}, no events yet"
    return f"{head}, {format_count(status.num_events, 'event')}, {format_long_duration(status.time_ns)}"


def _fullness(device: WatchedDevice) -> tuple[bool, float]:
    """Return how full a device is: share of its capacity, and bytes where no capacity is known."""
    measures = device.measures
    if measures.capacity_bytes:
        return True, measures.live_bytes / measures.capacity_bytes
    return False, float(measures.live_bytes)


def _device_table(devices: Sequence[WatchedDevice]) -> object:
    table = plain_table("rank", "device", "now", "peak", "step", "growth per step", "out of memory")
    for device in devices:
        measures = device.measures
        table.add_row(
            str(device.rank),
            escape(measures.device),
            format_bytes(measures.live_bytes),
            format_bytes(measures.peak_bytes),
            UNKNOWN if measures.step is None else f"{measures.step.number:,}",
            _growth(measures),
            _out_of_memory(measures, short=True),
        )
    return table


def _detail(device: WatchedDevice, width: int) -> object:
    measures, table = device.measures, fact_table()
    now = format_bytes(measures.live_bytes)
    if measures.capacity_bytes:
        share = format_share(measures.live_bytes, measures.capacity_bytes)
        now += f" of {format_bytes(measures.capacity_bytes)} ({share})"
    table.add_row("Device", escape(measures.device))
    table.add_row("Memory now", now)
    if spark := sparkline(device.samples, measures.device, min(_MAX_SPARK, width - 20)):
        table.add_row("Last minutes", spark)
    reserved = "" if measures.reserved_bytes is None else f", reserved {format_bytes(measures.reserved_bytes)}"
    table.add_row("Peak so far", f"{format_bytes(measures.peak_bytes)}{reserved}")
    table.add_row("This step", _step(measures))
    table.add_row("Growth", _growth(measures) + (" per step" if measures.growth_bytes_per_step else ""))
    table.add_row("Out of memory", _out_of_memory(measures))
    categories = sorted(measures.category_bytes.items(), key=lambda item: -item[1])
    if categories:
        texts = [f"{CATEGORY_LABELS[name].lower()} {format_bytes(num_bytes)}" for name, num_bytes in categories]
        table.add_row("Categories", ", ".join(texts))
    for place, site in enumerate(device.sites):
        size = f"{format_bytes(site.bytes_per_step)} per step"
        text = site.site or "(no call stack recorded)"
        table.add_row("Growing sites" if place == 0 else "", f"{size}  {escape(text)}")
    return table


def sparkline(samples: Sequence[LiveSample], device: str, width: int) -> str:
    """Return the highest live bytes of a device in equal runs of samples as bars, from 0 to the highest of them."""
    values = [sample.peak_bytes.get(device, 0) for sample in samples][-width:] if width > 0 else []
    highest = max(values, default=0)
    if highest <= 0:
        return ""
    return "".join(_BARS[min(len(_BARS) - 1, value * len(_BARS) // (highest + 1))] for value in values)


def _step(measures: LiveMeasures) -> str:
    step = measures.step
    if step is None:
        return "unknown: no step has ended"
    return (
        f"step {step.number:,}: {format_bytes(step.peak_bytes)} after {format_duration(step.duration_ns)} "
        f"(usually {format_bytes(step.usual_peak_bytes)} in {format_duration(step.usual_duration_ns)})"
    )


def _growth(measures: LiveMeasures) -> str:
    growth = measures.growth_bytes_per_step
    if growth is None:
        return UNKNOWN
    return format_bytes(growth) if growth > 0 else "none"


def _out_of_memory(measures: LiveMeasures, *, short: bool = False) -> str:
    growth = measures.growth_bytes_per_step
    if growth is not None and growth <= 0:
        return "no growth" if short else "not expected: memory does not grow"
    if measures.steps_to_capacity is None:
        why = "capacity unknown, pass --capacity" if measures.capacity_bytes is None else "too few steps"
        return UNKNOWN if short else f"{UNKNOWN}: {why}"
    duration = format_long_duration(measures.ns_to_capacity)
    return duration if short else f"in {duration}, after {format_count(measures.steps_to_capacity, 'step')}"


def plain_lines(recordings: Mapping[int, LiveRecording], devices: Sequence[WatchedDevice]) -> Iterator[str]:
    """Return one line for each device."""
    for device in devices:
        measures, status = device.measures, recordings[device.rank].status
        assert status is not None
        step = "" if measures.step is None else f", step {measures.step.number}"
        yield (
            f"{format_duration(status.time_ns)}: rank {device.rank}, {measures.device}{step}: "
            f"{format_bytes(measures.live_bytes)} now, peak {format_bytes(measures.peak_bytes)}, "
            f"growth per step: {_growth(measures)}, out of memory: {_out_of_memory(measures, short=True)}"
        )
