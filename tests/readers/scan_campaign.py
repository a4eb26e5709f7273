"""Compare the pickle scanner with the Python reader on mutated snapshots: the same tables, or an error of both.

    python -m tests.readers.scan_campaign --mutations 10000 --seed 1 [--sanitize]

Parts of real snapshots are pickled with protocols 2 to 5 and mutated as bytes and as values (``tests/readers/fuzz.py``).
Each file is read by both readers and, where its pickle is valid, its value is compared with that of Python's unpickler.
A file that the scanner hands over to the Python reader counts as ``handed_over``. Batches run in child processes, so
that a crash is one failure. --sanitize compiles the scanner with AddressSanitizer and UndefinedBehaviorSanitizer.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import io
import json
import os
import pickle
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from memtrace.errors import TraceError
from memtrace.readers.content import Content
from memtrace.readers.cuda_snapshot import read_scanned, read_snapshot
from memtrace.readers.limits import ReadLimits
from memtrace.readers.pickle_scanner import Scanner, UnsupportedPickle, build
from memtrace.readers.pickle_scanner.library import Scan
from memtrace.readers.rank import ReadRank
from memtrace.readers.unpickle import load_plain
from tests.readers.fuzz import DATA, mutate_bytes, mutate_value, wait_for_child

BATCH_SIZE = 100
PROGRESS_SIZE = 500
SECONDS_PER_BATCH = 300
SANITIZE_FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g")


def seeds() -> list[bytes]:
    """Return small parts of real snapshots, pickled with each protocol."""
    pickles = []
    for number, path in enumerate(sorted((DATA / "snapshots").glob("*.pickle"))):
        value = pickle.loads(path.read_bytes())
        value["segments"] = value["segments"][:3]
        for segment in value["segments"]:
            segment["blocks"] = segment["blocks"][:10]
        value["device_traces"] = [trace[:25] for trace in value["device_traces"]]
        if number % 2:
            # As torch writes them: a list of its own for each call stack, of frames that are shared.
            value["device_traces"] = [list(map(with_own_list, trace)) for trace in value["device_traces"]]
        value["external_annotations"] = value.get("external_annotations", [])[:10]
        pickles.append(pickle.dumps(value, protocol=2 + number % 4))
        pickles.append(pickle.dumps(value["segments"], protocol=5 - number % 4))
    return pickles


def with_own_list(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an entry whose list of frames is no other entry's."""
    return {**entry, "frames": list(entry["frames"])} if "frames" in entry else entry


def mutation(data: bytes, dice: random.Random) -> bytes:
    """Return a mutation of one seed."""
    if dice.random() < 0.6:
        return mutate_bytes(data, dice)
    return pickle.dumps(mutate_value(pickle.loads(data), dice), protocol=dice.choice((2, 3, 4, 5)))


def compare_file(scanner: Scanner, path: Path) -> str:
    """Read a file with both readers.

    Returns:
        "trace", "message" or "handed_over".

    Raises:
        AssertionError: the readers disagree.
    """
    try:
        content = Content.of(path)
    except TraceError:
        return "message"  # an empty file
    compare_values(scanner, path.read_bytes())
    try:
        with content.open() as stream:
            native = read_scanned(scanner, stream, content)
    except UnsupportedPickle:
        return "handed_over"
    except TraceError as error:
        try:
            read_in_python(content)
        except TraceError as expected:
            assert str(error) == str(expected) or "truncated" in str(error), f"{error} | {expected}"
            return "message"
        except MemoryError:
            return "message"  # a stated length beyond the limit; the scanner reports that the pickle is truncated
        raise AssertionError(f"only the scanner refuses the file: {error}") from error
    assert_same(native, read_in_python(content))
    return "trace"


def read_in_python(content: Content) -> ReadRank:
    """Read a snapshot without the scanner."""
    with content.open() as stream:
        return read_snapshot(load_plain(stream, content.path), content)


def assert_same(native: ReadRank, expected: ReadRank) -> None:
    """Assert that two readers read the same trace."""
    assert native.manifest.to_json() == expected.manifest.to_json()
    for name, table in expected.tables.items():
        assert native.tables[name].equals(table), name


def compare_values(scanner: Scanner, data: bytes) -> bool:
    """Compare the scanned value with that of Python's unpickler; return whether the scanner knows the pickle."""
    scanned = Scan(scanner)
    try:
        scanned.feed(np.frombuffer(data, np.uint8))
        word = scanned.result()
        (value,) = scanned.objects(np.array([word], np.uint64)) if word is not None else (None,)
    except UnsupportedPickle:
        return False
    try:
        expected = load_plain(io.BytesIO(data), Path("data"))
    except (TraceError, MemoryError):
        assert word is None, "only the scanner reads the pickle"
        return True
    assert word is not None, "only Python reads the pickle"
    assert is_same(value, expected), "the values differ"
    return True


