"""Fuzz the readers with mutated files: the result must be a valid trace or one error message.

    python tests/readers/fuzz.py --mutations 2000 --seed 1

Real files are mutated as bytes (flipped, cut out, replaced, duplicated) and as values (a field is replaced by an absurd
value, and the whole is pickled or written as JSON again). The readers run without their own separate process, so that
the traceback of a failure is visible; batches run in a child process with limits, so that hangs and crashes are
detected too. Every tenth mutation is read as a user reads it. --keep names a folder for the files that failed.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import os
import pickle
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memtrace.readers.rank import ReadRank

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
BATCH_SIZE = 50
SECONDS_PER_BATCH = 60
ABSURD = (
    None, -1, 0, 1, 2**31, 2**47, 2**63 - 1, 2**63, 2**64, 2**100, -(2**63), -(2**70), 1.5, float("nan"), float("inf"), True,
    "", "alloc", "\x1b[31m\n\t", "\ud800", "x" * 10_000, [], {}, [[]], [None], {"a": 1}, (0, 0), (1, 2, 3), [{}],
)  # fmt: skip


def seeds() -> list[tuple[str, bytes]]:
    """Return small parts of real files and other forms of them, by name."""
    files: list[tuple[str, bytes]] = []
    for name in ("complete_small", "trimmed", "torch20_block_history", "synthetic", "wrapped_ring_25000"):
        value = _cut(pickle.loads((DATA / "snapshots" / f"{name}.pickle").read_bytes()))
        files.append((f"{name}.pickle", pickle.dumps(value, protocol=4)))
        files.append((f"{name}.json", json.dumps(value).encode()))
    files.append(("bare.pickle", pickle.dumps(value["segments"], protocol=2)))
    files.append(("small.pickle.gz", gzip.compress(files[0][1])))
    for name in ("h100_bert_small.json.gz", "a100_switch_transformer.json", "resnet50_2021_no_addr.pt.trace.json.gz"):
        raw = (DATA / "chrome" / name).read_bytes()
        trace = json.loads(gzip.decompress(raw) if name.endswith(".gz") else raw)
        trace["traceEvents"] = _some_events(trace["traceEvents"])
        files.append((name, json.dumps(trace).encode()))
    rows = json.loads(gzip.decompress((DATA / "timeline" / "memory_timeline.raw.json.gz").read_bytes()))[:300]
    files.append(("timeline.json", json.dumps(rows).encode()))
    files.append(("totals.json", json.dumps([[1, 2, 3], [[0] * 9, [0, 5, 1, 2, 3, 4, 5, 6, 7], [0] * 9]]).encode()))
    return files


def _cut(value: Any) -> Any:
    value["segments"] = value["segments"][:5]
    value["device_traces"] = [trace[:60] for trace in value["device_traces"]]
    return value


def _some_events(events: list[Any]) -> list[Any]:
    memory = [event for event in events if event.get("name") == "[memory]"][:60]
    return [event for event in events if event.get("ph") == "X"][:200] + memory


def mutate_bytes(data: bytes, dice: random.Random) -> bytes:
    """Damage the bytes at one to four positions."""
    damaged = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        at, size = dice.randrange(len(damaged) + 1), dice.choice((1, 1, 2, 8, 64, 1000))
        kind = dice.randrange(6)
        if kind == 0 and at < len(damaged):
            damaged[at] ^= 1 << dice.randrange(8)
        elif kind == 1:
            damaged[at : at + size] = dice.randbytes(size)
        elif kind == 2:
            del damaged[at : at + size]
        elif kind == 3:
            damaged[at:at] = damaged[dice.randrange(len(damaged) + 1) :][:size]
        elif kind == 4 and dice.random() < 0.3:
            del damaged[at:]
        else:
            # Insert an opcode or a bracket.
            damaged[at:at] = bytes([dice.choice(b"\x80\x95()]}{[\x8f\x90\x91cRbioQP\x82\x94h2t0.NIL\x8a\x8b\"':,nN-")])
    return bytes(damaged)


def mutate_value(value: Any, dice: random.Random) -> Any:
    """Replace or delete one to six fields, or copy those next to them."""
    value = copy.deepcopy(value)
    for _ in range(dice.randint(1, 6)):
        container = value
        while isinstance(container, dict | list) and container:
            keys = list(container) if isinstance(container, dict) else list(range(len(container)))
            key = dice.choice(keys)
            if not isinstance(container[key], dict | list) or not container[key] or dice.random() < 0.15:
                action = dice.randrange(4)
                if action == 0:
                    del container[key]
                elif action == 1:
                    container[key] = copy.deepcopy(container[dice.choice(keys)])
                else:
                    container[key] = copy.deepcopy(dice.choice(ABSURD))
                break
            container = container[key]
    return value


def mutation(name: str, data: bytes, dice: random.Random) -> bytes:
    """Return a mutation of one seed."""
    if (name.endswith(".gz") and data[:2] == b"\x1f\x8b") or dice.random() < 0.5:
        return mutate_bytes(data, dice)
    if name.endswith(".pickle"):
        return pickle.dumps(mutate_value(pickle.loads(data), dice), protocol=dice.choice((2, 3, 4, 5)))
    try:
        return json.dumps(mutate_value(json.loads(data), dice)).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError):
        return mutate_bytes(data, dice)


def check_file(path: Path, *, isolated: bool) -> str:
    """Read a file and raise an exception unless the readers handle it correctly.

    Args:
        path: the file.
        isolated: read it in a separate process, as for a user.

    Returns:
        "trace" for a valid trace, "message" for a TraceError, "memory" if reading reached the limit on memory.
    """
    from memtrace import readers
    from memtrace.errors import TraceError
    from memtrace.readers.content import Content
    from memtrace.readers.registry import find_reader

    try:
        if isolated:
            ranks = readers.read(path)
        else:
            content = Content.of(path)
            ranks = find_reader(content).read(content)
    except TraceError as error:
        message = str(error)
        assert "\n" not in message and len(message) < 600 and "Please report" not in message, message
        assert all(character.isprintable() for character in message), ascii(message)
        return "message"
    except MemoryError:
        # The separate process in which a reader runs for a user turns this into an error message.
        assert not isolated
        return "memory"
    for rank in ranks:
        check_rank(rank)
    return "trace"


def check_rank(rank: ReadRank) -> None:
    """Check what must be true of every trace, and that it can be summarised."""
    from memtrace.cli.output import json_value

    from memtrace.analysis.summary import summarize
    from memtrace.format.schema import arrow_schema
    from memtrace.trace import Trace

    json.dumps(rank.manifest.to_json(), allow_nan=False)
    for name, table in rank.tables.items():
        assert table.schema.equals(arrow_schema(name)), name
        table.validate(full=True)
    trace = Trace.from_tables(rank.manifest, rank.tables)
    events = trace.columns("events", "time_ns", "kind", "device", "block_id", "size", "op_id")
    assert (events["device"] >= 0).all()
    assert int(events["op_id"].max(initial=-1)) < rank.tables["ops"].num_rows
    json.dumps(json_value(summarize(trace)), allow_nan=False)


def run_batch(jobs: list[tuple[str, bytes, bool]], folder: Path, results: Path) -> None:
    """In a child process: check the file of each job and write the outcomes to ``results``."""
    from memtrace.readers.limits import ReadLimits

    ReadLimits(1 << 30, SECONDS_PER_BATCH).impose()
    with results.open("w", encoding="utf-8") as out:
        for number, (name, data, isolated) in enumerate(jobs):
            path = folder / f"{number}-{name}"
            path.write_bytes(data)
            try:
                outcome = check_file(path, isolated=isolated)
            except BaseException as error:
                outcome = f"failure: {type(error).__name__}: {ascii(str(error))[:300]}"
            if not outcome.startswith("failure"):
                path.unlink()
            print(outcome, file=out, flush=True)


def fuzz(count: int, seed: int, keep: Path | None) -> Counter[str]:
    """Check ``count`` mutations, print the failures, and return the number of each outcome."""
    dice = random.Random(seed)
    pool = seeds()
    outcomes: Counter[str] = Counter()
    done = 0
    while done < count:
        jobs = []
        for number in range(min(BATCH_SIZE, count - done)):
            name, data = dice.choice(pool)
            jobs.append((name, mutation(name, data, dice), (done + number) % 10 == 0))
        done += len(jobs)
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder) / "results"
            status = _in_child(jobs, Path(folder), results)
            lines = results.read_text(encoding="utf-8").splitlines()
            if status != 0 or len(lines) < len(jobs):
                lines.append(
                    f"failure: the process ended with {status} in {jobs[len(lines)][0]}"
                    if len(lines) < len(jobs)
                    else ""
                )
            for number, line in enumerate(filter(None, lines)):
                outcomes[line.split(":")[0]] += 1
                if line.startswith("failure"):
                    print(jobs[min(number, len(jobs) - 1)][0], line, file=sys.stderr)
                    if keep:
                        keep.mkdir(parents=True, exist_ok=True)
                        (keep / f"{seed}-{done}-{number}-{jobs[number][0]}").write_bytes(jobs[number][1])
    return outcomes


def _in_child(jobs: list[tuple[str, bytes, bool]], folder: Path, results: Path) -> int:
    child = os.fork()
    if child == 0:
        try:
            run_batch(jobs, folder, results)
        finally:
            os._exit(0)
    return wait_for_child(child, 2 * SECONDS_PER_BATCH)


def wait_for_child(child: int, seconds: float) -> int:
    """Return the exit code of a forked process, which is killed if it does not end in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        finished, status = os.waitpid(child, os.WNOHANG)
        if finished:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -signal.SIGKILL


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path)
    arguments = parser.parse_args()
    start = time.monotonic()
    # Imported once here rather than in every child process.
    import memtrace.analysis.summary
    import memtrace.readers.json_files
    import memtrace.readers.viz_page  # noqa: F401

    outcomes = fuzz(arguments.mutations, arguments.seed, arguments.keep)
    print(json.dumps({"seconds": round(time.monotonic() - start, 1), **outcomes}))
    return 1 if outcomes["failure"] else 0


if __name__ == "__main__":
    sys.exit(main())
