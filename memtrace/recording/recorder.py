"""What runs while a process is recorded: observer, hooks, writer, clock alignment and CUDA monitor."""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import torch

from memtrace.errors import MemtraceError
from memtrace.format.manifest import RecordingOptions
from memtrace.format.schema import NAME_KINDS, SPAN_KINDS
from memtrace.recording.hook_errors import HookErrors
from memtrace.recording.hooks import install_hooks
from memtrace.recording.job import JobMembership
from memtrace.recording.labels import Labeller
from memtrace.recording.manifest import ManifestFile, new_manifest
from memtrace.recording.observers import Observer
from memtrace.recording.observers.select import select_observer
from memtrace.recording.observers.unseen import unseen_accesses
from memtrace.recording.output_dir import OutputDir, claim_output_dir, move_output_dir
from memtrace.recording.steps import StepTracker
from memtrace.recording.writer import Writer

if TYPE_CHECKING:
    from memtrace.recording.cuda import CudaMonitor
    from memtrace.recording.ring import Ring

logger = logging.getLogger("memtrace")

RESERVED_ADDRESS_SPACE_BYTES: Final = 256 << 20
"""Address space reserved, but never touched, while recording. It is released before the last part is written: Arrow
aborts the process when the program has used up all of the address space."""

LoaderItem = TypeVar("LoaderItem")
_DATA_WAIT: Final = SPAN_KINDS.index("data_wait")
_RANGE: Final = SPAN_KINDS.index("range")
_RANGE_NAME: Final = NAME_KINDS.index("range")


def start_recorder(
    path: Path,
    options: RecordingOptions,
    models: Mapping[str, torch.nn.Module],
    optimizers: Iterable[torch.optim.Optimizer],
) -> Recorder | None:
    """Start to record this process; None, after a warning, if the trace cannot be written to ``path``.

    Raises:
        MemtraceError: the native observer was requested and is not available.
    """
    reserve = _reserve_address_space()
    observer, notes = select_observer(options.observer)
    if options.device_time_min_bytes >= 0 and not observer.times_devices():
        notes.append("no device times: they need the native observer built with the CUDA headers")
        logger.warning("memtrace: %s", notes[-1])
    job = JobMembership(path.name, observer.now)
    manifest = ManifestFile(new_manifest(observer, options, notes, job.rank, job.world_size))
    output_dir: OutputDir | None = None
    try:
        output_dir = claim_output_dir(path, job.rank, job.world_size)
        manifest.write(output_dir.folder)
    except (OSError, MemtraceError) as error:
        logger.warning("memtrace: nothing is recorded, training continues: %s", error)
        if output_dir is not None:
            output_dir.release()
        return None
    with ExitStack() as undo:
        undo.callback(output_dir.release)
        recorder = Recorder(path, options, observer, job, output_dir, manifest, reserve)
        undo.callback(recorder.remove_hooks)
        recorder.start(models, optimizers)
        undo.pop_all()
    return recorder


def _reserve_address_space() -> mmap.mmap | None:
    with suppress(OSError, ValueError):
        return mmap.mmap(-1, RESERVED_ADDRESS_SPACE_BYTES)
    return None


def make_cuda_monitor(observer: Observer, manifest: ManifestFile) -> CudaMonitor | None:
    """The CUDA monitor of a recording; None if torch is built for neither CUDA nor ROCm (which uses CUDA's names)."""
    if torch.version.cuda is None and torch.version.hip is None:
        return None
    from memtrace.recording.cuda import CudaMonitor  # imports some MB that only CUDA needs
    from memtrace.recording.cuda_driver import TorchDriver

    return CudaMonitor(observer, TorchDriver(), manifest)