def is_same(first: Any, second: Any) -> bool:
    """Return whether two plain values are equal and of the same types, NaN and values in themselves included."""
    known: set[tuple[int, int]] = set()
    todo = [(first, second)]
    while todo:
        one, other = todo.pop()
        if type(one) is not type(other):
            return False
        if isinstance(one, list | tuple | dict):
            if len(one) != len(other):
                return False
            if (id(one), id(other)) in known:
                continue
            known.add((id(one), id(other)))
            if isinstance(one, dict):
                if list(one) != list(other):
                    return False
                todo += zip(one.values(), other.values(), strict=True)
            else:
                todo += zip(one, other, strict=True)
        elif not (one == other or (one != one and other != other)):
            return False
    return True


def run_batch(scanner: Scanner, files: list[bytes], folder: Path, results: Path) -> None:
    """Compare the files and write the outcomes to ``results``."""
    with results.open("w", encoding="utf-8") as out:
        for number, data in enumerate(files):
            path = folder / f"{number}.pickle"
            path.write_bytes(data)
            try:
                outcome = compare_file(scanner, path)
            except TraceError as error:
                outcome = f"failure: only the Python reader refuses the file: {error}"
            except MemoryError:
                outcome = "memory"
            except BaseException as error:
                outcome = f"failure: {type(error).__name__}: {ascii(str(error))[:300]}"
            print(outcome, file=out, flush=True)


def campaign(scanner: Scanner, count: int, seed: int, keep: Path | None, *, limited: bool) -> Counter[str]:
    """Compare the readers on ``count`` mutations, print the failures, and return the number of each outcome.

    Args:
        scanner: the scanner.
        count: number of files.
        seed: seed of the mutations.
        keep: receives the files on which the readers disagree.
        limited: read in child processes with limits on memory and time.
    """
    dice = random.Random(seed)
    pool = seeds()
    outcomes: Counter[str] = Counter()
    done = 0
    while done < count:
        files = [mutation(dice.choice(pool), dice) for _ in range(min(BATCH_SIZE, count - done))]
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder) / "results"
            status = 0
            if limited:
                status = _in_child(partial(run_batch, scanner, files, Path(folder), results))
            else:  # a sanitizer does not survive a fork, and ends this process with a report
                run_batch(scanner, files, Path(folder), results)
            lines = results.read_text(encoding="utf-8").splitlines()
        if status != 0 or len(lines) < len(files):
            lines.append(f"failure: the process ended with {status}")
        for number, line in enumerate(lines):
            outcomes[line.split(":")[0]] += 1
            if line.startswith("failure"):
                print(f"{done + number}: {line}", file=sys.stderr)
                if keep:
                    keep.mkdir(parents=True, exist_ok=True)
                    (keep / f"{seed}-{done + number}.pickle").write_bytes(files[min(number, len(files) - 1)])
        done += len(files)
        if done % PROGRESS_SIZE == 0:
            print(f"{done} files", file=sys.stderr)
    return outcomes


def _in_child(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            gc.disable()
            ReadLimits(1 << 30, SECONDS_PER_BATCH).impose()
            work()
            status = 0
        finally:
            os._exit(status)
    return wait_for_child(child, SECONDS_PER_BATCH)


def sanitized_scanner(folder: Path) -> Scanner:
    """Compile the scanner with sanitizers and load it; this process must have been started with ASan's library."""
    (compiler, *_) = build.find_compilers()
    recipe = build.recipe()
    flags = [*recipe.compile_flags, *SANITIZE_FLAGS, *recipe.link_flags]
    target = folder / "scanner.so"
    subprocess.run([*compiler.command, *flags, *map(str, recipe.sources), "-o", str(target)], check=True)
    return Scanner(ctypes.CDLL(str(target)))


def _restart_with_sanitizer() -> None:
    """Start this program again with the libraries that must be loaded before Python."""
    (compiler, *_) = build.find_compilers()
    libraries = [
        subprocess.run([*compiler.command, f"-print-file-name={name}"], check=True, capture_output=True, text=True)
        for name in ("libasan.so", "libstdc++.so.6")  # ASan needs to know how exceptions are thrown
    ]
    preload = " ".join(str(Path(library.stdout.strip()).resolve()) for library in libraries)
    options = {"LD_PRELOAD": preload, "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1"}
    command = [sys.executable, "-m", "tests.readers.scan_campaign", *sys.argv[1:]]
    os.execve(sys.executable, command, os.environ | options)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="A folder for the files on which the readers disagree.")
    parser.add_argument("--sanitize", action="store_true")
    arguments = parser.parse_args()
    if arguments.sanitize and "asan" not in os.environ.get("LD_PRELOAD", ""):
        _restart_with_sanitizer()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        scanner = sanitized_scanner(Path(folder)) if arguments.sanitize else build.load_scanner()
        assert scanner is not None
        outcomes = campaign(
            scanner, arguments.mutations, arguments.seed, arguments.keep, limited=not arguments.sanitize
        )
    print(json.dumps({"seconds": round(time.monotonic() - start, 1), **outcomes}))
    return 1 if outcomes["failure"] else 0


if __name__ == "__main__":
    sys.exit(main())
