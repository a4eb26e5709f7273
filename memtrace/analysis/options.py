"""What an analysis assumes of a machine, and the thresholds that a user can choose: one home for commands and page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from memtrace.analysis.bandwidth import CopyBandwidths
from memtrace.analysis.thresholds import MIN_SWAP_BYTES


@dataclass(frozen=True)
class AnalysisOptions:
    """What a user can state about the machine, and the thresholds of findings."""

    bandwidths: CopyBandwidths | None = None
    """Cost of copies between device and host; None: ``memtrace.analysis.swap.assumed_bandwidths``."""
    capacity_bytes: int | None = None
    """Memory that the device gives to the process; None: what the trace reveals."""
    min_swap_bytes: int = MIN_SWAP_BYTES
    """Smallest block to swap."""
    min_waste_bytes: int | None = None
    """Leave out findings that waste less; None: a hundredth of the peak."""


DEFAULT_OPTIONS: Final = AnalysisOptions()
"""What is assumed where the user states nothing."""
