"""Records into the folder ``sys.argv[1]`` until the process is killed, and prints a dot for every operator."""

import sys

import torch

import memtrace

with memtrace.record(sys.argv[1], flush_seconds=0.2):
    while True:
        torch.randn(1000).mul(2)
        print(".", flush=True)
