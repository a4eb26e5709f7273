"""Runs cases in processes of their own, forked from one that has imported torch: importing it anew takes seconds."""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from tests.cuda.case import Case, CaseResult, run_case

TIMEOUT_SECONDS = 180
MAX_PRINTED = 20_000
"""Characters of a dead process's output that its error quotes; a native call stack alone can take 10,000."""


class CaseServer:
    """A process from which a process is forked for every case; used in a with statement."""

    def __enter__(self) -> CaseServer:
        command = [sys.executable, "-m", "tests.cuda.case_server"]
        root = Path(__file__).parents[2]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def run(self, case: Case) -> CaseResult:
        """Run a case; AssertionError with the reason where it has no result."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(asdict(case)), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, f"the process that runs the cases ended with status {self._process.wait()}"
        fields = json.loads(answer)
        assert "error" not in fields, fields["error"]
        return CaseResult(**fields)


def main() -> None:
    """Read cases from stdin and write their results to stdout, one JSON object a line, until stdin ends."""
    import torch._dynamo  # optimizers import it at their first step, which takes seconds

    assert not torch.cuda.is_initialized()
    answers = os.dup(1)
    os.dup2(2, 1)  # what is printed must not mix with the answers
    for line in sys.stdin:
        os.write(answers, _run_in_child(Case(**json.loads(line))).encode() + b"\n")


def _run_in_child(case: Case) -> str:
    """Return the result of a case, or an error, as JSON."""
    reader, writer = os.pipe()
    output = Path(case.folder).parent / "output.txt"
    child = os.fork()
    if child == 0:
        os.close(reader)
        _answer(case, writer, output)
    os.close(writer)
    answer, ending = _read_answer(reader), ""
    if answer is None:
        os.kill(child, signal.SIGABRT)  # makes faulthandler print what every thread was doing
        ending = f"had no result after {TIMEOUT_SECONDS} s; "
    os.close(reader)
    _, status = os.waitpid(child, 0)
    if answer:
        return answer.decode()
    exit_code = os.waitstatus_to_exitcode(status)
    ending += f"ended by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exited with status {exit_code}"
    printed = output.read_text(errors="replace")[-MAX_PRINTED:] if output.exists() else ""
    return json.dumps({"error": f"the process of {case} {ending}. It printed:\n{printed}"})


def _read_answer(reader: int) -> bytes | None:
    """Return what the child wrote before it ended; None: it did not end in time."""
    answer = b""
    end = time.monotonic() + TIMEOUT_SECONDS
    while select.select([reader], [], [], max(0.0, end - time.monotonic()))[0]:
        content = os.read(reader, 1 << 16)
        if not content:
            return answer
        answer += content
    return None


def _answer(case: Case, writer: int, output: Path) -> None:
    try:
        printed = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        faulthandler.enable()
        answer = json.dumps(asdict(run_case(case)))
    except BaseException:
        answer = json.dumps({"error": traceback.format_exc()})
    os.write(writer, answer.encode())
    os._exit(0)  # without destructors: the result must not depend on the order in which CUDA shuts down


if __name__ == "__main__":
    main()
