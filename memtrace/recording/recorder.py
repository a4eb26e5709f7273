"""What runs while a process is recorded: observer, hooks, writer, clock alignment and CUDA monitor."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import torch

from memtrace.format.manifest import RecordingOptions
from memtrace.format.schema import NAME_KINDS, SPAN_KINDS
from memtrace.recording.background import BackgroundTask
from memtrace.recording.children import ChildProcesses
from memtrace.recording.compiled_regions import CompiledRegions
from memtrace.recording.hook_errors import HookErrors, describe_error
from memtrace.recording.hooks import watch_optimizers
from memtrace.recording.labels import Labeller
from memtrace.recording.manifest import ManifestFile, new_manifest
from memtrace.recording.observers import Observer
from memtrace.recording.out_of_memory import FailedAllocation
from memtrace.recording.pauses import Pauses
from memtrace.recording.reserve import AddressSpaceReserve
from memtrace.recording.schedule import ScheduleFunction, StepSchedule
from memtrace.recording.step_windows import StepWindows
from memtrace.recording.trace_output import TraceOutput
from memtrace.recording.writer import Writer

if TYPE_CHECKING:
    from memtrace.recording.cuda import CudaMonitor
    from memtrace.recording.nested import NestedRecorder

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
        options: what is recorded.
        output: the trace, with its rank and its steps.
        labeller: names modules and tensors.
        compiled: observes the kernels of compiled code.
        cuda: records what the observer does not see of CUDA; None without CUDA.
        writer: writes the trace; None until ``start``.
        nested: the recordings inside this one that have not ended.
        nested_numbers: gives each of them a number.
        children: counts the child processes that the program starts.
        pauses: pauses the recording between the steps that its schedule records.
        is_running: whether the recording has begun and not ended.
        is_complete: whether the trace is written and its manifest final.
    """

    def __init__(
        self,
        requested_path: Path,
        options: RecordingOptions,
        observer: Observer,
        notes: Sequence[str],
        schedule: ScheduleFunction | None = None,
    ) -> None:
        self.observer = observer
        self.is_running = False
        self.is_complete = False
        self.options = options
        self.children = ChildProcesses()
        self.nested: list[NestedRecorder] = []
        self.nested_numbers = count()
        self.writer: Writer | None = None
        self._reserve = AddressSpaceReserve()
        self.output = TraceOutput(
            requested_path,
            options,
            observer,
            partial(new_manifest, observer, options, notes),
            on_limit=self._stop_at_max_steps,
            on_step_end=self.step_ended,
        )
        self._manifest = self.output.manifest
        self.labeller = Labeller(observer, HookErrors(self._manifest.add_note))
        self.compiled = CompiledRegions(observer, self.labeller)
        self._hooks = ExitStack()
        self.pauses = Pauses(self)
        if schedule is not None:
            self.output.steps.windows = StepWindows(StepSchedule(schedule), self.pauses)
        self.cuda = make_cuda_monitor(observer, self._manifest)
        self._is_abandoned = False
        self._has_failed = False
        self._has_warned = False
        self._tasks: list[BackgroundTask] = []
        self._end: dict[str, BackgroundTask] = {}  # "end": the task that ends the recording; setdefault is atomic

    @property
    def trace_path(self) -> Path:
        """Folder of the trace."""
        return self.output.trace_path

    @property
    def rank_folder(self) -> Path:
        """Folder of this process's rank in the trace."""
        return self.output.rank_folder

    @property
    def is_recording(self) -> bool:
        """Whether events are recorded at the moment."""
        return self.is_running and not self.pauses.is_paused

    @property
    def has_ended(self) -> bool:
        """Whether the recording has ended, although the recorded block may go on."""
        return self._has_failed or "end" in self._end

    # Start.

    def start(self, models: Mapping[str, torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> bool:
        """Start to record; return False, after a warning, if that is not possible.

        Only an interrupt of the program is raised.
        """
        if self._run(self._open) and self._start_observer() and self._run(partial(self._begin, models, optimizers)):
            if self.output.steps.windows is not None:
                self.output.steps.windows.step_begins(0)
            return True
        self.undo_start()
        return False

    def _run(self, work: Callable[[], None]) -> bool:
        """Do work that an interrupt must not end half-way; return False, after a warning, if it failed."""
        task = BackgroundTask(work)
        self._tasks.append(task)
        task.finish()
        if task.error is not None:
            self._warn(f"nothing is recorded, training continues: {describe_error(task.error)}")
        return task.error is None

    def _warn(self, message: str) -> None:
        """Log the recording's one warning; what follows from the first trouble is not reported."""
        if not self._has_warned:
            self._has_warned = True
            with suppress(Exception):  # a handler of the program's
                logger.warning("memtrace: %s", message)

    def _open(self) -> None:
        self._reserve.acquire()
        if self.options.device_time_min_bytes >= 0 and not self.observer.times_devices():
            self._manifest.add_note(NO_DEVICE_TIMES_NOTE)
            logger.warning("memtrace: %s", NO_DEVICE_TIMES_NOTE)
        self.writer = Writer(self.observer, self.output.open(self._writing_failed), self._reserve, self.cuda)

    def _start_observer(self) -> bool:
        """Start the observer, on the thread that is recorded."""
        options = self.options
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
            self._warn(f"nothing is recorded, training continues: {describe_error(error)}")
            return False
        return True

    def _begin(self, models: Mapping[str, torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._manifest.update(t0_epoch_ns=time.time_ns() - self.observer.now())
        self.pauses.install()
        watch_optimizers(self.labeller, self._optimizer_stepped, lambda: self.pauses.is_paused, self._hooks)
        self.children.watch(self._hooks)
        if self.cuda is not None:
            self._hooks.callback(self.cuda.watch_graphs())
            self.cuda.start()
        self.label(models, ())
        self.labeller.errors.protect(self.labeller.label_existing_tensors)()
        self.label({}, optimizers)
        self.compiled.watch(self._hooks)
        assert self.writer is not None
        if not self.writer.start():
            raise MemoryError("no thread can be started")
        self.is_running = True
        self.output.job.start()

    def label(self, models: Mapping[str, torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Label the parameters of models and the state of optimizers that the program passed in."""
        labeller, protect = self.labeller, self.labeller.errors.protect
        for name, model in models.items():
            protect(labeller.add_model)(model, name)
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
        self.is_running = False
        end_writer = () if self.writer is None else (self.writer.abandon,)
        self._do_all(
            self._hooks.close, self.pauses.hooks.close, self.observer.stop, self._reserve.close, self.output.job.stop,
            *end_writer,
            self._close_cuda, self.output.discard,
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

    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self.output.steps.optimizer_stepped(optimizer)
        for nested in self._recording_nested():
            nested.output.steps.optimizer_stepped(optimizer)

    def _recording_nested(self) -> list[NestedRecorder]:
        return [nested for nested in list(self.nested) if nested.is_recording]

    def step_ended(self) -> None:
        """Read what is read once in a step."""
        self.output.job.refresh()
        self.read_totals()

    def read_totals(self) -> None:
        """Read the memory totals of the devices."""
        if self.cuda is not None:
            self.cuda.read_totals()

    def _stop_at_max_steps(self) -> None:
        self.stop("max_steps reached")

    def note_out_of_memory(self, error: BaseException) -> None:
        """Take note of the out-of-memory error that ends the program."""
        self.output.save_at_end()
        self.pauses.failed_allocation = FailedAllocation.from_error(error)

    def _writing_failed(self, reason: str) -> None:
        # Runs on the writer's thread. The program may be inside one of our hooks, so they stay installed, without
        # effect, until the recorded block ends.
        self.is_running = False
        self._has_failed = True
        self._do_all(partial(self._manifest.update, stop_reason=reason), self.observer.stop)
        self._warn(f"recording stopped, training continues: {reason}")

    def abandon(self) -> None:
        """Make this recorder inert in a forked child: trace, folder and threads belong to the parent."""
        self._is_abandoned = True
        self.is_running = False
        for work in (self.observer.abandon, self._hooks.close, self.pauses.abandon, self._reserve.close):
            with suppress(Exception):
                work()
        self.output.leave_to_parent()
        for nested in list(self.nested):
            nested.abandon()

    # End.

    def stop(self, reason: str | None) -> None:
        """End the recording and write the rest of the trace. May be interrupted and called again.

        Args:
            reason: why the recording ends before the recorded block does, for the manifest; None if it does not.
        """
        if self._is_abandoned:
            return
        if self.is_running and "end" not in self._end:
            self.output.steps.close()  # on this thread, which the step belongs to
            for nested in self._recording_nested():
                nested.close_spans()
        self._end.setdefault("end", BackgroundTask(partial(self._stop_now, reason))).finish()
        self.observer.stop()  # on this thread too: the observer is enabled for it

    def _stop_now(self, reason: str | None) -> None:
        self._do_all(self._hooks.close, self.pauses.end, self.output.align_clock)
        if self.is_running:
            self.is_running = False
            self._do_all(self.labeller.errors.protect(self.labeller.label_remaining_gradients), self._stop_cuda)
        self._do_all(self.observer.stop, self._stop_writer, self._reserve.close, self._close_cuda)
        self._do_all(partial(self._finish_manifest, reason), self.output.release)
        self._do_all(*(nested.stop_with_outer for nested in list(self.nested)))

    def _do_all(self, *steps: Callable[[], object]) -> None:
        """Take all steps, even if one fails."""
        for step in steps:
            try:
                step()
            except BaseException as error:  # noqa: PERF203 (whatever it is, the next step must be taken)
                self._warn(f"the trace may be incomplete: {describe_error(error)}")

    def _stop_writer(self) -> None:
        if self.writer is not None:
            self.writer.stop()

    def _stop_cuda(self) -> None:
        if self.cuda is not None:
            self.cuda.stop()

    def _close_cuda(self) -> None:
        if self.cuda is not None:
            self.cuda.close()

    def _finish_manifest(self, reason: str | None) -> None:
        if (note := self.children.note()) is not None:
            self._manifest.add_note(note)
            with suppress(Exception):  # a handler of the program's
                logger.warning("memtrace: %s", note)
        try:
            self.is_complete = self.output.finish(reason, self.compiled.opaque_bytes)
        except OSError as error:
            self._warn(f"the manifest could not be written, the trace is incomplete: {error}")
