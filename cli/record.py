"""``memtrace record``: run a training program unchanged and record it."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

import click
from memtrace.cli.feedback import FEEDBACK
from memtrace.cli.paths import PathOrUrl

from memtrace.format.storage import AnyPath, StoragePath
from memtrace.units import format_bytes

if TYPE_CHECKING:
    from memtrace.recording.session import Recording


@click.command("record", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "-o",
    "--output",
    default="run.memtrace",
    show_default=True,
    help="Folder of the trace to write, or a URL (s3://bucket/run.memtrace).",
)
@click.option("-m", "is_module", is_flag=True, help="PROGRAM is a module name, as in python -m.")
@click.option("-c", "is_code", is_flag=True, help="PROGRAM is Python code, as in python -c.")
@click.option("--stacks/--no-stacks", default=True, show_default=True,
              help="Record the Python call stack of allocations.")  # fmt: skip
@click.option("--accesses/--no-accesses", default=True, show_default=True,
              help="Record every read and write of a block.")  # fmt: skip
@click.option("--last-steps", type=click.IntRange(1), metavar="STEPS",
              help="Keep about this many most recent steps on disk.  [default: all]")  # fmt: skip
@click.option("--max-steps", type=click.IntRange(1), metavar="STEPS",
              help="Stop recording after this many steps; training continues.  [default: no limit]")  # fmt: skip
@click.option("--every", type=click.IntRange(1), metavar="STEPS",
              help="Record one step in so many (and the first two); nothing is slowed down in between.")  # fmt: skip
@click.option("--schedule", metavar="NAME=STEPS,...",
              help="Record steps as torch.profiler.schedule: skip_first, wait, warmup, active, repeat.")  # fmt: skip
@click.option("--on-oom", is_flag=True,
              help="Keep the last steps in memory and write them only when memory runs out.")  # fmt: skip
@click.option("--observer", type=click.Choice(["auto", "native", "dispatch"]), default="auto", show_default=True,
              help="native (C++), dispatch (pure Python, slower, supports fake tensors), or auto.")  # fmt: skip
@click.option("--stack-min-bytes", type=click.IntRange(0), default=512, show_default=True, metavar="BYTES",
              help="Minimum allocation for which a call stack is recorded.")  # fmt: skip
@click.option("--device-time", is_flag=True, help="Also time operators on the GPU.")
@click.option("--upload-seconds", type=click.FloatRange(min=0), default=60, show_default=True, metavar="SECONDS",
              help="Maximum wait for the upload at the end, where the output is a URL.")  # fmt: skip
@click.option("--keep-local", is_flag=True, help="Keep the trace on disk after it was uploaded to a URL.")
@click.option("--local-dir", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
              help="Folder to record into before the upload to a URL.  [default: memtrace-uploads]")  # fmt: skip
@click.option("--apply", "plan_file", type=PathOrUrl(), metavar="PLAN.json",
              help="Apply a plan that memtrace plan wrote to the model of PROGRAM.")  # fmt: skip
@click.option("--losses", "losses_file", type=click.Path(path_type=Path), hidden=True)
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    output: str,
    is_module: bool,
    is_code: bool,
    plan_file: AnyPath | None,
    losses_file: Path | None,
    schedule: str | None,
    program: str,
    arguments: tuple[str, ...],
    **options: Any,
) -> None:
    """Run PROGRAM (a script, with -m a module, or with -c code) with ARGUMENTS, and record its memory.

    Put memtrace's options before PROGRAM and the program's own options after it. The exit code is that of PROGRAM.

    \b
    Examples:
      memtrace record train.py --epochs 1
      memtrace record -o run.memtrace --last-steps 20 -m package.train
      memtrace record --every 1000 train.py
      memtrace record --schedule wait=98,active=2,repeat=5 train.py
      memtrace record --on-oom train.py

    kill -USR2 PID brings the trace of a running program up to date.
    """
    from memtrace.errors import MemtraceError
    from memtrace.execution.detected_model import apply_to_detected_model
    from memtrace.execution.losses import write_losses
    from memtrace.planning.plan import read_plan
    from memtrace.recording.schedule import parse_schedule
    from memtrace.recording.session import record

    if is_module and is_code:
        raise click.UsageError("-m and -c exclude each other.")
    is_script = not is_module and not is_code
    if is_script and not Path(program).is_file():
        raise MemtraceError(f"{program}: no such file; pass a Python script, -m and a module name, or -c and code")
    run = _choose_runner(program, is_module, is_code)
    plan = read_plan(plan_file) if plan_file is not None else None
    if schedule is not None:
        options["schedule"] = parse_schedule(schedule)
    sys.argv = ["-c" if is_code else program, *arguments]
    sys.path.insert(0, str(Path(program).resolve().parent if is_script else Path.cwd()))
    recording, folder = record(output, **options), Path.cwd()
    with recording, contextlib.ExitStack() as around_program:
        if losses_file is not None:
            around_program.enter_context(write_losses(losses_file.absolute()))
        if plan is not None:
            around_program.enter_context(apply_to_detected_model(plan))
        exit_code = _run_program(run, recording)
    _print_result(recording.path, folder)
    if isinstance(exit_code, str):  # as the interpreter does for sys.exit("message")
        click.echo(exit_code, err=True)
        exit_code = 1
    sys.exit(exit_code)


def _choose_runner(program: str, is_module: bool, is_code: bool) -> Callable[[], object]:
    """Return the function that runs the program as ``python`` would."""
    if is_module:
        return partial(runpy.run_module, program, run_name="__main__", alter_sys=True)
    if is_code:
        return partial(_run_code, program)
    # As python does, the script gets an absolute __file__, which stays valid when it changes the working directory.
    return partial(runpy.run_path, str(Path(program).absolute()), run_name="__main__")


def _run_code(code: str) -> None:
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        exec(compile(code, "<string>", "exec"), sys.modules["__main__"].__dict__)
    finally:
        sys.modules["__main__"] = main


def _run_program(run: Callable[[], object], recording: Recording) -> Any:
    """Run the program and return its exit code, which is whatever it passed to ``sys.exit``."""
    try:
        run()
    except SystemExit as exit_request:
        return exit_request.code
    except BaseException as error:
        recording.report_exception(error, f"{type(error).__name__} ended the program")
        traceback.print_exception(type(error), error, _program_frames(error.__traceback__))
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _program_frames(frames: TracebackType | None) -> TracebackType | None:
    """The traceback without its first frames, which belong to memtrace and runpy."""
    frame = frames
    while frame is not None:
        file = frame.tb_frame.f_code.co_filename
        if file != __file__ and "runpy" not in file:
            return frame
        frame = frame.tb_next
    return frames


def _print_result(trace: AnyPath, folder: Path) -> None:
    """Print where the trace is, as seen from ``folder``, the working directory of the shell."""
    from memtrace.recording.job import rank_and_world_size

    if isinstance(trace, StoragePath):
        FEEDBACK.note(f"wrote {trace}. Next: memtrace summary {trace}")
        return
    rank, _ = rank_and_world_size()
    if not (trace / f"rank={rank}").is_dir():  # with --on-oom
        FEEDBACK.note("memory did not run out: no trace was written")
        return
    with contextlib.suppress(OSError):
        size = sum(part.stat().st_size for part in (trace / f"rank={rank}").iterdir())
        name = os.path.relpath(trace, folder) if trace.is_relative_to(folder) else trace
        FEEDBACK.note(f"wrote {name} ({format_bytes(size)}). Next: memtrace summary {name}")
