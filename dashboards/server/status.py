"""What the page asks for every second: how far the index is, and how a running recording does."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from memtrace.dashboards.server.served import ServedRank, ServedTrace

from memtrace.analysis.live import known_capacity, measure_live
from memtrace.analysis.live_recording import read_live_recording
from memtrace.errors import TraceError


def describe_status(served: ServedTrace) -> dict[str, Any]:
    """Return the status of all ranks as a JSON value."""
    return {"follow": served.follow, "ranks": [_describe_rank(served, rank) for rank in served.ranks.values()]}


def _describe_rank(served: ServedTrace, rank: ServedRank) -> dict[str, Any]:
    current = rank.current
    return {
        "rank": rank.rank,
        "version": rank.version,
        "views": rank.views(),
        "num_parts": rank.progress.num_parts,
        "num_indexed": rank.progress.num_indexed,
        "num_events": current.index.num_events if current is not None else None,
        "end_ns": current.index.end_ns if current is not None else None,
        "error": rank.error,
        "live": _describe_recording(served, rank) if served.follow else None,
    }


def _describe_recording(served: ServedTrace, rank: ServedRank) -> dict[str, Any] | None:
    if rank.folder is None:
        return None
    try:
        recording = read_live_recording(rank.folder)
    except TraceError as error:
        return {"state": "unknown", "error": str(error), "devices": []}
    status = recording.status
    if status is None:
        return {"state": recording.state, "devices": []}
    return {
        "state": recording.state,
        "age_ns": recording.age_ns,
        "time_ns": status.time_ns,
        "num_events": status.num_events,
        "devices": [
            {
                **asdict(
                    measure_live(status, device, served.capacity_bytes or known_capacity(recording.manifest, device))
                ),
                "samples": [[sample.time_ns, sample.peak_bytes.get(device, 0)] for sample in status.samples],
                "sites": [asdict(site) for site in rank.growing_sites(device)],
            }
            for device in recording.devices
        ],
    }
