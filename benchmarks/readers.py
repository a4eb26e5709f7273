"""Reading files of other tools: `memtrace summary` from the shell, compared with torch's memory_viz in the same run.

    python benchmarks/readers.py [--entries 1000000] [--rounds 3] [--snapshot made.pickle] [--json]

../shared/tools/tile_snapshot.py repeats a real snapshot up to a million entries; its peak is that of the real one.
Three commands alternate: memory_viz, summary of the file, summary of the imported trace. The figures are medians of the
rounds and their ratios. Memory is the sum of the resident memory of a command's processes, sampled every 10 ms, so
memory that two processes share counts twice. The last section is the summary of every file of ../shared/data.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"
BASE = SHARED / "data" / "snapshots" / "transformer_training_step.pickle"
PEAK_BYTES = 7_013_335_044
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Run(NamedTuple):
    seconds: float
    mib: float
    output: str


def resident_bytes(process: int) -> int:
    """Return the resident memory of a process and of its children that are running."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except (OSError, IndexError):
        return 0
    return pages * PAGE_BYTES + sum(resident_bytes(int(child)) for child in children)


def run(*command: str) -> Run:
    start = time.monotonic()
    most = 0
    with tempfile.TemporaryFile("w+") as output:
        with subprocess.Popen(command, stdout=output, stderr=subprocess.PIPE, text=True) as process:
            while process.poll() is None:
                most = max(most, resident_bytes(process.pid))
                time.sleep(0.01)
            seconds = time.monotonic() - start
            error = process.stderr.read() if process.stderr else ""
        if process.returncode:
            raise SystemExit(f"{' '.join(command)}: {error}")
        output.seek(0)
        return Run(seconds, most / 2**20, output.read())


def memtrace(*arguments: str) -> Run:
    return run(sys.executable, "-c", "from memtrace.cli import main; main()", *arguments)


def peak_bytes(answer: Run) -> int:
    peak: int = json.loads(answer.output)["devices"][0]["peak"]["requested_bytes"]
    return peak


def against_memory_viz(snapshot: Path, folder: Path, rounds: int) -> dict[str, Any]:
    imported_trace = folder / "imported.memtrace"
    imported = memtrace("import", str(snapshot), "-o", str(imported_trace))
    runs: dict[str, list[Run]] = {"memory_viz": [], "file": [], "trace": []}
    for _ in range(rounds):
        page = ["-m", "torch.cuda._memory_viz", "trace_plot", str(snapshot), "-o", str(folder / "page.html")]
        runs["memory_viz"].append(run(sys.executable, *page))
        runs["file"].append(memtrace("summary", "--json", str(snapshot)))
        runs["trace"].append(memtrace("summary", "--json", str(imported_trace)))
    for name in ("file", "trace"):
        wrong = {peak_bytes(answer) for answer in runs[name]} - {PEAK_BYTES}
        if wrong:
            raise SystemExit(f"the peak by the {name} is {wrong}, not {PEAK_BYTES}")
    seconds = {name: statistics.median(run.seconds for run in kept_runs) for name, kept_runs in runs.items()}
    mib = {name: statistics.median(run.mib for run in kept_runs) for name, kept_runs in runs.items()}
    return {
        "seconds": seconds,
        "mib": mib,
        "import_seconds": imported.seconds,
        "trace_mib_on_disk": sum(file.stat().st_size for file in imported_trace.rglob("*") if file.is_file()) / 2**20,
        "faster_from_file": seconds["memory_viz"] / seconds["file"],
        "faster_from_trace": seconds["memory_viz"] / seconds["trace"],
        "share_of_memory": mib["file"] / mib["memory_viz"],
    }


def every_file() -> dict[str, float]:
    files = [file for file in sorted((SHARED / "data").rglob("*")) if file.is_file() and file.suffix != ".md"]
    return {file.name: memtrace("summary", str(file)).seconds for file in files}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--snapshot", type=Path, help="A snapshot tiled earlier, which saves half a minute.")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not BASE.exists():
        raise SystemExit(f"{BASE} is absent: this benchmark needs the shared files beside the repository")
    with tempfile.TemporaryDirectory() as place:
        snapshot = arguments.snapshot or Path(place) / "tiled.pickle"
        if not snapshot.exists():
            tool = str(SHARED / "tools" / "tile_snapshot.py")
            run(sys.executable, tool, str(BASE), str(snapshot), "--events", str(arguments.entries), "--fresh-lists")
        result = against_memory_viz(snapshot, Path(place), arguments.rounds)
    result["data_seconds"] = every_file()
    if arguments.json:
        print(json.dumps(result, indent=1))
        return
    for name in ("memory_viz", "file", "trace"):
        print(f"{name:12} {result['seconds'][name]:6.2f} s {result['mib'][name]:8.0f} MiB")
    print(
        f"from the file {result['faster_from_file']:.2f} times faster (wanted 3), in {result['share_of_memory']:.3f} "
        "of the memory (wanted 0.667)"
    )
    print(
        f"from the imported trace {result['faster_from_trace']:.1f} times faster (wanted 12); it takes "
        f"{result['trace_mib_on_disk']:.1f} MiB on disk"
    )
    print(
        f"import {result['import_seconds']:.2f} s; every file of ../shared/data "
        f"{sum(result['data_seconds'].values()):.2f} s (wanted 10)"
    )
    for name, seconds in result["data_seconds"].items():
        print(f"    {seconds:5.2f} s  {name}")


if __name__ == "__main__":
    main()
