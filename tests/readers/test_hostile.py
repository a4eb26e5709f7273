"""Hostile and broken inputs end with one error message and exit code 2, within limits on memory and time.

The command line reads each case in a separate process, whose peak memory (with that of its children) is measured. Run
this file as a program to print a table of all cases.
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
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from _pytest.mark import ParameterSet

import memtrace
from memtrace import readers
from memtrace.analysis.summary import summarize as summarize_trace
from memtrace.errors import TraceError
from memtrace.readers import isolated
from memtrace.readers.limits import ReadLimits
from tests.readers.snapshot_maker import START_US, SnapshotMaker, frame

MIB = 1 << 20
HEADER = b"\x80\x04"
MAX_SECONDS = 60
"""Processor time, which does not depend on what else the machine does."""


class Case(NamedTuple):
    """How to write the input, and what the error message must contain: one of the texts that ``|`` separates."""

    write: Callable[[Path], None]
    expected: str
    max_peak_mib: int = 420


class Outcome(NamedTuple):
    """What the command line did with an input."""

    exit_code: int
    message: str
    peak_mib: int
    seconds: float


def _bytes(data: bytes) -> Callable[[Path], None]:
    return _lazily(lambda: data)


def _lazily(make: Callable[[], bytes]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(make())

    return write


def _snapshot(damage: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    maker = SnapshotMaker()
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
    """Write many gzip members one after another: fast to write, slow to decompress."""
    return _lazily(lambda: gzip.compress(head + fill) + gzip.compress(fill) * times)


def _tuple_key_bomb() -> bytes:
    """Return a pickle with a dict key of 2**60 equal leaves, whose hash never completes."""
    body = b")" + b"2\x86" * 60
    return HEADER + b"}" + body + b"K\x01s."


def _colliding_keys() -> bytes:
    """Return a pickle of a dict whose integer keys all have the hash 0, so that building it takes quadratic time."""
    prime = (1 << 61) - 1
    keys = b"".join(b"\x8a\x0b" + (prime * n).to_bytes(11, "little", signed=True) + b"N" for n in range(1, 300_000))
    return HEADER + b"}(" + keys + b"u."


def _text_pickle(opcodes: bytes) -> bytes:
    return b"\x80\x02" + opcodes


IMPORTS = "the pickle asks to import"
UNRECOGNISED = "unrecognised file format"
CASES: dict[str, Case] = {
    # Other files than memory traces.
    "git-LFS pointer": Case(_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"), "a Git LFS pointer"),
    "empty file": Case(_bytes(b""), "the file is empty"),
    "random bytes": Case(_lazily(lambda: os.urandom(4096).replace(b"\x80", b"\x01", 1).lstrip(b"\x80[{<")), UNRECOGNISED),
    "text": Case(_bytes(b"hello world\n" * 100), UNRECOGNISED),
    "zip archive": Case(_bytes(b"PK\x03\x04" + b"x" * 100), "a zip archive"),
    "zstd": Case(_bytes(b"\x28\xb5\x2f\xfd" + b"x" * 100), "compressed with zstd"),
    "picture of a timeline": Case(_bytes(b"<html>\n<head><title>GPU Memory Timeline HTML</title></head>"), "contains a picture and no numbers"),
    "HTML without a snapshot": Case(_bytes(b"<!DOCTYPE html><html><body>404</body></html>"), "the HTML page contains no memory snapshot"),
    "truncated page": Case(_bytes(b'<!DOCTYPE html><script>[{"base64": "gASVAAAA'), "is truncated"),
    "page of damaged base64": Case(_bytes(b'<!DOCTYPE html><script>[{"base64": "\xff*A="}]'), "damaged base64 (it contains the byte"),
    "folder": Case(lambda path: path.mkdir(), "not a memtrace trace"),
    "missing": Case(lambda path: None, "does not exist"),
    "named pipe": Case(lambda path: os.mkfifo(path), "not a regular file"),
    # Pickles that try to run code.
    "GLOBAL os.system": Case(_bytes(_text_pickle(b"cos\nsystem\n(Vtouch /tmp/owned\ntR.")), IMPORTS),
    "STACK_GLOBAL": Case(_bytes(HEADER + b"\x8c\x02os\x8c\x06system\x93."), IMPORTS),
    "INST": Case(_bytes(_text_pickle(b"(S'x'\nios\nsystem\n.")), IMPORTS),
    "OBJ": Case(_bytes(_text_pickle(b"(cos\nsystem\no.")), IMPORTS),
    "NEWOBJ_EX": Case(_bytes(HEADER + b"\x8c\x02os\x8c\x06system\x93)}\x92."), IMPORTS),
    "EXT1": Case(_bytes(_text_pickle(b"\x82\x01.")), "unregistered extension code"),
    "EXT4": Case(_bytes(_text_pickle(b"\x84\xff\xff\xff\x7f.")), "unregistered extension code"),
    "PERSID": Case(_bytes(_text_pickle(b"Pfile\n.")), "the pickle refers to objects outside of itself"),
    "BINPERSID": Case(_bytes(_text_pickle(b"K\x01Q.")), "the pickle refers to objects outside of itself"),
    "REDUCE of a string": Case(_bytes(_text_pickle(b"Vprint\n)R.")), "not a valid pickle of plain values"),
    "BUILD of a dict": Case(_bytes(_text_pickle(b"}}(Va\nK\x01ub.")), "not a valid pickle of plain values"),
    "NEXT_BUFFER": Case(_bytes(b"\x80\x05\x97."), "not a valid pickle of plain values"),
    "torch.save, old form": Case(_bytes(_text_pickle(b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.")), "not a valid CUDA memory snapshot"),
    # Pickles that exhaust memory, time or the stack.
    "20 M sets": Case(_lazily(lambda: HEADER + b"(" + b"\x8f" * 20_000_000 + b"l."), "of memory, which is too much", 600),
    "20 M dicts": Case(_lazily(lambda: HEADER + b"(" + b"}" * 20_000_000 + b"l."), "of memory, which is too much", 600),
    "20 M times DUP": Case(_lazily(lambda: HEADER + b"](" + b"K\x01" + b"2" * 20_000_000 + b"e."), "not a valid CUDA memory snapshot", 600),
    "memo index of 4 G": Case(_bytes(HEADER + b"Nr\xff\xff\xff\xff."), "of memory, which is too much"),
    "string of 2**60 bytes": Case(_bytes(HEADER + b"\x8d" + struct.pack("<Q", 1 << 60) + b"x"), "truncated|of memory|not a valid pickle"),
    "bytes of 2 GiB": Case(_bytes(HEADER + b"\x8e" + struct.pack("<Q", 1 << 31) + b"x"), "truncated|of memory|not a valid pickle"),
    "frame of 2**62 bytes": Case(_bytes(HEADER + b"\x95" + struct.pack("<Q", 1 << 62) + b"N."), "truncated|of memory|not a valid pickle"),
    "nested 1 M deep": Case(_lazily(lambda: HEADER + b"]" * 1_000_000 + b"a" * 999_999 + b"."), "not a valid CUDA memory snapshot"),
    "segments nested 1 M deep": Case(
        _lazily(lambda: HEADER + b"}\x8c\x08segments" + b"]" * 1_000_000 + b"a" * 999_999 + b"s."), "not a valid CUDA memory snapshot"
    ),
    "key whose hash never completes": Case(_lazily(_tuple_key_bomb), "damaged or hostile"),
    "keys that collide": Case(_lazily(_colliding_keys), "damaged or hostile"),
    "number of 10 M digits": Case(_lazily(lambda: _text_pickle(b"L" + b"9" * 10_000_000 + b"L\n.")), "not a valid pickle"),
    "size of 8 M bits": Case(_snapshot(_entry(1, size=1 << (8 * MIB))), "of 8388609 bits"),
    # Damage.
    "truncated pickle": Case(_bytes(pickle.dumps({"segments": list(range(1000))}, protocol=4)[:-300]), "is truncated"),
    "pickle without an end": Case(_bytes(pickle.dumps([1, 2, 3], protocol=2)[:-1]), "is truncated"),
    "truncated gzip": Case(_bytes(gzip.compress(os.urandom(5000))[:3000]), "the gzip stream is truncated"),
    "gzip truncated within its header": Case(_bytes(b"\x1f\x8b\x08"), "the gzip stream is truncated"),
    "gzip damaged": Case(_bytes(gzip.compress(b"[" * 9000)[:12] + b"\xff" * 40), "the gzip stream is damaged"),
    "gzip in gzip": Case(_bytes(gzip.compress(gzip.compress(b"[]"))), "compressed with gzip twice"),
    "gzip of zeros, 4 GiB": Case(_gzip_bomb(b"\0" * MIB, 4096), UNRECOGNISED),
    "gzip of a list, 2 GiB": Case(_gzip_bomb(b"[]," * (MIB // 3), 2048, b'{"traceEvents":['), "are not JSON objects"),
    "gzip of records, 2 GiB": Case(_gzip_bomb(b"{}," * (MIB // 3), 2048, b'{"traceEvents":['), "bomb|takes more than"),
    "gzip of an endless string, 2 GiB": Case(_gzip_bomb(b"x" * MIB, 2048, b'{"traceEvents":["'), "bomb|longer than"),
    "gzip of a pickle, 1 GiB": Case(_gzip_bomb(b"\x8f" * MIB, 1024, HEADER + b"("), "bomb|of memory, which is too much", 1300),
    "10 GB of zeros": Case(_sparse(b"", 10 * 10**9), UNRECOGNISED),
    "10 GB after the first bytes of a pickle": Case(_sparse(HEADER + b"(", 10 * 10**9), "the file holds 9.31 GiB|not a valid pickle"),
    "10 GB after the first bytes of a Chrome trace": Case(_sparse(b'{"traceEvents": [', 10 * 10**9), "the JSON is damaged or truncated"),
    "10 GB after the first bytes of a page": Case(_sparse(b'<!DOCTYPE html>"base64": "', 10 * 10**9), "damaged base64 (it contains the byte"),
    # JSON.
    "JSON of another kind": Case(_bytes(b'{"nodes": [1, 2]}'), "neither a Chrome trace"),
    "truncated JSON": Case(_bytes(json.dumps({"traceEvents": [{"name": "x"}] * 9})[:-20].encode()), "the JSON is damaged or truncated"),
    "JSON nested 1 M deep": Case(_lazily(lambda: b'{"a":' + b"[" * 1_000_000), "nested too deeply"),
    "JSON number of 1 M digits": Case(_lazily(lambda: b'{"traceEvents":[{"ts":' + b"9" * 1_000_000 + b"}]}"), "the JSON is damaged or truncated"),
    "JSON with an impossible size": Case(
        _bytes(json.dumps({"traceEvents": [{"name": "[memory]", "ts": 1, "pid": 1, "tid": 1, "args": {"Bytes": 10**40}}]}).encode()),
        "more than 256 TiB",
    ),
    "UTF-16": Case(_bytes('{"traceEvents": []}'.encode("utf-16")), UNRECOGNISED),
    "timeline of odd rows": Case(_bytes(b"[[1,2,3],[4,5,6]]"), "not a timeline of export_memory_timeline"),
    "timeline of an unknown action": Case(_bytes(b"[[1,9,8,0],[2,2,8,0],[3,4,8,0]]"), "not a timeline of export_memory_timeline"),
    # Snapshots with absurd values.
    "negative size": Case(_snapshot(_entry(1, size=-5)), "size -5, which an allocator never writes"),
    "size of 2**62": Case(_snapshot(_entry(1, size=1 << 62)), "which an allocator never writes"),
    "address of 2**70": Case(_snapshot(_entry(1, addr=1 << 70)), "which is not an address"),
    "address as a string": Case(_snapshot(_entry(1, addr="0x7f")), "which is not an address"),
    "size NaN": Case(_snapshot(_entry(1, size=float("nan"))), "size nan, which an allocator never writes"),
    "action of a list": Case(_snapshot(_entry(1, action=[])), "that is not a string"),
    "entry without a size": Case(_snapshot(lambda value: value["device_traces"][0][1].pop("size")), "has no 'size'"),
    "frames of numbers": Case(_snapshot(_entry(1, frames=[1, 2])), "frame"),
    "device 10**9": Case(_snapshot(lambda value: value["segments"][0].update(device=10**9)), "a segment is on device 1000000000"),
    "time of 2**80": Case(_snapshot(_entry(1, time_us=1 << 80)), "time_us"),
    "terminal escapes in a key": Case(_bytes(HEADER + b"\x8c\x07\x1b[31m\x00\n\x8c\x01\x07\x93."), IMPORTS),
}  # fmt: skip


class Launcher:
    """Runs ``memtrace summary`` on files, each in a fork of a small process that has imported memtrace.

    The tests do not fork their own process, because the peak memory of a child counts that of the process that it was
    forked from. Another process in between adopts the one that reads the file, for which the command line does not wait.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def summarize(self, path: Path) -> Outcome:
        """Run the command on a file."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(path, file=self._process.stdin, flush=True)
        exit_code, message, peak_kib, seconds = json.loads(self._process.stdout.readline())
        return Outcome(exit_code, message.strip(), peak_kib // 1024, seconds)

    def close(self) -> None:
        """End the process."""
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()


LAUNCHER = """
import ctypes, json, os, sys, tempfile
import pyarrow
from memtrace.cli import main, summary
from memtrace import trace
from memtrace.readers import isolated, registry

