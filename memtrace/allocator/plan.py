"""The allocator plan of a trace: how exactly each device replays, and what other settings would reserve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from memtrace.allocator.exact_replay import reproduce_exactly
from memtrace.allocator.history import OOM, AllocatorHistory
from memtrace.allocator.infer_rules import reproduce_history
from memtrace.allocator.plan_advice import SuggestedSetting, format_advice, suggest_setting
from memtrace.allocator.replay import PreparedHistory, ReplayResult
from memtrace.allocator.requests import RequestHistory, devices_to_plan, read_device_history
from memtrace.allocator.settings import AllocatorSettings
from memtrace.allocator.what_if import AllocatorPrediction, Workload, predict_settings, sweep_settings
from memtrace.analysis.gaps import find_gaps
from memtrace.display import Displayed
from memtrace.errors import MemtraceError
from memtrace.units import format_count

if TYPE_CHECKING:
    import pandas as pd

    from memtrace.trace import Trace

MAX_SWEPT_ENTRIES: Final = 100_000
"""Longest history that is replayed under many settings unasked: a second or two."""
ESTIMATE_NOTE: Final = (
    "This is an estimate from the requests alone, all on one stream. It does not include the workspaces of cuBLAS "
    "(8.1 MiB per stream, 32 MiB on Hopper) and cuDNN, the CUDA context, and the memory of other libraries."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityEstimate:
    """Bytes that the device gives to the allocator."""

    stated_bytes: int | None
    """As the user states (`--capacity`); None: not stated."""
    low_bytes: int | None
    """Smallest capacity that explains which requests the device refused; None: it refused none."""
    high_bytes: int | None
    """Largest such capacity; None: the device refused no request."""
    estimate_bytes: int | None
    """Bytes held plus bytes that the driver reported free when a request failed; None: none failed."""
    device_bytes: int | None
    """Memory of the device, of which contexts and other processes need a part; None: not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceAllocatorPlan:
    """Replay and predictions for one device."""

    device: str
    replay: ReplayResult | None
    """How exactly the history replays; None: there is none, and the predictions are estimates from the requests."""
    num_older_blocks: int
    """Blocks older than the recording, which every prediction allocates afresh."""
    capacity: CapacityEstimate
    failed_request_bytes: tuple[int, ...]
    """Sizes of the requests that failed in the recording."""
    predictions: tuple[AllocatorPrediction, ...]
    """One per setting, the recorded settings first; empty where the replay is not exact."""
    suggestion: SuggestedSetting | None
    """The setting to try; None: none fits or saves enough."""
    advice: tuple[str, ...]
    """What to do, in sentences."""
    notes: tuple[str, ...]
    """Limits of the predictions, in sentences."""

    @property
    def baseline(self) -> AllocatorPrediction | None:
        """The prediction to compare the others with: the recorded settings, simulated."""
        return next((prediction for prediction in self.predictions if prediction.is_recorded), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorPlan(Displayed):
    """Replay and predictions for every device of a trace."""

    devices: tuple[DeviceAllocatorPlan, ...]


def plan_allocator(
    trace: Trace,
    settings: Sequence[AllocatorSettings] | None = None,
    *,
    capacity: int | None = None,
    progress: Callable[[], None] | None = None,
) -> AllocatorPlan:
    """Replay every device of a trace and predict what other settings would reserve (a sweep is cached).

    Args:
        trace: a trace of one rank.
        settings: the settings to simulate besides the recorded ones; None: a sweep.
        capacity: bytes that each device gives; None: what the history reveals.
        progress: called after each prediction; None: nothing is called.

    Raises:
        SettingError: a setting requires the size of the device, which is unknown.
        MemtraceError: a schedule left out steps, whose allocations are unknown.
    """
    if len(find_gaps(trace)):
        raise MemtraceError(
            "the trace lacks the allocations between the recorded steps, so the allocator cannot be replayed. Record "
            "all steps: memtrace.record without schedule and every."
        )
    if settings is None and progress is None:
        sweeps = [sweep_device(trace, device, capacity) for device in devices_to_plan(trace)]
        return AllocatorPlan(devices=tuple(sweeps))
    devices = []
    for device in devices_to_plan(trace):
        source = read_device_history(trace, device)
        devices.append(plan_device(source, settings, capacity=capacity, progress=progress or (lambda: None)))
    return AllocatorPlan(devices=tuple(devices))


def sweep_device(trace: Trace, device: str, capacity: int | None = None) -> DeviceAllocatorPlan:
    """Return the plan of one device for a sweep of settings (cached); the arguments are those of `plan_allocator`."""
    return trace.cached(_sweep_device, device, capacity)


def _sweep_device(trace: Trace, device: str, capacity: int | None) -> DeviceAllocatorPlan:
    reproduced = reproduce_exactly(trace, device)
    if reproduced is not None:
        return plan_reproduced(*reproduced, capacity=capacity)
    return plan_device(read_device_history(trace, device), capacity=capacity)


def plan_device(
    source: AllocatorHistory | RequestHistory,
    settings: Sequence[AllocatorSettings] | None = None,
    *,
    capacity: int | None = None,
    progress: Callable[[], None] = lambda: None,
) -> DeviceAllocatorPlan:
    """Return the plan of one device; the arguments are those of `plan_allocator`."""
    if isinstance(source, AllocatorHistory):
        prepared, result = reproduce_history(source)
        return plan_reproduced(prepared, result, settings, capacity=capacity, progress=progress)
    workload = Workload(source.operations, AllocatorSettings(), capacity=capacity)
    predictions = _predict_all(workload, settings, progress)
    return _assemble(source.device, None, workload, predictions, failed_request_bytes=(), notes=(ESTIMATE_NOTE,))


def plan_reproduced(
    prepared: PreparedHistory,
    result: ReplayResult,
    settings: Sequence[AllocatorSettings] | None = None,
    *,
    capacity: int | None = None,
    progress: Callable[[], None] = lambda: None,
) -> DeviceAllocatorPlan:
    """Return the plan of a device whose history has been replayed (`reproduce_history`)."""
    history, workload = prepared.history, workload_of(prepared, capacity)
    return _assemble(
        history.device,
        result,
        workload,
        _predict_all(workload, settings, progress) if result.is_exact else (),
        failed_request_bytes=tuple(int(size) for size in history.size[history.kind == OOM]),
        notes=_notes(prepared, result),
    )


def workload_of(prepared: PreparedHistory, capacity: int | None = None) -> Workload:
    """Return the workload behind a history that replays exactly; `capacity` as in `plan_allocator`."""
    return Workload(
        prepared.operations,
        prepared.history.settings,
        prepared.rules,
        capacity,
        None if prepared.replays_refusals else prepared.capacity,
        prepared.history.device_bytes,
    )


def settings_table(plan: DeviceAllocatorPlan) -> pd.DataFrame:
    """Return one row per setting: the device, and the fields of `AllocatorPrediction`; NA: unknown."""
    import pandas as pd

    rows = [{"device": plan.device, **asdict(prediction)} for prediction in plan.predictions]
    flags = dict.fromkeys(("fits", "fits_at_low", "fits_at_high"), "boolean") if rows else {}
    table: pd.DataFrame = pd.DataFrame(rows).astype(flags)
    return table


def _predict_all(
    workload: Workload, settings: Sequence[AllocatorSettings] | None, progress: Callable[[], None]
) -> tuple[AllocatorPrediction, ...]:
    if settings is None:
        return tuple(predict_settings(workload, sweep_settings(workload), progress))
    baseline = workload.baseline_settings
    others = [candidate for candidate in settings if candidate != baseline]
    return tuple(predict_settings(workload, [baseline, *others], progress))


def _assemble(
    device: str,
    replay: ReplayResult | None,
    workload: Workload,
    predictions: tuple[AllocatorPrediction, ...],
    *,
    failed_request_bytes: tuple[int, ...],
    notes: tuple[str, ...],
) -> DeviceAllocatorPlan:
    bounds = workload.capacity_bounds
    low, high = (bounds and bounds.interval) or (None, None)
    suggestion = suggest_setting(predictions)
    return DeviceAllocatorPlan(
        device=device,
        replay=replay,
        num_older_blocks=workload.operations.num_older,
        capacity=CapacityEstimate(
            stated_bytes=workload.capacity,
            low_bytes=low,
            high_bytes=high,
            estimate_bytes=bounds.estimate_bytes if bounds else None,
            device_bytes=workload.total_bytes,
        ),
        failed_request_bytes=failed_request_bytes,
        predictions=predictions,
        suggestion=suggestion,
        advice=format_advice(predictions, suggestion, failed_request_bytes),
        notes=notes,
    )


def _notes(prepared: PreparedHistory, result: ReplayResult) -> tuple[str, ...]:
    if not result.is_exact:
        return (f"No predictions, because the replay is not exact. {result.reason}",)
    notes = []
    if not result.final_blocks_match:
        notes.append(
            "The segments at the end of the file are not those that its entries lead to: it was truncated or edited."
        )
    num_older = prepared.operations.num_older
    if not result.num_allocations:
        notes.append("The file has no allocation history: predictions allocate its live blocks afresh.")
    elif num_older:
        notes.append(
            f"Recording started mid-run: predictions first allocate the {format_count(num_older, 'older block')} "
            "afresh. Compare a setting with the recorded setting in the table, not with the recorded peak."
        )
    if prepared.replays_refusals:
        notes.append(
            "No single capacity explains which requests the device refused: other processes used the device for a "
            "while."
        )
    return tuple(notes)
