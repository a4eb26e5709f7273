"""How long a step would take if a share of the data set were cached.

A step is as slow as the slowest of three: computing (ingestion), preprocessing, and supply, which reads the cached
share from memory and the rest from storage.

Source: DS-Analyzer (CoorDL, VLDB 2021), its what-if for the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from memtrace.errors import MemtraceError

DEFAULT_SHARES: Final = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares that are predicted if none is asked for."""
Limit = Literal["ingestion", "prep", "supply"]


@dataclass(frozen=True)
class DataSource:
    """Where the data of a step comes from, if its rates are known."""

    step_bytes: int
    """Bytes that one step reads."""
    storage_bytes_per_s: int
    """Bandwidth of the storage."""
    memory_bytes_per_s: int
    """Bandwidth at which cached data is read."""


@dataclass(frozen=True)
class CachedStep:
    """A step with a share of the data set in the cache."""

    share: float
    """From 0 to 1."""
    supply_ns: int
    """Time to read the data of the step."""
    step_ns: int
    """Duration of the step."""
    limit: Limit
    """What the step is as slow as: ``ingestion`` (computing), ``prep`` (preprocessing) or ``supply`` (reading)."""


@dataclass(frozen=True)
class CacheWhatIf:
    """Steps with shares of the data set in the cache."""

    ingestion_ns: int
    """A step on data generated in memory."""
    prep_ns: int
    """A step with all data cached."""
    fetch_ns: int
    """Time to read the data of a step from storage."""
    is_fetch_measured: bool
    """Whether ``fetch_ns`` is the recorded fetch stall, which is shorter than the time of reading where reading
    overlaps with computing; if not, it follows from a bandwidth."""
    steps: tuple[CachedStep, ...]
    """One for each share."""
    enough_share: float | None
    """The smallest share with which reading no longer limits the steps; None: even a full cache is too slow."""


def predict_cache_shares(
    synthetic_ns: int, cached_ns: int, cold_ns: int, shares: Sequence[float] = (), source: DataSource | None = None
) -> CacheWhatIf:
    """Predict steps with shares of the data set in the cache.

    Args:
        synthetic_ns: a step on data generated in memory.
        cached_ns: a step with all data cached.
        cold_ns: a step with an empty cache.
        shares: from 0 to 1; empty: ``DEFAULT_SHARES``.
        source: bandwidths; None: the time of reading is the difference between the recordings.

    Raises:
        MemtraceError: a share is not from 0 to 1.
    """
    for share in shares:
        if not 0 <= share <= 1:
            raise MemtraceError(f"a cache share is from 0 to 1, not {share:g}.")
    memory_ns = 0.0
    fetch_ns = float(max(cold_ns - cached_ns, 0))
    if source is not None:
        fetch_ns = 1e9 * source.step_bytes / source.storage_bytes_per_s
        memory_ns = 1e9 * source.step_bytes / source.memory_bytes_per_s
    slowest_ns = max(synthetic_ns, cached_ns)
    return CacheWhatIf(
        synthetic_ns,
        cached_ns,
        round(fetch_ns),
        source is None,
        tuple(
            _step(share, share * memory_ns + (1 - share) * fetch_ns, synthetic_ns, cached_ns)
            for share in shares or DEFAULT_SHARES
        ),
        _enough_share(fetch_ns, memory_ns, slowest_ns),
    )


def _step(share: float, supply_ns: float, ingestion_ns: int, prep_ns: int) -> CachedStep:
    times: dict[Limit, float] = {"ingestion": ingestion_ns, "prep": prep_ns, "supply": supply_ns}
    limit = max(times, key=lambda name: times[name])
    return CachedStep(share, round(supply_ns), round(times[limit]), limit)


def _enough_share(fetch_ns: float, memory_ns: float, slowest_ns: int) -> float | None:
    if fetch_ns <= slowest_ns:
        return 0.0
    if memory_ns > slowest_ns:
        return None
    return (fetch_ns - slowest_ns) / (fetch_ns - memory_ns)
