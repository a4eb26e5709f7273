"""A recording that another process is writing: whether it still runs, and its status."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from memtrace.errors import TraceError
from memtrace.format.live_status import LiveStatus, read_live_status
from memtrace.format.manifest import Manifest, read_manifest
from memtrace.format.schema import MANIFEST_NAME

FRESH_NS: Final = 5 * 10**9
"""Age of a status up to which its recording counts as running, wherever its process is."""

RecordingState = Literal["running", "finished", "stopped", "unknown"]


@dataclass(frozen=True)
class LiveRecording:
    """A recording at one moment."""

    state: RecordingState
    """``running``; ``finished``: the trace is complete; ``stopped``: the process ended before it completed the trace;
    ``unknown``: the process is on another machine and has recorded nothing for some seconds."""
    manifest: Manifest
    status: LiveStatus | None
    """None: the recording has ended, or has not written its first status."""
    age_ns: int | None
    """Time since the status was written; None without one, or where the clocks of two machines differ."""

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices in the status: cpu first."""
        return () if self.status is None else tuple(self.status.live_bytes)


def read_live_recording(folder: Path) -> LiveRecording:
    """Return the recording in the folder of a rank as it is now.

    Raises:
        TraceError: the folder is not that of a rank, or a file in it is damaged.
    """
    manifest, status = read_manifest(folder / MANIFEST_NAME), read_live_status(folder)
    age_ns = None if status is None else time.time_ns() - status.written_epoch_ns
    if age_ns is not None and age_ns < 0:
        age_ns = None
    if manifest.finished or manifest.stop_reason is not None or manifest.source.kind != "recording":
        return LiveRecording("finished", manifest, None, None)
    if age_ns is not None and age_ns < FRESH_NS:
        return LiveRecording("running", manifest, status, age_ns)
    is_alive = _is_alive(manifest)
    state: RecordingState = "unknown" if is_alive is None else "running" if is_alive else "stopped"
    return LiveRecording(state, manifest, status, age_ns)


def _is_alive(manifest: Manifest) -> bool | None:
    """Return whether the process of a recording runs; None where it is on another machine."""
    if manifest.process is None or manifest.host != platform.node():
        return None
    try:
        os.kill(manifest.process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # it belongs to somebody else
    return True


def rank_folders(path: Path) -> dict[int, Path]:
    """Return the folders of the ranks of a trace by rank: those that have a manifest.

    Raises:
        TraceError: there is none.
    """
    if (path / MANIFEST_NAME).is_file():
        return {read_manifest(path / MANIFEST_NAME).rank: path}
    folders = [folder for folder in path.glob("rank=*") if (folder / MANIFEST_NAME).is_file()]
    if not folders:
        raise TraceError(
            f"{path} is not a memtrace trace: it contains neither rank=0, rank=1, ... nor {MANIFEST_NAME}. "
            "Pass the folder that memtrace.record is writing (*.memtrace)."
        )
    return dict(sorted((read_manifest(folder / MANIFEST_NAME).rank, folder) for folder in folders))
