"""``memtrace summary``: peak memory, its allocation sites, steps and findings on one screen.

The result is computed and printed by ``memtrace.cli.summary_output``, which is imported while another process reads a
file.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import click
from memtrace.cli.arguments import Selection, selects_traces
from memtrace.cli.bandwidths import takes_analysis_options
from memtrace.cli.workers import Workers, takes_workers

if TYPE_CHECKING:
    from memtrace.analysis.options import AnalysisOptions

_OUTPUT: Final = "memtrace.cli.summary_output"


def __getattr__(name: str) -> Any:
    """Return ``RESULT``, the type that --json prints."""
    if name != "RESULT":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(_OUTPUT).RESULT


@click.command("summary")
@selects_traces
@takes_workers
@takes_analysis_options
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON; unknown values are null.")
def command(selection: Selection, workers: Workers, options: AnalysisOptions, as_json: bool) -> None:
    """Summarize TRACE on one screen: peak memory, its allocation sites and modules, steps, and the best fix.

    TRACE is a *.memtrace folder or a memory file of another tool; several are the ranks of one job.

    \b
    Examples:
      memtrace summary run.memtrace
      memtrace summary run.memtrace --capacity 16GiB
      memtrace summary rank0.pickle rank1.pickle
    """
    trace = selection.open(work_during_read=partial(import_module, _OUTPUT))
    from memtrace.cli.summary_output import print_summary

    print_summary(trace, selection, workers, options, as_json=as_json)
