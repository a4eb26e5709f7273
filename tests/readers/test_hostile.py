"""Hostile and broken inputs: one clear sentence, exit code 2, bounded memory and time.

Each case is read by the command line in a process of its own, whose peak memory (its children's included) is taken.
Run this file as a program to print the table.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from memtrace import readers
from memtrace.errors import TraceError
from memtrace.readers import isolated
from memtrace.readers.limits import Limits
from tests.readers.making import START_US, Maker, frame

MIB = 1 << 20
HEADER = b"\x80\x04"
# What a user waits for at most; on a busy machine it takes that long to start Python.
SECONDS = 60


class Case(NamedTuple):
    """How to write the file, and what the sentence must say."""

    write: Callable[[Path], None]
    says: str
    peak_mib: int = 420


class Outcome(NamedTuple):
    code: int
    sentence: str
    peak_mib: int
    seconds: float


def _bytes(data: bytes) -> Callable[[Path], None]:
    return _lazily(lambda: data)


def _lazily(make: Callable[[], bytes]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(make())

    return write


def _snapshot(damage: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    maker = Maker()
    maker.alloc(1000, [frame("train.py", 3, "step")])
    maker.free(maker.alloc(2000))
    value = maker.snapshot()
    damage(value)
    return _bytes(pickle.dumps(value, protocol=4))


def _entry(number: int, **fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda value: value["device_traces"][0][number].update(fields)


def _sparse(head: bytes, size: int) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with path.open("wb") as file:
            file.write(head)
            file.truncate(size)

    return write


def _gzip_bomb(fill: bytes, times: int, head: bytes = b"") -> Callable[[Path], None]:
    """As many gzip members as wanted, one behind the other: quick to make, as long to unzip."""
    return _lazily(lambda: gzip.compress(head + fill) + gzip.compress(fill) * times)


def _tuple_key_bomb() -> bytes:
    """A dict key of 2**60 equal leaves: hashing it never ends."""
    body = b")" + b"2\x86" * 60
    return HEADER + b"}" + body + b"K\x01s."


def _colliding_keys() -> bytes:
    """Integers that all hash to 0: a dict of them takes the square of their number."""
    prime = (1 << 61) - 1
    keys = b"".join(b"\x8a\x0b" + (prime * n).to_bytes(11, "little", signed=True) + b"N" for n in range(1, 300_000))
    return HEADER + b"}(" + keys + b"u."


def _text_pickle(opcodes: bytes) -> bytes:
    return b"\x80\x02" + opcodes


IMPORTS = "to be imported while it is read"
CASES: dict[str, Case] = {
    # What arrives in place of the file.
    "git-LFS pointer": Case(_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"), "git-LFS pointer"),
    "empty file": Case(_bytes(b""), "is empty"),
    "random bytes": Case(_lazily(lambda: os.urandom(4096).replace(b"\x80", b"\x01", 1).lstrip(b"\x80[{<")), "is of no kind that memtrace knows"),
    "text": Case(_bytes(b"hello world\n" * 100), "is of no kind that memtrace knows"),
    "zip archive": Case(_bytes(b"PK\x03\x04" + b"x" * 100), "is a zip archive"),
    "zstd": Case(_bytes(b"\x28\xb5\x2f\xfd" + b"x" * 100), "compressed with zstd"),
    "picture of a timeline": Case(_bytes(b"<html>\n<head><title>GPU Memory Timeline HTML</title></head>"), "holds no numbers"),
    "HTML without a snapshot": Case(_bytes(b"<!DOCTYPE html><html><body>404</body></html>"), "HTML page without a memory snapshot"),
    "page cut off": Case(_bytes(b'<!DOCTYPE html><script>[{"base64": "gASVAAAA'), "is truncated"),
    "page of no base64": Case(_bytes(b'<!DOCTYPE html><script>[{"base64": "\xff*A="}]'), "is"),
    "folder": Case(lambda path: path.mkdir(), "is not a memtrace trace"),
    "missing": Case(lambda path: None, "does not exist"),
    "named pipe": Case(lambda path: os.mkfifo(path), "is not a regular file"),
    # Pickles that want to do something.
    "GLOBAL os.system": Case(_bytes(_text_pickle(b"cos\nsystem\n(Vtouch /tmp/owned\ntR.")), IMPORTS),
    "STACK_GLOBAL": Case(_bytes(HEADER + b"\x8c\x02os\x8c\x06system\x93."), IMPORTS),
    "INST": Case(_bytes(_text_pickle(b"(S'x'\nios\nsystem\n.")), IMPORTS),
    "OBJ": Case(_bytes(_text_pickle(b"(cos\nsystem\no.")), IMPORTS),
    "NEWOBJ_EX": Case(_bytes(HEADER + b"\x8c\x02os\x8c\x06system\x93)}\x92."), IMPORTS),
    "EXT1": Case(_bytes(_text_pickle(b"\x82\x01.")), "unregistered extension code"),
    "EXT4": Case(_bytes(_text_pickle(b"\x84\xff\xff\xff\x7f.")), "unregistered extension code"),
    "PERSID": Case(_bytes(_text_pickle(b"Pfile\n.")), "refers to objects outside of itself"),
    "BINPERSID": Case(_bytes(_text_pickle(b"K\x01Q.")), "refers to objects outside of itself"),
    "REDUCE of a text": Case(_bytes(_text_pickle(b"Vprint\n)R.")), "is no whole pickle of plain values"),
    "BUILD of a dict": Case(_bytes(_text_pickle(b"}}(Va\nK\x01ub.")), "is no whole pickle of plain values"),
    "NEXT_BUFFER": Case(_bytes(b"\x80\x05\x97."), "is no whole pickle of plain values"),
    "torch.save, old form": Case(_bytes(_text_pickle(b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.")), "is no memory snapshot"),
    # Pickles that want memory, time or the stack.
    "20 M sets": Case(_lazily(lambda: HEADER + b"(" + b"\x8f" * 20_000_000 + b"l."), "of memory to read", 600),
    "20 M dicts": Case(_lazily(lambda: HEADER + b"(" + b"}" * 20_000_000 + b"l."), "of memory to read", 600),
    "20 M times DUP": Case(_lazily(lambda: HEADER + b"](" + b"K\x01" + b"2" * 20_000_000 + b"e."), "no memory snapshot", 600),
    "memo index of 4 G": Case(_bytes(HEADER + b"Nr\xff\xff\xff\xff."), "of memory to read"),
    "text of 2**60 bytes": Case(_bytes(HEADER + b"\x8d" + struct.pack("<Q", 1 << 60) + b"x"), "is"),
    "bytes of 2 GiB": Case(_bytes(HEADER + b"\x8e" + struct.pack("<Q", 1 << 31) + b"x"), "is"),
    "frame of 2**62 bytes": Case(_bytes(HEADER + b"\x95" + struct.pack("<Q", 1 << 62) + b"N."), "is"),
    "nested 1 M deep": Case(_lazily(lambda: HEADER + b"]" * 1_000_000 + b"a" * 999_999 + b"."), "is no memory snapshot"),
    "segments nested 1 M deep": Case(
        _lazily(lambda: HEADER + b"}\x8c\x08segments" + b"]" * 1_000_000 + b"a" * 999_999 + b"s."), "is no memory snapshot"
    ),
    "key that takes for ever to hash": Case(_lazily(_tuple_key_bomb), "refused as hostile"),
    "keys that collide": Case(_lazily(_colliding_keys), "refused as hostile"),
    "number of 10 M digits": Case(_lazily(lambda: _text_pickle(b"L" + b"9" * 10_000_000 + b"L\n.")), "is no whole pickle"),
    "size of 8 M bits": Case(_snapshot(_entry(1, size=1 << (8 * MIB))), "of 8388609 bits"),
    # Damage.
    "pickle cut off": Case(_bytes(pickle.dumps({"segments": list(range(1000))}, protocol=4)[:-300]), "is truncated"),
    "pickle without an end": Case(_bytes(pickle.dumps([1, 2, 3], protocol=2)[:-1]), "is truncated"),
    "gzip cut off": Case(_bytes(gzip.compress(os.urandom(5000))[:3000]), "gzip stream has no end"),
    "gzip cut off within its header": Case(_bytes(b"\x1f\x8b\x08"), "gzip stream has no end"),
    "gzip damaged": Case(_bytes(gzip.compress(b"[" * 9000)[:12] + b"\xff" * 40), "does not unzip"),
    "gzip in gzip": Case(_bytes(gzip.compress(gzip.compress(b"[]"))), "gzip within gzip"),
    "gzip of zeros, 4 GiB": Case(_gzip_bomb(b"\0" * MIB, 4096), "is of no kind"),
    "gzip of a list, 2 GiB": Case(_gzip_bomb(b"[]," * (MIB // 3), 2048, b'{"traceEvents":['), "are no records"),
    "gzip of records, 2 GiB": Case(_gzip_bomb(b"{}," * (MIB // 3), 2048, b'{"traceEvents":['), "bomb|more than"),
    "gzip of an endless text, 2 GiB": Case(_gzip_bomb(b"x" * MIB, 2048, b'{"traceEvents":["'), "bomb|longer than"),
    "gzip of a pickle, 1 GiB": Case(_gzip_bomb(b"\x8f" * MIB, 1024, HEADER + b"("), "bomb|of memory to read", 1300),
    "10 GB of zeros": Case(_sparse(b"", 10 * 10**9), "is of no kind"),
    "10 GB behind a pickle's first byte": Case(_sparse(HEADER + b"(", 10 * 10**9), "holds 9.3 GiB|is no whole pickle"),
    "10 GB behind a trace's first byte": Case(_sparse(b'{"traceEvents": [', 10 * 10**9), "is damaged JSON"),
    "10 GB behind a page's first byte": Case(_sparse(b'<!DOCTYPE html>"base64": "', 10 * 10**9), "holds 9.3 GiB|no base64|is"),
    # JSON.
    "JSON of another kind": Case(_bytes(b'{"nodes": [1, 2]}'), "neither a Chrome trace"),
    "JSON cut off": Case(_bytes(json.dumps({"traceEvents": [{"name": "x"}] * 9})[:-20].encode()), "is damaged JSON, or cut off"),
    "JSON nested 1 M deep": Case(_lazily(lambda: b'{"a":' + b"[" * 1_000_000), "is nested deeper"),
    "JSON number of 1 M digits": Case(_lazily(lambda: b'{"traceEvents":[{"ts":' + b"9" * 1_000_000 + b"}]}"), "is damaged JSON"),
    "JSON sizes no machine has": Case(
        _bytes(json.dumps({"traceEvents": [{"name": "[memory]", "ts": 1, "pid": 1, "tid": 1, "args": {"Bytes": 10**40}}]}).encode()),
        "more than 256 TiB",
    ),
    "UTF-16": Case(_bytes('{"traceEvents": []}'.encode("utf-16")), "is of no kind"),
    "timeline of odd rows": Case(_bytes(b"[[1,2,3],[4,5,6]]"), "is no timeline"),
    "timeline of an unknown action": Case(_bytes(b"[[1,9,8,0],[2,2,8,0],[3,4,8,0]]"), "is no timeline"),
    # Snapshots that say absurd things.
    "negative size": Case(_snapshot(_entry(1, size=-5)), "size -5, which no allocator writes"),
    "size of 2**62": Case(_snapshot(_entry(1, size=1 << 62)), "which no allocator writes"),
    "address of 2**70": Case(_snapshot(_entry(1, addr=1 << 70)), "which is no address"),
    "address as a text": Case(_snapshot(_entry(1, addr="0x7f")), "which is no address"),
    "size NaN": Case(_snapshot(_entry(1, size=float("nan"))), "size nan, which no allocator writes"),
    "action of a list": Case(_snapshot(_entry(1, action=[])), "no text"),
    "entry without a size": Case(_snapshot(lambda value: value["device_traces"][0][1].pop("size")), "has no 'size'"),
    "frames of numbers": Case(_snapshot(_entry(1, frames=[1, 2])), "frame"),
    "device 10**9": Case(_snapshot(lambda value: value["segments"][0].update(device=10**9)), "a segment is on device 1000000000"),
    "time of 2**80": Case(_snapshot(_entry(1, time_us=1 << 80)), "time_us"),
    "terminal escapes in a key": Case(_bytes(HEADER + b"\x8c\x07\x1b[31m\x00\n\x8c\x01\x07\x93."), IMPORTS),
}  # fmt: skip


# A small process in between: what is said of a child's memory counts that of the process that it was forked from. It
# adopts the process that reads, for which the command line does not wait.
LAUNCH = """
import ctypes, os, sys
PR_SET_CHILD_SUBREAPER = 36
assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
quiet = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
child = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=quiet)
most = 0
while True:
    try:
        process, status, usage = os.wait4(-1, 0)
    except ChildProcessError:
        break
    most = max(most, usage.ru_maxrss)
    if process == child:
        code = os.waitstatus_to_exitcode(status)
