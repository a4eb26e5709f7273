"""Comparison of a job of many ranks: the first question, the second one, and the page.

    python benchmarks/ranks.py [--ranks 1024] [--steps 5]
    python benchmarks/ranks.py --storage s3 --scheduler local --kill-worker

Four pipeline stages of different depth are recorded, each as one process, and one of them again with a larger batch.
The job consists of links to these parts; every rank has a manifest of its own. With ``--storage s3`` it is read from an
S3 server (moto) that runs on this machine, with ``--scheduler local`` by a Dask cluster of two worker processes. With
``--kill-worker`` the first question is asked again, without the reports of the ranks, and one worker is killed when
half of the ranks are done: the answer must be the same.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import memtrace
from memtrace.analysis.rank_reports import REPORT_NAME
from memtrace.format.manifest import RankCoordinate, read_manifest, write_manifest

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from gpt import GPT, synthetic_text, train_step

STAGES = 4
TENSOR_PARALLEL = 2
BUCKET = "bench"
NUM_WORKERS = 2
COMMAND = """
import re, sys
from pathlib import Path
from memtrace.cli import main
output, sys.argv[1:] = sys.argv[1], sys.argv[2:]
try:
    main()
finally:
    Path(output).write_text(re.search("VmHWM:\\\\s*([0-9]+)", Path("/proc/self/status").read_text())[1])
