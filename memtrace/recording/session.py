"""The recording of a training loop: ``with memtrace.record("run.memtrace") as rec:``."""

from __future__ import annotations

import logging
import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import torch

from memtrace.errors import MemtraceError
from memtrace.format import schema
from memtrace.format.manifest import ClockOffset, RecordingOptions
from memtrace.recording import hooks
from memtrace.recording.clock import ClockAligner
from memtrace.recording.labels import Labeller
from memtrace.recording.manifest import ManifestFile, new_manifest
from memtrace.recording.observers import Observer
from memtrace.recording.observers.build import BuildError
from memtrace.recording.output_dir import Place, move_place, take_place
from memtrace.recording.pipelining import Direction, action_text, mark_action
from memtrace.recording.steps import StepFinder
from memtrace.recording.writer import FLUSH_SECONDS, Writer

if TYPE_CHECKING:
    from memtrace.recording.cuda import CudaSide

logger = logging.getLogger("memtrace")

DEVICE_TIME_MIN_BYTES: Final = 1 << 20
# Address space kept, untouched, so that the last part can be written where the program left none: Arrow dies of that.
RESERVE_BYTES: Final = 256 << 20
Batch = TypeVar("Batch")
ObserverKind = Literal["auto", "native", "dispatch"]
_running: Recording | None = None


def record(
    path: str | os.PathLike[str] = "run.memtrace",
    *,
    model: torch.nn.Module | Mapping[str, torch.nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    stacks: bool = True,
    accesses: bool = True,
    last_steps: int | None = None,
    max_steps: int | None = None,
    observer: ObserverKind = "auto",
    stack_min_bytes: int = 512,
    device_time: bool | int = False,
    flush_seconds: float = FLUSH_SECONDS,
) -> Recording:
    """Record the memory of everything that runs inside the ``with`` block.

    Args:
        path: folder of the trace. A trace that is there already is kept under another name.
        model: the model, or several by name, so that names are exactly those of ``named_parameters()``; without it
            models are found by themselves and their names begin with their class.
        optimizer: the optimizer, or several, so that their state is known before the first step.
        stacks: take the Python stack of operators that allocate (and of those that autograd records).
        accesses: record every read and write of a block, not only its allocation and free.
        last_steps: keep only (about) the last N steps on disk, for long jobs.
        max_steps: end the recording after N steps; the program goes on.
        observer: "native" (C++), "dispatch" (pure Python; also for fake tensors), or "auto": dispatch under a
            FakeTensorMode and where the native one cannot be built, saying so, else native.
        stack_min_bytes: operators that allocate less get no stack of their own.
        device_time: time operators on the GPU as well, those that touch a block there of at least so many bytes (True:
            1 MiB): the host runs ahead of the device, so that its clock does not tell when a block was really used.
        flush_seconds: how much a killed process loses at most.

    Raises:
        MemtraceError: an option makes no sense, or ``observer="native"`` cannot be had. Trouble with the disk is a
            warning, never an exception: the program is not harmed.
    """
    for name, value in (("last_steps", last_steps), ("max_steps", max_steps)):
        if value is not None and value < 1:
            raise MemtraceError(f"{name}={value} makes no sense; give a number of steps from 1, or None")
    if observer not in ("auto", "native", "dispatch"):
        raise MemtraceError(f'observer={observer!r} is not one of "auto", "native", "dispatch"')
    options = {
        "stacks": stacks, "accesses": accesses, "last_steps": last_steps, "max_steps": max_steps, "observer": observer,
        "stack_min_bytes": stack_min_bytes, "flush_seconds": flush_seconds,
        "device_time_min_bytes": DEVICE_TIME_MIN_BYTES if device_time is True else int(device_time) or -1,
    }  # fmt: skip
    return Recording(Path(path), options, _models(model), _optimizers(optimizer))


def _models(model: torch.nn.Module | Mapping[str, torch.nn.Module] | None) -> dict[str, torch.nn.Module]:
    if model is None:
        return {}
    return {"": model} if isinstance(model, torch.nn.Module) else dict(model)


def _optimizers(
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None,
) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)