print(code, most // 1024)
"""


def outcome(path: Path) -> Outcome:
    """What the command line makes of a file."""
    command = [sys.executable, "-c", "from memtrace.cli import main; main()", "summary", str(path)]
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", LAUNCH, *command], capture_output=True, text=True, check=True)
    code, peak_mib = map(int, done.stdout.split())
    return Outcome(code, done.stderr.strip(), peak_mib, time.monotonic() - start)


# These end by the bound on time, which is tested below with a shorter one.
SLOW = ("key that takes for ever to hash", "keys that collide", "gzip of records, 2 GiB")


@pytest.mark.parametrize("name", sorted(set(CASES) - set(SLOW)))
def test_one_sentence_and_exit_code_2(tmp_path: Path, name: str) -> None:
    path = tmp_path / "input"
    CASES[name].write(path)
    found = outcome(path)
    assert found.code == 2, found
    assert found.sentence.startswith("memtrace: ") and found.sentence.count("\n") == 0, found.sentence
    assert "Traceback" not in found.sentence and "please report" not in found.sentence
    assert all(character.isprintable() for character in found.sentence)
    assert any(part in found.sentence for part in CASES[name].says.split("|")), found.sentence
    assert found.peak_mib <= CASES[name].peak_mib
    assert found.seconds < SECONDS


@pytest.mark.parametrize("name", SLOW)
def test_the_bound_on_time_holds(tmp_path: Path, name: str) -> None:
    path = tmp_path / "input"
    CASES[name].write(path)
    with pytest.raises(TraceError, match="takes more than 1 s to read, which no trace of its size does"):
        readers.read(path, limits=Limits(memory_bytes=1 << 30, cpu_seconds=1))


def test_the_bound_on_memory_holds_for_honest_files_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A fork of this process could reuse what earlier tests freed, which is within the bound.
    monkeypatch.setattr(isolated, "_may_fork", lambda: False)
    path = tmp_path / "input"
    path.write_bytes(
        pickle.dumps({"segments": [], "device_traces": [[{"action": "x", "n": n} for n in range(500_000)]]})
    )
    with pytest.raises(TraceError, match="takes more than 64 MiB of memory to read"):
        readers.read(path, limits=Limits(memory_bytes=64 << 20, cpu_seconds=30))


@pytest.mark.parametrize("seconds", [None, "from the future"])
def test_odd_times_are_survived(tmp_path: Path, seconds: str | None) -> None:
    """Times that span centuries are no times; the order of the entries stands."""
    path = tmp_path / "input"
    _snapshot(_entry(2, time_us=START_US * (1 if seconds is None else 1000)))(path)
    assert outcome(path).code == 0


def main() -> None:
    """Print the table: input, sentence, exit code, peak memory, time."""
    print("| input | sentence | exit code | peak MiB | s |\n| --- | --- | --- | --- | --- |")
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "input"
            case.write(path)
            found = outcome(path)
            sentence = found.sentence.replace(str(path), "FILE").removeprefix("memtrace: ").replace("|", "/")
            print(f"| {name} | {sentence} | {found.code} | {found.peak_mib} | {found.seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
