"""``memtrace export``: write a trace in the format of another tool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click
from memtrace.cli.arguments import Selection, selects_traces
from memtrace.cli.feedback import FEEDBACK
from memtrace.cli.output import print_confirmation, working
from memtrace.cli.paths import PathOrUrl

from memtrace.exporters import FORMATS, MEASURES
from memtrace.exporters.options import JOB_FORMATS, STACK_FORMATS
from memtrace.units import format_bytes

if TYPE_CHECKING:
    from memtrace.format.storage import AnyPath
    from memtrace.trace import Trace

_READERS: Final = {
    "perfetto": "Open it at https://ui.perfetto.dev.",
    "pprof": "Open it with: go tool pprof -http=: {output}",
    "speedscope": "Open it at https://www.speedscope.app.",
    "snapshot": "Open it at https://pytorch.org/memory_viz.",
    "chrome": "Open it at https://ui.perfetto.dev or chrome://tracing.",
    "csv": "",
}


@click.command("export")
@selects_traces
@click.option("-f", "--format", "format_", type=click.Choice(FORMATS), required=True, help="Format to write.")
@click.option("-o", "--output", type=PathOrUrl(), required=True,
              help="File to write; for csv, the folder.")  # fmt: skip
@click.option("--what", "measures", type=click.Choice(MEASURES), multiple=True,
              help="For pprof and speedscope: count the peak, all allocations, or those freed in the same step. The "
              "first one given is shown first.  [default: all of them]")  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Replace the output.")
def command(selection: Selection, format_: str, output: AnyPath, measures: tuple[str, ...], overwrite: bool) -> None:
    """Write TRACE in the format of another tool.

    \b
    perfetto    counters, steps, modules, operators, allocations and frees
    pprof       bytes by call stack, with category, module and operator
    speedscope  bytes by call stack, as flame graphs
    snapshot    history of allocations for PyTorch's memory_viz, CPU included
    chrome      Chrome trace as torch.profiler writes it
    csv         a folder of tables: blocks, events, steps, allocation sites

    Files of Perfetto, speedscope and Chrome whose name ends in .gz are compressed.

    \b
    Examples:
      memtrace export run.memtrace -f perfetto -o run.pftrace --from-step 3
      memtrace export run.memtrace -f pprof -o run.pb.gz
    """
    if measures and format_ not in STACK_FORMATS:
        raise click.UsageError(f"--what applies to {' and '.join(STACK_FORMATS)}, not to {format_}.")
    trace = selection.open() if format_ in JOB_FORMATS else selection.open_rank()
    from memtrace.exporters import export_trace

    with working(f"writing {output}"):
        export_trace(trace, output, format=format_, measures=measures or MEASURES, overwrite=overwrite)
    if format_ == "csv":
        from memtrace.exporters.csv_tables import CSV_TABLES

        print_confirmation(f"Wrote {', '.join(sorted(CSV_TABLES))} to {output}.")
        return
    num_bytes = output.stat().st_size
    print_confirmation(f"Wrote {output} ({format_bytes(num_bytes)}). {_READERS[format_].format(output=output)}")
    for note in _notes(trace, format_, num_bytes, is_window=selection.from_step is not None):
        FEEDBACK.note(note)


def _notes(trace: Trace, format_: str, num_bytes: int, *, is_window: bool) -> list[str]:
    """Return sentences on what the reader of the file should know."""
    from memtrace.exporters.formats import FILE_FORMATS
    from memtrace.exporters.snapshot import device_numbers

    notes = []
    chosen = FILE_FORMATS.get(format_)
    if chosen is not None and chosen.comfortable_bytes is not None and num_bytes > chosen.comfortable_bytes:
        fewer = "a shorter window of steps" if is_window else "a window of steps with --from-step and --to-step"
        notes.append(
            f"a browser may not open a file larger than {format_bytes(chosen.comfortable_bytes)}. Export {fewer}"
            + (", or start trace_processor --httpd with the file and open the page." if format_ == "perfetto" else ".")
        )
    first = trace.rank(trace.ranks[0])
    if format_ in ("perfetto", "chrome") and not first.manifest.coverage.has_times:
        notes.append("the trace has no times: the times in the export number its entries.")
    if format_ == "snapshot":
        others = {name: number for name, number in device_numbers(first).items() if name != f"cuda:{number}"}
        notes += [f"device {number} of the snapshot is {name}." for name, number in others.items()]
    return notes
