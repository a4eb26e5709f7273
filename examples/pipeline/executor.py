"""Run any pipeline schedule over torch.distributed: every process runs its row of the schedule.

    dist.init_process_group("gloo")                                 # one rank per worker of the schedule
    worker = Worker(schedule, make_stage, loss, message_shape)
    losses = worker.step(inputs, targets)                           # one training step
    optimizer.step()                                                # gradients are in .grad of worker.parameters()

The executor is minimal: stages are modules, messages are matched by tag, and the gradients of a stage that several
workers hold are all-reduced as soon as its last backward is done.

Schedules without a flush (PipeDream, PipeDream-2BW) update every stage within the step, with an optimizer that the
executor makes for it, and keep the weight versions that micro-batches in flight use (``weights.StageWeights``). Which
version a micro-batch uses, and when a stage is updated, is defined in ``memtrace.pipeline.schedules.weight_versions``.
The step drains the pipeline at its end; versions and batches continue in the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from weights import StageWeights

from memtrace.pipeline.schedules.actions import BACKWARD, FORWARD, INPUT_BACKWARD, WEIGHT_BACKWARD, Action
from memtrace.pipeline.schedules.schedule import STASH, TWO_BUFFERED, Schedule
from memtrace.pipeline.schedules.validation import validate_schedule
from memtrace.pipeline.schedules.weight_versions import microbatches_per_update, version_changes, version_used
from memtrace.pipeline.simulation.all_reduce import last_backward_actions, stage_holders

Key = tuple[int, int, int]
"""(stage, micro-batch, half); half is 0 for a whole micro-batch."""
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass
class _SavedForward:
    """What a forward saves for its backward."""

    received: torch.Tensor | None
    """The received input, whose gradient is sent back; None on the first stage."""
    output: torch.Tensor
    version: int
    """The weight version that the forward used; 0 with a flush."""
    gradient: torch.Tensor | None = None
    """Gradient of the output; saved between input backward and weight backward."""


class Worker:
    """One worker of a schedule, run by one process.

    Args:
        schedule: the schedule; the default process group must have one rank per worker.
        make_stage: builds a stage by its number, with the same weights in every process.
        loss: loss of an output of the last stage and a target, a mean over samples.
        message_shape: shape of a stage's output for a whole micro-batch, samples first, by the number of the stage.
        make_optimizer: makes the optimizer of the parameters of one stage; needed for schedules without a flush only.
        mark: called with the action about to run; the returned context is entered when its message has arrived and
            exited when its computation has ended.
    """

    def __init__(
        self,
        schedule: Schedule,
        make_stage: Callable[[int], nn.Module],
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        message_shape: Callable[[int], tuple[int, ...]],
        *,
        make_optimizer: MakeOptimizer | None = None,
        mark: Callable[[Action], AbstractContextManager[object]] = lambda action: nullcontext(),
    ) -> None:
        self.schedule, self.rank = validate_schedule(schedule), dist.get_rank()
        if dist.get_world_size() != schedule.num_workers:
            raise ValueError(f"{schedule.name} needs {schedule.num_workers} ranks, not {dist.get_world_size()}")
        self._loss, self._message_shape, self._mark = loss, message_shape, mark
        self._row = schedule.rows[self.rank]
        self.copies: dict[tuple[int, int], nn.Module] = {}
        for (worker, stage), pipelines in schedule.replicas.items():
            if worker == self.rank:
                for pipeline in pipelines:
                    self.copies[pipeline, stage] = make_stage(stage)
        self._halved = {(a.stage, a.microbatch) for a in schedule.actions() if a.half is not None}
        self._saved: dict[Key, _SavedForward] = {}
        self._own: dict[int, torch.Tensor] = {}
        # Gloo reports that a message was sent only to a thread that waits for it.
        self._waiters = ThreadPoolExecutor(max_workers=64)
        self._sending: list[Future[None]] = []
        self._groups = {
            stage: dist.new_group(list(stage_holders(schedule, stage))) for stage in range(schedule.num_stages)
        }
        begin = sum(map(len, schedule.rows[: self.rank]))
        last = {
            stage: number - begin
            for (worker, stage), number in last_backward_actions(schedule).items()
            if worker == self.rank
        }
        self._last = {number: stage for stage, number in last.items()}
        self._idle_stages = [stage for _, stage in self.copies if stage not in last]
        self._updates_after = version_changes(schedule, self.rank).is_update
        self._num_steps = 0
        self.weights: dict[int, StageWeights] = {}
        self.optimizers: list[torch.optim.Optimizer] = []
        if schedule.asynchronous:
            self._make_weights(make_optimizer)

    def _make_weights(self, make_optimizer: MakeOptimizer | None) -> None:
        """Make the optimizers and weight versions of a schedule without a flush."""
        every = microbatches_per_update(self.schedule)
        if make_optimizer is None:
            raise ValueError(f"{self.schedule.name} updates the weights within a step; pass make_optimizer")
        if self.schedule.num_microbatches % every:
            raise ValueError(
                f"{self.schedule.num_microbatches} micro-batches are not a whole number of batches of {every}; change "
                "the number of micro-batches or update_every"
            )
        for (_, stage), module in self.copies.items():
            optimizer = make_optimizer(list(module.parameters()))
            self.optimizers.append(optimizer)
            is_double_buffered = self.schedule.update == TWO_BUFFERED
            self.weights[stage] = StageWeights(module, optimizer, is_double_buffered=is_double_buffered)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of all copies on this worker."""
        for copy in self.copies.values():
            yield from copy.parameters()

    def step(self, inputs: Callable[[int], torch.Tensor], targets: Callable[[int], torch.Tensor]) -> list[float]:
        """Run one step.

        Args:
            inputs: the inputs of a micro-batch by its number.
            targets: the targets of a micro-batch by its number.

        Returns:
            The losses that this worker computed, each divided by the number of micro-batches per update.
        """
        losses: list[float] = []
        reductions: list[dist.Work] = []
        for number, action in enumerate(self._row):
            if action.kind == FORWARD:
                losses += self._forward(action, inputs, targets)
            else:
                self._backward(action, is_updating=self._updates_after[number])
            if number in self._last:
                reductions += self._reduce(self._last[number])
        # A copy that no micro-batch passed through has no gradients, but the other workers wait for its all-reduce.
        for stage in self._idle_stages:
            reductions += self._reduce(stage)
        for work in reductions:
            work.wait()
        for sending in self._sending:
            sending.result()
        self._sending.clear()
        self._num_steps += 1
        return losses

    def close(self) -> None:
        """Stop the threads that wait for sent messages."""
        self._waiters.shutdown()

    # -- actions ---------------------------------------------------------------------------------------------

    def _parts(self, action: Action) -> list[Key]:
        """The halves that an action runs on; a forward whose backward is halved runs in two halves."""
        if action.half is not None:
            return [(action.stage, action.microbatch, action.half)]
        halves = (0, 1) if (action.stage, action.microbatch) in self._halved else (0,)
        return [(action.stage, action.microbatch, half) for half in halves]

    def _forward(
        self,
        action: Action,
        inputs: Callable[[int], torch.Tensor],
        targets: Callable[[int], torch.Tensor],
    ) -> list[float]:
        parts, version = self._parts(action), self._version(action)
        share = 1 / (microbatches_per_update(self.schedule) * len(parts))
        losses = []
        for key in parts:
            received = None if action.stage == 0 else self._receive(action, key, gradient=False).requires_grad_()
            with self._mark(action):
                value = self._part(inputs(action.microbatch), key, len(parts)) if received is None else received
                output = self._run_forward(action, version, value)
                if action.stage == self.schedule.num_stages - 1:
                    target = self._part(targets(action.microbatch), key, len(parts))
                    output = self._loss(output, target) * share
                    losses.append(output.item())
            if action.stage < self.schedule.num_stages - 1:
                self._send(action, key, output.detach(), gradient=False)
            self._saved[key] = _SavedForward(received, output, version)
        return losses

    def _version(self, action: Action) -> int:
        """The weight version that the micro-batch of a forward uses; 0 with a flush."""
        if not self.schedule.asynchronous:
            return 0
        if self.schedule.update == STASH:
            return self.weights[action.stage].newest
        microbatch = self._num_steps * self.schedule.num_microbatches + action.microbatch
        return version_used(microbatch, microbatches_per_update(self.schedule))

    def _run_forward(self, action: Action, version: int, value: torch.Tensor) -> torch.Tensor:
        if self.weights:
            return self.weights[action.stage].run(version, value)
        output: torch.Tensor = self.copies[action.pipeline, action.stage](value)
        return output

    @staticmethod
    def _part(batch: torch.Tensor, key: Key, num_parts: int) -> torch.Tensor:
        return batch if num_parts == 1 else batch.chunk(2)[key[2]]

    def _backward(self, action: Action, *, is_updating: bool) -> None:
        version = 0
        for key in self._parts(action):
            version = self._backward_part(action, key)
            if self.weights and action.kind != INPUT_BACKWARD:
                self.weights[action.stage].release(version)
        if is_updating:
            self.weights[action.stage].update(version)

    def _backward_part(self, action: Action, key: Key) -> int:
        """Run the backward of one part of a micro-batch; returns the weight version of its forward."""
        saved = self._saved[key]
        last = action.stage == self.schedule.num_stages - 1
        if action.kind != WEIGHT_BACKWARD and not last:
            saved.gradient = self._receive(action, key, gradient=True)
        with self._mark(action):
            gradient = self._run_backward(action, saved)
        if gradient is not None:
            self._send(action, key, gradient, gradient=True)
        if action.kind != INPUT_BACKWARD:
            del self._saved[key]
        return saved.version

    def _run_backward(self, action: Action, saved: _SavedForward) -> torch.Tensor | None:
        """Run a backward and return the gradient to send back; None where there is none."""
        if action.kind == BACKWARD:
            torch.autograd.backward([saved.output], [saved.gradient])
            return saved.received.grad if saved.received is not None else None
        if action.kind == WEIGHT_BACKWARD:
            torch.autograd.backward(
                [saved.output], [saved.gradient], inputs=self._differentiated(action, saved.version)
            )
            return None
        if saved.received is None:
            return None
        # The weight backward needs the graph and frees it.
        return torch.autograd.grad([saved.output], [saved.received], [saved.gradient], retain_graph=True)[0]

    def _differentiated(self, action: Action, version: int) -> list[torch.Tensor]:
        """The tensors that the weight gradients of an action belong to."""
        if self.weights:
            return self.weights[action.stage].parameters(version)
        return list(self.copies[action.pipeline, action.stage].parameters())

    # -- messages --------------------------------------------------------------------------------------------

    def _peer(self, action: Action, gradient: bool, sending: bool) -> tuple[int, int]:
        """The other worker of a message, and the boundary that it crosses (the number of the stage before it)."""
        towards_end = gradient != sending
        other = action.stage + (1 if towards_end else -1)
        return self.schedule.placement[action.pipeline][other], min(action.stage, other)

    def _tag(self, boundary: int, key: Key, gradient: bool) -> int:
        return ((boundary * self.schedule.num_microbatches + key[1]) * 2 + key[2]) * 2 + gradient

    def _send(self, action: Action, key: Key, tensor: torch.Tensor, *, gradient: bool) -> None:
        peer, boundary = self._peer(action, gradient, sending=True)
        tag = self._tag(boundary, key, gradient)
        if peer == self.rank:
            self._own[tag] = tensor
            return
        tensor = tensor.contiguous()
        work = dist.isend(tensor, peer, tag=tag)
        assert work is not None
        self._sending = [sending for sending in self._sending if not sending.done()]
        self._sending.append(self._waiters.submit(_wait, work, tensor))

    def _receive(self, action: Action, key: Key, *, gradient: bool) -> torch.Tensor:
        peer, boundary = self._peer(action, gradient, sending=False)
        tag = self._tag(boundary, key, gradient)
        if peer == self.rank:
            return self._own.pop(tag)
        samples, *rest = self._message_shape(boundary)
        halved = (action.stage, action.microbatch) in self._halved
        tensor = torch.empty((samples // 2 if halved else samples, *rest))
        dist.recv(tensor, peer, tag=tag)
        return tensor

    def _reduce(self, stage: int) -> list[dist.Work]:
        """Start the all-reduce of a stage's gradients over its copies."""
        if len(stage_holders(self.schedule, stage)) == 1:
            return []
        works = []
        for (_, own), copy in self.copies.items():
            for parameter in copy.parameters() if own == stage else ():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                works.append(dist.all_reduce(parameter.grad, group=self._groups[stage], async_op=True))
        return works


def _wait(work: dist.Work, tensor: torch.Tensor) -> None:
    """Keep the tensor until it was sent."""
    work.wait()
    del tensor
