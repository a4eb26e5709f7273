"""The import graph: no cycles, and dependencies in one direction only (ARCHITECTURE.md)."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {"memtrace": ROOT / "memtrace", "memtrace.cli": ROOT / "cli", "memtrace.dashboards": ROOT / "dashboards"}

# What each part of the package may import beside itself: nothing else does the work of keeping the layers apart.
BASE = {
    "memtrace",
    "memtrace.errors",
    "memtrace.units",
    "memtrace.text",
    "memtrace.categories",
    "memtrace.frames",
    "memtrace.code_owner",
    "memtrace.interpreter",
    "memtrace.processors",
    "memtrace.machine_memory",
    "memtrace.display",
    "memtrace.format",
}
ALLOWED = {
    "memtrace": set(),
    "memtrace.errors": set(),
    "memtrace.units": set(),
    "memtrace.text": set(),
    "memtrace.categories": set(),
    "memtrace.frames": {"memtrace.format", "memtrace.text"},
    "memtrace.code_owner": {"memtrace.format", "memtrace.frames"},
    "memtrace.interpreter": set(),
    "memtrace.processors": set(),
    "memtrace.machine_memory": set(),
    "memtrace.display": set(),
    "memtrace.format": {"memtrace", "memtrace.errors", "memtrace.units", "memtrace.text"},
    "memtrace.native_build": {"memtrace.processors"},
    "memtrace.readers": BASE | {"memtrace.allocator", "memtrace.native_build"},
    "memtrace.trace": BASE | {"memtrace.readers"},
    "memtrace.recording": BASE | {"memtrace.readers", "memtrace.allocator", "memtrace.native_build"},
    "memtrace.analysis": BASE | {"memtrace.trace", "memtrace.allocator"},
    "memtrace.allocator": BASE | {"memtrace.trace", "memtrace.analysis"},
    "memtrace.pipeline": BASE | {"memtrace.trace", "memtrace.analysis"},
    "memtrace.planning": BASE | {"memtrace.trace", "memtrace.analysis", "memtrace.allocator", "memtrace.pipeline"},
    "memtrace.execution": BASE | {"memtrace.trace", "memtrace.analysis", "memtrace.planning", "memtrace.recording"},
    "memtrace.engine": BASE | {"memtrace.trace", "memtrace.analysis", "memtrace.planning"},
    "memtrace.exporters": BASE | {"memtrace.trace", "memtrace.analysis"},
    "memtrace.integrations": BASE | {"memtrace.trace", "memtrace.analysis", "memtrace.recording"},
    "memtrace.dashboards": BASE
    | {f"memtrace.{name}" for name in ("trace", "analysis", "allocator", "pipeline", "planning")},
    "memtrace.plots": BASE | {f"memtrace.{name}" for name in ("trace", "analysis", "pipeline", "dashboards")},
    "memtrace.cli": BASE
    | {
        f"memtrace.{name}"
        for name in (
            *("trace", "readers", "recording", "analysis", "allocator", "pipeline", "planning", "execution"),
            *("engine", "exporters", "dashboards", "plots"),
        )
    },
}


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    named: dict[str, Path] = {}
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            named[".".join((package, *parts)).removesuffix(".__init__")] = path
    return named


class ImportCollector(ast.NodeVisitor):
    """Collects the modules that a module imports, inside functions too; what only type checkers see is left out."""

    def __init__(self, named: dict[str, Path]) -> None:
        self.named = named
        self.imported: set[str] = set()

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for statement in node.orelse:
                self.visit(statement)
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.imported |= {alias.name for alias in node.names if alias.name in self.named}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        assert node.level == 0, "imports are absolute"
        for alias in node.names:
            module = f"{node.module}.{alias.name}"
            target = module if module in self.named else node.module
            if target in self.named:
                self.imported.add(str(target))


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    """For each module those that it imports."""
    named = modules()
    imports: dict[str, set[str]] = {}
    for module, path in named.items():
        collector = ImportCollector(named)
        collector.visit(ast.parse(path.read_text(encoding="utf-8")))
        imports[module] = collector.imported - {module}
    return imports


def part_of(module: str) -> str:
    """The part of the package that a module belongs to: ``memtrace.readers`` for ``memtrace.readers.limits``."""
    return ".".join(module.split(".")[:2])


def test_the_graph_sees_imports_inside_functions(graph: dict[str, set[str]]) -> None:
    # The command group imports nothing heavy at its top; its commands do, when they are called.
    assert "memtrace.readers" in {part_of(module) for module in graph["memtrace.trace"]}
    assert len(graph) > 100


def test_modules_import_each_other_without_cycles(graph: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


def test_every_part_imports_only_the_layers_below_it(graph: dict[str, set[str]]) -> None:
    wrong = sorted(
        f"{module} imports {target}"
        for module, targets in graph.items()
        for target in targets
        if part_of(target) != part_of(module) and part_of(target) not in ALLOWED[part_of(module)]
    )
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("part", ["memtrace.cli", "memtrace.dashboards"])
def test_interfaces_are_imported_by_nobody_but_entry_points(graph: dict[str, set[str]], part: str) -> None:
    importers = {
        part_of(module)
        for module, targets in graph.items()
        if any(part_of(target) == part for target in targets) and part_of(module) != part
    }
    # memtrace.plots is the figures' public interface. memtrace.display names the renderer of notebooks as text.
    assert importers <= {"memtrace.cli", "memtrace.plots"}
