"""``memtrace serve``: the page of traces of any size, from a local server."""

from __future__ import annotations

import os
from functools import partial

import click
from memtrace.cli.output import print_line
from memtrace.cli.quantities import BYTES
from memtrace.cli.workers import Workers, takes_workers

from memtrace.recording.serving import TOKEN_VARIABLE, require_server_packages


@click.command("serve")
@click.argument("traces", metavar="TRACE...", nargs=-1, required=True, type=click.Path())
@click.option("--live", is_flag=True, help="Follow recordings that are being written.")
@click.option("--rank", type=int, help="Show only this rank, of a trace of several ranks.")
@click.option("--capacity", type=BYTES, metavar="SIZE",
              help="Memory capacity (e.g. 24GiB) for the time to out-of-memory.  [default: as recorded]")  # fmt: skip
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, metavar="PORT",
              help="Port to listen on.  [default: a free one]")  # fmt: skip
@takes_workers
@click.option("--no-open", is_flag=True, help="Do not open a browser.")
@click.option("--parent", type=int, hidden=True)
@click.option("--descriptor", type=int, hidden=True)
def command(
    traces: tuple[str, ...],
    live: bool,
    rank: int | None,
    capacity: int | None,
    host: str,
    port: int,
    workers: Workers,
    no_open: bool,
    parent: int | None,
    descriptor: int | None,
) -> None:
    """Show the page of TRACE from a local server, at any size and while it is being recorded.

    A page of memtrace report is one file, and leaves out details of a trace with millions of events. The server loads
    what the visible range needs. The printed address ends with a random token, which every request needs.

    \b
    Examples:
      memtrace serve run.memtrace
      memtrace serve run.memtrace --live --capacity 24GiB
      memtrace serve run.memtrace --no-open --port 8000
    """
    require_server_packages()
    from memtrace.dashboards.server.run import run_server
    from memtrace.dashboards.server.served import ServedTrace

    from memtrace.engine.indexing import summarize_parts

    def announce(url: str) -> None:
        print_line(f"Serving {served.name} at {url}")
        if parent is None:
            print_line("Press Ctrl-C to stop.", err=True)

    summarize = partial(summarize_parts, paths=traces, options=workers.options)
    served = ServedTrace(traces, rank, follow=live, capacity_bytes=capacity, summarize=summarize)
    run_server(
        served,
        host=host,
        port=port,
        token=os.environ.pop(TOKEN_VARIABLE, None),
        open_browser=not no_open,
        parent=parent,
        descriptor=descriptor,
        announce=announce,
    )
