"""Reading files of other tools: `memtrace summary` from the shell, compared with torch's memory_viz in the same run.

    python benchmarks/readers.py [--entries 1000000] [--rounds 3] [--snapshot made.pickle] [--json]

../shared/tools/tile_snapshot.py repeats a real snapshot up to a million entries; its peak is that of the real one.
Four commands alternate, each from cold: memory_viz, summary of the file, reading the file alone (`memtrace.load`, all
that any command of memtrace takes from it), and summary of the imported trace. The figures are medians of the rounds
and their ratios, of elapsed time and of processor time, which other programs disturb less. Both programs are compiled
to bytecode first, as installed packages are. Memory is that of all processes of a command, sampled every 20 ms; pages
that processes share count once (PSS). The next section reads copies of real snapshots, one of them damaged, as the
ranks of a job, with one process and with one per core. The last one is the summary of every file of ../shared/data.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import pickle
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from memtrace.errors import TraceError
from memtrace.readers import read_each

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"
BASE = SHARED / "data" / "snapshots" / "transformer_training_step.pickle"
PEAK_BYTES = 7_013_335_044
NUM_RANKS = 64
DAMAGED_RANK = 17
PR_SET_CHILD_SUBREAPER = 36


class Run(NamedTuple):
    seconds: float
    processor_seconds: float
    mib: float
    output: str


def used_bytes(process: int) -> int:
    """Return the memory of a process and of its children that are running; shared pages count once."""
    try:
        rollup = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:
        return 0
    kib = sum(int(line.split()[1]) for line in rollup if line.startswith("Pss:"))
    return kib * 1024 + sum(used_bytes(int(child)) for child in children)


def processor_seconds() -> float:
    """Return the processor time of all processes that this one has started and that have ended."""
    with suppress(ChildProcessError):
        while True:  # processes that the commands left behind, which are children of this one then
            os.waitpid(-1, 0)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(*command: str) -> Run:
    used_before = processor_seconds()
    start = time.monotonic()
    most = 0
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryFile("w+") as output:
        with subprocess.Popen(command, stdout=output, stderr=subprocess.PIPE, text=True, env=environment) as process:
            while process.poll() is None:
                most = max(most, used_bytes(process.pid))
                time.sleep(0.02)
            seconds = time.monotonic() - start
            error = process.stderr.read() if process.stderr else ""
        if process.returncode:
            raise SystemExit(f"{' '.join(command)}: {error}")
        output.seek(0)
        return Run(seconds, processor_seconds() - used_before, most / 2**20, output.read())


def memtrace(*arguments: str) -> Run:
    return run(sys.executable, "-c", "from memtrace.cli import main; main()", *arguments)


def peak_bytes(answer: Run) -> int:
    peak: int = json.loads(answer.output)["devices"][0]["peak"]["requested_bytes"]
    return peak


def against_memory_viz(snapshot: Path, folder: Path, rounds: int) -> dict[str, Any]:
    imported_trace = folder / "imported.memtrace"
    imported = memtrace("import", str(snapshot), "-o", str(imported_trace))
    run(sys.executable, "-c", "import torch.cuda._memory_viz")  # compiles what is not compiled yet
    memtrace("summary", "--json", str(snapshot))
    runs: dict[str, list[Run]] = {"memory_viz": [], "file": [], "reading": [], "trace": []}
    for _ in range(rounds):
        page = ["-m", "torch.cuda._memory_viz", "trace_plot", str(snapshot), "-o", str(folder / "page.html")]
        runs["memory_viz"].append(run(sys.executable, *page))
        runs["file"].append(memtrace("summary", "--json", str(snapshot)))
        runs["reading"].append(run(sys.executable, "-c", f"import memtrace; memtrace.load({str(snapshot)!r})"))
        runs["trace"].append(memtrace("summary", "--json", str(imported_trace)))
    for name in ("file", "trace"):
        wrong = {peak_bytes(answer) for answer in runs[name]} - {PEAK_BYTES}
        if wrong:
            raise SystemExit(f"the peak by the {name} is {wrong}, not {PEAK_BYTES}")
    seconds = {name: statistics.median(run.seconds for run in kept_runs) for name, kept_runs in runs.items()}
    processor = {name: statistics.median(run.processor_seconds for run in kept) for name, kept in runs.items()}
    mib = {name: statistics.median(run.mib for run in kept_runs) for name, kept_runs in runs.items()}
    return {
        "seconds": seconds,
        "processor_seconds": processor,
        "mib": mib,
        "import_seconds": imported.seconds,
        "trace_mib_on_disk": sum(file.stat().st_size for file in imported_trace.rglob("*") if file.is_file()) / 2**20,
        "faster_from_file": seconds["memory_viz"] / seconds["file"],
        "less_processor_time_from_file": processor["memory_viz"] / processor["file"],
        "faster_from_trace": seconds["memory_viz"] / seconds["trace"],
        "faster_reading": seconds["memory_viz"] / seconds["reading"],
        "less_processor_time_reading": processor["memory_viz"] / processor["reading"],
        "share_of_memory": mib["file"] / mib["memory_viz"],
        "share_of_memory_reading": mib["reading"] / mib["memory_viz"],
    }


def ranks_of_a_job(folder: Path) -> dict[str, float]:
    """Return the seconds that reading the ranks of a job takes, by the number of processes."""
    values = [pickle.loads(path.read_bytes()) for path in sorted(BASE.parent.glob("*.pickle"))]
    values = [value for value in values if any(map(len, value["device_traces"]))]
    paths = []
    for rank in range(NUM_RANKS):
        value = values[rank % len(values)]
        # A different number of the oldest entries is missing in each file.
        traces = [trace[min(rank, len(trace) // 2) :] for trace in value["device_traces"]]
        content = pickle.dumps({**value, "device_traces": traces}, protocol=4)
        paths.append(folder / f"rank{rank}_memory_snapshot.pickle")
        paths[-1].write_bytes(content[: len(content) // 2] if rank == DAMAGED_RANK else content)
    seconds = {}
    for num_processes in (1, os.cpu_count() or 1):
        start = time.monotonic()
        answers = list(read_each(paths, num_processes=num_processes))
        seconds[str(num_processes)] = time.monotonic() - start
        failed = [rank for rank, answer in enumerate(answers) if isinstance(answer, TraceError)]
        if failed != [DAMAGED_RANK]:
            raise SystemExit(f"ranks {failed} were not read")
    return seconds


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
    # Processes that a command leaves behind become children of this one.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if not BASE.exists():
        raise SystemExit(f"{BASE} is absent: this benchmark needs the shared files beside the repository")
    with tempfile.TemporaryDirectory() as place:
        snapshot = arguments.snapshot or Path(place) / "tiled.pickle"
        if not snapshot.exists():
            tool = str(SHARED / "tools" / "tile_snapshot.py")
            run(sys.executable, tool, str(BASE), str(snapshot), "--events", str(arguments.entries), "--fresh-lists")
        result = against_memory_viz(snapshot, Path(place), arguments.rounds)
    with tempfile.TemporaryDirectory() as place:
        result["rank_seconds"] = ranks_of_a_job(Path(place))
    result["data_seconds"] = every_file()
    if arguments.json:
        print(json.dumps(result, indent=1))
        return
    for name in ("memory_viz", "file", "reading", "trace"):
        print(
            f"{name:12} {result['seconds'][name]:6.2f} s, processor {result['processor_seconds'][name]:6.2f} s "
            f"{result['mib'][name]:8.0f} MiB"
        )
    print(
        f"from the file {result['faster_from_file']:.2f} times faster (wanted 10), processor time "
        f"{result['less_processor_time_from_file']:.2f} times less, in {result['share_of_memory']:.3f} of the memory "
        "(wanted 0.2)"
    )
    print(
        f"reading alone {result['faster_reading']:.2f} times faster (wanted 10), processor time "
        f"{result['less_processor_time_reading']:.2f} times less, in {result['share_of_memory_reading']:.3f} of the "
        "memory (wanted 0.2)"
    )
    print(
        f"from the imported trace {result['faster_from_trace']:.1f} times faster (wanted 12); it takes "
        f"{result['trace_mib_on_disk']:.1f} MiB on disk"
    )
    for num_processes, seconds in result["rank_seconds"].items():
        print(f"{NUM_RANKS} ranks, one of them damaged, {num_processes} at a time: {seconds:.2f} s")
    print(
        f"import {result['import_seconds']:.2f} s; every file of ../shared/data "
        f"{sum(result['data_seconds'].values()):.2f} s (wanted 10)"
    )
    for name, seconds in result["data_seconds"].items():
        print(f"    {seconds:5.2f} s  {name}")


if __name__ == "__main__":
    main()
