"""Checks that torch takes the null device for a GPU: nullcuda python selftest.py"""

import gc
import os
import time

import torch

MIB = 1 << 20


def stat(name: str) -> int:
    return torch.cuda.memory_stats()[f"{name}_bytes.all.current"]


# Tensors, copies, a training step.
assert torch.arange(10.0).cuda().cpu().tolist() == list(map(float, range(10)))
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.LayerNorm(64)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(8, 64, device="cuda")).sum().backward()
optimizer.step()
optimizer.zero_grad()

# A free that waits for another stream; the time of events.
block, side = torch.empty(4 * MIB, device="cuda"), torch.cuda.Stream()
with torch.cuda.stream(side):
    torch.cuda._sleep(50_000_000)  # ns
    block.record_stream(side)
before, began = stat("active"), time.monotonic()
del block
assert stat("active") == before and stat("allocated") == before - 16 * MIB
torch.cuda.synchronize()
assert time.monotonic() - began > 0.04
for _ in range(10):  # each allocation asks once (NULLCUDA_EVENT_QUERIES)
    torch.empty(1, device="cuda")
assert stat("active") == before - 16 * MIB
start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
start.record(), torch.cuda._sleep(10_000_000), end.record(), end.synchronize()
assert 9 < start.elapsed_time(end) < 30

# A graph; what may not be done while one is captured ends the capture.
given, graph = torch.ones(1000, device="cuda"), torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    given * 2
graph.replay()
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        (given * 2).sum().item()
    raise SystemExit("an item() was captured")
except RuntimeError as error:
    assert "capture" in str(error)

# Out of memory, and after it.
try:
    kept = [torch.empty(512 * MIB, dtype=torch.uint8, device="cuda") for _ in range(1000)]
    raise SystemExit("the memory of the device never ends")
except torch.OutOfMemoryError:
    gc.collect()
torch.cuda.empty_cache()
free, total = torch.cuda.mem_get_info()
assert total - free > torch.cuda.memory_reserved()  # the context
pool = torch.cuda.MemPool()
with torch.cuda.use_mem_pool(pool):
    private = torch.ones(5 * MIB, device="cuda")
assert len({segment["segment_pool_id"] for segment in torch.cuda.memory_snapshot()}) > 1

# CUDA does not work in a forked child.
if (child := os.fork()) == 0:
    try:
        torch.ones(3, device="cuda")
    except RuntimeError:
        os._exit(0)
    os._exit(1)
assert os.waitpid(child, 0)[1] == 0
print(f"passed: torch {torch.__version__}, {torch.cuda.device_count()} device(s) of {total / MIB:.0f} MiB")