def make_observer(kind: ObserverKind) -> tuple[Observer, list[str]]:
    """The observer to use and notes on why it is not the native one. MemtraceError when "native" cannot be had."""
    from memtrace.recording.observers.dispatch_observer import DispatchObserver, fake_mode_active

    if kind == "dispatch":
        return DispatchObserver(), []
    if kind == "auto" and fake_mode_active():
        return DispatchObserver(), ["fake tensors: sizes are those the program would allocate; nothing was computed"]
    try:
        from memtrace.recording.observers.native_observer import NativeObserver

        return NativeObserver(), []
    except BuildError as error:
        if kind == "native":
            raise MemtraceError(f"the native observer cannot be used: {error}") from error
        note = f"recorded in pure Python, several times slower: {error}"
        logger.warning("memtrace: %s", note)
        return DispatchObserver(), [note]


def make_cuda_side(observer: Observer, manifest: ManifestFile) -> CudaSide | None:
    """The CUDA side of a recording; None where torch is built neither for CUDA nor for ROCm (of the same names)."""
    if torch.version.cuda is None and torch.version.hip is None:
        return None
    from memtrace.recording.cuda import CudaSide, TorchDriver  # some MB that no other recording needs

    return CudaSide(observer, TorchDriver(), manifest)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on a device or in torch's CPU allocator."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
    )


