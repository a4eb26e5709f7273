"""What importing memtrace imports: nothing that takes time, so that the import is free where nothing is recorded."""

from __future__ import annotations

import json
import subprocess
import sys

NEW_MODULES = (
    "import sys, json\n"
    "before = set(sys.modules)\n"
    "{statement}\n"
    "print(json.dumps(sorted(name for name in set(sys.modules) - before)))"
)
SLOW_MODULES = {"asyncio", "concurrent", "dataclasses", "http", "inspect", "logging", "multiprocessing", "pathlib"}


def modules_imported_by(statement: str) -> list[str]:
    """The names of the modules that a statement imports in a new process."""
    code = NEW_MODULES.format(statement=statement)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names: list[str] = json.loads(result.stdout)
    return names


def test_importing_memtrace_imports_nothing_but_itself() -> None:
    names = modules_imported_by("import memtrace")
    assert [name for name in names if name.startswith("memtrace")] == ["memtrace"]
    packages = {name.partition(".")[0] for name in names}
    assert packages - set(sys.stdlib_module_names) == {"memtrace"}
    assert not packages & SLOW_MODULES


def test_names_are_imported_when_they_are_used() -> None:
    names = modules_imported_by("import memtrace; dir(memtrace); memtrace.MemtraceError")
    assert "memtrace.errors" in names
    assert {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) == {"memtrace"}
    assert "torch" in modules_imported_by("import memtrace; memtrace.record")
