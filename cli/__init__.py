"""The ``memtrace`` command. A command's module is imported when it is called, so that ``--help`` is quick."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import ClassVar

import click

from memtrace import __version__
from memtrace.errors import MemtraceError

COMMANDS: dict[str, tuple[str, str]] = {
    "record": ("memtrace.cli.record", "Record a training script, unchanged."),
    "summary": ("memtrace.cli.summary", "Say on one screen where the memory went."),
    "report": ("memtrace.cli.report", "Write all of it as one HTML page that works offline."),
    "findings": ("memtrace.cli.findings", "Name memory that is there without need, and what mending it saves."),
    "steps": ("memtrace.cli.steps", "Find the steps, with or without marks, and tell whether they are alike."),
    "access": ("memtrace.cli.access", "Tell how long blocks lie untouched, and what could be swapped out."),
    "leaks": ("memtrace.cli.leaks", "Tell what grows from step to step, and from which line."),
    "diff": ("memtrace.cli.diff", "Say what changed between two traces."),
    "check": ("memtrace.cli.check", "Check a trace against limits, in CI."),
    "stalls": ("memtrace.cli.stalls", "Say how long the steps wait for data."),
    "ranks": ("memtrace.cli.ranks", "Compare the ranks of one job, and say which to look at first."),
    "pipeline": ("memtrace.cli.pipeline", "Compare the stages of a recorded pipeline."),
    "plan": ("memtrace.cli.plan", "Predict what a change would give, such as another allocator setting."),
    "import": ("memtrace.cli.import_", "Keep memory files of other tools as a trace."),
    "doctor": ("memtrace.cli.doctor", "Tell what works on this machine, and what is missing."),
}


class LazyGroup(click.Group):
    """Commands by name, imported on first use; each is the attribute ``command`` of its module."""

    table: ClassVar[dict[str, tuple[str, str]]] = COMMANDS
    """Module and help line of each command."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands in the order a user meets them."""
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        if cmd_name not in self.table:
            return None
        found = import_module(self.table[cmd_name][0]).command
        assert isinstance(found, click.Command)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self.table.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="memtrace")
def cli() -> None:
    """Trace the memory of DNN training in PyTorch: record it, and say where it went."""


def main() -> None:
    """Run the command line: errors a user can mend are a message on stderr and exit code 2."""
    try:
        cli(standalone_mode=True)
    except MemtraceError as error:
        click.echo(f"memtrace: {error}", err=True)
        sys.exit(2)
    except BrokenPipeError:
        # Whoever read us has left; keep Python from complaining while it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
