"""``memtrace record``: run a training program unchanged and record it."""

from __future__ import annotations

import contextlib
import runpy
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

import click


@click.command("record", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-o", "--output", default="run.memtrace", show_default=True, help="Folder of the trace.")
@click.option("-m", "module", is_flag=True, help="PROGRAM is a module, as in python -m.")
@click.option("--stacks/--no-stacks", default=True, help="Python stacks of allocations.")
@click.option("--accesses/--no-accesses", default=True, help="Reads and writes of every block.")
@click.option("--last-steps", type=click.IntRange(1), help="Keep about the last N steps on disk.")
@click.option("--max-steps", type=click.IntRange(1), help="Record N steps, then let the program go on alone.")
@click.option("--observer", type=click.Choice(["auto", "native", "dispatch"]), default="auto", show_default=True)
@click.option("--stack-min-bytes", type=click.IntRange(0), default=512, show_default=True,
              help="Allocations below get no stack.")  # fmt: skip
@click.option("--device-time", is_flag=True, help="Time operators on the GPU too: the host runs ahead of it.")
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(output: str, module: bool, program: str, arguments: tuple[str, ...], **options: Any) -> None:
    """Record PROGRAM (a script, or with -m a module) with its ARGUMENTS, as python would run it.

    Options of memtrace stand before the program, those of the program after it. Its exit code is kept.
    """
    from memtrace.errors import MemtraceError
    from memtrace.recording.session import record

    if not module and not Path(program).is_file():
        raise MemtraceError(f"{program} is not a file; give a Python script, or -m and a module")
    sys.argv = [program, *arguments]
    sys.path.insert(0, str(Path.cwd()) if module else str(Path(program).resolve().parent))
    recording = record(output, **options)
    code: Any = 0
    with recording:
        try:
            if module:
                runpy.run_module(program, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(program, run_name="__main__")
        except SystemExit as left:
            code = left.code
        except BaseException as error:
            code = 130 if isinstance(error, KeyboardInterrupt) else 1
            recording.failed(error, f"{type(error).__name__} ended the program")
            traceback.print_exception(type(error), error, _program_frames(error.__traceback__, program))
    _say_what_was_written(output)
    if isinstance(code, str):
        click.echo(code, err=True)
        code = 1
    sys.exit(code)


def _program_frames(found: TracebackType | None, program: str) -> TracebackType | None:
    """The traceback without the frames of memtrace and runpy at its head."""
    head = found
    while head is not None:
        file = head.tb_frame.f_code.co_filename
        if file != __file__ and "runpy" not in file:
            return head
        head = head.tb_next
    return found


def _say_what_was_written(output: str) -> None:
    from memtrace.recording.session import rank_and_world

    rank = rank_and_world()[0]
    written = Path(output) / f"rank={rank}"
    with contextlib.suppress(OSError):
        total = sum(part.stat().st_size for part in written.iterdir())
        click.echo(f"memtrace: wrote {output} ({total / 2**20:.1f} MiB); now: memtrace summary {output}", err=True)
