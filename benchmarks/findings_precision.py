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
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import memtrace
from memtrace.analysis import find_device_waste
from memtrace.units import format_bytes, format_share

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.programs.edits import Edit, EditedProgram, read_programs
from tests.programs.ground_truth import profile_peak, run_in_child, run_program

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


def record_program(source: str, path: Path) -> Answer:
    """Record a script and return its findings on the CPU."""
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


@dataclass(frozen=True)
class Outcome:
    """What one program contributes to the totals."""

    program: EditedProgram
    judgements: list[Judgement]
    num_planted: int
    num_missed: int
    has_equal_peak: bool
    """Whether torch.profiler counts the same peak."""
    has_bad_bound: bool
    """Whether the lower bound is above the peak of the program or of one of its variants."""


def examine(program: EditedProgram) -> Outcome:
    """Record a program and its edited variants, print one row for it and one per finding, and return the outcome."""
    answer: Answer = run_in_child(record_program, program.source, program.path)
    profiled = run_in_child(profile_peak, program.source, program.path)
    edited = {
        edit: run_in_child(record_program, program.apply(edit), program.path).peak_bytes for edit in program.edits
    }
    bound, fixed = answer.lower_bound_bytes or 0, answer.peak_if_all_fixed_bytes or answer.peak_bytes
    print(
        f"{program.name:32} peak {format_bytes(answer.peak_bytes):>9}  "
        f"profiler {profiled / answer.peak_bytes - 1:+8.3%}  "
        f"bound {format_bytes(bound):>9}  all fixed {format_bytes(fixed):>9}"
    )
    judgements = judge(program, answer, edited)
    for judgement in judgements:
        claim, measured = judgement.claim, judgement.measured_bytes
        print(
            f"    {'true ' if judgement.is_true else 'FALSE'} {claim.pattern:32} line {claim.line:3}"
            f"  predicted {format_bytes(claim.saved_bytes):>9}"
            f"  measured {'no edit' if measured is None else format_bytes(measured):>9}"
        )
    missed = missed_edits(program, answer, edited)
    for edit in missed:
        saved = format_bytes(answer.peak_bytes - edited[edit])
        print(f"    MISSED {edit.pattern} {edit.site_text}: the edit saves {saved}")
    sys.stdout.flush()
    return Outcome(
        program=program,
        judgements=judgements,
        num_planted=sum(_matters(edit, answer, edited) for edit in program.edits),
        num_missed=len(missed),
        has_equal_peak=profiled == answer.peak_bytes,
        has_bad_bound=bound > min([answer.peak_bytes, fixed, *edited.values()]),
    )


def print_totals(title: str, outcomes: list[Outcome]) -> None:
    """Print the totals of some programs."""
    judgements = [judgement for outcome in outcomes for judgement in outcome.judgements]
    num_true = sum(judgement.is_true for judgement in judgements)
    num_planted, num_missed = (sum(getattr(o, name) for o in outcomes) for name in ("num_planted", "num_missed"))
    print(f"\n{title}: {len(outcomes)} programs, {len(judgements)} findings among the first three")
    print(f"true: {num_true} of {len(judgements)} ({format_share(num_true, max(len(judgements), 1))})")
    print(f"planted defects found: {num_planted - num_missed} of {num_planted}")
    print(f"peaks equal to torch.profiler's: {sum(o.has_equal_peak for o in outcomes)} of {len(outcomes)}")
    print(f"lower bounds above a peak: {sum(o.has_bad_bound for o in outcomes)}")


def main() -> None:
    """Print one row per program and finding, then the totals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", help="names of programs; default: all")
    names = set(parser.parse_args().programs)
    outcomes = [examine(program) for program in read_programs() if not names or program.name in names]
    recipes = [outcome for outcome in outcomes if outcome.program.is_recipe]
    if recipes and len(recipes) < len(outcomes):
        print_totals("Programs made for one pattern", [outcome for outcome in outcomes if outcome not in recipes])
        print_totals("Training recipes", recipes)
    print_totals("All programs", outcomes)


if __name__ == "__main__":
    main()
