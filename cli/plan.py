"""`memtrace plan`: what would happen if. Each plan is a command of its own module, imported when it is
called."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

import click

from memtrace.errors import MemtraceError

PLANS: Final = {
    "allocator": "memtrace.cli.plan_allocator",
}
"""Name of each plan and the module whose `command` it is."""


class _Plans(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(PLANS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in PLANS:
            return None
        command: click.Command = import_module(PLANS[cmd_name]).command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except MemtraceError as error:
            refusal = click.ClickException(str(error))
            refusal.exit_code = 2
            raise refusal from None


@click.group(cls=_Plans, name="plan")
def command() -> None:
    """Predict what a change would give: the allocator's settings and more."""
