"""What runs while a process is recorded: observer, hooks, writer, clock alignment and CUDA monitor."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import torch

from memtrace.errors import MemtraceError
from memtrace.format.manifest import RecordingOptions
from memtrace.format.schema import NAME_KINDS, SPAN_KINDS
from memtrace.recording.background import BackgroundTask
from memtrace.recording.children import ChildProcesses
from memtrace.recording.hook_errors import HookErrors
from memtrace.recording.hooks import install_hooks
from memtrace.recording.job import JobMembership
from memtrace.recording.labels import Labeller
from memtrace.recording.manifest import ManifestFile, new_manifest
from memtrace.recording.observers import Observer
from memtrace.recording.observers.unseen import unseen_accesses
from memtrace.recording.output_dir import OutputDir, claim_output_dir, move_output_dir
from memtrace.recording.reserve import AddressSpaceReserve
from memtrace.recording.steps import StepTracker
from memtrace.recording.writer import Writer

if TYPE_CHECKING:
    from memtrace.recording.cuda import CudaMonitor
    from memtrace.recording.ring import Ring

logger = logging.getLogger("memtrace")
NO_DEVICE_TIMES_NOTE: Final = "no device times: they need the native observer, built for the CUDA version of torch"

LoaderItem = TypeVar("LoaderItem")
_DATA_WAIT: Final = SPAN_KINDS.index("data_wait")
_RANGE: Final = SPAN_KINDS.index("range")
_RANGE_NAME: Final = NAME_KINDS.index("range")


def make_cuda_monitor(observer: Observer, manifest: ManifestFile) -> CudaMonitor | None:
    """The CUDA monitor of a recording; None if torch is built for neither CUDA nor ROCm (which uses CUDA's names)."""
    if torch.version.cuda is None and torch.version.hip is None:
        return None
    from memtrace.recording.cuda import CudaMonitor  # imports some MB that only CUDA needs
    from memtrace.recording.cuda_driver import TorchDriver

    return CudaMonitor(observer, TorchDriver(), manifest)


class Recorder:
    """The parts of one running recording.

    ``start`` and ``stop`` work on threads of their own, which no interrupt of the program can reach. Only what belongs
    to the recorded thread is done there, in steps that can be repeated. After an interrupt of ``start`` call
    ``undo_start``, after one of ``stop`` call it again.

    Attributes:
        observer: sees allocations and accesses.
        job: rank and world size of this process.
        labeller: names modules and tensors.
        steps: tracks the training steps.
        children: counts the child processes that the program starts.
        is_recording: whether events are recorded at the moment.
        is_complete: whether the trace is written and its manifest final.
    """

    def __init__(
        self, requested_path: Path, options: RecordingOptions, observer: Observer, notes: Sequence[str]
    ) -> None:
        self.observer = observer
        self.is_recording = False
        self.is_complete = False
        self.job = JobMembership(requested_path.name, observer.now)
        self.children = ChildProcesses()
        self._requested_path = requested_path
        self._options = options
        self._reserve = AddressSpaceReserve()
        self._manifest = ManifestFile(new_manifest(observer, options, notes, self.job.rank, self.job.world_size))
        self.labeller = Labeller(observer, HookErrors(self._manifest.add_note))
        self._output_dir: OutputDir | None = None
        self._writer: Writer | None = None
        self._hooks = ExitStack()
        self._cuda = make_cuda_monitor(observer, self._manifest)
        self._ring = self._make_ring()
        self.steps = StepTracker(
            observer,
            self._ring,
            options.max_steps,
            on_limit=self._stop_at_max_steps,
            on_step_end=self._step_ended,
            on_renumber=self._steps_renumbered,
        )
        self._is_abandoned = False
        self._has_warned = False
        self._tasks: list[BackgroundTask] = []
        self._end: dict[str, BackgroundTask] = {}  # "end": the task that ends the recording; setdefault is atomic

    def _make_ring(self) -> Ring | None:
        if self._options.last_steps is None:
            return None
        from memtrace.recording.ring import Ring

        return Ring(self._requested_path, self._options.last_steps)

    @property
    def trace_path(self) -> Path:
        """Folder of the trace."""
        return self._requested_path if self._output_dir is None else self._output_dir.trace

    @property
    def rank_folder(self) -> Path:
        """Folder of this process's rank in the trace."""
        return self._requested_path if self._output_dir is None else self._output_dir.folder

    # Start.

    def start(self, models: Mapping[str, torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> bool:
        """Start to record; return False, after a warning, if that is not possible.

        Only an interrupt of the program is raised.
        """
        if self._run(self._open) and self._start_observer() and self._run(partial(self._begin, models, optimizers)):
            return True
        self.undo_start()
        return False

    def _run(self, work: Callable[[], None]) -> bool:
        """Do work that an interrupt must not end half-way; return False, after a warning, if it failed."""
        task = BackgroundTask(work)
        self._tasks.append(task)
        task.finish()
        if task.error is not None:
            self._warn(f"nothing is recorded, training continues: {_describe(task.error)}")
        return task.error is None

    def _warn(self, message: str) -> None:
        """Log the recording's one warning; what follows from the first trouble is not reported."""
        if not self._has_warned:
            self._has_warned = True
            with suppress(Exception):  # a handler of the program's
                logger.warning("memtrace: %s", message)

    def _open(self) -> None:
        self._reserve.acquire()
        if self._options.device_time_min_bytes >= 0 and not self.observer.times_devices():
            self._manifest.add_note(NO_DEVICE_TIMES_NOTE)
            logger.warning("memtrace: %s", NO_DEVICE_TIMES_NOTE)
        self._output_dir = claim_output_dir(self._requested_path, self.job.rank, self.job.world_size)
        self._manifest.write(self._output_dir.folder)
        if self._ring is not None:
            self._ring.folder = self._output_dir.folder
        self._writer = Writer(
            self.observer, self._output_dir.folder, self._manifest, self._ring, self._writing_failed, self._reserve,
            self._options.flush_seconds, self._cuda,
        )  # fmt: skip

    def _start_observer(self) -> bool:
        """Start the observer, on the thread that is recorded."""
        options = self._options
        try:
            self.observer.start(
                accesses=options.accesses,
                stacks=options.stacks,
                stack_min_bytes=options.stack_min_bytes,
                device_time_min_bytes=options.device_time_min_bytes,
            )
        except (RuntimeError, MemoryError) as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
                raise  # not from the observer, which is C++, but from a signal handler of the program
            self._warn(f"nothing is recorded, training continues: {_describe(error)}")
            return False
        return True

    def _begin(self, models: Mapping[str, torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._manifest.update(t0_epoch_ns=time.time_ns() - self.observer.now())
        install_hooks(self.observer, self.labeller, self.steps.optimizer_stepped, self._hooks)
        self.children.watch(self._hooks)
        if self._cuda is not None:
            self._hooks.callback(self._cuda.watch_graphs())
            self._cuda.start()
        self._label_existing(models, optimizers)
        assert self._writer is not None
        if not self._writer.start():
            raise MemoryError("no thread can be started")
        self.is_recording = True
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

    def undo_start(self) -> None:
        """Leave everything as it was before ``start``, however far that came."""
        for task in self._tasks:
            task.settle()
        self._end.setdefault("end", BackgroundTask(self._undo)).finish()
        self.observer.stop()  # on this thread too: the observer may be enabled for it

    def _undo(self) -> None:
        self.is_recording = False
        end_writer = () if self._writer is None else (self._writer.abandon,)
        discard = () if self._output_dir is None else (self._output_dir.discard,)
        self._do_all(
            self._hooks.close, self.observer.stop, self._reserve.close, self.job.stop, *end_writer, self._close_cuda,
            *discard,
        )  # fmt: skip

    # While recording.

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
        if self._writer is not None:
            self._writer.steps_numbered_anew()

    def _stop_at_max_steps(self) -> None:
        self.stop("max_steps reached")

    def _writing_failed(self, reason: str) -> None:
        # Runs on the writer's thread. The program may be inside one of our hooks, so they stay installed, without
        # effect, until the recorded block ends.
        self.is_recording = False
        self._do_all(partial(self._manifest.update, stop_reason=reason), self.observer.stop)
        self._warn(f"recording stopped, training continues: {reason}")

    def abandon(self) -> None:
        """Make this recorder inert in a forked child: trace, folder and threads belong to the parent."""
        self._is_abandoned = True
        self.is_recording = False
        for work in (self.observer.abandon, self._hooks.close, self._reserve.close):
            with suppress(Exception):
                work()
        if self._output_dir is not None:
            self._output_dir.leave_to_parent()

    # End.

    def stop(self, reason: str | None) -> None:
        """End the recording and write the rest of the trace. May be interrupted and called again.

        Args:
            reason: why the recording ends before the recorded block does, for the manifest; None if it does not.
        """
        if self._is_abandoned:
            return
        if self.is_recording and "end" not in self._end:
            self.steps.close()  # on this thread, which the step belongs to
        self._end.setdefault("end", BackgroundTask(partial(self._stop_now, reason))).finish()
        self.observer.stop()  # on this thread too: the observer is enabled for it

    def _stop_now(self, reason: str | None) -> None:
        self._do_all(self._hooks.close, self._align_clock)
        if self.is_recording:
            self.is_recording = False
            self._do_all(self.labeller.errors.protect(self.labeller.label_remaining_gradients), self._stop_cuda)
        self._do_all(self.observer.stop, self._stop_writer, self._reserve.close, self._close_cuda)
        self._do_all(partial(self._finish_manifest, reason))
        if self._output_dir is not None:
            self._output_dir.release()

    def _do_all(self, *steps: Callable[[], object]) -> None:
        """Take all steps, even if one fails."""
        for step in steps:
            try:
                step()
            except BaseException as error:  # noqa: PERF203 (whatever it is, the next step must be taken)
                self._warn(f"the trace may be incomplete: {_describe(error)}")

    def _align_clock(self) -> None:
        self.job.refresh()
        if (offset := self.job.stop()) is not None:
            self._manifest.update(clock=offset)

    def _stop_writer(self) -> None:
        if self._writer is not None:
            self._writer.stop()

    def _stop_cuda(self) -> None:
        if self._cuda is not None:
            self._cuda.stop()

    def _close_cuda(self) -> None:
        if self._cuda is not None:
            self._cuda.close()

    def _finish_manifest(self, reason: str | None) -> None:
        assert self._writer is not None
        assert self._output_dir is not None
        manifest = self._manifest
        manifest.set_unseen_accesses(unseen_accesses(self.observer))
        if (note := self.children.note()) is not None:
            manifest.add_note(note)
            with suppress(Exception):  # a handler of the program's
                logger.warning("memtrace: %s", note)
        failure = manifest.current.stop_reason
        manifest.update(finished=failure is None, stop_reason=failure or reason, num_events=self._writer.num_events)
        if manifest.current.world_size != self.job.world_size and self._move_to_rank(self._output_dir):
            manifest.update(rank=self.job.rank, world_size=self.job.world_size)
        try:
            manifest.write(self._output_dir.folder)
            self.is_complete = True
        except OSError as error:
            self._warn(f"the manifest could not be written, the trace is incomplete: {error}")

    def _move_to_rank(self, output_dir: OutputDir) -> bool:
        """Move a trace that was started without a rank to the folder of its rank; whether that was possible."""
        return any(
            move_output_dir(output_dir, trace, self.job.rank) for trace in (self._requested_path, output_dir.trace)
        )


def _describe(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return f"out of memory: {error}" if str(error) else "out of memory"
    return str(error) if isinstance(error, (OSError, MemtraceError)) else f"{type(error).__name__}: {error}"