PR_SET_CHILD_SUBREAPER = 36

def run(path, messages):
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(messages.fileno(), 2)
    try:
        main(["summary", path])
    except SystemExit as end:
        os._exit(end.code or 0)

def adopt(path, messages):
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    command = os.fork()
    if command == 0:
        try:
            run(path, messages)
        finally:
            os._exit(99)
    peak_kib, seconds, code = 0, 0.0, None
    while True:
        try:
            process, status, usage = os.wait4(-1, 0)
        except ChildProcessError:
            break
        peak_kib, seconds = max(peak_kib, usage.ru_maxrss), seconds + usage.ru_utime + usage.ru_stime
        if process == command:
            code = os.waitstatus_to_exitcode(status)
    messages.seek(0)
    print(json.dumps([code, messages.read(), peak_kib, seconds]), flush=True)

for line in sys.stdin:
    with tempfile.TemporaryFile("w+", encoding="utf-8") as messages:
        child = os.fork()
        if child == 0:
            try:
                adopt(line.removesuffix("\\n"), messages)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with closing(Launcher()) as started:
        yield started


# These reach the limit on time, which is tested below with a shorter limit.
ENDLESS = ("key whose hash never completes", "keys that collide", "gzip of records, 2 GiB")


# The fast tests run one case of each kind; the others run with the slow tests.
SAMPLE = frozenset({
    "empty file", "text", "zip archive", "HTML without a snapshot", "missing", "STACK_GLOBAL", "PERSID", "20 M sets",
    "nested 1 M deep", "truncated pickle", "gzip damaged", "gzip of zeros, 4 GiB", "JSON of another kind", "truncated JSON",
    "timeline of odd rows", "negative size", "terminal escapes in a key",
})  # fmt: skip


