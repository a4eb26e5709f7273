"""The programs whose CUDA recordings are compared with torch's own history."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from tests.cuda import memory_programs as memory
from tests.cuda import training_programs as training
from tests.cuda.training_programs import Run


@dataclass(frozen=True)
class Program:
    """A program on one device; it returns what stays live until the end of the recording."""

    run: Callable[[Run, Any], object]
    prepare: Callable[[Run], object] | None = None
    """Runs before the recording; its result is passed to ``run``."""
    memory_bytes: int | None = None
    """Free memory of the device; None: all."""
    min_devices: int = 1


def _whole(run: Callable[[Run], object]) -> Program:
    """Return a program that is recorded from its beginning."""
    return Program(lambda context, _: run(context))


RANDOM: Final = "random"
"""The program that the seed of a case determines."""
PROGRAMS: Final[dict[str, Program]] = {
    "transformer": _whole(training.transformer),
    "cnn": _whole(training.cnn),
    "lstm": _whole(training.lstm),
    "gan": _whole(training.gan),
    "mixed_precision": _whole(training.mixed_precision),
    "checkpointing": _whole(training.checkpointing),
    "threads": _whole(memory.threads),
    "memory_pools": _whole(memory.memory_pools),
    "graphs": _whole(memory.graphs),
    "streams": _whole(memory.streams),
    "out_of_memory": Program(lambda run, _: memory.retry_after_out_of_memory(run), memory_bytes=768 << 20),
    "mid_run_start": Program(memory.mid_run_start, memory.train_before),
    "two_devices": Program(lambda run, _: memory.two_devices(run), min_devices=2),
    "cache_emptied": _whole(memory.cache_emptied),
    "growth": _whole(memory.growth),
    "sizes": _whole(memory.sizes),
    "prefetching": _whole(memory.prefetching),
    RANDOM: Program(lambda run, _: memory.random_program(run), memory_bytes=640 << 20),
}
