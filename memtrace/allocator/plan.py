"""The whole answer for a trace: how exactly each device replays, and what other settings would do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from memtrace.allocator.capacity import Bracket
from memtrace.allocator.history import OOM, History
from memtrace.allocator.infer_rules import reproduce
from memtrace.allocator.replay import Prepared, Replay
from memtrace.allocator.requests import Requests, devices_to_plan, read_device
from memtrace.allocator.settings import Settings
from memtrace.allocator.what_if import Case, Prediction, predict, sweep_settings

if TYPE_CHECKING:
    import pandas as pd

    from memtrace.trace import Trace

NOT_INCLUDED: Final = (
    "an estimate from the requests alone, all on one stream: not included are the workspaces of cuBLAS "
    "(8.1 MiB a stream, 32 MiB on Hopper) and cuDNN, the CUDA context and other libraries' memory"
)
MIN_SAVING: Final = 0.02
"""Share of the peak that a setting must save, beyond its error bar, to be worth naming."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """The answer for one device. Bytes."""

    device: str
    replay: Replay | None
    """How exactly its history replays; None: it left none, what follows is an estimate from the requests."""
    num_older_blocks: int
    """Blocks older than the recording: requested afresh in every prediction."""
    capacity: int | None
    """Bytes the device gives, as told by the user; None: not told."""
    bracket: Bracket | None
    """What the history tells of it."""
    failed_requests: tuple[int, ...]
    """Sizes of the requests that failed when it was recorded."""
    predictions: tuple[Prediction, ...]
    """One a setting; the recorded one first, where it is among them. Empty where the replay is not exact."""
    notes: tuple[str, ...]

    @property
    def baseline(self) -> Prediction | None:
        """The prediction that the others are to be compared with: the recorded settings, laid out afresh."""
        return next((one for one in self.predictions if one.is_recorded), None)

    @property
    def best(self) -> Prediction | None:
        """The setting to try: of those that fit most surely the one with the lowest peak, if it saves more than its
        error bar.

        One that fits more surely than the recorded settings is better whatever it takes. None where nothing fits.
        """
        baseline = self.baseline
        if baseline is None:
            return None
        best = min(self.predictions, key=lambda one: (-one.certainty, one.peak_reserved_bytes + one.spread_bytes))
        saved = baseline.peak_reserved_bytes - best.peak_reserved_bytes - max(best.spread_bytes, baseline.spread_bytes)
        rescues = best.certainty > baseline.certainty
        helps = rescues or saved > MIN_SAVING * baseline.peak_reserved_bytes
        return best if helps and best.certainty else None

    def as_dict(self) -> dict[str, Any]:
        """The documented shape of `memtrace plan allocator --json`; null for what is not known."""
        baseline, best = self.baseline, self.best
        return {
            "device": self.device,
            "replay": None if self.replay is None else _replay_dict(self.replay),
            "num_older_blocks": self.num_older_blocks,
            "capacity": _capacity_dict(self),
            "failed_requests_bytes": list(self.failed_requests),
            "settings": [_prediction_dict(one, baseline) for one in self.predictions],
            "best": None if best is None else {"setting": best.settings.name, "ready_line": best.settings.ready_line},
            "notes": list(self.notes),
        }


def plan_allocator(
    trace: Trace,
    settings: Sequence[Settings] | None = None,
    *,
    capacity: int | None = None,
    progress: Callable[[], None] = lambda: None,
) -> list[DevicePlan]:
    """Replay every device of a one-rank trace and predict `settings` (None: a sweep; the recorded ones are
    added).

    `capacity`: bytes the device gives; None: what the history tells. SettingError where a setting needs a
    capacity and none is known. `progress` is called after each prediction.
    """
    plans = []
    for device in devices_to_plan(trace):
        source = read_device(trace, device)
        plans.append(plan_device(source, settings, capacity=capacity, progress=progress))
    return plans


def plan_device(
    source: History | Requests,
    settings: Sequence[Settings] | None = None,
    *,
    capacity: int | None = None,
    progress: Callable[[], None] = lambda: None,
) -> DevicePlan:
    """The answer for one device; see `plan_allocator`."""
    if isinstance(source, Requests):
        case = Case(source.program, Settings(), capacity=capacity)
        return DevicePlan(
            device=source.device,
            replay=None,
            num_older_blocks=source.program.num_older,
            capacity=capacity,
            bracket=None,
            failed_requests=(),
            predictions=_predictions(case, settings, progress),
            notes=(NOT_INCLUDED,),
        )
    prepared, result = reproduce(source)
    case = case_of(prepared, capacity)
    failed = source.size[source.kind == OOM]
    return DevicePlan(
        device=source.device,
        replay=result,
        num_older_blocks=prepared.program.num_older,
        capacity=capacity,
        bracket=None if prepared.is_cued else prepared.bracket,
        failed_requests=tuple(int(size) for size in failed),
        predictions=_predictions(case, settings, progress) if result.is_exact else (),
        notes=tuple(_notes(prepared, result)),
    )


def case_of(prepared: Prepared, capacity: int | None = None) -> Case:
    """What a history that replays exactly lets one ask."""
    bracket = None if prepared.is_cued else prepared.bracket
    history = prepared.history
    return Case(prepared.program, history.settings, prepared.rules, capacity, bracket, history.device_bytes)


def settings_table(plans: Sequence[DevicePlan]) -> pd.DataFrame:
    """One row a device and setting.

    Columns: device, setting, peak_reserved_bytes, change_bytes (against the recorded settings laid out
    afresh), spread_bytes, unallocated_at_peak_bytes, peak_allocated_bytes, num_segments, num_device_allocs,
    num_retries, num_ooms, fits, fits_at_low, fits_at_high, is_recorded, ready_line. NA: not known.
    """
    import pandas as pd

    rows = [
        {"device": plan.device, **_prediction_dict(one, plan.baseline)} for plan in plans for one in plan.predictions
    ]
    flags = dict.fromkeys(("fits", "fits_at_low", "fits_at_high"), "boolean") if rows else {}
    table: pd.DataFrame = pd.DataFrame(rows).astype(flags)
    return table


def _predictions(
    case: Case, settings: Sequence[Settings] | None, progress: Callable[[], None]
) -> tuple[Prediction, ...]:
    if settings is None:
        return tuple(predict(case, sweep_settings(case), progress))
    first = sweep_settings(case)[0]
    return tuple(predict(case, [first, *(one for one in settings if one != first)], progress))


def _notes(prepared: Prepared, result: Replay) -> list[str]:
    notes = []
    if not result.is_exact:
        return [f"no predictions: {result.reason}"]
    if not result.final_blocks_match:
        notes.append("its segments at the end are not those its entries lead to: the file was cut or changed")
    if not result.allocations:
        notes.append("it has no history: predictions lay the blocks it holds out afresh")
    elif prepared.program.num_older:
        notes.append(
            f"it begins in mid-run: {prepared.program.num_older} older blocks are requested afresh in every "
            "prediction, so compare settings with the recorded ones here, not with the recorded peak"
        )
    if prepared.is_cued:
        notes.append("no one capacity explains when the device refused: others used it meanwhile")
    return notes


def _replay_dict(replay: Replay) -> dict[str, Any]:
    return {
        "allocations": replay.allocations,
        "allocations_exact": replay.allocations_exact,
        "segment_events": replay.segment_events,
        "segment_events_exact": replay.segment_events_exact,
        "segment_events_extra": replay.segment_events_extra,
        "peak_reserved_bytes": replay.peak_reserved_bytes,
        "recorded_peak_reserved_bytes": replay.recorded_peak_reserved_bytes,
        "final_blocks_match": replay.final_blocks_match,
        "exact": replay.is_exact,
        "reason": replay.reason,
        "block_order": replay.rules.tie,
    }


def _capacity_dict(plan: DevicePlan) -> dict[str, Any]:
    ends = None if plan.bracket is None else plan.bracket.ends
    return {
        "given_bytes": plan.capacity,
        "low_bytes": None if ends is None else ends[0],
        "high_bytes": None if ends is None else ends[1],
        "estimate_bytes": None if plan.bracket is None else plan.bracket.estimate,
    }


def _prediction_dict(one: Prediction, baseline: Prediction | None) -> dict[str, Any]:
    row = asdict(one)
    ends = row.pop("fits_at")
    row.pop("settings")
    change = None if baseline is None else one.peak_reserved_bytes - baseline.peak_reserved_bytes
    return {
        "setting": one.settings.name,
        **row,
        "change_bytes": change,
        "fits_at_low": None if ends is None else ends[0],
        "fits_at_high": None if ends is None else ends[1],
        "ready_line": one.settings.ready_line,
    }
