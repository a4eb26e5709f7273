"""Feeds mutated files to the readers and demands a trace or one sentence, never anything else.

    python tests/readers/fuzz.py --mutations 2000 --seed 1

Real files are mutated as bytes (flips, cuts, splices, doubled pieces) and as values (a field replaced by something
absurd, then pickled or written as JSON again). Readers run as they do for a user but for the process of their own, so
that a fault shows where it is; a batch at a time in a child under limits, so that a hang or a crash shows too. Every
tenth mutation goes the whole way. What failed is kept in the folder that --keep names.
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
from typing import Any

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
BATCH = 50
SECONDS_A_BATCH = 60
ABSURD = (
    None, -1, 0, 1, 2**31, 2**47, 2**63 - 1, 2**63, 2**64, 2**100, -(2**63), -(2**70), 1.5, float("nan"), float("inf"), True,
    "", "alloc", "\x1b[31m\n\t", "\ud800", "x" * 10_000, [], {}, [[]], [None], {"a": 1}, (0, 0), (1, 2, 3), [{}],
)  # fmt: skip


def seeds() -> list[tuple[str, bytes]]:
    """Small real files, cut down so that a mutation costs little, and forms made from them."""
    found: list[tuple[str, bytes]] = []
    for name in ("complete_small", "trimmed", "torch20_block_history", "synthetic", "wrapped_ring_25000"):
        value = _cut(pickle.loads((DATA / "snapshots" / f"{name}.pickle").read_bytes()))
        found.append((f"{name}.pickle", pickle.dumps(value, protocol=4)))
        found.append((f"{name}.json", json.dumps(value).encode()))
    found.append(("bare.pickle", pickle.dumps(value["segments"], protocol=2)))
    found.append(("small.pickle.gz", gzip.compress(found[0][1])))
    for name in ("h100_bert_small.json.gz", "a100_switch_transformer.json", "resnet50_2021_no_addr.pt.trace.json.gz"):
        raw = (DATA / "chrome" / name).read_bytes()
        trace = json.loads(gzip.decompress(raw) if name.endswith(".gz") else raw)
        trace["traceEvents"] = _some_events(trace["traceEvents"])
        found.append((name, json.dumps(trace).encode()))
    rows = json.loads(gzip.decompress((DATA / "timeline" / "memory_timeline.raw.json.gz").read_bytes()))[:300]
    found.append(("timeline.json", json.dumps(rows).encode()))
    found.append(("totals.json", json.dumps([[1, 2, 3], [[0] * 9, [0, 5, 1, 2, 3, 4, 5, 6, 7], [0] * 9]]).encode()))
    return found


def _cut(value: Any) -> Any:
    value["segments"] = value["segments"][:5]
    value["device_traces"] = [trace[:60] for trace in value["device_traces"]]
    return value


def _some_events(events: list[Any]) -> list[Any]:
    memory = [event for event in events if event.get("name") == "[memory]"][:60]
    return [event for event in events if event.get("ph") == "X"][:200] + memory


def mutate_bytes(data: bytes, dice: random.Random) -> bytes:
    """One to four damages."""
    piece = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        at, size = dice.randrange(len(piece) + 1), dice.choice((1, 1, 2, 8, 64, 1000))
        kind = dice.randrange(6)
        if kind == 0 and at < len(piece):
            piece[at] ^= 1 << dice.randrange(8)
        elif kind == 1:
            piece[at : at + size] = dice.randbytes(size)
        elif kind == 2:
            del piece[at : at + size]
        elif kind == 3:
            piece[at:at] = piece[dice.randrange(len(piece) + 1) :][:size]
        elif kind == 4 and dice.random() < 0.3:
            del piece[at:]
        else:
            # An opcode or a bracket where none should be.
            piece[at:at] = bytes([dice.choice(b"\x80\x95()]}{[\x8f\x90\x91cRbioQP\x82\x94h2t0.NIL\x8a\x8b\"':,nN-")])
    return bytes(piece)


def mutate_value(value: Any, dice: random.Random) -> Any:
    """One to six fields replaced, dropped or swapped for a neighbour's."""
    value = copy.deepcopy(value)
    for _ in range(dice.randint(1, 6)):
        place = value
        while isinstance(place, dict | list) and place:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = dice.choice(keys)
            if not isinstance(place[key], dict | list) or not place[key] or dice.random() < 0.15:
                action = dice.randrange(4)
                if action == 0:
                    del place[key]
                elif action == 1:
                    place[key] = copy.deepcopy(place[dice.choice(keys)])
                else:
                    place[key] = copy.deepcopy(dice.choice(ABSURD))
                break
            place = place[key]
    return value


