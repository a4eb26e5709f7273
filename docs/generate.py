"""Writes what the documentation derives from the code: the JSON schema of every command's output.

Run ``python docs/generate.py`` after changing a result type; a test checks that the committed files are current.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_type_hints

from pydantic import ConfigDict, TypeAdapter

DOCS = Path(__file__).parent


def result_types() -> dict[str, Any]:
    """The type that each command prints with ``--json`` (its module's ``RESULT``), by the command's name."""
    from memtrace.cli import COMMANDS
    from memtrace.cli.plan import PLANS

    homes = {name: home for name, (home, _) in COMMANDS.items()}
    homes |= {f"plan-{name}": home for name, (home, _) in PLANS.items()}
    types = {name: getattr(import_module(home), "RESULT", None) for name, home in homes.items()}
    return {name: result for name, result in types.items() if result is not None}


def dataclasses_in(result: Any) -> Iterator[type]:
    """Every dataclass that values of a type can hold, the type itself included."""
    waiting, seen = [result], set()
    while waiting:
        current = waiting.pop()
        waiting += get_args(current)
        if isinstance(current, type) and is_dataclass(current) and current not in seen:
            seen.add(current)
            waiting += get_type_hints(current).values()
            yield current


def json_schema(name: str, result: Any) -> dict[str, Any]:
    """The JSON schema of a result type; the docstrings of its fields are the descriptions."""
    for dataclass in dataclasses_in(result):
        # pydantic reads its settings from the class; only this program, which never parses with it, sees them.
        dataclass.__pydantic_config__ = ConfigDict(use_attribute_docstrings=True, extra="forbid")  # type: ignore[attr-defined]
    schema = TypeAdapter(result).json_schema(mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"memtrace-{name}.json", **schema}


def generated_files() -> dict[Path, str]:
    """The text of every generated file, by its path."""
    return {
        DOCS / "json" / f"{name}.json": json.dumps(json_schema(name, result), indent=1) + "\n"
        for name, result in result_types().items()
    }


if __name__ == "__main__":
    for path, text in generated_files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
