"""Options of commands that need the bandwidths between device and host: --bandwidths, or --d2h and --h2d."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from memtrace.analysis.bandwidth import CopyBandwidths, bandwidths_from_json, bandwidths_from_rates
from memtrace.errors import MemtraceError


def takes_bandwidths(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command: the options, passed as ``bandwidths``; None: none of them was given."""

    @click.option("--bandwidths", "file", type=click.Path(), metavar="FILE",
                  help="Bandwidths of a machine: the output of memtrace doctor --bandwidth --json.")  # fmt: skip
    @click.option("--d2h", type=float, metavar="GB/s", help="Device-to-host bandwidth; requires --h2d.")
    @click.option("--h2d", type=float, metavar="GB/s", help="Host-to-device bandwidth; requires --d2h.")
    @wraps(command)
    def with_bandwidths(file: str | None, d2h: float | None, h2d: float | None, **options: Any) -> Any:
        return command(bandwidths=_given_bandwidths(file, d2h, h2d), **options)

    return with_bandwidths


def _given_bandwidths(file: str | None, d2h: float | None, h2d: float | None) -> CopyBandwidths | None:
    if file is not None and (d2h is not None or h2d is not None):
        raise click.UsageError("--bandwidths cannot be combined with --d2h and --h2d.")
    if (d2h is None) != (h2d is None):
        raise click.UsageError("--d2h and --h2d must be given together.")
    if d2h is not None and h2d is not None:
        return bandwidths_from_rates(d2h, h2d)
    return None if file is None else _read_bandwidths(file)


def _read_bandwidths(file: str) -> CopyBandwidths:
    try:
        return bandwidths_from_json(json.loads(Path(file).read_text(encoding="utf-8")))
    except OSError as error:
        raise MemtraceError(f"{file}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise MemtraceError(f"{file}: not JSON ({error}). Write it with: memtrace doctor --bandwidth --json") from error
    except MemtraceError as error:
        raise MemtraceError(f"{file}: {error}") from error
