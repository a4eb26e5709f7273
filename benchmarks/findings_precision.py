"""Precision and recall of findings, measured by editing programs, and peaks compared with torch.profiler.

    python benchmarks/findings_precision.py [PROGRAM ...]

Every program of ``tests/programs/edited`` is recorded as it is, and once with each edit that its comments describe. A
finding among the first three of a program is true if the peak of the edited program is the predicted one, within 5 % of
the saving and 0.1 % of the peak. A finding that no edit of the program confirms is false. A planted defect whose edit
lowers the peak by 1 % or more must be among the first three findings. Each peak is also compared with the one that
torch.profiler counts in a run without memtrace.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch

import memtrace
from memtrace.units import format_bytes, format_share

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.programs.edits import Edit, EditedProgram, read_programs

NUM_FINDINGS: Final = 3
MAX_ERROR_OF_SAVING: Final = 0.05
MAX_ERROR_OF_PEAK: Final = 0.001
MIN_SAVED_SHARE: Final = 0.01


@dataclass(frozen=True)
class Claim:
    """One finding of a program."""

    pattern: str
    line: int
    saved_bytes: int
    is_single_line_fix: bool
    is_upper_bound: bool


@dataclass(frozen=True)
class Answer:
    """What memtrace reports about one recorded program."""

    peak_bytes: int
    lower_bound_bytes: int | None
    peak_if_all_fixed_bytes: int | None
    claims: tuple[Claim, ...]


@dataclass(frozen=True)
class Judgement:
    """One of the first findings of a program, compared with the edited program."""

    program: str
    claim: Claim
    measured_bytes: int | None
    """By how much the edit lowers the peak; None: the program has no such edit."""
    peak_bytes: int

    @property
    def is_true(self) -> bool:
        """Whether the edited program has the predicted peak (at most the predicted saving, for an upper bound)."""
        if self.measured_bytes is None:
            return False
        error = self.measured_bytes - self.claim.saved_bytes
        tolerance = MAX_ERROR_OF_SAVING * self.claim.saved_bytes + MAX_ERROR_OF_PEAK * self.peak_bytes
        return abs(error) <= tolerance or (self.claim.is_upper_bound and self.measured_bytes > 0 and error <= tolerance)


def run_program(source: str, path: Path) -> dict[str, Any]:
    """Run a script; its variables live until the caller drops the result."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    namespace: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
    exec(compile(source, str(path), "exec"), namespace)
    return namespace


def record_program(source: str, path: Path) -> Answer:
    """Record a script and return its findings on the CPU."""
    from memtrace.analysis import find_device_waste

    with tempfile.TemporaryDirectory() as folder:
        with memtrace.record(Path(folder) / "run.memtrace"):
            namespace = run_program(source, path)
        waste = find_device_waste(memtrace.load(Path(folder) / "run.memtrace"), "cpu")
        namespace.clear()
    claims = [
        Claim(
            finding.pattern,
            _line(finding.site, path),
            finding.saved_bytes,
            finding.is_single_line_fix,
            finding.is_upper_bound,
        )
        for finding in waste.findings
        if finding.saved_bytes
    ]
    return Answer(waste.peak_bytes, waste.lower_bound_bytes, waste.peak_if_all_fixed_bytes, tuple(claims))


def _line(site: str | None, path: Path) -> int:
    match = re.search(rf"{re.escape(path.name)}:(\d+)", site or "")
    return int(match[1]) if match else 0


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


def in_child(function: Callable[..., Any], *arguments: Any) -> Any:
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
        raise SystemExit(f"{arguments[-1]}: the program failed, see above") from None
    finally:
        child.join()


def judge(program: EditedProgram, answer: Answer, peak_after: dict[Edit, int]) -> list[Judgement]:
    """Return the first findings of a program, compared with its edited variants."""
    judgements = []
    for claim in answer.claims[:NUM_FINDINGS]:
        edit = program.find_edit(claim.pattern, claim.line)
        measured = answer.peak_bytes - peak_after[edit] if edit is not None else None
        judgements.append(Judgement(program.name, claim, measured, answer.peak_bytes))
    return judgements


def missed_edits(program: EditedProgram, answer: Answer, peak_after: dict[Edit, int]) -> list[Edit]:
    """Return the planted defects that matter and are not among the first findings."""
    first = {program.find_edit(claim.pattern, claim.line) for claim in answer.claims[:NUM_FINDINGS]}
    return [edit for edit in program.edits if edit not in first and _matters(edit, answer, peak_after)]


def _matters(edit: Edit, answer: Answer, peak_after: dict[Edit, int]) -> bool:
    return edit.is_planted and answer.peak_bytes - peak_after[edit] >= MIN_SAVED_SHARE * answer.peak_bytes


def main() -> None:
    """Print one row per program and finding, then the totals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", help="names of programs; default: all")
    names = set(parser.parse_args().programs)
    judgements: list[Judgement] = []
    num_planted = num_missed = num_equal_peaks = num_bad_bounds = num_programs = 0
    for program in read_programs():
        if names and program.name not in names:
            continue
        num_programs += 1
        answer: Answer = in_child(record_program, program.source, program.path)
        profiled = in_child(profile_peak, program.source, program.path)
        edited = {
            edit: in_child(record_program, program.apply(edit), program.path).peak_bytes for edit in program.edits
        }
        num_equal_peaks += profiled == answer.peak_bytes
        bound, fixed = answer.lower_bound_bytes or 0, answer.peak_if_all_fixed_bytes or answer.peak_bytes
        num_bad_bounds += bound > min([answer.peak_bytes, fixed, *edited.values()])
        print(
            f"{program.name:32} peak {format_bytes(answer.peak_bytes):>9}  "
            f"profiler {profiled / answer.peak_bytes - 1:+8.3%}  "
            f"bound {format_bytes(bound):>9}  all fixed {format_bytes(fixed):>9}"
        )
        for judgement in judge(program, answer, edited):
            judgements.append(judgement)
            claim, measured = judgement.claim, judgement.measured_bytes
            print(
                f"    {'true ' if judgement.is_true else 'FALSE'} {claim.pattern:32} line {claim.line:3}"
                f"  predicted {format_bytes(claim.saved_bytes):>9}"
                f"  measured {'no edit' if measured is None else format_bytes(measured):>9}"
            )
        planted = [edit for edit in program.edits if _matters(edit, answer, edited)]
        missed = missed_edits(program, answer, edited)
        for edit in missed:
            saved = format_bytes(answer.peak_bytes - edited[edit])
            print(f"    MISSED {edit.pattern} {edit.site_text}: the edit saves {saved}")
        num_planted += len(planted)
        num_missed += len(missed)
    num_true = sum(judgement.is_true for judgement in judgements)
    print(f"\n{num_programs} programs, {len(judgements)} findings among the first three")
    print(f"true: {num_true} of {len(judgements)} ({format_share(num_true, max(len(judgements), 1))})")
    print(f"planted defects found: {num_planted - num_missed} of {num_planted}")
    print(f"peaks equal to torch.profiler's: {num_equal_peaks} of {num_programs}")
    print(f"lower bounds above a peak: {num_bad_bounds}")


if __name__ == "__main__":
    main()
