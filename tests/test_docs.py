"""The documentation is current: what is generated from the code, the commands it shows, the links in it."""

from __future__ import annotations

import json
import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import jsonschema
import pytest
from click.testing import CliRunner
from memtrace.cli import COMMANDS, cli
from memtrace.cli.plan import PLANS

from memtrace.planning.actions import Recompute
from memtrace.planning.plan import Plan, StepCost, write_plan

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    """docs/generate.py as a module."""
    spec = spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_files_are_current(generate: ModuleType) -> None:
    for path, text in generate.generated_files().items():
        assert path.read_text(encoding="utf-8") == text, f"{path} is out of date: run python docs/generate.py"


def shown_commands() -> list[tuple[str, str]]:
    """Every memtrace command line that a page shows, with the page."""
    lines = []
    for page in PAGES:
        for block in re.findall(
            r"^```(?:bash|console)?\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
        ):
            joined = block.replace("\\\n", " ")
            lines += [
                (page.name, line.split("#")[0].strip()) for line in joined.splitlines() if line.startswith("memtrace ")
            ]
    return lines


@pytest.mark.parametrize(("page", "line"), shown_commands())
def test_commands_that_the_documentation_shows_exist_with_their_options(page: str, line: str) -> None:
    words = line.split()[1:]
    name = words[: 2 if words[0] == "plan" else 1]
    usage = CliRunner().invoke(cli, [*name, "--help"])
    assert usage.exit_code == 0, f"{page}: {line}"
    if name != ["record"]:
        for option in (word for word in words if word.startswith("-")):
            assert re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", usage.output), f"{page}: {line}: no {option}"


def json_commands() -> list[tuple[str, list[str]]]:
    """The commands with --json that read one trace, with the arguments that ask for it."""
    names = [(name, [name]) for name in COMMANDS] + [(f"plan-{name}", ["plan", name]) for name in PLANS]
    return [
        (name, words)
        for name, words in names
        if re.search(r"^ +--json\b", CliRunner().invoke(cli, [*words, "--help"]).output, re.MULTILINE)
    ]


@pytest.mark.parametrize(("name", "words"), json_commands())
def test_json_output_matches_its_schema(name: str, words: list[str], gpt_trace: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    write_plan(Plan("cpu", (Recompute(("blocks.0",)),), StepCost(2, 3), StepCost(1, None)), plan)
    arguments = {
        "check": [str(gpt_trace), "--max-peak", "1TiB"],
        "diff": [str(gpt_trace), str(gpt_trace)],
        "compare": [str(gpt_trace), str(gpt_trace)],
        "doctor": [],
        "plan-show": [str(plan)],
        "plan-spill": [str(gpt_trace), "--budget", "1GiB"],
        "plan-diff": [str(plan), str(plan)],
        "plan-pipeline": [str(gpt_trace), "--stages", "2", "--microbatches", "4"],
    }.get(name, [str(gpt_trace)])
    result = CliRunner().invoke(cli, [*words, *arguments, "--json"])
    if name == "pipeline":  # the trace is of one process: there is no pipeline in it
        pytest.skip("needs the trace of a pipeline: tests/pipeline checks it")
    assert result.exit_code == 0, result.output
    schema = json.loads((ROOT / "docs" / "json" / f"{name}.json").read_text(encoding="utf-8"))
    jsonschema.validate(json.loads(result.stdout), schema)


def test_pages_link_to_files_that_exist() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?://)([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page}: {target}"


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in (ROOT / "docs").rglob("*.md"):
        assert str(page.relative_to(ROOT / "docs")) in navigation, page