def rank_and_world() -> tuple[int, int]:
    """Rank and world size of this process, as torchrun or torch.distributed give them; (0, 1) for a single one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", "0") or 0), int(os.environ.get("WORLD_SIZE", "1") or 1)


class Recording:
    """One recording, made by ``record``. Enter it once; after the block its trace is complete.

    Attributes:
        path: folder of the trace.
        is_recording: whether events are being recorded now.
        end_reason: why the recording ended before its program was done, for the manifest; None where it did not.
    """

    def __init__(
        self, path: Path, options: dict[str, Any], models: dict[str, torch.nn.Module],
        optimizers: list[torch.optim.Optimizer],
    ) -> None:  # fmt: skip
        self.path = self._asked_path = path
        self.is_recording = False
        self.end_reason: str | None = None
        self._options = options
        self._models = models
        self._optimizers = optimizers
        self._is_written = False
        self._ran_out_of_memory = False
        self._reserve: mmap.mmap | None = None
        self._outer: Recording | None = None
        self._hooks = ExitStack()
        self._observer: Observer | None = None
        self._labeller: Labeller | None = None
        self._steps: StepFinder | None = None
        self._writer: Writer | None = None
        self._cuda: CudaSide | None = None
        self._clock: ClockAligner | None = None
        self._stage: tuple[int, int] | None = None
        self._in_microbatch = False
        self._manifest: ManifestFile
        self._folder = path
        self._place: Place | None = None
        self._rank, self._world_size = 0, 1

    def __enter__(self) -> Recording:
        global _running
        if _running is not None:
            # One allocator, one observer: the inner recording becomes a range of the outer one.
            self._outer = _running
            logger.warning("memtrace: %s is already being recorded; %s becomes a range in it", _running.path, self.path)
            self._outer_started = _running._now()
            return self
        _running = self
        try:
            self._start()
        except BaseException:
            _running = None
            self._hooks.close()
            self._leave_place()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        global _running
        if self._outer is not None:
            self._outer._mark_range(str(self.path), self._outer_started)
            return
        _running = None
        if error is not None:
            self.failed(error, f"{type(error).__name__} left the recorded block")
        self._stop(self.end_reason)
        if self._ran_out_of_memory and self._is_written:
            self._explain()

    def _explain(self) -> None:
        from memtrace.cli.failure import explain_failure

        try:
            explain_failure(self._folder)
        except Exception as trouble:  # the program's own exception is on its way, and must arrive
            logger.warning("memtrace: why memory ran out cannot be told: %s", trouble)

    def failed(self, error: BaseException, reason: str) -> None:
        """An exception ended what is recorded; ``reason`` for the manifest. That of missing memory is explained."""
        self.end_reason = reason
        self._ran_out_of_memory = is_out_of_memory(error)

    # What the program tells.

    def step(self) -> None:
        """Mark the end of a training step. Only such marks make steps then; the first began with the recording."""
        if self._outer is not None:
            self._outer.step()
        elif self._steps is not None and self.is_recording:
            self._steps.mark()

    def steps(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Iterate over a loader: each round is a step, the time it waits for data is recorded, its batch is input."""
        recording = self._outer or self
        if recording._steps is not None and recording.is_recording:
            recording._steps.begin()
        iterator: Iterator[Batch] | None = None

        def fetch() -> Any:
            nonlocal iterator
            if iterator is None:
                iterator = iter(loader)  # the workers of a DataLoader start here: the program waits for them, too
            return next(iterator, recording)

        while True:
            batch, ended = recording._next_batch(fetch)
            if ended:
                return
            yield batch
            recording.step()

    @contextmanager
    def stage(self, number: int, *, pipeline: int = 0) -> Iterator[None]:
        """Of a hand-written pipeline: the micro-batches marked inside belong to this stage of the model.

        ``pipeline`` is the way through the workers, where there are several (Chimera's down and up). Stages of
        torch.distributed.pipelining are marked by themselves.
        """
        recording = self._outer or self
        if recording._in_microbatch:
            raise MemtraceError("rec.stage(...) stands around rec.microbatch(...), not inside it")
        before, recording._stage = recording._stage, (number, pipeline)
        try:
            yield
        finally:
            recording._stage = before

    @contextmanager
    def microbatch(self, number: int, direction: Direction = "forward") -> Iterator[None]:
        """Of a hand-written pipeline: what runs inside is the forward or backward of one micro-batch.

        Its stage is that of ``stage`` around it, else the rank's number. ``direction``: forward, backward, or where
        the backward is split, input_backward and weight_backward.
        """
        recording = self._outer or self
        stage, pipeline = recording._stage or (recording._rank, 0)
        before, recording._in_microbatch = recording._in_microbatch, True
        try:
            with recording.action(action_text(direction, stage, number, pipeline)):
                yield
        finally:
            recording._in_microbatch = before

    @contextmanager
    def action(self, text: str) -> Iterator[None]:
        """Mark what runs inside as one action of a schedule, such as F0.3 or B2.5a@1 (``SPAN_KINDS`` explains them)."""
        recording = self._outer or self
        if recording._observer is None or not recording.is_recording:
            yield
            return
        with mark_action(recording._observer, text):
            yield

    def _next_batch(self, fetch: Callable[[], Any]) -> tuple[Any, bool]:
        observer = self._observer
        if observer is None or not self.is_recording:
            batch = fetch()
            return batch, batch is self
        started = observer.now()
        observer.waiting(True)
        try:
            batch = fetch()
        finally:
            observer.waiting(False)
        if batch is not self:
            observer.span(schema.SPAN_KINDS.index("data_wait"), -1, started, observer.now(), -1)
            assert self._labeller is not None
            self._labeller.label_inputs(batch)
        return batch, batch is self

    def _now(self) -> int:
        return self._observer.now() if self._observer is not None else 0

    def _mark_range(self, name: str, started: int) -> None:
        if self._observer is not None and self.is_recording:
            name_id = self._observer.name_id(schema.NAME_KINDS.index("range"), name)
            self._observer.span(schema.SPAN_KINDS.index("range"), name_id, started, self._observer.now(), -1)

    # Start and end.

    def _start(self) -> None:
        with suppress(OSError, ValueError):
            self._reserve = mmap.mmap(-1, RESERVE_BYTES)
        self._observer, notes = make_observer(self._options["observer"])
        if self._options["device_time_min_bytes"] >= 0 and not self._observer.times_devices():
            notes.append("no device times: they need the native observer, built with CUDA's headers")
            logger.warning("memtrace: %s", notes[-1])
        self._rank, self._world_size = rank_and_world()
        options = RecordingOptions(**self._options)
        self._manifest = ManifestFile(new_manifest(self._observer, options, notes, self._rank, self._world_size))
        try:
            self._place = take_place(self._asked_path, self._rank, self._world_size)
            self.path, self._folder = self._place.trace, self._place.folder
            self._manifest.write(self._folder)
        except (OSError, MemtraceError) as error:
            logger.warning("memtrace: nothing is recorded, the program goes on: %s", error)
            self._observer = None
            self._leave_place()
            return
        self._begin_to_observe(self._observer)

    def _begin_to_observe(self, observer: Observer) -> None:
        ring = None
        if (last_steps := self._options["last_steps"]) is not None:
            from memtrace.recording.ring import Ring  # pyarrow.compute: 7 MB that only a ring needs

            ring = Ring(self._folder, last_steps)
        self._labeller = Labeller(observer)
        self._cuda = make_cuda_side(observer, self._manifest)
        told = (self._end_at_max_steps, self._step_ended, self._steps_numbered_anew)
        self._steps = StepFinder(observer, ring, self._options["max_steps"], *told)
        self._writer = Writer(
            observer,
            self._folder,
            self._manifest,
            ring,
            self._writing_failed,
            self._options["flush_seconds"],
            self._cuda,
        )
        names = ("accesses", "stacks", "stack_min_bytes", "device_time_min_bytes")
        observer.start(**{name: self._options[name] for name in names})
        try:
            self._manifest.update(t0_epoch_ns=time.time_ns() - observer.now())
            self._hooks = hooks.install(observer, self._labeller, self._steps.optimizer_stepped)
            if self._cuda is not None:
                self._hooks.callback(self._cuda.watch_graphs())
                self._cuda.start()
            for name, model in self._models.items():
                self._labeller.adopt(model, name)
            self._labeller.label_older_tensors()
            for optimizer in self._optimizers:
                self._labeller.before_optimizer_step(optimizer)
                self._labeller.after_optimizer_step(optimizer)
        except BaseException:
            observer.stop()
            raise
        self.is_recording = True
        self._writer.start()
        if self._world_size > 1:
            self._tie_clocks(observer)

    def _tie_clocks(self, observer: Observer) -> None:
        self._clock = ClockAligner(self._asked_path.name, self._rank, observer.now)
        self._clock.start()

    def _look_for_rank(self, observer: Observer) -> None:
        """A process that knew no rank may have joined its job since."""
        if self._world_size == 1:
            self._rank, self._world_size = rank_and_world()
            if self._world_size > 1:
                self._tie_clocks(observer)

    def _take_rank(self, place: Place) -> None:
        """Put the trace where its rank belongs, once that is known and everything is written."""
        if self._manifest.current.world_size == self._world_size:
            return
        if move_place(place, self._asked_path, self._rank) or move_place(place, place.trace, self._rank):
            self._manifest.update(rank=self._rank, world_size=self._world_size)
            self.path, self._folder = place.trace, place.folder

    def _step_ended(self) -> None:
        if self._observer is not None:
            self._look_for_rank(self._observer)
        if self._cuda is not None:
            self._cuda.read_totals()

    def _steps_numbered_anew(self) -> None:
        if self._writer is not None:
            self._writer.steps_numbered_anew()

    def _end_at_max_steps(self) -> None:
        self._stop("max_steps reached")

    def _writing_failed(self, reason: str) -> None:
        # On the writer's thread: the program may be running our hooks, so they stay until the block ends, inert.
        self.is_recording = False
        self._manifest.update(stop_reason=reason)
        logger.warning("memtrace: recording ends here, the program goes on: %s", reason)
        if self._observer is not None:
            self._observer.stop()

    def _stop(self, reason: str | None) -> None:
        self._hooks.close()
        if self._reserve is not None:
            self._reserve.close()
        observer, writer = self._observer, self._writer
        if observer is None or writer is None:
            return
        self._look_for_rank(observer)
        self._observer = self._writer = None
        if self._clock is not None:
            self._manifest.update(clock=ClockOffset(**self._clock.stop()))
        if self.is_recording:
            self.is_recording = False
            assert self._labeller is not None and self._steps is not None
            self._labeller.label_leftover_gradients()
            self._steps.close()
            if self._cuda is not None:
                self._cuda.stop()
            observer.stop()
        writer.stop()
        if self._cuda is not None:
            self._cuda.close()
        failure = self._manifest.current.stop_reason
        self._manifest.update(finished=failure is None, stop_reason=failure or reason, num_events=writer.num_events)
        if self._place is not None:
            self._take_rank(self._place)
        try:
            self._manifest.write(self._folder)
            self._is_written = True
        except OSError as error:
            logger.warning("memtrace: the trace %s is incomplete: %s", self.path, error)
        self._leave_place()

    def _leave_place(self) -> None:
        if self._place is not None:
            self._place.leave()
            self._place = None
