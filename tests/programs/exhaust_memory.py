"""Records into the folder ``sys.argv[1]`` and allocates until the limit on its address space is reached."""

import resource
import sys
from pathlib import Path

import torch

import memtrace

with memtrace.record(sys.argv[1]):
    size_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size_bytes + (400 << 20),) * 2)
    tensors = []
    while True:
        tensors.append(torch.empty(16 << 20, dtype=torch.uint8))
