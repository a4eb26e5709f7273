"""Advice from the predictions of an allocator plan: the setting to try, and sentences for the user."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from memtrace.allocator.settings import VARIABLE, AllocatorSettings
from memtrace.allocator.what_if import AllocatorPrediction
from memtrace.units import format_bytes, format_share

MIN_SAVING_SHARE: Final = 0.02
"""Share of the peak that a setting must save, beyond its error, to be suggested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuggestedSetting:
    """The setting to try."""

    setting: str
    """The text that PyTorch reads; `default` for the defaults."""
    environment_setting: str
    """The same as an environment variable to put before the command."""
    caveats: tuple[str, ...]
    """What to know before using it, in sentences."""


def suggest_setting(predictions: Sequence[AllocatorPrediction]) -> SuggestedSetting | None:
    """Return the setting with the lowest peak among those that fit most certainly; None where none is worth trying.

    The setting must fit, and save more than `MIN_SAVING_SHARE` of the peak beyond its error. A setting that fits more
    certainly than the recorded one need not save anything.
    """
    best = _best_prediction(predictions)
    if best is None:
        return None
    return SuggestedSetting(setting=best.setting, environment_setting=best.environment_setting, caveats=_caveats(best))


def format_advice(
    predictions: Sequence[AllocatorPrediction],
    suggestion: SuggestedSetting | None,
    failed_request_bytes: Sequence[int],
) -> tuple[str, ...]:
    """Return what to do, in sentences; empty without predictions.

    Args:
        predictions: one per setting.
        suggestion: the result of `suggest_setting`.
        failed_request_bytes: sizes of the requests that failed in the recording.
    """
    if not predictions:
        return ()
    advice = [_failed_request_advice(predictions, failed_request_bytes)] if failed_request_bytes else []
    if suggestion is not None:
        advice.append(_suggestion_advice(predictions, suggestion))
    elif any(prediction.fit_rank for prediction in predictions):
        advice.append(
            f"No setting saves more than {format_share(MIN_SAVING_SHARE)} of the peak: keep the recorded setting."
        )
    else:
        smallest = min(predictions, key=lambda prediction: prediction.peak_reserved_bytes)
        advice.append(
            f"None of these settings fits. The smallest peak is {format_bytes(smallest.peak_reserved_bytes)}, "
            f"with {smallest.setting}."
        )
    if any("garbage_collection" in p.setting and "memory_fraction" not in p.setting for p in predictions):
        advice.append("garbage_collection_threshold has no effect without per_process_memory_fraction: set both.")
    return tuple(advice)


def _best_prediction(predictions: Sequence[AllocatorPrediction]) -> AllocatorPrediction | None:
    baseline = next((prediction for prediction in predictions if prediction.is_recorded), None)
    if baseline is None:
        return None
    best = min(predictions, key=lambda p: (-p.fit_rank, p.peak_reserved_bytes + p.spread_bytes))
    error = max(best.spread_bytes, baseline.spread_bytes)
    saved = baseline.peak_reserved_bytes - best.peak_reserved_bytes - error
    helps = best.fit_rank > baseline.fit_rank or saved > MIN_SAVING_SHARE * baseline.peak_reserved_bytes
    return best if helps and best.fit_rank else None


def _caveats(best: AllocatorPrediction) -> tuple[str, ...]:
    caveats = []
    if best.fit_rank == 1:
        caveats.append("It fits only at the upper end of the capacity range.")
    settings = AllocatorSettings.parse(best.setting)
    if settings.large_segment_bytes != AllocatorSettings().large_segment_bytes:
        caveats.append("large_segment_size_mb requires torch 2.11 or later.")
    return tuple(caveats)


def _suggestion_advice(predictions: Sequence[AllocatorPrediction], suggestion: SuggestedSetting) -> str:
    by_setting = {prediction.setting: prediction for prediction in predictions}
    best = by_setting[suggestion.setting]
    baseline = next(prediction for prediction in predictions if prediction.is_recorded)
    is_default = suggestion.setting == "default"
    action = f"Unset {VARIABLE} (default settings)" if is_default else f"Set {suggestion.environment_setting}"
    before, after = format_bytes(baseline.peak_reserved_bytes), format_bytes(best.peak_reserved_bytes)
    effect = f"the peak changes from {before} to {after}."
    return " ".join((f"{action}: {effect}", *suggestion.caveats))


def _failed_request_advice(predictions: Sequence[AllocatorPrediction], failed_request_bytes: Sequence[int]) -> str:
    sizes = ", ".join(map(format_bytes, failed_request_bytes))
    plural = "s" if len(failed_request_bytes) > 1 else ""
    certain = ", ".join(prediction.setting for prediction in predictions if prediction.fits)
    possible = ", ".join(prediction.setting for prediction in predictions if prediction.fit_rank == 1)
    fits = f"fits with {certain}" if certain else "fits with none of these settings for certain"
    if plural:
        fits = fits.replace("fits", "fit", 1)
    if possible:
        fits += f"; only at the upper end of the capacity range with {possible}"
    return f"The request{plural} that failed in the recording ({sizes}) {fits}."
