"""Writes what the documentation derives from the code: trace format, analysis API and JSON schemas.

Run ``python docs/generate.py`` after changing the schema or a result type; a test checks that the committed files are
current.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_type_hints

from memtrace.cli.output import SCHEMA_VERSION, SCHEMA_VERSION_KEY
from pydantic import ConfigDict, TypeAdapter

from memtrace.format.part_writer import LARGEST_PART_ROWS, PART_ROWS
from memtrace.format.schema import COPIES, FORMAT_VERSION, TABLE_MEANINGS, TABLES, Column, Stored

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
    versioned = with_version(schema, schema.get("$defs", {}))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"memtrace-{name}.json", **versioned}


def with_version(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object, or of several alternatives, with the version that every output begins with."""
    if "anyOf" in schema:
        return {**schema, "anyOf": [with_version(alternative, definitions) for alternative in schema["anyOf"]]}
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return with_version({**definitions[name], **{key: schema[key] for key in schema if key != "$ref"}}, definitions)
    version = {"const": SCHEMA_VERSION, "description": "Version of the form of this output.", "type": "integer"}
    return {
        **schema,
        "properties": {SCHEMA_VERSION_KEY: version, **schema.get("properties", {})},
        "required": [SCHEMA_VERSION_KEY, *schema.get("required", [])],
    }


COPIED_COLUMNS = ", ".join(f"`{table}.{copy}` equals `{original}`" for (table, copy), original in COPIES.items())
INTRODUCTION = f"""# The trace format, version {FORMAT_VERSION}

This file is generated from `memtrace/format/schema.py` by `docs/generate.py`.

A trace is a folder of plain Parquet files, one subfolder per rank:

    run.memtrace/
      rank=0/
        manifest.json
        live-00000.parquet  events-00000.parquet  ops-00000.parquet  spans-00000.parquet  ...
        live-00001.parquet  events-00001.parquet  ...

A table is cut into parts of about {PART_ROWS:,} events, or of up to about {LARGEST_PART_ROWS:,} where a program makes
more events in a second. The files of a part have the same number. A part without rows of a table has no such file.
Each part begins with a keyframe: the table `live` is the live set before its first event, so a window in the middle of
a trace opens without the parts before it, and a recording of the last steps deletes old parts. The metadata of a
`live` file has the key `memtrace.order_ns`: the largest `time_ns` of all events before the part.

Bytes and times are integers; times are nanoseconds since the recording began, and `t0_epoch_ns` in the manifest is the
Unix time of 0. An unknown number is null, never 0. Addresses and streams of 2^63 and above are stored as their two's
complement. The order of the rows of `events` is the order of what happened; times follow it except for small disorder
between threads. `text` columns are dictionary-encoded strings. A column that is absent is null in every row.

Some columns are stored in a shorter form where that gives back the same values: the file then has the column named
under "stored as" in the place of the column. Values that are alike in every step compress to almost nothing, so a
recording takes 3 to 4 bytes an event. `block_reference` counts from the largest number of a block before the part,
which the metadata of the file has under the key `memtrace.newest_block`. The key `memtrace.copies` lists columns that
are left out because they equal another one: {COPIED_COLUMNS}.
`memtrace.load` and `memtrace export` give the columns themselves.

`manifest.json` contains the fields of `memtrace.format.manifest.Manifest`. Its member `parts` lists the numbers of the
parts of each table as ranges (first and last number), so that a lost file is noticed. While a recording runs, the
folder of its rank also contains `live.json` (`memtrace.format.live_status`), which does not belong to the trace.
"""


def describe_column(column: Column) -> str:
    """Return the row of a column in the table of its table."""
    dtype = column.dtype + (f" ({column.unit})" if column.unit else "")
    meaning = column.meaning
    if column.vocabulary:
        meaning += ": " + ", ".join(f"`{value}`" for value in column.vocabulary)
    flags = [text for text, is_set in (("required", column.is_required), ("statistics", column.is_searched)) if is_set]
    return (
        f"| `{column.name}` | {dtype} | {meaning} | {column.null or 'never'} | {', '.join([column.encoding, *flags])} |"
    )


def describe_stored(name: str, stored: Stored) -> str:
    """Return the row of a shorter form of a column."""
    return f"| `{name}` | `{stored.name}` | {stored.dtype} | {stored.meaning} | {stored.encoding} |"


def format_document() -> str:
    """Return the text of docs/format.md."""
    sections = [INTRODUCTION]
    for table, columns in TABLES.items():
        rows = "\n".join(describe_column(column) for column in columns)
        header = "| column | type | meaning | null | encoding |\n|---|---|---|---|---|"
        stored = "\n".join(
            describe_stored(column.name, column.stored) for column in columns if column.stored is not None
        )
        stored_header = "\n| column | stored as | type | meaning | encoding |\n|---|---|---|---|---|\n"
        forms = f"{stored_header}{stored}\n" if stored else ""
        sections.append(f"## {table}\n\n{TABLE_MEANINGS[table]}\n\n{header}\n{rows}\n{forms}")
    return "\n".join(sections)


ANALYSIS_INTRODUCTION = """# Analysis API

This page is generated from the exports of `memtrace.analysis` by `docs/generate.py`. Every function takes a `Trace` of
one rank and returns a frozen dataclass, or a DataFrame with documented columns. Bytes and nanoseconds are integers; an
unknown value is None (NA in a DataFrame), never 0.
"""

JSON_INTRODUCTION = """# JSON output

Each command with `--json` prints one JSON document. Its JSON Schema (draft 2020-12) is generated from the result type
that the command prints; a test validates real output against it. The first member, `schema_version`, is the version of
these forms: it grows when a member is removed, renamed or changes its meaning, and not when one is added. Bytes and
nanoseconds are integers; an unknown value is `null`, never 0. The functions of the [analysis API](analysis.md) return
the same types.

| command | schema |
|---|---|
"""


def analysis_document() -> str:
    """Return the text of docs/reference/analysis.md: the public names of each module."""
    from memtrace import analysis

    names_of: dict[str, list[str]] = {}
    for name in analysis.__all__:
        names_of.setdefault(analysis._HOMES[name], []).append(name)
    sections = [ANALYSIS_INTRODUCTION]
    for module, names in sorted(names_of.items()):
        title = module.removeprefix("memtrace.analysis.").replace("_", " ").capitalize()
        docstring = (import_module(module).__doc__ or "").strip()
        members = "\n\n".join(f"::: {module}.{name}" for name in sorted(names, key=str.lower))
        sections.append(f"## {title}\n\n{docstring}\n\n{members}\n")
    return "\n".join(sections)


def json_document() -> str:
    """Return the text of docs/reference/json.md: the schema of each command."""
    rows = (
        f"| `memtrace {name.replace('plan-', 'plan ')}` | [{name}.json](../json/{name}.json) |"
        for name in result_types()
    )
    return JSON_INTRODUCTION + "\n".join(rows) + "\n"


def generated_files() -> dict[Path, str]:
    """The text of every generated file, by its path."""
    schemas = {
        DOCS / "json" / f"{name}.json": json.dumps(json_schema(name, result), indent=1) + "\n"
        for name, result in result_types().items()
    }
    reference = DOCS / "reference"
    pages = {
        DOCS / "format.md": format_document(),
        reference / "analysis.md": analysis_document(),
        reference / "json.md": json_document(),
    }
    return pages | schemas


if __name__ == "__main__":
    for path, text in generated_files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
