"""The trace that one recording writes: its folder, its manifest, its steps, and the rank that it belongs to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from memtrace.format.manifest import Manifest, RecordingOptions
from memtrace.recording.job import JobMembership
from memtrace.recording.manifest import ManifestFile
from memtrace.recording.observers import Observer
from memtrace.recording.observers.unseen import THREADS_NOTE, unseen_accesses
from memtrace.recording.output_dir import OutputDir, claim_output_dir, move_output_dir
from memtrace.recording.sink import OUTERMOST, TraceSink
from memtrace.recording.steps import StepTracker

if TYPE_CHECKING:
    from memtrace.recording.ring import Ring


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
        self._requested_path = requested_path
        self._options = options
        self._observer = observer
        self._number = number
        self._output_dir: OutputDir | None = None
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
        if self._options.last_steps is None:
            return None
        from memtrace.recording.ring import Ring

        return Ring(self._requested_path, self._options.last_steps)

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

        Args:
            failed: called once, on the writer's thread, with the reason when writing ends early.

        Raises:
            MemtraceError: the folder contains something other than a memtrace trace.
            OSError: the folder or the manifest cannot be written.
        """
        self._output_dir = claim_output_dir(self._requested_path, self.job.rank, self.job.world_size)
        folder = self._output_dir.folder
        self.manifest.write(folder)
        if self._ring is not None:
            self._ring.folder = folder
        self.sink = TraceSink(folder, self.manifest, self._ring, failed, self._options.flush_seconds, self._number)
        return self.sink

    def discard(self) -> None:
        """Remove the trace of a recording that never began."""
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

    def align_clock(self) -> None:
        """End the alignment of the clock with the other ranks."""
        self.job.refresh()
        if (offset := self.job.stop()) is not None:
            self.manifest.update(clock=offset)

    def finish(self, reason: str | None) -> None:
        """Write the last manifest.

        Args:
            reason: why the recording ended before the recorded block did; None if it did not.

        Raises:
            OSError: the manifest cannot be written.
        """
        assert self.sink is not None
        assert self._output_dir is not None
        manifest, job = self.manifest, self.job
        manifest.set_unseen_accesses(unseen_accesses(self._observer))
        if not self._observer.sees_threads():
            manifest.add_note(THREADS_NOTE)
        failure = manifest.current.stop_reason
        manifest.update(finished=failure is None, stop_reason=failure or reason, num_events=self.sink.num_events)
        if manifest.current.world_size != job.world_size and self._move_to_rank(self._output_dir):
            manifest.update(rank=job.rank, world_size=job.world_size)
        manifest.write(self._output_dir.folder)
        self.sink.remove_status()

    def _move_to_rank(self, output_dir: OutputDir) -> bool:
        """Move a trace that was started without a rank to the folder of its rank; whether that was possible."""
        return any(
            move_output_dir(output_dir, trace, self.job.rank) for trace in (self._requested_path, output_dir.trace)
        )
