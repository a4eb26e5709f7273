"""Trains while it is recorded, with a limit of address space: MOMENT (start or running) EXTRA_BYTES LAST_STEPS FOLDER."""

import resource
import sys
from pathlib import Path

import torch
from torch import nn

import memtrace
from memtrace.recording.observers.build import native_module

moment, extra_bytes, last_steps, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
torch.set_num_threads(1)
model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(20)])
optimizer = torch.optim.Adam(model.parameters())


def step() -> None:
    optimizer.zero_grad()
    model(torch.randn(16, 64)).sum().backward()
    optimizer.step()


def limit_address_space() -> None:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    used_bytes = int(status["VmSize"].split()[0]) << 10
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + extra_bytes, resource.RLIM_INFINITY))


native_module()
for _ in range(3):
    step()
recording = memtrace.record(f"{folder}/run.memtrace", flush_seconds=0.02, last_steps=last_steps or None)
if moment == "start":
    limit_address_space()
with recording:
    for _ in range(20):
        step()
    if moment == "running":
        limit_address_space()
    for _ in range(100):
        step()
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print("trained")
