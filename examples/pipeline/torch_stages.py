"""Schedules of torch.distributed.pipelining over the same stages, with the interface of ``executor.Worker``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from memtrace.pipeline.schedules.schedule import Schedule

CLASSES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
}


class TorchWorker:
    """One rank of a pipeline run by torch; ``schedule`` gives the schedule class and the placement of the stages."""

    def __init__(
        self,
        schedule: Schedule,
        make_stage: Callable[[int], nn.Module],
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        *,
        return_outputs: bool,
    ) -> None:
        from torch.distributed import pipelining

        self.schedule = schedule
        (workers,) = schedule.placement
        own = [stage for stage, worker in enumerate(workers) if worker == dist.get_rank()]
        self.copies = {(0, stage): make_stage(stage) for stage in own}
        stages = [
            pipelining.PipelineStage(self.copies[0, stage], stage, schedule.num_stages, torch.device("cpu"))
            for stage in own
        ]
        kind = getattr(pipelining.schedules, CLASSES[schedule.name])
        many = issubclass(kind, pipelining.schedules.PipelineScheduleMulti)
        self._runner = kind(stages if many else stages[0], schedule.num_microbatches, loss_fn=loss)
        self._return_outputs = return_outputs
        self._first, self._last = 0 in own, schedule.num_stages - 1 in own

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of all stages on this rank."""
        for stage in self.copies.values():
            yield from stage.parameters()

    def step(self, inputs: Callable[[int], torch.Tensor], targets: Callable[[int], torch.Tensor]) -> list[float]:
        """Run one step; returns the losses that this rank computed, each divided by the number of micro-batches."""
        count = self.schedule.num_microbatches
        given = (torch.cat([inputs(m) for m in range(count)]),) if self._first else ()
        target = torch.cat([targets(m) for m in range(count)]) if self._last else None
        losses: list[torch.Tensor] = []
        kept = losses if self._last else None
        outputs = self._runner.step(*given, target=target, losses=kept, return_outputs=self._return_outputs)
        del outputs  # as in most programs, which need the losses only
        return [loss.item() / count for loss in losses]

    def close(self) -> None:
        """Do nothing: torch's stages start no threads."""
