"""Programs that exercise the CUDA allocator: streams, threads, pools, graphs, caches, failures."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from tests.cuda.training_programs import Run, Transformer, train_transformer
from tests.programs.cuda_fuzz import FEATURES, FuzzProgram

MIB = 1 << 20


def allocate(run: Run, num_bytes: int) -> torch.Tensor:
    """Return an uninitialized tensor of a number of bytes."""
    return torch.empty(num_bytes, dtype=torch.uint8, device=run.device)


def streams(run: Run) -> object:
    """Tensors that are used on several streams; their frees wait for events."""
    sides = [torch.cuda.Stream(run.device) for _ in range(3)]
    kept = []
    for number in range(24):
        batch = allocate(run, (number % 5 + 1) * 700_000)
        side = sides[number % 3]
        side.wait_stream(torch.cuda.current_stream(run.device))
        with torch.cuda.stream(side):
            result = batch.float()
            batch.record_stream(side)
            torch.cuda._sleep(200_000)
            kept.append(result.half() if number % 4 == 0 else result[:1000].clone())
            if number % 7 == 0:
                result.record_stream(sides[(number + 1) % 3])
        del batch, result
        run.mark()
    torch.cuda.synchronize(run.device)
    allocate(run, 1000)
    run.mark()
    return kept, sides


def threads(run: Run) -> object:
    """Threads that allocate at the same time, each on a stream of its own."""
    kept: list[list[torch.Tensor]] = [[] for _ in range(3)]
    # In a forked process, about one run in 100 hangs in torch if the first backward passes of all run at the same time.
    torch.ones(1, device=run.device, requires_grad=True).sum().backward()

    def work(number: int) -> None:
        torch.cuda.set_device(run.device)
        with torch.cuda.stream(torch.cuda.Stream(run.device)):
            layer = nn.Linear(256, 256, device=run.device)
            for repeat in range(12):
                layer(torch.randn(100 + 50 * repeat, 256, device=run.device)).sum().backward()
                kept[number].append(allocate(run, 1 + 300_000 * (repeat + number)))
                if repeat % 3 == 2:
                    kept[number].pop(0)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    run.mark()
    return kept


def memory_pools(run: Run) -> object:
    """Private pools: training in one, and another that is deleted."""
    kept_pool, short_pool = torch.cuda.MemPool(), torch.cuda.MemPool()
    outside = [allocate(run, size * MIB) for size in (1, 3, 12)]
    with torch.cuda.use_mem_pool(kept_pool, run.device):
        model = nn.Linear(1500, 1500, device=run.device)
        model(torch.randn(300, 1500, device=run.device)).sum().backward()
    run.mark()
    with torch.cuda.use_mem_pool(short_pool, run.device):
        temporary = [allocate(run, size) for size in (100, 5 * MIB, 30 * MIB)]
        del temporary[1]
    outside.append(allocate(run, 5 * MIB))
    run.mark()
    del temporary, short_pool
    torch.cuda.empty_cache()
    run.mark()
    with torch.cuda.use_mem_pool(kept_pool, run.device):
        more = allocate(run, 2 * MIB)
    run.mark()
    return outside, model, more, kept_pool


def graphs(run: Run) -> object:
    """Two captured training steps that share a pool, replayed; then the graphs are deleted."""
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).to(run.device)
    inputs = torch.randn(256, 512, device=run.device)
    side = torch.cuda.Stream(run.device)
    side.wait_stream(torch.cuda.current_stream(run.device))
    with torch.cuda.stream(side):
        for _ in range(2):
            model(inputs).sum().backward()
            model.zero_grad(set_to_none=True)
    torch.cuda.current_stream(run.device).wait_stream(side)
    run.mark()
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(first, stream=side):
        outputs = model(inputs)
        outputs.sum().backward()
    with torch.cuda.graph(second, pool=first.pool(), stream=side):
        scaled = [outputs * 2, (outputs @ outputs.T).relu()]
        del scaled[0]
    run.mark()
    for _ in range(3):
        first.replay()
        second.replay()
        eager = inputs * 2
    run.mark()
    del second, scaled, eager
    torch.cuda.empty_cache()
    run.mark()
    return model, inputs, outputs, first


def retry_after_out_of_memory(run: Run) -> object:
    """Requests that succeed only after the allocator released its cache, and requests that fail for good."""
    free_bytes, _ = torch.cuda.mem_get_info(run.device)
    unit = min(free_bytes, 2048 * MIB) // 16 // MIB * MIB
    blocks = [allocate(run, unit) for _ in range(12)]
    run.mark()
    del blocks[::2]
    larger = []
    for num_bytes in (2 * unit, 3 * unit, unit, free_bytes, free_bytes):
        with suppress(torch.OutOfMemoryError):
            larger.append(allocate(run, num_bytes))
        run.mark()
    del blocks[1:]
    larger.append(allocate(run, 5 * unit))
    small = [allocate(run, 3000 * number) for number in range(40)]
    run.mark()
    return blocks, larger, small


def train_before(run: Run) -> Any:
    """Train, and leave the allocator with caches, several streams and a free that waits."""
    with run.device:
        model = Transformer(width=256, num_blocks=2)
    optimizer = torch.optim.AdamW(model.parameters())
    train_transformer(run, model, optimizer, 2)
    side = torch.cuda.Stream(run.device)
    holes = [allocate(run, size) for size in (100, 70_000, 3 * MIB, 800_000, 11 * MIB, 25 * MIB, 2 * MIB)]
    with torch.cuda.stream(side):
        other = [allocate(run, 900_000), allocate(run, 6 * MIB)]
        torch.cuda._sleep(20_000_000)
    waiting = allocate(run, 4 * MIB)
    waiting.record_stream(side)
    del holes[1::2], other[0], waiting
    return model, optimizer, holes, other


def mid_run_start(run: Run, state: Any) -> object:
    """The rest of a run that was not recorded from its beginning."""
    model, optimizer, holes, other = state
    train_transformer(run, model, optimizer, 2)
    del holes[0], other[0]
    torch.cuda.synchronize(run.device)
    holes += [allocate(run, size) for size in (200, 5 * MIB, 40 * MIB)]
    run.mark()
    torch.cuda.empty_cache()
    run.mark()
    return model, optimizer, holes


def two_devices(run: Run) -> object:
    """A model whose second half is on another device, with copies between the devices."""
    second = torch.device("cuda", (run.device.index + 1) % torch.cuda.device_count())
    lower, upper = nn.Linear(1024, 1024, device=run.device), nn.Linear(1024, 1024, device=second)
    optimizer = torch.optim.Adam([*lower.parameters(), *upper.parameters()])
    for batch in (64, 300, 64):
        hidden = lower(torch.randn(batch, 1024, device=run.device)).relu()
        upper(hidden.to(second)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.mark()
    return lower, upper, optimizer


def cache_emptied(run: Run) -> object:
    """The cache is emptied between phases, with fragmented segments."""
    kept = []
    for repeat in range(4):
        blocks = [allocate(run, (1 + number % 7) * (400_000 + 100_000 * repeat)) for number in range(30)]
        kept += blocks[repeat::11]
        del blocks
        run.mark()
        torch.cuda.empty_cache()
        run.mark()
    return kept


def growth(run: Run) -> object:
    """Tensors that grow: a key-value cache that is concatenated, a list, and storages that are resized."""
    cache = torch.zeros(1, 8, 0, 64, device=run.device)
    history, buffer = [], torch.zeros(1000, device=run.device)
    for step in range(30):
        cache = torch.cat([cache, torch.randn(1, 8, 16, 64, device=run.device)], dim=2)
        history.append(cache.sum(dim=(1, 3)))
        if step % 6 == 5:
            buffer.resize_(buffer.numel() * 4)
            run.mark()
    buffer.untyped_storage().resize_(0)
    run.mark()
    buffer.untyped_storage().resize_(5 * MIB)
    run.mark()
    return cache, history, buffer


def sizes(run: Run) -> object:
    """Sizes around every limit of the allocator, freed in another order."""
    limits = (512, MIB, 2 * MIB, 10 * MIB, 20 * MIB, 32 * MIB)
    blocks = [allocate(run, size + offset) for size in limits for offset in (-513, -1, 0, 1, 512) if size + offset > 0]
    blocks += [allocate(run, 0), torch.empty(3, 0, device=run.device)]
    run.mark()
    del blocks[::3]
    run.mark()
    blocks += [allocate(run, size // 3 * 2) for size in reversed(limits)]
    blocks.reverse()
    del blocks[1::2]
    run.mark()
    return blocks


def prefetching(run: Run) -> object:
    """Batches copied from page-locked memory on a side stream while the last one is used."""
    loader = torch.cuda.Stream(run.device)
    main = torch.cuda.current_stream(run.device)
    batches = [torch.zeros(200 + 100 * number, 512).pin_memory() for number in range(6)]
    layer = nn.Linear(512, 512, device=run.device)
    for number, batch in enumerate(batches):
        with torch.cuda.stream(loader):
            on_device = batch.to(run.device, non_blocking=True)
        main.wait_stream(loader)
        on_device.record_stream(main)
        layer(on_device).square().mean().backward()
        del on_device
        if number % 2:
            run.mark()
    return layer


def random_program(run: Run) -> object:
    """Random operations; the seed also determines which features of the allocator they use."""
    features = tuple(name for bit, name in enumerate(FEATURES) if (run.seed + 1) * 37 >> bit & 1)
    program = FuzzProgram(run.seed, features, run.device.index)
    for _ in range(8):
        program.run(40)
        run.mark()
    return program
