"""Writes golden.jsonl.gz: what PyTorch's allocator does for some programs. Run as a module; see README.md."""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from tests.allocator.oracle.machine import HERE, Machine, Operation, build
from tests.allocator.programs import SETTINGS, random_program, training_program

GOLDEN = HERE.parent / "golden.jsonl.gz"


def cases() -> list[tuple[str, list[Operation], str, int, int]]:
    """Return name, operations, settings, capacity and address order of each case."""
    chosen = []
    for number, settings in enumerate(SETTINGS):
        capacity = 512 << 20 if "fraction" in settings else 80 << 30
        chosen.append((f"training-{number}", training_program(5), settings, capacity, 0))
        for seed in range(3):
            capacity = (300 << 20, 1 << 30, 512 << 20)[seed]
            chosen.append(
                (f"anything-{number}-{seed}", random_program(100 * number + seed), settings, capacity, seed % 2)
            )
    return chosen


def line(machine: Machine, name: str, operations: list[Operation], settings: str, capacity: int, order: int) -> str:
    """Return a case and the allocator's answer as one line of JSON."""
    answer = machine.answer(operations, settings=settings, capacity=capacity, order=order)
    case = {"name": name, "settings": settings, "capacity": capacity, "order": order, "operations": operations}
    return json.dumps({**case, "answer": asdict(answer)}, separators=(",", ":"))


def main() -> None:
    """Run all cases and write the file."""
    with tempfile.TemporaryDirectory() as folder:
        machine = build(Path(folder))
        if machine is None:
            sys.exit("PyTorch's allocator cannot be built here: see tests/allocator/oracle/README.md")
        text = "\n".join(line(machine, *case) for case in cases()) + "\n"
    GOLDEN.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{GOLDEN}: {len(cases())} programs, {GOLDEN.stat().st_size} bytes")


if __name__ == "__main__":
    main()
