"""Prints the verdict on a trace: a paragraph, and the changes that are worth most."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtrace.cli.output import escape, print_next_command

from memtrace.planning.fix import describe_saving

if TYPE_CHECKING:
    from rich.console import Console

    from memtrace.planning.verdict import Verdict


def print_verdict(out: Console, verdict: Verdict) -> None:
    """Print the verdict on a trace."""
    out.print(f"[bold]{escape(' '.join(verdict.sentences))}[/]")
    if verdict.fixes:
        out.print("\nWhat to change")
    for number, fix in enumerate(verdict.fixes, 1):
        out.print(f"{number}. {escape(fix.what)} {escape(describe_saving(fix))}")
        for line in (fix.paste or "").splitlines():
            out.print(f"     {escape(line)}", style="cyan", soft_wrap=True)
    if verdict.next_command:
        print_next_command(out, verdict.next_command)