class Recorder:
    """The parts of one running recording, created by ``start_recorder``.

    Attributes:
        observer: sees allocations and accesses.
        job: rank and world size of this process.
        labeller: names modules and tensors.
        steps: tracks the training steps.
        is_recording: whether events are recorded at the moment.
        is_complete: whether the trace is written and its manifest final.
    """

    def __init__(
        self,
        requested_path: Path,
        options: RecordingOptions,
        observer: Observer,
        job: JobMembership,
        output_dir: OutputDir,
        manifest: ManifestFile,
        reserve: mmap.mmap | None,
    ) -> None:
        self.observer = observer
        self.job = job
        self.is_recording = False
        self.is_complete = False
        self._requested_path = requested_path
        self._options = options
        self._output_dir = output_dir
        self._manifest = manifest
        self._reserve = reserve
        self._is_stopped = False
        self._hooks = ExitStack()
        ring = self._make_ring()
        self.labeller = Labeller(observer, HookErrors(manifest.add_note))
        self._cuda = make_cuda_monitor(observer, manifest)
        self.steps = StepTracker(
            observer,
            ring,
            options.max_steps,
            on_limit=self._stop_at_max_steps,
            on_step_end=self._step_ended,
            on_renumber=self._steps_renumbered,
        )
        self._writer = Writer(
            observer, output_dir.folder, manifest, ring, self._writing_failed, options.flush_seconds, self._cuda
        )

    def _make_ring(self) -> Ring | None:
        if self._options.last_steps is None:
            return None
        from memtrace.recording.ring import Ring  # imports pyarrow.compute, 7 MB that only a ring needs

        return Ring(self._output_dir.folder, self._options.last_steps)

    @property
    def trace_path(self) -> Path:
        """Folder of the trace."""
        return self._output_dir.trace

    @property
    def rank_folder(self) -> Path:
        """Folder of this process's rank in the trace."""
        return self._output_dir.folder

    def start(self, models: Mapping[str, torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Install the hooks and start to observe and to write."""
        options = self._options
        self.observer.start(
            accesses=options.accesses,
            stacks=options.stacks,
            stack_min_bytes=options.stack_min_bytes,
            device_time_min_bytes=options.device_time_min_bytes,
        )
        try:
            self._manifest.update(t0_epoch_ns=time.time_ns() - self.observer.now())
            self._hooks = install_hooks(self.observer, self.labeller, self.steps.optimizer_stepped)
            if self._cuda is not None:
                self._hooks.callback(self._cuda.watch_graphs())
                self._cuda.start()
            self._label_existing(models, optimizers)
        except BaseException:
            self.observer.stop()
            raise
        self.is_recording = True
        self._writer.start()
        self.job.start()

    def _label_existing(
        self, models: Mapping[str, torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]
    ) -> None:
        labeller, protect = self.labeller, self.labeller.errors.protect
        for name, model in models.items():
            protect(labeller.add_model)(model, name)
        protect(labeller.label_existing_tensors)()
        for optimizer in optimizers:
            protect(labeller.before_optimizer_step)(optimizer)
            protect(labeller.after_optimizer_step)(optimizer)

    def time_fetch(self, fetch: Callable[[], LoaderItem]) -> LoaderItem:
        """Call ``fetch``, record its time as a wait for data and label the tensors it returns as inputs."""
        started_ns = self.observer.now()
        self.observer.waiting(True)
        try:
            item = fetch()
        finally:
            self.observer.waiting(False)
        self.observer.span(_DATA_WAIT, -1, started_ns, self.observer.now(), -1)
        self.labeller.errors.protect(self.labeller.label_inputs)(item)
        return item

    def mark_range(self, name: str, started_ns: int) -> None:
        """Record a range of the program that began at ``started_ns`` and ends now."""
        self.observer.span(_RANGE, self.observer.name_id(_RANGE_NAME, name), started_ns, self.observer.now(), -1)

    def _step_ended(self) -> None:
        self.job.refresh()
        if self._cuda is not None:
            self._cuda.read_totals()

    def _steps_renumbered(self) -> None:
        self._writer.steps_numbered_anew()

    def _stop_at_max_steps(self) -> None:
        self.stop("max_steps reached")

    def _writing_failed(self, reason: str) -> None:
        # Runs on the writer's thread. The program may be inside one of our hooks, so they stay installed, without
        # effect, until the recorded block ends.
        self.is_recording = False
        self._manifest.update(stop_reason=reason)
        logger.warning("memtrace: recording stopped, training continues: %s", reason)
        self.observer.stop()

    def remove_hooks(self) -> None:
        """Leave torch as it was before the recording."""
        self._hooks.close()

    def stop(self, reason: str | None) -> None:
        """End the recording and write the rest of the trace.

        Args:
            reason: why the recording ends before the recorded block does, for the manifest; None if it does not.
        """
        self.remove_hooks()
        if self._reserve is not None:
            self._reserve.close()
        if self._is_stopped:
            return
        self._is_stopped = True
        self.job.refresh()
        if (offset := self.job.stop()) is not None:
            self._manifest.update(clock=offset)
        if self.is_recording:
            self._stop_observing()
        else:
            self.observer.stop()  # the writer has stopped it on its own thread, which leaves this one switched on
        self._writer.stop()
        if self._cuda is not None:
            self._cuda.close()
        self._finish_manifest(reason)
        self._output_dir.release()

    def _stop_observing(self) -> None:
        self.is_recording = False
        self.labeller.errors.protect(self.labeller.label_remaining_gradients)()
        self.steps.close()
        if self._cuda is not None:
            self._cuda.stop()
        self.observer.stop()

    def _finish_manifest(self, reason: str | None) -> None:
        manifest = self._manifest
        manifest.set_unseen_accesses(unseen_accesses(self.observer))
        failure = manifest.current.stop_reason
        manifest.update(finished=failure is None, stop_reason=failure or reason, num_events=self._writer.num_events)
        if manifest.current.world_size != self.job.world_size and self._move_to_rank():
            manifest.update(rank=self.job.rank, world_size=self.job.world_size)
        try:
            manifest.write(self._output_dir.folder)
            self.is_complete = True
        except OSError as error:
            logger.warning("memtrace: the manifest could not be written, the trace is incomplete: %s", error)

    def _move_to_rank(self) -> bool:
        """Move a trace that was started without a rank to the folder of its rank; whether that was possible."""
        traces = (self._requested_path, self._output_dir.trace)
        return any(move_output_dir(self._output_dir, trace, self.job.rank) for trace in traces)
