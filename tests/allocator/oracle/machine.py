"""Builds the driver of PyTorch's allocator and sends programs to it."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
Operation = tuple[Any, ...]  # such as ("alloc", 3, 4096, 0): see driver.cpp


@dataclass(frozen=True)
class Answer:
    """The allocator's trace entries for each operation, and its final state."""

    entries: list[list[list[Any]]]
    """For each operation [kind, address, size, stream, pool]."""
    segments: list[list[int]]
    """[address, size, stream, pool, small, expandable]."""
    blocks: list[list[int]]
    """[address, size, requested, state]: 0 free, 1 in use, 2 waiting for a stream."""
    reserved: int
    peak_reserved: int
    retries: int
    ooms: int


class Machine:
    """A built driver."""

    def __init__(self, program: Path, libraries: str) -> None:
        self.operations = program
        self.environment = {**os.environ, "LD_LIBRARY_PATH": libraries}

    def answer(
        self, operations: list[Operation], *, settings: str = "", capacity: int = 80 << 30, order: int = 0
    ) -> Answer:
        """Run a program on a new allocator."""
        lines = [f"capacity {capacity}", f"order {order}", *([f"settings {settings}"] if settings else [])]
        lines += [" ".join(map(str, operation)) for operation in [*operations, ("end",)]]
        done = subprocess.run(
            [self.operations],
            input="\n".join(lines) + "\n",
            capture_output=True,
            text=True,
            env=self.environment,
            check=True,
        )
        return _parse(done.stdout)


def build(folder: Path) -> Machine | None:
    """Build the driver in `folder`; None where its requirements are missing (see README.md)."""
    torch = Path(os.environ.get("MEMTRACE_TORCH_CUDA", "/nowhere"))
    cuda = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"
    libraries = [torch / "lib" / "libc10_cuda.so", torch / "lib" / "libc10.so"]
    if not all(path.exists() for path in [*libraries, cuda / "cuda.h"]) or not shutil.which("g++"):
        return None
    runtime = folder / "libcudart.so.13"
    symbols = folder / "symbols.map"
    symbols.write_text("libcudart.so.13 { global: cuda*; fake_*; local: *; };\n")
    _call("gcc", "-O1", "-w", "-shared", "-fPIC", f"-I{cuda}", HERE / "device.c", "-o", runtime,
          "-Wl,-soname,libcudart.so.13", f"-Wl,--version-script={symbols}")  # fmt: skip
    program = folder / "driver"
    _call("g++", "-O1", "-w", "-std=c++20", "-DNDEBUG", f"-I{torch / 'include'}", f"-I{cuda}", HERE / "driver.cpp",
          "-o", program, *libraries, runtime)  # fmt: skip
    return Machine(program, f"{folder}:{torch / 'lib'}")


def _call(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True)


def _parse(output: str) -> Answer:
    entries: list[list[list[Any]]] = []
    segments: list[list[int]] = []
    blocks: list[list[int]] = []
    totals = [0, 0, 0, 0]
    for line in output.splitlines():
        word, *rest = line.split()
        if word == "operation":
            entries.append([])
        elif word == "entry":
            entries[-1].append([rest[0], *map(int, rest[1:])])
        elif word == "state":
            totals = list(map(int, rest))
        elif word == "segment":
            segments.append(list(map(int, rest)))
        elif word == "block":
            blocks.append(list(map(int, rest)))
    return Answer(entries[:-1], segments, blocks, *totals)
