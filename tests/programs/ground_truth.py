"""Independent counts of a program's memory: torch.profiler, the tensors that Python can reach, and tracemalloc."""

from __future__ import annotations

import gc
import multiprocessing
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch

RANGE_PREFIX: Final = "line event "
"""Names of the ranges that mark the program's line events in a recording; the number of the event follows."""


def run_program(source: str, path: Path) -> dict[str, Any]:
    """Run a script; its variables live until the caller drops the result."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    namespace: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
    exec(compile(source, str(path), "exec"), namespace)
    return namespace


def run_in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a function that runs in a forked process, so that programs do not influence each other."""
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)

    def run(sender: Connection) -> None:
        sender.send(function(*arguments))

    child = multiprocessing.get_context("fork").Process(target=run, args=(sender,))
    child.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        raise SystemExit(f"{arguments[1]}: the program failed, see above") from None
    finally:
        child.join()


def profile_peak(source: str, path: Path) -> int:
    """Return the peak of the bytes that torch.profiler counts while a script runs."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        namespace = run_program(source, path)
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    namespace.clear()
    live = peak = 0
    for _, num_bytes in changes:
        live += num_bytes
        peak = max(peak, live)
    return peak


def run_with_line_events(source: str, path: Path, on_line: Callable[[int], None]) -> None:
    """Run a script and call ``on_line`` with the number of each line event, before the line runs."""
    num_events = 0

    def trace_lines(frame: FrameType, event: str, _: object) -> Any:
        nonlocal num_events
        if frame.f_code.co_filename != str(path):
            return None
        if event == "line":
            on_line(num_events)
            num_events += 1
        return trace_lines

    sys.settrace(trace_lines)
    try:
        namespace = run_program(source, path)
    finally:
        sys.settrace(None)
    namespace.clear()


def mark_line(number: int) -> None:
    """Record a line event as a range of torch, which recordings contain with its time."""
    with torch.profiler.record_function(f"{RANGE_PREFIX}{number}"):
        pass


def count_at_line(source: str, path: Path, number: int) -> int:
    """Return the bytes of all tensors that Python reaches at a line event of a script."""
    before = set(_storages())
    counted: list[int] = []

    def on_line(event: int) -> None:
        if event == number:
            counted.append(sum(size for address, size in _storages().items() if address not in before))

    run_with_line_events(source, path, on_line)
    return counted[0]


def numpy_bytes_at_line(source: str, path: Path, number: int) -> int:
    """Return the bytes of NumPy's arrays at a line event of a script, as tracemalloc counts them."""
    import numpy as np

    counted: list[int] = []
    domain = tracemalloc.DomainFilter(inclusive=True, domain=np.lib.tracemalloc_domain)

    def on_line(event: int) -> None:
        if event == number:
            snapshot = tracemalloc.take_snapshot().filter_traces([domain])
            counted.append(sum(trace.size for trace in snapshot.traces))

    tracemalloc.start()
    try:
        run_with_line_events(source, path, on_line)
    finally:
        tracemalloc.stop()
    return counted[0]


def _storages() -> dict[int, int]:
    """Return the addresses and bytes of the storages of all tensors that the garbage collector or a graph reaches."""
    tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    nodes: list[Any] = []
    seen_nodes: set[Any] = set()
    storages: dict[int, int] = {}
    while tensors or nodes:
        if tensors:
            tensor = tensors.pop()
            for part in _dense_parts(tensor):
                storages[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
            if tensor.is_leaf and tensor.grad is not None:
                tensors.append(tensor.grad)
            nodes += [tensor.grad_fn] if tensor.grad_fn is not None else []
            continue
        node = nodes.pop()
        if node in seen_nodes:
            continue
        seen_nodes.add(node)
        nodes += [following for following, _ in node.next_functions if following is not None]
        tensors += _saved_tensors(node)
    storages.pop(0, None)
    return storages


def _dense_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    else:
        yield tensor


def _saved_tensors(node: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that a node of a graph saves; a node whose backward has run has released them."""
    for name in dir(node):
        if not name.startswith("_saved_") and name not in ("variable", "saved_tensors"):
            continue
        try:
            value = getattr(node, name)
        except RuntimeError:
            continue
        items = value if isinstance(value, (list, tuple)) else (value,)
        yield from (item for item in items if isinstance(item, torch.Tensor))
