"""Records each test of a pytest run and checks its limits; see ``memtrace.integrations.pytest_plugin``."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from memtrace.analysis.growth import measure_growth
from memtrace.analysis.steps import step_columns
from memtrace.analysis.summary import summarize_peak
from memtrace.categories import describe_category_share
from memtrace.errors import MemtraceError
from memtrace.integrations.adapter import RecorderAdapter
from memtrace.integrations.peak_text import added_peak_bytes, describe_peak_holders
from memtrace.recording.out_of_memory import is_out_of_memory
from memtrace.trace import Trace, load
from memtrace.units import format_bytes, format_count, format_share, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Generator

PROPERTY_PREFIX: Final = "memtrace_"


@dataclass(frozen=True)
class MarkerLimits:
    """The limits that a marker gives a test, in bytes; None: no limit."""

    peak_bytes: int | None
    growth_bytes_per_step: int | None


@dataclass(frozen=True)
class MeasuredTest:
    """The memory of a test, which goes with the properties of its report (and into JUnit files)."""

    name: str
    peak_bytes: int
    """The peak above what was live when the test began, on the device where that is highest."""
    device: str
    held_by: str
    """The category that holds most of that device's peak."""

    @classmethod
    def of_report(cls, report: object) -> MeasuredTest | None:
        """Return the memory of the test of a report; None for other reports and where nothing was recorded."""
        if not isinstance(report, pytest.TestReport) or report.when != "call":
            return None
        properties = dict(report.user_properties)
        values = {field.name: properties.get(f"{PROPERTY_PREFIX}{field.name}") for field in fields(cls)}
        if values["peak_bytes"] is None:
            return None
        return cls(**values | {"name": report.nodeid})  # type: ignore[arg-type]


def read_marker(marker: pytest.Mark) -> MarkerLimits:
    """Return the limits of a marker.

    Raises:
        ValueError: the marker has no limit, an unknown argument or an invalid size; the message says which.
    """
    unknown = sorted(set(marker.kwargs) - {"peak", "max_growth"})
    if unknown or len(marker.args) > 1 or (marker.args and "peak" in marker.kwargs):
        raise ValueError(f'{marker.name} takes a peak such as "100 MiB" and max_growth; remove the other arguments')
    peak = marker.args[0] if marker.args else marker.kwargs.get("peak")
    growth = marker.kwargs.get("max_growth")
    if peak is None and growth is None:
        raise ValueError(f'{marker.name} has no limit; pass a peak such as "100 MiB", or max_growth')
    try:
        return MarkerLimits(_size(peak), _size(growth))
    except ValueError as error:
        raise ValueError(f"{marker.name}: {error}") from None


def _size(value: object) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    return parse_bytes(value) if isinstance(value, str) else parse_bytes(repr(value))


class ItemRecorder:
    """Records the call of each test.

    Args:
        markers: names of the markers that limit a test.
        folder: where traces are kept; None: they are deleted.
    """

    def __init__(self, markers: Sequence[str], folder: str | None) -> None:
        self._markers = markers
        self._folder = None if folder is None else Path(folder).absolute()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Record a test; a test that passes fails if it exceeds a limit."""
        limits = self._limits(item)
        with self._trace_path(item) as path:
            adapter = RecorderAdapter(path)
            try:
                adapter.start()
            except Exception as error:
                adapter.disable(error)
            try:
                result = yield
            except BaseException as error:
                adapter.end(error)
                self._describe_failure(item, adapter, error)
                raise
            adapter.end()
            trace = _load(adapter)
            _add_properties(item, trace)
            if limits is not None and (failure := check_limits(trace, limits)) is not None:
                pytest.fail(failure, pytrace=False)
        return result

    def _limits(self, item: pytest.Item) -> MarkerLimits | None:
        marker = next((mark for mark in item.iter_markers() if mark.name in self._markers), None)
        if marker is None:
            return None
        try:
            return read_marker(marker)
        except ValueError as error:
            message = str(error)
        return pytest.fail(message, pytrace=False)

    def _describe_failure(self, item: pytest.Item, adapter: RecorderAdapter, error: BaseException) -> None:
        trace = _load(adapter)
        _add_properties(item, trace)
        if trace is not None and is_out_of_memory(error):
            item.add_report_section("call", "memtrace", "\n".join(_peak_lines(trace)))

    def _trace_path(self, item: pytest.Item) -> _TracePath:
        return _TracePath(self._folder, re.sub(r"[^\w.-]+", "-", item.nodeid).strip("-")[-150:])


class _TracePath:
    """The folder of a test's trace, deleted after the ``with`` block unless traces are kept."""

    def __init__(self, kept_in: Path | None, name: str) -> None:
        self._kept_in = kept_in
        self._name = name
        self._temporary: str | None = None

    def __enter__(self) -> Path:
        if self._kept_in is None:
            self._temporary = tempfile.mkdtemp(prefix="memtrace-")
        return Path(self._temporary or str(self._kept_in)) / f"{self._name}.memtrace"

    def __exit__(self, *_: object) -> None:
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)