def mutation(name: str, data: bytes, dice: random.Random) -> bytes:
    """A mutation of one seed."""
    if (name.endswith(".gz") and data[:2] == b"\x1f\x8b") or dice.random() < 0.5:
        return mutate_bytes(data, dice)
    if name.endswith(".pickle"):
        return pickle.dumps(mutate_value(pickle.loads(data), dice), protocol=dice.choice((2, 3, 4, 5)))
    try:
        return json.dumps(mutate_value(json.loads(data), dice)).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError):
        return mutate_bytes(data, dice)


def judge(path: Path, *, whole_way: bool) -> str:
    """Read one file; "trace", "sentence" for a TraceError of one line, "memory" for a bound kept. Anything else raises."""
    from memtrace import readers
    from memtrace.errors import TraceError
    from memtrace.readers.content import Content
    from memtrace.readers.registry import reader_for

    try:
        if whole_way:
            ranks = readers.read(path)
        else:
            content = Content.of(path)
            ranks = reader_for(content).read(content)
    except TraceError as error:
        sentence = str(error)
        assert "\n" not in sentence and len(sentence) < 600 and "please report" not in sentence, sentence
        assert all(character.isprintable() for character in sentence), ascii(sentence)
        return "sentence"
    except MemoryError:
        # The process of its own, in which a reader runs for a user, ends this with a sentence.
        assert not whole_way
        return "memory"
    for manifest, tables in ranks:
        check(manifest, tables)
    return "trace"


def check(manifest: dict[str, Any], tables: dict[str, Any]) -> None:
    """What every trace must hold, whatever it was read from; and it can be summarised."""
    from dataclasses import asdict

    from memtrace.analysis.summary import summarize
    from memtrace.format.schema import arrow_schema
    from memtrace.trace import Trace

    json.dumps(manifest, allow_nan=False)
    for name, table in tables.items():
        assert table.schema.equals(arrow_schema(name)), name
        table.validate(full=True)
    trace = Trace.from_tables(manifest, tables)
    events = trace.columns("events", "time_ns", "kind", "device", "block_id", "size", "op_id")
    assert (events["device"] >= 0).all()
    assert int(events["op_id"].max(initial=-1)) < tables["ops"].num_rows
    json.dumps(asdict(summarize(trace)), allow_nan=False)


def run_batch(jobs: list[tuple[str, bytes, bool]], folder: Path, results: Path) -> None:
    """In a child: judge each job and write down what came of it."""
    from memtrace.readers.limits import Limits

    Limits(1 << 30, SECONDS_A_BATCH).impose()
    with results.open("w", encoding="utf-8") as out:
        for number, (name, data, whole_way) in enumerate(jobs):
            path = folder / f"{number}-{name}"
            path.write_bytes(data)
            try:
                outcome = judge(path, whole_way=whole_way)
            except BaseException as error:
                outcome = f"fault: {type(error).__name__}: {ascii(str(error))[:300]}"
            if not outcome.startswith("fault"):
                path.unlink()
            print(outcome, file=out, flush=True)


def fuzz(count: int, seed: int, keep: Path | None) -> Counter[str]:
    """Judge ``count`` mutations; how many ended how. Faults are printed."""
    dice = random.Random(seed)
    pool = seeds()
    outcomes: Counter[str] = Counter()
    done = 0
    while done < count:
        jobs = []
        for number in range(min(BATCH, count - done)):
            name, data = dice.choice(pool)
            jobs.append((name, mutation(name, data, dice), (done + number) % 10 == 0))
        done += len(jobs)
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder) / "results"
            status = _in_child(jobs, Path(folder), results)
            lines = results.read_text(encoding="utf-8").splitlines()
            if status != 0 or len(lines) < len(jobs):
                lines.append(
                    f"fault: the process ended with {status} in {jobs[len(lines)][0]}" if len(lines) < len(jobs) else ""
                )
            for number, line in enumerate(filter(None, lines)):
                outcomes[line.split(":")[0]] += 1
                if line.startswith("fault"):
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
    deadline = time.monotonic() + 2 * SECONDS_A_BATCH
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
    # What readers import, once and not in every child.
    import memtrace.analysis.summary
    import memtrace.readers.json_files
    import memtrace.readers.viz_page  # noqa: F401

    outcomes = fuzz(arguments.mutations, arguments.seed, arguments.keep)
    print(json.dumps({"seconds": round(time.monotonic() - start, 1), **outcomes}))
    return 1 if outcomes["fault"] else 0


if __name__ == "__main__":
    sys.exit(main())
