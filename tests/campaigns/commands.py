"""Runs ``memtrace`` commands in this process on an input that may be damaged, and classifies what they did."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from memtrace.cli import INTERNAL_ERROR, main

from memtrace import trace as trace_module
from memtrace.errors import TraceError
from memtrace.exporters import FORMATS
from memtrace.trace import Trace

ANSWERED, REFUSED = "answered", "refused"
SECONDS_PER_COMMAND = 20
"""Processor time after which a command counts as hanging; the inputs are small, so that a second is long."""
MAX_MESSAGE_CHARS = 2000
_FORMULA = re.compile(r'(^|,)"?[=@+]', re.MULTILINE)

TRACE = "TRACE"
"""Stands for the mutated input in the arguments of a command, OTHER for an intact trace, OUT for a new path."""
OTHER, OUT = "OTHER", "OUT"
_RATES = ("--d2h", "6", "--h2d", "6")
_CHANGES = ("--amp", "bf16", "--optimizer", "adamw:foreach", "--shard", "fsdp=8")
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("summary", TRACE), ("summary", TRACE, "--json"), ("summary", TRACE, "--from-step", "1", "--to-step", "2"),
    ("report", TRACE, "-o", OUT), ("findings", TRACE), ("findings", TRACE, "--csv", "--min-bytes", "1B"), ("steps", TRACE),
    ("steps", TRACE, "--from-events", "--json"), ("access", TRACE), ("access", TRACE, "--csv", "--min-bytes", "0"),
    ("leaks", TRACE), ("leaks", TRACE, "--csv", "--capacity", "1GiB"), ("diff", TRACE, OTHER), ("diff", OTHER, TRACE, "--csv"),
    ("check", TRACE, "--max-peak", "1GiB", "--max-growth", "0"), ("stalls", TRACE), ("stalls", TRACE, "--csv"), ("ranks", TRACE),
    ("pipeline", TRACE), ("plan", "allocator", TRACE, "--sweep"),
    ("plan", "pipeline", TRACE, "--stages", "2", "--microbatches", "2"),
    ("plan", "whatif", TRACE, "--scale-batch", "2", "--capacity", "1GiB"), ("plan", "whatif", TRACE, *_CHANGES, "--json"),
    ("plan", "offload", TRACE, *_RATES), ("plan", "recompute", TRACE, "-o", OUT),
    ("plan", "spill", TRACE, "--budget", "1MiB", *_RATES), ("plan", "auto", TRACE, "--capacity", "1GiB", *_RATES),
    *(("export", TRACE, "-f", name, "-o", OUT) for name in FORMATS),
)  # fmt: skip
FILE_COMMANDS = (("import", TRACE, "-o", OUT),)
"""Commands for files of other tools only."""
PLAN_COMMANDS = (("plan", "show", TRACE), ("plan", "show", TRACE, "--json"), ("plan", "diff", TRACE, OTHER))
"""Commands for plans, of which OTHER is an intact one."""
SLOW_COMMANDS = tuple(
    command for command in COMMANDS if command[0] == "report" or command[1] in ("allocator", "recompute")
)
"""Commands that take ten times as long as the others."""


@dataclass(frozen=True)
class Outcome:
    """What a command did."""

    kind: str
    """ANSWERED, REFUSED, or what is wrong."""
    detail: str = ""

    @property
    def is_fault(self) -> bool:
        """Whether memtrace must never do this."""
        return self.kind not in (ANSWERED, REFUSED)


class Hang(BaseException):
    """A command took longer than SECONDS_PER_COMMAND."""


def command_name(arguments: tuple[str, ...]) -> str:
    """Return the name of a command for the table of outcomes."""
    return " ".join(argument for argument in arguments if argument not in (TRACE, OTHER, OUT))


def run_command(arguments: tuple[str, ...], trace: Path, other: Path, folder: Path) -> Outcome:
    """Run a command on an input and classify what it did."""
    output = folder / "output"
    places = {TRACE: str(trace), OTHER: str(other), OUT: str(output)}
    stdout, stderr = _Stream(), _Stream()
    with _captured(stdout, stderr), _deadline():
        try:
            main([places.get(argument, argument) for argument in arguments])
            status: object = 0
        except SystemExit as end:
            status = end.code
        except Hang:
            return Outcome("hang", _innermost(sys.exc_info()[1]))
        except BaseException as error:
            return Outcome(f"traceback: {type(error).__name__}", f"{_innermost(error)}: {str(error)[:150]!a}")
    outcome = _classify(status, stdout.text(), stderr.text(), as_csv="--csv" in arguments)
    fault = _fault_of_output(arguments, output) if outcome.kind == ANSWERED else None
    return outcome if fault is None else Outcome(fault)


@contextmanager
def shared_loads() -> Iterator[None]:
    """Open each trace once for all commands inside, which share what they compute: several times faster."""
    opened: dict[tuple[str, ...], Trace | TraceError] = {}
    load = trace_module.load

    def load_once(*paths: str | Path, work_during_read: Callable[[], None] | None = None) -> Trace:
        key = tuple(map(str, paths))
        if key not in opened:
            try:
                opened[key] = load(*paths, work_during_read=work_during_read)
            except TraceError as error:
                opened[key] = error
        result = opened[key]
        if isinstance(result, TraceError):
            raise TraceError(str(result))
        return result

    trace_module.load = load_once  # type: ignore[assignment]
    try:
        yield
    finally:
        trace_module.load = load


def _fault_of_output(arguments: tuple[str, ...], output: Path) -> str | None:
    """Return what is wrong with the file or folder that a command wrote; None where nothing is."""
    if arguments[0] == "report":
        page = output.read_text(encoding="utf-8")
        is_bad = "<img src=x" in page or "<b>bold" in page or not page.rstrip().endswith("</html>")
        return "markup in the page" if is_bad else None
    if arguments[0] == "export":
        kind = arguments[arguments.index("-f") + 1]
        if kind == "csv" and any(_FORMULA.search(path.read_text(encoding="utf-8")) for path in output.iterdir()):
            return "formula in CSV"
        if kind in ("speedscope", "chrome"):
            try:
                json.loads(output.read_bytes(), parse_constant=_refuse_constant)
            except ValueError:
                return "export that is not JSON"
    return None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _classify(status: object, stdout: str, stderr: str, *, as_csv: bool) -> Outcome:
    for name, text in (("stdout", stdout), ("stderr", stderr)):
        if "\x1b" in text or "\x9b" in text:
            return Outcome("ANSI escape", f"{name}: {_around(text, chr(0x1B))}")
        odd = next((char for char in text if char != "\n" and not char.isprintable()), None)
        if odd is not None:
            return Outcome("unprintable character", f"{name}: {_around(text, odd)}")
    if "Traceback (most recent" in stderr:
        return Outcome("traceback printed", stderr[-300:])
    if INTERNAL_ERROR in stderr:
        return Outcome("last resort", stderr[:300])
    if as_csv and _FORMULA.search(stdout):
        return Outcome("formula in CSV", stdout[:200])
    if status in (0, None):
        return Outcome(ANSWERED)
    if status == 1 and stdout and not stderr:  # a failed check
        return Outcome(ANSWERED)
    messages = [line for line in stderr.splitlines() if line]
    if status != 2 or not messages or len(stderr) > MAX_MESSAGE_CHARS or not messages[-1].startswith("memtrace: "):
        return Outcome(f"exit code {status} without a sentence", stderr[:300])
    return Outcome(REFUSED, messages[-1])


def _around(text: str, part: str) -> str:
    place = max(text.find(part), 0)
    return ascii(text[max(0, place - 80) : place + 40])


def _innermost(error: BaseException | None) -> str:
    """Return the innermost place in memtrace of an exception."""
    frames = traceback.extract_tb(error.__traceback__ if error else None)
    own = [frame for frame in frames if any(part in frame.filename for part in ("/memtrace/", "/cli/", "/dashboards/"))]
    places = [f"{Path(frame.filename).parent.name}/{Path(frame.filename).name}:{frame.lineno}" for frame in own[-2:]]
    return " > ".join(places)


class _Stream(io.TextIOWrapper):
    """A stream that encodes as a terminal does."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", newline="\n", write_through=True)

    def text(self) -> str:
        """Return what was written."""
        self.flush()
        assert isinstance(self.buffer, io.BytesIO)
        return self.buffer.getvalue().decode("utf-8")


@contextmanager
def _captured(stdout: _Stream, stderr: _Stream) -> Iterator[None]:
    """Replace the streams, and send to /dev/null what does not go through them."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = stdout, stderr
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


@contextmanager
def _deadline() -> Iterator[None]:
    """Raise Hang in the code inside when it takes too long, and let opening a pipe without a writer fail at once."""

    def hang(_signal: int, _frame: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, hang)
    # Waiting for a pipe takes no processor time, so a second clock runs as well.
    signal.setitimer(signal.ITIMER_REAL, 3 * SECONDS_PER_COMMAND)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def silence_c_libraries() -> None:
    """Discard what C libraries print to the descriptors of stdout and stderr in this process."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