def check_limits(trace: Trace | None, limits: MarkerLimits) -> str | None:
    """Return why a test exceeds its limits, with what held the peak; None if it does not.

    Args:
        trace: the trace of the test; None: nothing was recorded, so that no limit can be checked.
        limits: of the test.
    """
    if trace is None:
        return "memory limit not checked: memtrace recorded nothing; a warning says why"
    failures = [*_peak_failures(trace, limits.peak_bytes), *_growth_failures(trace, limits.growth_bytes_per_step)]
    return "\n".join([*failures, *_peak_lines(trace)]) if failures else None


def _peak_failures(trace: Trace, limit_bytes: int | None) -> Iterator[str]:
    for device in trace.devices:
        added = added_peak_bytes(trace, device)
        if limit_bytes is not None and added > limit_bytes:
            yield (
                f"memory limit exceeded: the test needs {format_bytes(added)} on {device}, "
                f"the limit is {format_bytes(limit_bytes)}"
            )


def _growth_failures(trace: Trace, limit_bytes: int | None) -> Iterator[str]:
    if limit_bytes is None:
        return
    growth = measure_growth(trace)
    if growth is None:
        num_steps = format_count(len(step_columns(trace)), "training step")
        yield (
            f"memory growth unknown: the test has {num_steps}, too few to measure growth per step; train for more "
            "steps or remove max_growth"
        )
    elif growth.bytes_per_step > limit_bytes:
        yield (
            f"memory growth exceeded: {format_bytes(growth.bytes_per_step)} per training step stay live, the limit is "
            f"{format_bytes(limit_bytes)}"
        )
        yield from (f"  {format_bytes(source.bytes_per_step)} per step at {source.site}" for source in growth.sources)


def _peak_lines(trace: Trace) -> list[str]:
    return [line for device in trace.devices for line in describe_peak_holders(trace, device)]


def _load(adapter: RecorderAdapter) -> Trace | None:
    recording = adapter.recording
    if adapter.is_disabled or recording is None:
        return None
    try:
        return load(recording.rank_folder)
    except (MemtraceError, OSError):
        return None


def _add_properties(item: pytest.Item, trace: Trace | None) -> None:
    if trace is None or not trace.devices:
        return
    device = max(trace.devices, key=lambda name: added_peak_bytes(trace, name))
    measured = MeasuredTest(item.nodeid, added_peak_bytes(trace, device), device, _largest_category(trace, device))
    properties = {name: value for name, value in asdict(measured).items() if name != "name"}
    item.user_properties += [(f"{PROPERTY_PREFIX}{name}", value) for name, value in properties.items()]


def _largest_category(trace: Trace, device: str) -> str:
    peak = summarize_peak(trace, device)
    if not peak.by_category:
        return "no memory"
    largest = max(peak.by_category, key=lambda category: peak.by_category[category])
    return describe_category_share(largest, format_share(peak.by_category[largest], peak.bytes))
