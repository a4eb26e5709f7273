"""Random programs: allocations of all sizes on several streams and pools, frees that wait, captures, and failures."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import torch

from tests.cuda.training_programs import Run

MIN_BYTES: Final = 1
MAX_BYTES: Final = 60 << 20
NUM_ACTIONS: Final = 250


class RandomProgram:
    """The state of a random program.

    Args:
        run: the device.
        seed: determines the program.
    """

    def __init__(self, run: Run, seed: int) -> None:
        self.run, self.random = run, random.Random(seed)
        self.live: list[torch.Tensor] = []
        self.streams = [torch.cuda.current_stream(run.device)] + [torch.cuda.Stream(run.device) for _ in range(2)]
        self.pools = [torch.cuda.MemPool() for _ in range(2)]
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.actions: dict[Callable[[], None], int] = {
            self.allocate: 50,
            self.free: 40,
            self.use_on_another_stream: 10,
            self.allocate_in_pool: 4,
            self.compute: 6,
            self.synchronize: 2,
            self.empty_cache: 1,
            self.capture: 1,
            self.drop_graph: 1,
            self.request_too_much: 1,
            self.run.mark: 8,
        }

    def execute(self) -> object:
        """Run the program; return what stays live."""
        actions = self.random.choices(list(self.actions), list(self.actions.values()), k=NUM_ACTIONS)
        for action in actions:
            action()
        self.run.mark()
        return self.live, self.pools, self.graphs

    def new_tensor(self) -> torch.Tensor:
        """Return a tensor of a random size; every size class of the allocator is equally likely."""
        num_bytes = int(math.exp(self.random.uniform(math.log(MIN_BYTES), math.log(MAX_BYTES))))
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.run.device)

    def allocate(self) -> None:
        """Allocate on a random stream; where memory is short, free half of the tensors."""
        with torch.cuda.stream(self.random.choice(self.streams)):
            try:
                self.live.append(self.new_tensor())
            except torch.OutOfMemoryError:
                del self.live[::2]

    def free(self) -> None:
        """Free a random tensor."""
        if self.live:
            self.live.pop(self.random.randrange(len(self.live)))

    def use_on_another_stream(self) -> None:
        """Keep a stream busy with a tensor, so that its free waits."""
        if self.live:
            stream = self.random.choice(self.streams)
            with torch.cuda.stream(stream):
                torch.cuda._sleep(self.random.choice((1000, 300_000, 2_000_000)))
            self.random.choice(self.live).record_stream(stream)

    def allocate_in_pool(self) -> None:
        """Allocate in a private pool."""
        with torch.cuda.use_mem_pool(self.random.choice(self.pools), self.run.device):
            with suppress(torch.OutOfMemoryError):
                self.live.append(self.new_tensor())

    def compute(self) -> None:
        """Run operators with temporaries, forward and backward."""
        width = self.random.choice((64, 500, 1200))
        layer = torch.nn.Linear(width, width, device=self.run.device)
        layer(torch.randn(self.random.randint(1, 700), width, device=self.run.device)).relu().sum().backward()
        if self.random.random() < 0.3 and layer.weight.grad is not None:
            self.live.append(layer.weight.grad)

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.run.device)

    def empty_cache(self) -> None:
        """Release the cached segments."""
        torch.cuda.empty_cache()

    def capture(self) -> None:
        """Capture a graph, half of the time into the pool of an earlier one."""
        pool = self.graphs[-1].pool() if self.graphs and self.random.random() < 0.5 else None
        graph = torch.cuda.CUDAGraph()
        self.synchronize()
        with torch.cuda.graph(graph, stream=self.streams[1], pool=pool):
            inputs = torch.zeros(self.random.choice((1000, 700_000, 3_000_000)), device=self.run.device)
            outputs = (inputs * 2).sin() + 1
        self.live += self.random.sample([inputs, outputs], 1)
        self.graphs.append(graph)
        graph.replay()

    def drop_graph(self) -> None:
        """Delete the oldest graph."""
        if self.graphs:
            del self.graphs[0]

    def request_too_much(self) -> None:
        """Ask for more than the device has."""
        with suppress(torch.OutOfMemoryError):
            torch.empty(self.random.choice((1 << 36, 1 << 44)), dtype=torch.uint8, device=self.run.device)
