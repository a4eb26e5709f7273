"""``memtrace import``: keep the memory files of other tools as a trace."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("import")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The trace to write (*.memtrace).")
@click.option("--overwrite", is_flag=True, help="Replace the trace that is there.")
def command(files: tuple[Path, ...], output: Path, overwrite: bool) -> None:
    """Keep FILES as one trace: CUDA snapshots, Chrome traces, memory timelines.

    Several files are the ranks of one job. A file's rank is what it says; else what the names say (rank3); else the
    order of FILES.
    """
    from memtrace.readers import read_job
    from memtrace.readers.import_job import write_trace

    ranks = read_job(files)
    write_trace(ranks, output, overwrite=overwrite)
    for manifest, tables in ranks:
        click.echo(f"rank {manifest.rank}: {manifest.source.file}, {tables['events'].num_rows:,} events")
    click.echo(f"{output} written.")
