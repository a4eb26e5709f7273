"""The ``memtrace`` command. The module of a command is imported when the command runs, so that ``--help`` is fast."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import ClassVar, Final, NoReturn

import click
from click.shell_completion import CompletionItem
from memtrace.cli.feedback import FEEDBACK, add_verbosity_options

from memtrace import __version__
from memtrace.errors import MemtraceError
from memtrace.text import to_printable

ISSUES_URL: Final = "https://github.com/memtrace/memtrace/issues"

COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "record": ("memtrace.cli.record", "Record an unmodified training script."),
    "summary": ("memtrace.cli.summary", "Summarize a trace on one screen."),
    "report": ("memtrace.cli.report", "Write an HTML page with all results; it works offline."),
    "serve": ("memtrace.cli.serve", "Show a trace of any size, or a running recording, in the browser."),
    "live": ("memtrace.cli.live", "Watch a running recording in the terminal."),
    "plot": ("memtrace.cli.plot", "Write one figure as an image or an HTML file."),
    "findings": ("memtrace.cli.findings", "Find wasted memory and estimate what each fix would save."),
    "steps": ("memtrace.cli.steps", "Detect training steps and measure how much they vary."),
    "access": ("memtrace.cli.access", "Show access intervals and swap candidates."),
    "leaks": ("memtrace.cli.leaks", "Find memory that grows from step to step."),
    "diff": ("memtrace.cli.diff", "Compare two traces."),
    "compare": ("memtrace.cli.compare", "Compare any number of runs side by side."),
    "check": ("memtrace.cli.check", "Check a trace against memory limits, for CI."),
    "stalls": ("memtrace.cli.stalls", "Show how long the steps wait for data."),
    "ranks": ("memtrace.cli.ranks", "Compare the ranks of a distributed job."),
    "pipeline": ("memtrace.cli.pipeline", "Show the stages and bubbles of a recorded pipeline."),
    "plan": ("memtrace.cli.plan", "Plan changes, predict their effect, and prove it."),
    "export": ("memtrace.cli.export", "Write a trace for Perfetto, pprof, speedscope, memory_viz or as CSV."),
    "import": ("memtrace.cli.import_", "Convert memory files of other tools to a trace."),
    "upload": ("memtrace.cli.upload", "Upload a trace to S3 or another storage."),
    "doctor": ("memtrace.cli.doctor", "Check the installation and list what is missing."),
    "completion": ("memtrace.cli.completion", "Print the completion script of a shell."),
}
"""Module and one-line help of each command."""


class LazyGroup(click.Group):
    """A group of commands that are imported on first use; each is the attribute ``command`` of its module."""

    table: ClassVar[dict[str, tuple[str, str]]] = COMMANDS
    """Module and one-line help of each command."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands in the order in which a user needs them."""
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None for an unknown name."""
        if cmd_name not in self.table:
            return None
        command = import_module(self.table[cmd_name][0]).command
        assert isinstance(command, click.Command)
        add_verbosity_options(command)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands and options that begin with a text, without importing the commands."""
        if incomplete.startswith("-"):
            return click.Command.shell_complete(self, ctx, incomplete)
        return [
            CompletionItem(name, help=text) for name, (_, text) in self.table.items() if name.startswith(incomplete)
        ]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the arguments name; for an unknown name suggest the commands that are spelt alike."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            similar = get_close_matches(args[0], self.table)
            if not similar:
                raise
            raise click.UsageError(f"{error.message} Did you mean {' or '.join(similar)}?", ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self.table.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="memtrace")
def cli() -> None:
    """Profile the memory of PyTorch training: record a run, then find out what holds memory and how to reduce it.

    \b
    memtrace record train.py --epochs 1
    memtrace summary run.memtrace
    memtrace report run.memtrace -o report.html
    """


add_verbosity_options(cli)


PROGRAM: Final = "memtrace"
MIN_COLUMNS: Final = 40
"""Least width to which errors are wrapped."""
INTERNAL_ERROR: Final = "This may be a bug in memtrace"
"""Part of the message for an exception that no module expected."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line: an error becomes one sentence on stderr and exit code 2.

    Args:
        arguments: the arguments of the command; None: those of the process.
    """
    try:
        exit_code = cli.main(arguments, prog_name=PROGRAM, standalone_mode=False)
    except MemtraceError as error:
        _fail(str(error))
    except click.ClickException as error:
        _fail_usage(error)
    except click.Abort:
        _fail("interrupted", exit_code=1)
    except BrokenPipeError:
        # The reader of stdout (head, less) has exited. Python must not fail again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except MemoryError:
        _fail("the command needs more memory than this process can have. Run it on a machine with more memory.")
    except Exception as error:
        if os.environ.get("MEMTRACE_DEBUG"):
            raise
        _fail(
            f"the command failed unexpectedly ({_describe(error)}). {INTERNAL_ERROR}: set MEMTRACE_DEBUG=1 to see the "
            f"traceback, and report it with the input at {ISSUES_URL}."
        )
    finally:
        FEEDBACK.end()
    FEEDBACK.finish()
    if isinstance(exit_code, int) and exit_code:
        sys.exit(exit_code)


def _fail_usage(error: click.ClickException) -> NoReturn:
    """Print what is wrong with the arguments below the usage of the command; without arguments, its help."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        sys.exit(error.exit_code)
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is not None:
        click.echo(f"{context.get_usage()}\nTry '{context.command_path} --help' for help.\n", err=True)
    _fail(error.format_message(), exit_code=error.exit_code)


def _describe(error: Exception) -> str:
    """Return the type of an unexpected exception and the line that raised it, on one line."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {Path(frame.filename).name}:{frame.lineno}"


def _fail(message: str, *, exit_code: int = 2) -> NoReturn:
    """Print an error on stderr, in a terminal in lines that fit, and exit."""
    FEEDBACK.end()
    text = to_printable(f"memtrace: {message}")
    if sys.stderr.isatty():
        columns = max(shutil.get_terminal_size().columns, MIN_COLUMNS)
        text = textwrap.fill(text, columns, break_long_words=False, break_on_hyphens=False)
    click.echo(text, err=True)
    sys.exit(exit_code)
