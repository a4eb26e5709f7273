"""``memtrace live``: a recording that is being written, in the terminal."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
from memtrace.cli.live_view import draw_screen, plain_lines
from memtrace.cli.output import console, print_line
from memtrace.cli.paths import PathOrUrl
from memtrace.cli.quantities import BYTES

from memtrace.analysis.live import GrowingSite, LiveMeasures, growing_sites, known_capacity, measure_live
from memtrace.analysis.live_recording import LiveRecording, rank_folders, read_live_recording
from memtrace.errors import MemtraceError, TraceError
from memtrace.format.live_status import LiveSample
from memtrace.format.schema import MANIFEST_NAME
from memtrace.format.storage import AnyPath, StoragePath
from memtrace.recording.remote_trace import LOCAL_FOLDER

if TYPE_CHECKING:
    from rich.console import Console

NUM_SITES: Final = 5
DEFAULT_INTERVAL_SECONDS: Final = 1.0
INTERRUPTED: Final = 130
"""Exit code after Ctrl-C, as shells use it."""


@dataclass(frozen=True)
class WatchedDevice:
    """A device of a rank at one moment."""

    rank: int
    measures: LiveMeasures
    samples: Sequence[LiveSample]
    sites: Sequence[GrowingSite]


@click.command("live")
@click.argument("trace", type=PathOrUrl())
@click.option("--rank", type=int, help="Watch only this rank.")
@click.option("--capacity", type=BYTES, metavar="SIZE",
              help="Memory capacity (e.g. 24GiB) for the time to out-of-memory.  [default: as recorded]")  # fmt: skip
@click.option("--interval", type=click.FloatRange(min=0.1), default=DEFAULT_INTERVAL_SECONDS, show_default=True,
              metavar="SECONDS", help="Time between two updates.")  # fmt: skip
def command(trace: AnyPath, rank: int | None, capacity: int | None, interval: float) -> None:
    """Watch TRACE while it is being recorded: memory now, this step, growth, and the time to out-of-memory.

    TRACE is the folder that memtrace.record is writing. The command ends when the recording ends; stop it with Ctrl-C.
    In a pipe it prints one line for each device and update.

    \b
    Examples:
      memtrace live run.memtrace
      memtrace live run.memtrace --capacity 24GiB
      ssh machine memtrace live run.memtrace
    """
    if isinstance(trace, StoragePath):
        raise MemtraceError(
            f"{trace}: a recording can be watched where it is written to disk. On the machine that records, pass the "
            f"folder of the trace in {LOCAL_FOLDER}."
        )
    if not trace.exists():
        raise MemtraceError(f"{trace} does not exist. Start the recording first, then pass the folder that it writes.")
    folders = rank_folders(trace)
    if rank is not None and rank not in folders:
        raise MemtraceError(f"{trace} has no rank {rank}. It has rank {', '.join(map(str, folders))}.")
    chosen = folders if rank is None else {rank: folders[rank]}
    try:
        _watch(Watch(str(trace), chosen, capacity), console(), interval)
    except KeyboardInterrupt:
        raise click.exceptions.Exit(INTERRUPTED) from None


class Watch:
    """Reads the recordings of some ranks, again and again.

    Args:
        name: the trace as the user named it.
        folders: the folder of each rank.
        capacity_bytes: memory of every device; None: as the recordings found it.
    """

    def __init__(self, name: str, folders: dict[int, Path], capacity_bytes: int | None) -> None:
        self.name = name
        self._folders = folders
        self._capacity_bytes = capacity_bytes
        self._sites: dict[tuple[int, str], list[GrowingSite]] = {}
        self._seen: dict[int, int] = {}

    def read(self) -> dict[int, LiveRecording]:
        """Return the recordings as they are now."""
        return {rank: read_live_recording(folder) for rank, folder in self._folders.items()}

    def devices(self, recordings: dict[int, LiveRecording]) -> Iterator[WatchedDevice]:
        """Return the devices of recordings, with what there is to know of each."""
        for rank, recording in recordings.items():
            if recording.status is None:
                continue
            for device in recording.devices:
                capacity = self._capacity_bytes or known_capacity(recording.manifest, device)
                measures = measure_live(recording.status, device, capacity)
                yield WatchedDevice(rank, measures, recording.status.samples, self._growing_sites(rank, device))

    def _growing_sites(self, rank: int, device: str) -> list[GrowingSite]:
        """Return the allocation sites that grow, read again after each part of the trace."""
        from memtrace.trace import load

        folder = self._folders[rank]
        try:
            changed = (folder / MANIFEST_NAME).stat().st_mtime_ns
            if self._seen.get(rank) != changed:
                self._sites = {key: sites for key, sites in self._sites.items() if key[0] != rank}
                self._seen[rank] = changed
            if (rank, device) not in self._sites:
                self._sites[rank, device] = growing_sites(load(folder).rank(rank), device, NUM_SITES)
        except (TraceError, OSError):  # the part is not there yet, or a ring has deleted it
            return self._sites.get((rank, device), [])
        return self._sites[rank, device]


def _watch(watch: Watch, out: Console, interval: float) -> None:
    show = _show_screen if sys.stdout.isatty() else _show_lines
    recordings = show(watch, out, interval)
    for rank, recording in recordings.items():
        of_rank = f"rank {rank}: " if len(recordings) > 1 else ""
        ended = (
            "the recording has ended."
            if recording.state == "finished"
            else "the process ended before it completed the recording; the trace has what was written until then."
        )
        print_line(f"{watch.name}: {of_rank}{ended}")
    print_line(f"Run memtrace summary {watch.name} for the results.")


def _moments(watch: Watch, interval: float) -> Iterator[dict[int, LiveRecording]]:
    """Return the recordings again and again, the last time when all have ended."""
    pause = threading.Event()
    while True:
        recordings = watch.read()
        yield recordings
        if all(recording.state in ("finished", "stopped") for recording in recordings.values()):
            return
        pause.wait(interval)


def _show_screen(watch: Watch, out: Console, interval: float) -> dict[int, LiveRecording]:
    from rich.live import Live

    recordings: dict[int, LiveRecording] = {}
    with Live(console=out, auto_refresh=False, transient=False) as screen:
        for recordings in _moments(watch, interval):
            devices = list(watch.devices(recordings))
            screen.update(draw_screen(watch.name, recordings, devices, out.width), refresh=True)
    return recordings


def _show_lines(watch: Watch, out: Console, interval: float) -> dict[int, LiveRecording]:
    recordings: dict[int, LiveRecording] = {}
    for recordings in _moments(watch, interval):
        for line in plain_lines(recordings, list(watch.devices(recordings))):
            print_line(line)
        sys.stdout.flush()
    return recordings
