"""``memtrace import``: convert the memory files of other tools to a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from memtrace.cli.output import print_confirmation
from memtrace.cli.paths import PathOrUrl

if TYPE_CHECKING:
    from memtrace.format.storage import AnyPath


@click.command("import")
@click.argument("files", nargs=-1, required=True, type=PathOrUrl())
@click.option("-o", "--output", required=True, type=PathOrUrl(), help="New trace (*.memtrace).")
@click.option("--overwrite", is_flag=True, help="Replace the trace in the output folder.")
def command(files: tuple[AnyPath, ...], output: AnyPath, overwrite: bool) -> None:
    """Convert FILES of other tools to one trace.

    The files can be CUDA memory snapshots, Chrome traces of torch.profiler and memory timelines. Several files are the
    ranks of one job: the rank of a file is the one that the file states, otherwise the one in its name (rank3),
    otherwise its position among FILES.

    \b
    Example:
      memtrace import rank0.pickle rank1.pickle -o job.memtrace
    """
    from memtrace.readers import read_job
    from memtrace.readers.import_job import write_trace
    from memtrace.units import format_count

    ranks = read_job(files)
    write_trace(ranks, output, overwrite=overwrite)
    for rank in ranks:
        events = format_count(rank.tables["events"].num_rows, "event")
        print_confirmation(f"Rank {rank.manifest.rank}: {rank.manifest.source.file}, {events}")
    print_confirmation(f"Wrote {output}.")
