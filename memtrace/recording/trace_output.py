"""The trace that one recording writes: its folder, its manifest, its steps, and the rank that it belongs to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from memtrace.format.manifest import Manifest, RecordingOptions
from memtrace.recording.job import JobMembership
from memtrace.recording.job_coordinates import find_coordinates
from memtrace.recording.manifest import ManifestFile
from memtrace.recording.memory_files import MemoryFiles
from memtrace.recording.observers import Observer
from memtrace.recording.observers.unseen import THREADS_NOTE, unseen_accesses
from memtrace.recording.output_dir import OutputDir, check_rank_folder, claim_output_dir, move_output_dir
from memtrace.recording.sink import OUTERMOST, TraceSink
from memtrace.recording.steps import StepTracker

if TYPE_CHECKING:
    from memtrace.recording.remote_trace import RemoteTrace
    from memtrace.recording.ring import Ring


LAST_STEPS_ON_OOM: Final = 3
"""Number of steps that are kept in memory by default until memory runs out."""


class TraceOutput:
    """One trace while it is recorded.

    Args:
        requested_path: folder of the trace; another one if another process is recording there.
        options: of the recording.
        observer: records the spans of the steps.
        make_manifest: returns the manifest for a rank and a world size.
        number: number of the recording, or OUTERMOST.
        on_limit: called when ``options.max_steps`` is reached.
        on_step_end: called at the end of every step.

    Attributes:
        job: rank and world size of this process.
        manifest: the manifest of the rank.
        steps: tracks the training steps.
        sink: the parts; None until ``open``.
        remote: uploads the trace to a storage; None for a trace on disk.
    """

    def __init__(
        self,
        requested_path: Path,
        options: RecordingOptions,
        observer: Observer,
        make_manifest: Callable[[int, int], Manifest],
        *,
        number: int = OUTERMOST,
        on_limit: Callable[[], None],
        on_step_end: Callable[[], None],
    ) -> None:
        self.job = JobMembership(requested_path.name, observer.now)
        self.manifest = ManifestFile(make_manifest(self.job.rank, self.job.world_size))
        self.sink: TraceSink | None = None
        self.remote: RemoteTrace | None = None
        self._requested_path = requested_path
        self._options = options
        self._observer = observer
        self._number = number
        self._output_dir: OutputDir | None = None
        self._files = MemoryFiles() if options.on_oom else None
        self._ring = self._make_ring()
        self.steps = StepTracker(
            observer,
            self._ring,
            options.max_steps,
            number=number,
            on_limit=on_limit,
            on_step_end=on_step_end,
            on_renumber=self._steps_renumbered,
        )

    def _make_ring(self) -> Ring | None:
        if self._options.last_steps is None and self._files is None:
            return None
        from memtrace.recording.ring import Ring

        return Ring(self._requested_path, self._options.last_steps or LAST_STEPS_ON_OOM, self._files)

    def _steps_renumbered(self) -> None:
        if self.sink is not None:
            self.sink.steps_numbered_anew()

    @property
    def trace_path(self) -> Path:
        """Folder of the trace."""
        return self._requested_path if self._output_dir is None else self._output_dir.trace

    @property
    def rank_folder(self) -> Path:
        """Folder of this process's rank in the trace."""
        return self._requested_path if self._output_dir is None else self._output_dir.folder

    def open(self, failed: Callable[[str], None]) -> TraceSink:
        """Claim the folder, write the first manifest, and return the sink of the parts.

        With ``on_oom``, the folder is claimed when the parts are saved.

        Args:
            failed: called once, on the writer's thread, with the reason when writing ends early.

        Raises:
            MemtraceError: the folder contains something other than a memtrace trace.
            OSError: the folder or the manifest cannot be written.
        """
        if self._files is None:
            folder, unsaved = self._claim(), None
        else:
            check_rank_folder(self._requested_path / f"rank={self.job.rank}")
            folder, unsaved = self._requested_path, (self._files, self._claim)
        self.sink = TraceSink(
            folder, self.manifest, self._ring, failed, self._options.flush_seconds, self._number, unsaved
        )
        return self.sink

    def _claim(self) -> Path:
        """Claim the folder and write the first manifest, unless that is done; return the folder."""
        if self._output_dir is None:
            self._output_dir = claim_output_dir(self._requested_path, self.job.rank, self.job.world_size)
            self.manifest.update(rank=self.job.rank, world_size=self.job.world_size)
            self._find_coordinates()
            self.manifest.write(self._output_dir.folder)
            if self._ring is not None and self._files is None:
                self._ring.folder = self._output_dir.folder
            if self.remote is not None:
                self.remote.begin(self._output_dir.folder, self.job.rank, self.job.world_size)
        return self._output_dir.folder

    def save_at_end(self) -> None:
        """Save the parts that are kept in memory when the recording ends: memory ran out."""
        if self.sink is not None and self._files is not None:
            self.sink.must_save_at_end = True

    def discard(self) -> None:
        """Remove the trace of a recording that never began."""
        if self.remote is not None:
            self.remote.discard()
        if self._output_dir is not None:
            self._output_dir.discard()

    def release(self) -> None:
        """Allow other recordings to use the folder."""
        if self._output_dir is not None:
            self._output_dir.release()

    def leave_to_parent(self) -> None:
        """Close a forked child's descriptor of the folder, which belongs to the parent."""
        if self._output_dir is not None:
            self._output_dir.leave_to_parent()
        if self.remote is not None:
            self.remote.abandon()

    def align_clock(self) -> None:
        """End the alignment of the clock with the other ranks."""
        self.job.refresh()
        if (offset := self.job.stop()) is not None:
            self.manifest.update(clock=offset)

    def finish(self, reason: str | None, opaque_bytes: int | None) -> bool:
        """Write the last manifest.

        Args:
            reason: why the recording ended before the recorded block did; None if it did not.
            opaque_bytes: see ``FileCoverage.opaque_bytes``.

        Returns:
            Whether there is a trace: with ``on_oom``, only if it was saved.

        Raises:
            OSError: the manifest cannot be written.
        """
        assert self.sink is not None
        if self._output_dir is None:
            return False
        manifest, job = self.manifest, self.job
        if self.steps.windows is not None:
            manifest.set_program_steps(self.steps.num_steps)
        unseen = unseen_accesses(self._observer, ran_opaque_code=opaque_bytes != 0)
        manifest.set_unseen_accesses(unseen, opaque_bytes)
        if not self._observer.sees_threads():
            manifest.add_note(THREADS_NOTE)
        self._find_coordinates()
        failure = manifest.current.stop_reason
        manifest.update(finished=failure is None, stop_reason=failure or reason, num_events=self.sink.num_events)
        if manifest.current.world_size != job.world_size and self._move_to_rank(self._output_dir):
            manifest.update(rank=job.rank, world_size=job.world_size)
        manifest.write(self._output_dir.folder)
        self.sink.remove_status()
        if self.remote is not None:
            self.remote.complete(self._output_dir.folder, manifest.current.rank, manifest.current.world_size)
        return True

    def _find_coordinates(self) -> None:
        """Add the coordinates of this process in its job, which it may learn after the recording has started."""
        if self.job.world_size > 1 and not self.manifest.current.coordinates:
            self.manifest.update(coordinates=find_coordinates(self._observer.live_instances))

    def _move_to_rank(self, output_dir: OutputDir) -> bool:
        """Move a trace that was started without a rank to the folder of its rank; whether that was possible."""
        return any(
            move_output_dir(output_dir, trace, self.job.rank) for trace in (self._requested_path, output_dir.trace)
        )
