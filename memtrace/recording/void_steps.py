"""Removes the steps of optimizers from the parts on disk once the program marks its own."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from memtrace.format.part_writer import open_part
from memtrace.format.schema import arrow_schema


def drop_void_steps(folder: Path, newest: Path) -> bool:
    """Drop all steps before the last step 0: they came from optimizers, until the program marked its own.

    The older parts are rewritten before the newest one is in place: a killed process leaves no step twice.

    Args:
        folder: the folder of the rank.
        newest: the part of spans that is about to be renamed into place.

    Returns:
        Whether steps were dropped. If not, the first marked step is still to come.
    """
    import pyarrow.compute as pc  # 7 MB that hardly any recording needs

    paths = [*sorted(folder.glob("spans-*.parquet")), newest]
    parts = [pq.read_table(path, partitioning=None).cast(arrow_schema("spans")) for path in paths]
    is_step = [pc.equal(pc.cast(part["kind"], pa.string()), "step") for part in parts]
    first_steps = pc.indices_nonzero(pc.and_(is_step[-1], pc.fill_null(pc.equal(parts[-1]["index"], 0), False)))
    if not len(first_steps):
        return False
    start = first_steps[-1].as_py()
    void = [*is_step[:-1], is_step[-1].slice(0, start)]
    if not any(pc.any(steps).as_py() for steps in void):
        return False
    kept = [part.filter(pc.invert(steps)) for part, steps in zip(parts[:-1], void[:-1], strict=True)]
    kept.append(pa.concat_tables([parts[-1].slice(0, start).filter(pc.invert(void[-1])), parts[-1].slice(start)]))
    for path, rows in zip(paths, kept, strict=True):
        temporary = folder / ".spans.rewritten.tmp"
        with open_part(temporary, "spans") as writer:
            writer.write_table(rows.unify_dictionaries())
        temporary.replace(path)
    return True
