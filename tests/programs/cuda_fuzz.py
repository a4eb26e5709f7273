"""Random programs for the CUDA caching allocator, the same for the same seed.

    python -m tests.programs.cuda_fuzz SEED [OPERATIONS] [FEATURE ...]

runs one without recording. `FEATURES` names what a program may do besides allocating and freeing.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import torch

FEATURES: Final = ("streams", "record_stream", "empty_cache", "pools", "graphs", "large")
"""Names of what a program may do: allocate on several streams, free blocks that another stream still uses, release the
cache, allocate from memory pools, capture CUDA graphs, and fill the device until requests fail."""

_KIB: Final = 1 << 10
_MIB: Final = 1 << 20
_ROUND_SIZES: Final = (512, 4 * _KIB, _MIB, _MIB + 512, 2 * _MIB, 10 * _MIB, 10 * _MIB - 512, 20 * _MIB, 32 * _MIB)
_NUM_POPULAR_SIZES: Final = 12
_BUSY_NS: Final = 200_000  # how long a stream uses a block that the program frees


class FuzzProgram:
    """A random program on one CUDA device.

    Args:
        seed: determines the program.
        features: any of `FEATURES`.
        device: number of the device.
    """

    def __init__(self, seed: int, features: tuple[str, ...] = FEATURES[:3], device: int = 0) -> None:
        unknown = set(features) - set(FEATURES)
        if unknown:
            raise ValueError(f"unknown features: {', '.join(sorted(unknown))}. Known: {', '.join(FEATURES)}.")
        self.device = torch.device("cuda", device)
        self.num_ooms = 0
        """Requests that failed and that the program caught."""
        self._random = random.Random(seed)
        self._features = features
        self._popular = [self._draw_size() for _ in range(_NUM_POPULAR_SIZES)]
        self._tensors: list[torch.Tensor] = []
        num_streams = 2 if "streams" in features or "record_stream" in features else 0
        self._side_streams = [torch.cuda.Stream(self.device) for _ in range(num_streams)]
        self._pools: list[torch.cuda.MemPool] = []
        self._graphs: list[tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]] = []

    def run(self, num_operations: int) -> None:
        """Execute random operations."""
        for operation in self._draw_operations(num_operations):
            getattr(self, f"_do_{operation}")()

    def close(self) -> None:
        """Free what the program still holds."""
        self._tensors.clear()
        self._graphs.clear()
        self._pools.clear()
        gc.collect()

    def _draw_operations(self, count: int) -> Iterator[str]:
        weights = {"allocate": 50.0, "free": 40.0, "free_most": 0.7}
        optional = {"record_stream": 8.0, "empty_cache": 1.2, "pools": 6.0, "graphs": 0.8}
        weights |= {name: weight for name, weight in optional.items() if name in self._features}
        for _ in range(count):
            yield self._random.choices(list(weights), list(weights.values()))[0]

    def _draw_size(self) -> int:
        kind = self._random.random()
        if kind < 0.15:
            return self._random.choice(_ROUND_SIZES)
        if kind < 0.5:
            return self._random.randint(1, _MIB)
        if kind < 0.8:
            return self._random.randint(_MIB, 12 * _MIB)
        return self._random.randint(12 * _MIB, 400 * _MIB if "large" in self._features else 90 * _MIB)

    def _next_size(self) -> int:
        return self._random.choice(self._popular) if self._random.random() < 0.6 else self._draw_size()

    def _on_some_stream(self) -> AbstractContextManager[object]:
        if "streams" in self._features and self._random.random() < 0.3:
            return torch.cuda.stream(self._random.choice(self._side_streams))
        return nullcontext()

    def _request(self, size: int) -> None:
        """Allocate; where the device has no memory left, free half of the tensors."""
        try:
            self._tensors.append(torch.empty(size, dtype=torch.uint8, device=self.device))
        except torch.OutOfMemoryError:
            self.num_ooms += 1
            self._random.shuffle(self._tensors)
            del self._tensors[len(self._tensors) // 2 :]

    def _do_allocate(self) -> None:
        with self._on_some_stream():
            self._request(self._next_size())

    def _do_free(self) -> None:
        if self._tensors:
            del self._tensors[self._random.randrange(len(self._tensors))]

    def _do_free_most(self) -> None:
        self._random.shuffle(self._tensors)
        del self._tensors[self._random.randint(0, 5) :]

    def _do_record_stream(self) -> None:
        """Free a tensor that another stream still uses."""
        if not self._tensors:
            return
        tensor = self._tensors.pop(self._random.randrange(len(self._tensors)))
        with torch.cuda.stream(self._random.choice(self._side_streams)):
            torch.cuda._sleep(_BUSY_NS)
            tensor.record_stream(torch.cuda.current_stream())

    def _do_empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def _do_pools(self) -> None:
        """Allocate from a memory pool of the program, or give one up whose tensors are gone."""
        if len(self._pools) < 2:
            self._pools.append(torch.cuda.MemPool())
        with torch.cuda.use_mem_pool(self._random.choice(self._pools)):
            for _ in range(self._random.randint(1, 4)):
                self._request(self._next_size())

    def _do_graphs(self) -> None:
        """Capture a graph that allocates and frees, or destroy one."""
        if len(self._graphs) == 2:
            self._graphs.pop(self._random.randrange(2))
            return
        torch.cuda.synchronize()
        graph, kept = torch.cuda.CUDAGraph(), []
        # The stream that torch would choose belongs to the device of the process's first capture.
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(self.device)):
            for _ in range(self._random.randint(1, 6)):
                tensor = torch.empty(min(self._next_size(), 30 * _MIB), dtype=torch.uint8, device=self.device)
                if self._random.random() < 0.4:
                    kept.append(tensor)
            del tensor
        self._graphs.append((graph, kept))


def run_program(seed: int, num_operations: int, features: tuple[str, ...] = FEATURES[:3], device: int = 0) -> None:
    """Run one random program and free what it holds at its end."""
    program = FuzzProgram(seed, features, device)
    program.run(num_operations)
    program.close()


if __name__ == "__main__":
    run_program(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 400, tuple(sys.argv[3:]) or FEATURES[:3])
    print(f"peak allocated {torch.cuda.max_memory_allocated()}, peak reserved {torch.cuda.max_memory_reserved()}")
