"""Programs for an allocator: lists of operations such as ("alloc", 3, 4096, 0); see oracle/driver.cpp."""

from __future__ import annotations

import random

from tests.allocator.oracle.machine import Operation

MIB = 1 << 20
EDGES = (1, 511, 512, 513, 1000, 65536, MIB - 512, MIB - 1, MIB, MIB + 1, 2 * MIB, 3 * MIB + 7, 9 * MIB, 10 * MIB - 512,
         10 * MIB, 10 * MIB + 1, 19 * MIB, 20 * MIB, 21 * MIB, 30 * MIB, 64 * MIB, 100 * MIB, 150 * MIB)  # fmt: skip
"""Sizes at and around every threshold of the rules."""
SETTINGS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:21",
    "max_split_size_mb:64",
    "max_split_size_mb:64,max_non_split_rounding_mb:40",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[64:8,256:4,>:2]",
    "roundup_power2_divisions:16,expandable_segments:True",
    "expandable_segments:True,max_split_size_mb:32",
    "garbage_collection_threshold:0.3,per_process_memory_fraction:0.8",
    "large_segment_size_mb:40",
    "large_segment_size_mb:12,expandable_segments:True",
    "large_segment_size_mb:30,max_split_size_mb:35",
    "per_process_memory_fraction:0.5",
)


def training_program(seed: int, steps: int = 3, layers: int = 4) -> list[Operation]:
    """Return a training loop: parameters, activations, gradients, and optimizer state from the first step on."""
    rng = random.Random(seed)
    operations: list[Operation] = []
    number = 0

    def alloc(size: float) -> int:
        nonlocal number
        operations.append(("alloc", number, max(1, int(size)), 0))
        number += 1
        return number - 1

    width = rng.choice([1000, 1300, 1500])
    sizes = [4 * width * width, 4 * width, 16 * width * width]
    weights = [alloc(size) for _ in range(layers) for size in sizes]
    state: list[int] = []
    for step in range(steps):
        batch = rng.choice([1.0, 1.0, 0.6])
        saved = []
        for _ in range(layers):
            scratch = alloc(batch * rng.choice([12, 30, 75]) * MIB)
            saved.append(alloc(batch * rng.choice([5, 26]) * MIB))
            saved.append(alloc(batch * 0.7 * MIB))
            operations.append(("free", scratch))
        gradients = []
        for block in reversed(saved):
            scratch = alloc(batch * rng.choice([3, 8]) * MIB)
            gradients.append(alloc(sizes[len(gradients) % 3]))
            operations += [("free", block), ("free", scratch)]
        if step == 0:
            state = [alloc(size) for _ in weights[: len(weights) // 2] for size in (sizes[0], sizes[1])]
        operations += [("free", block) for block in gradients]
        if rng.random() < 0.4:
            operations.append(("empty_cache",))
    operations += [("free", block) for block in (*state, *weights)][: rng.randrange(2 * layers)]
    return operations


def random_program(seed: int, length: int = 80, *, streams: bool = True, pools: bool = True) -> list[Operation]:
    """Return a random program: all sizes, blocks used on other streams, private pools, and empty_cache calls."""
    rng = random.Random(seed)
    handles = rng.choice([[0], [0, 16], [0, 48, 16]]) if streams else [0]
    frequent_sizes = [rng.choice(EDGES) for _ in range(10)] if rng.random() < 0.6 else None
    operations: list[Operation] = []
    live: list[int] = []
    pool, begun, number = False, 0, 0
    if rng.random() < 0.3:
        operations.append(("streams_done", 0))
    for _ in range(length):
        chance = rng.random()
        if chance < 0.52 or not live:
            size = (
                rng.choice(frequent_sizes)
                if frequent_sizes and rng.random() < 0.9
                else max(1, int(2 ** rng.uniform(0, 27)))
            )
            operations.append(("alloc", number, size, rng.choice(handles)))
            live.append(number)
            number += 1
        elif chance < 0.92:
            operations.append(("free", live.pop(rng.randrange(len(live)) if rng.random() < 0.7 else -1)))
        elif chance < 0.94:
            operations.append(("empty_cache",))
        elif chance < 0.965:
            operations.append(("use", rng.choice(live), rng.choice(handles)))
        elif chance < 0.975:
            operations.append(("streams_done", rng.randrange(2)))
        elif pools and rng.random() < 0.7:
            operations.append(("end_pool" if pool else "begin_pool", 1))
            begun += not pool
            pool = not pool
    if pool:
        operations.append(("end_pool", 1))
    if begun and rng.random() < 0.5:
        operations += [("streams_done", 1), *[("release_pool", 1)] * begun, ("empty_cache",)]
    return operations
