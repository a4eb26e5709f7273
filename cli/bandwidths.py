"""Options for what the user states about a machine: bandwidths of copies between device and host, and its memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import wraps
from typing import Any

import click
from memtrace.cli.quantities import BYTES, BYTES_OR_ZERO

from memtrace.analysis.bandwidth import (
    TITAN_XP,
    CopyBandwidths,
    bandwidths_from_json,
    bandwidths_from_rates,
    bandwidths_of_card,
)
from memtrace.analysis.options import AnalysisOptions
from memtrace.analysis.thresholds import MIN_SWAP_BYTES
from memtrace.errors import MemtraceError
from memtrace.format.storage import to_path


def takes_bandwidths(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command: bandwidths from a file, rates or the name of a card, passed as ``bandwidths`` (or None)."""

    @click.option("--bandwidth", "bandwidth_file", type=click.Path(), metavar="FILE",
                  help="Bandwidths of a machine: the output of memtrace doctor --bandwidth --json.")  # fmt: skip
    @click.option(
        "--card", metavar="NAME", help='Bandwidths of a card, e.g. "TITAN Xp" (published) or A100 (link rate).'
    )
    @click.option("--d2h", "d2h_gb_per_s", type=float, metavar="GB/s", help="Device-to-host bandwidth; requires --h2d.")
    @click.option("--h2d", "h2d_gb_per_s", type=float, metavar="GB/s", help="Host-to-device bandwidth; requires --d2h.")
    @wraps(command)
    def with_bandwidths(
        bandwidth_file: str | None,
        card: str | None,
        d2h_gb_per_s: float | None,
        h2d_gb_per_s: float | None,
        **options: Any,
    ) -> Any:
        if (d2h_gb_per_s is None) != (h2d_gb_per_s is None):
            raise click.UsageError("--d2h and --h2d must be given together.")
        if sum(value is not None for value in (bandwidth_file, card, d2h_gb_per_s)) > 1:
            raise click.UsageError("give only one of --bandwidth, --card, and --d2h with --h2d.")
        bandwidths = None
        if d2h_gb_per_s is not None and h2d_gb_per_s is not None:
            bandwidths = bandwidths_from_rates(d2h_gb_per_s, h2d_gb_per_s)
        elif card is not None:
            bandwidths = bandwidths_of_card(card)
        elif bandwidth_file is not None:
            bandwidths = _read_bandwidths(bandwidth_file)
        return command(bandwidths=bandwidths, **options)

    return with_bandwidths


def takes_analysis_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command: what the user states about the machine, and thresholds, passed as ``options``."""

    @takes_bandwidths
    @click.option("--capacity", type=BYTES, metavar="SIZE",
                  help="Memory of the device for the process (e.g. 16GiB), to compare the peak with.")  # fmt: skip
    @click.option("--min-swap", type=BYTES_OR_ZERO, default=MIN_SWAP_BYTES, metavar="SIZE",
                  help="Smallest block to swap, as memtrace access --min-bytes; default: 1MiB.")  # fmt: skip
    @click.option("--min-waste", type=BYTES, metavar="SIZE",
                  help="Leave out findings that waste less, as memtrace findings --min-bytes; default: 1 % of the "
                  "peak.")  # fmt: skip
    @wraps(command)
    def with_analysis_options(
        bandwidths: CopyBandwidths | None,
        capacity: int | None,
        min_swap: int,
        min_waste: int | None,
        **others: Any,
    ) -> Any:
        return command(options=AnalysisOptions(bandwidths, capacity, min_swap, min_waste), **others)

    return with_analysis_options


def bandwidths_here(device: str) -> CopyBandwidths:
    """Return the measured bandwidths of this machine; those of a TITAN Xp for a trace of a GPU that is not here."""
    import torch

    from memtrace.execution.host_bandwidth import measure_bandwidths

    if device != "cpu" and not torch.cuda.is_available():
        return TITAN_XP
    return measure_bandwidths("cpu" if device == "cpu" else "cuda:0")


def _read_bandwidths(file: str) -> CopyBandwidths:
    try:
        return bandwidths_from_json(json.loads(to_path(file).read_text(encoding="utf-8")))
    except OSError as error:
        raise MemtraceError(f"{file}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise MemtraceError(f"{file}: not JSON ({error}). Write it with: memtrace doctor --bandwidth --json") from error
    except MemtraceError as error:
        raise MemtraceError(f"{file}: {error}") from error
