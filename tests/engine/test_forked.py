"""Worker processes that are forked, and the heap of processes that analyze; in processes of their own, without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from memtrace.engine import processes
from tests.cli.runner import run_memtrace

ROOT = Path(__file__).parents[2]
BEGIN = """
import multiprocessing, os, sys
from memtrace.engine.processes import Processes
from tests.engine import tasks
"""


def run(program: str, *arguments: str) -> str:
    """The output of a program in a process that has not imported torch."""
    command = [sys.executable, "-W", "error", "-c", BEGIN + program, *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def test_forked_processes_know_what_was_imported_before_and_answer_in_order() -> None:
    program = """
tasks.square = lambda number: -number  # known to forks only: other processes import the module anew
with Processes(2) as runner:
    runner.fork()
    assert runner.is_forked and len(multiprocessing.active_children()) == 2
    print(list(runner.map(tasks.call_square, range(5))))
    assert os.getpid() not in set(runner.map(tasks.name_of_process, range(4)))
assert not runner.is_forked and not multiprocessing.active_children()
"""
    assert run(program) == "[0, -1, -2, -3, -4]\n"


def test_a_forked_worker_that_dies_is_replaced(tmp_path: Path) -> None:
    program = """
with Processes(2) as runner:
    runner.fork()
    print(list(runner.map(tasks.die_once, [(number, sys.argv[1]) for number in range(8)])), runner.is_forked)
"""
    assert run(program, str(tmp_path)) == f"{list(range(8))} True\n"


def test_where_the_second_fork_fails_the_first_worker_is_ended_and_the_error_says_what_to_do() -> None:
    program = """
fork, calls = os.fork, []
def fail_later():
    calls.append(1)
    if len(calls) % 2 == 0:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()
os.fork = fail_later
with Processes(2) as runner:
    runner.fork()
    assert len(calls) == 2 and not multiprocessing.active_children()
    try:
        list(runner.map(tasks.square, range(3)))
    except Exception as error:
        print(error)
    assert len(calls) == 4 and not multiprocessing.active_children()
"""
    assert run(program) == (
        "worker processes cannot be started (Resource temporarily unavailable). Pass --workers 1 to use none.\n"
    )


def test_nothing_is_forked_beside_threads_torch_or_dask(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "distributed"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    assert processes.can_fork() == (sys.platform == "linux")
    for name in ("torch", "distributed"):
        with monkeypatch.context() as context:
            context.setitem(sys.modules, name, sys)
            assert not processes.can_fork()
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    assert not processes.can_fork()


@pytest.mark.parametrize("command", ["summary", "ranks", "leaks --rank 1", "check --max-peak 1MiB"])
def test_commands_print_the_same_with_forked_workers(job: Path, command: str) -> None:
    name, *options = command.split()
    here, forked = (run_memtrace(name, job, *options, "--json", "--workers", count) for count in ("1", "2"))
    assert here.stdout and json.loads(here.stdout) == json.loads(forked.stdout)
    assert (here.returncode, here.stderr) == (forked.returncode, forked.stderr)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_a_heap_that_keeps_freed_memory_does_not_map_it_again() -> None:
    program = """
import resource
import numpy as np
import pyarrow as pa
from memtrace.engine.heap import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        arrays = [np.ones(1 << 19) for _ in range(8)] + [pa.array(range(10)).take(pa.array([0] * (1 << 17)))]
        del arrays
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

first = faults()
keep_freed_memory()
faults()
print(first, faults(), pa.default_memory_pool().backend_name)
"""
    before, after, pool = run(program).split()
    # What the heap looks like decides whether one of the arrays still needs new pages.
    assert int(before) > 10_000 and int(after) < int(before) // 20 and pool == "system"