"""
"""Runs a command, and writes the largest resident memory of its process in KiB to a file. What the system counts for a
child begins with the memory of the process that started it."""


def record(path: Path, layers: int, batch: int, steps: int) -> Path:
    """Record some steps of a model; return the folder of its rank."""
    torch.manual_seed(0)
    model = GPT(width=64, layers=layers, heads=4, length=64)
    optimizer = torch.optim.AdamW(model.parameters())
    text = synthetic_text(batch, 64)
    with memtrace.record(path):
        for _ in range(steps):
            train_step(model, optimizer, text)
    return path / "rank=0"


def make_job(folder: Path, job: Path, num_ranks: int, steps: int) -> int:
    """Make a job of some ranks; return the rank that differs from its peers."""
    stages = [record(folder / f"stage{stage}.memtrace", STAGES - stage, 4, steps) for stage in range(STAGES)]
    different = record(folder / "different.memtrace", STAGES - 2, 6, steps)
    ranks_of_stage = num_ranks // STAGES
    odd_one = 2 * ranks_of_stage + ranks_of_stage // 3
    for rank in range(num_ranks):
        stage, place = divmod(rank, ranks_of_stage)
        source = different if rank == odd_one else stages[stage]
        target = job / f"rank={rank}"
        target.mkdir(parents=True)
        for file in source.glob("*.parquet"):
            (target / file.name).hardlink_to(file)
        coordinates = (
            RankCoordinate("pp", stage, STAGES),
            RankCoordinate("dp", place // TENSOR_PARALLEL, ranks_of_stage // TENSOR_PARALLEL),
            RankCoordinate("tp", place % TENSOR_PARALLEL, TENSOR_PARALLEL),
        )
        manifest = read_manifest(source / "manifest.json")
        write_manifest(target, replace(manifest, rank=rank, world_size=num_ranks, coordinates=coordinates))
    return odd_one


def run(*arguments: str) -> tuple[str, str]:
    """Run a command; return its output, and in words its time, that of the processors, and its memory."""
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output, tempfile.NamedTemporaryFile("w+") as memory:
        process = subprocess.Popen([sys.executable, "-c", COMMAND, memory.name, *arguments], stdout=output)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - began
        assert process.returncode == 0, arguments
        output.seek(0)
        cost = f"{seconds:.1f} s (processor {used.ru_utime + used.ru_stime:.1f} s)"
        return output.read(), f"{cost}, {int(memory.read()) / 1024:.0f} MiB"


def serve() -> None:
    """Run an S3 server until stdin is closed; print its port."""
    import logging

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    print(server.get_host_and_port()[1], flush=True)
    sys.stdin.read()


@contextmanager
def s3_server() -> Iterator[Any]:
    """Run an S3 server in a process of its own, and have this process and its children use it."""
    with subprocess.Popen(
        [sys.executable, __file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        os.environ |= {
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{int(server.stdout.readline())}",
            "NO_PROXY": "127.0.0.1",
        }
        import s3fs

        filesystem = s3fs.S3FileSystem(use_listings_cache=False)
        filesystem.mkdir(BUCKET)
        try:
            yield filesystem
        finally:
            server.kill()


@contextmanager
def dask_cluster() -> Iterator[Any]:
    """Run a Dask cluster on this machine."""
    from distributed import LocalCluster

    with LocalCluster(n_workers=NUM_WORKERS, threads_per_worker=1, processes=True, dashboard_address=":0") as cluster:
        yield cluster


def kill_after(cluster: Any, num_tasks: int) -> Callable[[], int]:
    """Have a worker killed when some tasks are done; return a function that counts the workers that were killed."""
    from distributed.diagnostics.plugin import SchedulerPlugin

    class Killer(SchedulerPlugin):  # type: ignore[misc]
        num_done = 0
        num_killed = 0

        def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
            self.num_done += finish == "memory"
            if self.num_done == num_tasks and not self.num_killed:
                os.kill(cluster.workers[0].pid, signal.SIGKILL)
                self.num_killed += 1

    killer = Killer()
    cluster.scheduler.add_plugin(killer)
    return lambda: killer.num_killed


def check(output: str, odd_one: int) -> str:
    """Return the reason for the rank to inspect, which must be the one that differs."""
    answer = json.loads(output)
    assert answer["rank_to_inspect"] == odd_one, answer["reason"]
    return f"rank {odd_one}: {answer['reason']}"


def measure(job: Path, folder: Path, odd_one: int, filesystem: Any, cluster: Any, kills_worker: bool) -> None:
    """Ask the questions, and print what they cost."""
    target, options = str(job), ["--json"]
    num_ranks = len(list(job.iterdir()))
    if cluster is not None:
        options += ["--scheduler", cluster.scheduler_address]
    if filesystem is not None:
        filesystem.put(str(job), f"{BUCKET}/job.memtrace", recursive=True)
        target = f"s3://{BUCKET}/job.memtrace"
    output = ""
    for question in ("first", "second"):
        again, cost = run("ranks", target, *options)
        print(f"{question} question: {cost}", flush=True)
        assert not output or output == again
        output = again
    print(f"{num_ranks} ranks; {check(output, odd_one)}")
    if filesystem is None:
        (job / f"rank={num_ranks - 1}" / REPORT_NAME).unlink()
    else:
        filesystem.rm_file(f"{BUCKET}/job.memtrace/rank={num_ranks - 1}/{REPORT_NAME}")
    print(f"one rank is new: {run('ranks', target, *options)[1]}")
    if kills_worker:
        filesystem.rm([f"{BUCKET}/job.memtrace/rank={rank}/{REPORT_NAME}" for rank in range(num_ranks)])
        count_killed = kill_after(cluster, num_ranks // 2)
        again, cost = run("ranks", target, *options)
        assert count_killed() == 1
        assert again == output
        print(f"first question, one of {NUM_WORKERS} workers killed: {cost}; the same answer")
    _, cost = run("report", target, "-o", str(folder / "page.html"))
    print(f"page: {cost}, {(folder / 'page.html').stat().st_size / 1e6:.2f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024, help="A multiple of 8.")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--storage", choices=("disk", "s3"), default="disk")
    parser.add_argument("--scheduler", choices=("none", "local"), default="none")
    parser.add_argument("--kill-worker", action="store_true", help="Needs both --storage s3 and --scheduler local.")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return
    if arguments.kill_worker and (arguments.storage, arguments.scheduler) != ("s3", "local"):
        parser.error("--kill-worker needs --storage s3 and --scheduler local")
    with (
        tempfile.TemporaryDirectory() as name,
        s3_server() if arguments.storage == "s3" else nullcontext() as filesystem,
        dask_cluster() if arguments.scheduler == "local" else nullcontext() as cluster,
    ):
        folder = Path(name)
        job = folder / "job.memtrace"
        odd_one = make_job(folder, job, arguments.ranks, arguments.steps)
        measure(job, folder, odd_one, filesystem, cluster, arguments.kill_worker)


if __name__ == "__main__":
    main()
