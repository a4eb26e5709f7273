"""What recording into S3 costs against recording to disk, and what reading from S3 takes.

    python benchmarks/storage.py [--rounds 8] [--seconds 3] [--latency-ms 20]

An S3 server (moto) runs in a process of its own on this machine, behind a proxy that delays every message. Windows of
the same training without a recording, recorded to disk and recorded into S3 alternate; the ratio is that of the average
steps of neighboring windows, and its median over the rounds is printed. The server and the uploading process share the
processors with the training.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memtrace
from memtrace.analysis import summarize

FLUSH_SECONDS = 0.5


def make_step() -> Callable[[], None]:
    """A step of many small operators, of which recording costs most."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.LayerNorm(128)) for _ in range(12)])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    batch = torch.randn(64, 128)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def run_steps(step: Callable[[], None], seconds: float) -> float:
    """Return the average time of a step, in milliseconds."""
    begin = time.perf_counter()
    count = 0
    while (now := time.perf_counter()) < begin + seconds:
        step()
        count += 1
    return 1e3 * (now - begin) / count


class DelayingProxy:
    """Passes connections on; what comes from the client waits for the latency first."""

    def __init__(self, port: int, latency_seconds: float) -> None:
        self._port = port
        self._latency_seconds = latency_seconds
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            server = socket.create_connection(("127.0.0.1", self._port))
            for source, target, delay in ((client, server, self._latency_seconds), (server, client, 0.0)):
                threading.Thread(target=self._forward, args=(source, target, delay), daemon=True).start()

    @staticmethod
    def _forward(source: socket.socket, target: socket.socket, delay: float) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                time.sleep(delay)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


def serve(latency_seconds: float) -> None:
    """Run the server and the proxy; print the port."""
    import logging

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    print(DelayingProxy(server.get_host_and_port()[1], latency_seconds).port, flush=True)
    sys.stdin.read()


def compare(step: Callable[[], None], folder: Path, rounds: int, seconds: float) -> dict[str, Any]:
    """Time windows in alternation."""
    times: dict[str, list[float]] = {"none": [], "disk": [], "s3": []}
    leave: dict[str, list[float]] = {"disk": [], "s3": []}
    for number in range(rounds):
        for kind in times:
            recording: Any = nullcontext()
            if kind == "disk":
                recording = memtrace.record(folder / f"{number}.memtrace", flush_seconds=FLUSH_SECONDS)
            elif kind == "s3":
                recording = memtrace.record(f"s3://bench/{number}.memtrace", flush_seconds=FLUSH_SECONDS)
            with recording:
                run_steps(step, 0.2)
                times[kind].append(run_steps(step, seconds))
                ended = time.perf_counter()
            if kind != "none":
                leave[kind].append(time.perf_counter() - ended)
    pairs = list(zip(times["none"], times["disk"], times["s3"], strict=True))
    return {
        "disk / none": statistics.median(disk / none for none, disk, _ in pairs),
        "s3 / none": statistics.median(s3 / none for none, _, s3 in pairs),
        "s3 / disk": statistics.median(s3 / disk for _, disk, s3 in pairs),
        "s3 / disk, all rounds": " ".join(f"{s3 / disk:.3f}" for _, disk, s3 in pairs),
        "seconds to leave, disk": statistics.median(leave["disk"]),
        "seconds to leave, s3": statistics.median(leave["s3"]),
    }


def time_reading(folder: Path) -> dict[str, float]:
    """Time ``load`` and ``summarize`` of the last trace, from disk and from S3."""
    times = {}
    last = sorted(folder.glob("*.memtrace"))[-1]
    for name, path in (("disk", str(last)), ("s3", f"s3://bench/{last.name}")):
        begin = time.perf_counter()
        trace = memtrace.load(path)
        summarize(trace)
        times[f"seconds to load and summarize, {name}"] = time.perf_counter() - begin
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--latency-ms", type=float, default=20.0)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.latency_ms / 1e3)
        return
    command = [sys.executable, __file__, "--serve", "--latency-ms", str(options.latency_ms)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        os.environ |= {
            "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "bench",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "NO_PROXY": "127.0.0.1",
        }
        import s3fs

        s3fs.S3FileSystem().mkdir("bench")
        folder = Path(tempfile.mkdtemp(prefix="memtrace-bench-"))
        os.chdir(folder)
        try:
            torch.set_num_threads(1)
            step = make_step()
            run_steps(step, 1.0)
            results = compare(step, folder, options.rounds, options.seconds) | time_reading(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            server.kill()
    for name, value in results.items():
        print(f"{name:40} {value if isinstance(value, str) else format(value, '.3f')}")


if __name__ == "__main__":
    main()
