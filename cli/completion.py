"""``memtrace completion``: the script with which a shell completes commands, options and files."""

from __future__ import annotations

from typing import Final

import click
from click.shell_completion import get_completion_class
from memtrace.cli import PROGRAM, cli

SHELLS: Final = ("bash", "zsh", "fish")


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> None:
    """Print the completion script of SHELL.

    \b
    Examples:
      memtrace completion bash >> ~/.bashrc
      memtrace completion zsh >> ~/.zshrc
      memtrace completion fish > ~/.config/fish/completions/memtrace.fish
    """
    completion = get_completion_class(shell)
    assert completion is not None
    click.echo(completion(cli, {}, PROGRAM, f"_{PROGRAM.upper()}_COMPLETE").source())
