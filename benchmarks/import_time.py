"""What ``import memtrace`` and the command line add to the start of Python.

    python benchmarks/import_time.py [--rounds 30]

Starts processes in turns: Python alone, with ``import memtrace``, and ``memtrace --version``. Prints the median time of
each and its ratio to Python alone.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

PROGRAMS = {
    "python": ["-c", "pass"],
    "import memtrace": ["-c", "import memtrace"],
    "memtrace --version": ["-m", "memtrace.cli", "--version"],
}


def start_milliseconds(arguments: list[str]) -> float:
    """Return the milliseconds from start to end of a Python process."""
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return 1e3 * (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="processes of each program (default: %(default)s)")
    rounds = parser.parse_args().rounds
    times: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for _ in range(rounds + 1):
        for name, arguments in PROGRAMS.items():
            times[name].append(start_milliseconds(arguments))
    alone = times["python"][1:]  # the first round reads the files into the system's cache
    print(f"{'program':20} {'median':>9} {'added':>9} {'ratio':>7}")
    for name, values in times.items():
        ratio = statistics.median(value / bare for value, bare in zip(values[1:], alone, strict=True))
        added = statistics.median(value - bare for value, bare in zip(values[1:], alone, strict=True))
        print(f"{name:20} {statistics.median(values[1:]):6.1f} ms {added:6.1f} ms {ratio:7.2f}")


if __name__ == "__main__":
    main()
