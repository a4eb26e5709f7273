"""Writes docs/format.md from memtrace.format.schema.

python docs/generate_format.py          # write the file
python docs/generate_format.py --check  # fail where the file is not current
"""

from __future__ import annotations

import sys
from pathlib import Path

from memtrace.format.part_writer import PART_ROWS
from memtrace.format.schema import FORMAT_VERSION, TABLE_MEANINGS, TABLES, Column

PATH = Path(__file__).parent / "format.md"

INTRODUCTION = f"""# The trace format, version {FORMAT_VERSION}

This file is generated from `memtrace/format/schema.py` by `docs/generate_format.py`.

A trace is a folder of plain Parquet files, one subfolder per rank:

    run.memtrace/
      rank=0/
        manifest.json
        live-00000.parquet  events-00000.parquet  ops-00000.parquet  spans-00000.parquet  ...
        live-00001.parquet  events-00001.parquet  ...

A table is cut into parts of about {PART_ROWS:,} events; the files of a part have the same number. A part without rows
of a table has no such file. Each part begins with a keyframe: the table `live` is the live set before its first event,
so a window in the middle of a trace opens without the parts before it, and a recording of the last steps deletes old
parts. The metadata of a `live` file has the key `memtrace.order_ns`: the largest `time_ns` of all events before the
part.

Bytes and times are integers; times are nanoseconds since the recording began, and `t0_epoch_ns` in the manifest is the
Unix time of 0. An unknown number is null, never 0. Addresses and streams of 2^63 and above are stored as their two's
complement. The order of the rows of `events` is the order of what happened; times follow it except for small disorder
between threads. `text` columns are dictionary-encoded strings.

`manifest.json` contains the fields of `memtrace.format.manifest.Manifest`. Its member `parts` lists the numbers of the
parts of each table as ranges (first and last number), so that a lost file is noticed.
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


def format_document() -> str:
    """Return the text of docs/format.md."""
    sections = [INTRODUCTION]
    for table, columns in TABLES.items():
        rows = "\n".join(describe_column(column) for column in columns)
        header = "| column | type | meaning | null | encoding |\n|---|---|---|---|---|"
        sections.append(f"## {table}\n\n{TABLE_MEANINGS[table]}\n\n{header}\n{rows}\n")
    return "\n".join(sections)


def main() -> None:
    """Write the file, or check it."""
    if "--check" in sys.argv[1:]:
        if PATH.read_text(encoding="utf-8") != format_document():
            sys.exit(f"{PATH} is not current: run python docs/generate_format.py")
        return
    PATH.write_text(format_document(), encoding="utf-8")


if __name__ == "__main__":
    main()