def _case_parameters() -> list[ParameterSet]:
    assert set(CASES) >= SAMPLE
    names = sorted(set(CASES) - set(ENDLESS))
    return [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", _case_parameters())
def test_a_hostile_input_ends_with_one_message_and_exit_code_2(launcher: Launcher, tmp_path: Path, name: str) -> None:
    path = tmp_path / "input"
    CASES[name].write(path)
    outcome = launcher.summarize(path)
    assert outcome.exit_code == 2, outcome
    assert outcome.message.startswith("memtrace: ") and outcome.message.count("\n") == 0, outcome.message
    assert "Traceback" not in outcome.message and "Please report" not in outcome.message
    assert all(character.isprintable() for character in outcome.message)
    assert any(text in outcome.message for text in CASES[name].expected.split("|")), outcome.message
    assert outcome.peak_mib <= CASES[name].max_peak_mib
    assert outcome.seconds < MAX_SECONDS


@pytest.mark.parametrize("name", ENDLESS)
def test_the_limit_on_processor_time_holds(tmp_path: Path, name: str) -> None:
    path = tmp_path / "input"
    CASES[name].write(path)
    with pytest.raises(TraceError, match="reading it takes more than 1 s"):
        readers.read(path, limits=ReadLimits(memory_bytes=1 << 30, cpu_seconds=1))


def test_the_limit_on_memory_holds_for_valid_files_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A fork of this process could reuse the memory that earlier tests freed.
    monkeypatch.setattr(isolated, "_can_fork", lambda: False)
    path = tmp_path / "input"
    entries = [{"action": "x", "n": n} for n in range(500_000)]
    # The set at the end leaves the file to the Python reader, which takes more memory for the entries than the scanner.
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [entries], "more": {1}}))
    with pytest.raises(TraceError, match=r"reading it takes more than 64\.0 MiB of memory"):
        readers.read(path, limits=ReadLimits(memory_bytes=64 << 20, cpu_seconds=30))


@pytest.mark.parametrize("factor", [1, 1000])
def test_entries_whose_times_span_centuries_are_read_without_times(tmp_path: Path, factor: int) -> None:
    path = tmp_path / "input"
    _snapshot(_entry(2, time_us=START_US * factor))(path)
    trace = memtrace.load(path)
    assert trace.has_times == (factor == 1)
    assert summarize_trace(trace).devices[0].live_requested_bytes_at_end == 1000


def main() -> None:
    """Print a table of all cases: input, error message, exit code, peak memory, time."""
    print("| input | message | exit code | peak MiB | s |\n| --- | --- | --- | --- | --- |")
    launcher = Launcher()
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "input"
            case.write(path)
            outcome = launcher.summarize(path)
            message = outcome.message.replace(str(path), "FILE").removeprefix("memtrace: ").replace("|", "/")
            row = (name, message, outcome.exit_code, outcome.peak_mib, f"{outcome.seconds:.1f}")
            print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()
