"""Runs cases in processes of their own, forked from one that has imported torch: importing it anew takes seconds."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from tests.cuda.case import Case, CaseResult, run_case

TIMEOUT_SECONDS = 180


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
    os.dup2(2, 1)  # what a case prints must not mix with the answers
    for line in sys.stdin:
        os.write(answers, _run_in_child(Case(**json.loads(line))).encode() + b"\n")


def _run_in_child(case: Case) -> str:
    """Return the result of a case, or an error, as JSON."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _answer(case, writer)
    os.close(writer)
    answer = b""
    while select.select([reader], [], [], TIMEOUT_SECONDS)[0]:
        content = os.read(reader, 1 << 16)
        if not content:
            break
        answer += content
    else:
        os.kill(child, signal.SIGKILL)
        answer = json.dumps({"error": f"no result after {TIMEOUT_SECONDS} s"}).encode()
    os.close(reader)
    _, status = os.waitpid(child, 0)
    return answer.decode() or json.dumps({"error": f"the process died with status {status}"})


def _answer(case: Case, writer: int) -> None:
    try:
        answer = json.dumps(asdict(run_case(case)))
    except BaseException:
        answer = json.dumps({"error": traceback.format_exc()})
    os.write(writer, answer.encode())
    os._exit(0)  # without destructors: the result must not depend on the order in which CUDA shuts down


if __name__ == "__main__":
    main()
