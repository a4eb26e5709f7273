"""Tries the wheel with every supported combination of Python and torch: ``make test-compat``.

For each combination of ``memtrace.recording.observers.versions.TESTED``: an empty environment, torch, the wheel and
nothing else; the demo of the README; then tests of the recording against the installed package, in a folder without
the sources. Prints a table, and fails if a demo or a test failed.

Variables:
    COMBINATIONS: those to try, such as ``3.10:2.9 3.14:2.15`` (default: all).
    COMPAT_TESTS: files and options for pytest, quoted as in a shell (default: QUICK_TESTS below).
    COMPAT_TORCH: arguments for pip that say where to find torch (default: the CPU builds of download.pytorch.org).
    COMPAT_TORCH_FROM: folders of environments whose torch is used instead of a download where it fits.
    COMPAT_STRICT: set it to fail if this machine lacks a combination.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from memtrace.recording.observers.versions import OLDEST_PYTHON, OLDEST_TORCH, TESTED, Version, format_version
from tests.compatibility.environments import Unavailable, create, find_interpreter, install_torch, run

ROOT: Final = Path(__file__).resolve().parents[2]
QUICK_TESTS: Final = (
    "tests/recording/test_ground_truth.py",
    "tests/recording/test_dispatch_modes.py",
    "tests/recording/test_labels.py",
    "tests/recording/test_steps.py",
    "tests/recording/test_threads.py",
    "tests/native_build/test_loading.py",
    "-m",
    "not slow",
)
"""What depends on the internals of torch and Python: what is observed, names, steps and threads."""
QUICK_REQUIREMENTS: Final = ("pytest >= 8", "hypothesis")
CPU_INDEX: Final = "--index-url https://download.pytorch.org/whl/cpu"
TESTS_FAILED: Final = 1
"""Exit status of pytest if tests ran and some failed."""
HEADER: Final = ("Python", "torch", "observer", "built in", "passed", "failed", "skipped", "tests took")


@dataclass(frozen=True)
class Result:
    """What one combination gave."""

    observer: str
    build_seconds: float
    passed: int
    failed: int
    skipped: int
    test_seconds: float

    def cells(self) -> tuple[str, ...]:
        """The cells of the table."""
        counts = (str(count) for count in (self.passed, self.failed, self.skipped))
        return self.observer, f"{self.build_seconds:.0f} s", *counts, f"{self.test_seconds:.0f} s"


def chosen_combinations() -> tuple[tuple[Version, Version], ...]:
    """The combinations that $COMBINATIONS names, or all."""
    names = os.environ.get("COMBINATIONS", "").split()
    by_name = {f"{format_version(python)}:{format_version(torch)}": (python, torch) for python, torch in TESTED}
    if unknown := [name for name in names if name not in by_name]:
        sys.exit(f"COMBINATIONS: {unknown[0]} is not one of {', '.join(by_name)}")
    return tuple(by_name[name] for name in names) or TESTED


def try_combination(wheel: Path, combination: tuple[Version, Version], work: Path) -> Result:
    """Install the wheel with one combination of Python and torch and run the demo and the tests.

    Raises:
        Unavailable: this machine does not have that Python or torch.
        subprocess.CalledProcessError: the installation or the demo failed.
    """
    python, torch = combination
    environment = create(work / "env", find_interpreter(python))
    pip = [environment, "-m", "pip", "install", "-q", "--no-compile"]
    if combination == (OLDEST_PYTHON, OLDEST_TORCH):
        pip += ["-c", ROOT / "constraints-oldest.txt"]
    donors = [Path(folder) for folder in os.environ.get("COMPAT_TORCH_FROM", "").split()]
    install_torch(environment, torch, os.environ.get("COMPAT_TORCH", CPU_INDEX).split(), donors)
    run([*pip, wheel], cwd=work)
    demo = work / "demo"
    demo.mkdir()
    cache = {"MEMTRACE_CACHE": str(work / "cache")}
    shutil.copy(ROOT / "examples" / "gpt.py", demo)
    doctor = json.loads(
        run([environment.with_name("memtrace"), "doctor", "--build", "--json"], cwd=demo, variables=cache)
    )
    run([environment, "gpt.py", "--steps", "5", "--record", "run.memtrace"], cwd=demo, variables=cache)
    run([environment.with_name("memtrace"), "summary", "run.memtrace"], cwd=demo, variables=cache)
    run([environment.with_name("memtrace"), "report", "run.memtrace", "-o", "report.html"], cwd=demo, variables=cache)
    run([*pip, *([f"{wheel}[test]"] if os.environ.get("COMPAT_TESTS") else QUICK_REQUIREMENTS)], cwd=work)
    built = doctor["environment"]
    return Result(built["observer"], built["build_seconds"], *run_tests(environment, work, cache))


def run_tests(python: Path, work: Path, variables: dict[str, str]) -> tuple[int, int, int, float]:
    """Run the tests in a folder that has everything of the repository but the sources of the package.

    Returns:
        How many passed, failed and were skipped, and the seconds that they took.
    """
    folder = work / "repository"
    names = run(["git", "ls-files"], cwd=ROOT).splitlines()
    for name in names:
        if not name.startswith(("memtrace/", "cli/", "dashboards/")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    report = work / "report.xml"
    tests = shlex.split(os.environ.get("COMPAT_TESTS", "")) or QUICK_TESTS
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *tests]
    started = time.monotonic()
    try:
        run(command, cwd=folder, variables=variables)
    except subprocess.CalledProcessError as error:
        print(error.stdout[-20_000:], flush=True)
        if error.returncode != TESTS_FAILED:
            raise  # no test ran: a file is missing, or cannot be imported
    seconds = time.monotonic() - started
    suite = next(ElementTree.parse(report).getroot().iter("testsuite")).attrib
    total, failed, skipped = int(suite["tests"]), int(suite["failures"]) + int(suite["errors"]), int(suite["skipped"])
    return total - failed - skipped, failed, skipped, seconds


def results(wheel: Path) -> Iterator[tuple[tuple[str, ...], bool]]:
    """The rows of the table, each with whether everything passed."""
    for python, torch in chosen_combinations():
        versions = format_version(python), format_version(torch)
        print(f"== Python {versions[0]}, torch {versions[1]}", flush=True)
        with tempfile.TemporaryDirectory(prefix="memtrace-compat-", ignore_cleanup_errors=True) as folder:
            try:
                result = try_combination(wheel, (python, torch), Path(folder))
                yield (*versions, *result.cells()), result.failed == 0
            except Unavailable as reason:
                yield (*versions, f"not tried: {reason}"), not os.environ.get("COMPAT_STRICT")
            except (subprocess.SubprocessError, OSError) as error:
                print(getattr(error, "stderr", None) or "", flush=True)
                yield (*versions, f"failed: {error}"), False


def main() -> int:
    """Print the table and return the exit status."""
    (wheel,) = (ROOT / "dist").glob("memtrace-*.whl")
    rows, passed = [], True
    for cells, is_good in results(wheel):
        rows.append(cells)
        passed &= is_good
        print(" ".join(cells), flush=True)
    print()
    for cells in (HEADER, ("---",) * len(HEADER), *rows):
        print("| " + " | ".join([*cells, *[""] * (len(HEADER) - len(cells))]) + " |")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
