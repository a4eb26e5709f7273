"""``memtrace doctor``: what this machine offers for recording, and what is missing."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import click
from memtrace.cli.output import print_json, print_line

from memtrace.analysis.bandwidth import CopyBandwidths, CopyCost
from memtrace.readers.pickle_scanner.build import ScannerError, load_scanner
from memtrace.recording.environment import Environment, examine_environment
from memtrace.units import format_duration


@dataclass(frozen=True)
class DoctorReport:
    """The state of this machine, as ``memtrace doctor --json`` prints it."""

    environment: Environment
    bandwidth: CopyBandwidths | None
    """Cost of copies between device and host; None: not measured."""


RESULT: Final = DoctorReport
_OBSERVERS: Final = {"native": "native", "dispatch": "dispatch (pure Python)", None: "none"}
_CUDA_EVENTS: Final = {
    "observer": "native observer",
    "history": "torch's allocator history",
    None: "none (torch is built without CUDA)",
}
_NOT_BUILT: Final = 1
"""Exit status of --build where the native observer is not available."""


@click.command("doctor")
@click.option(
    "--bandwidth", is_flag=True, help="Also measure the copies of an offload between device and host (takes seconds)."
)
@click.option(
    "--build",
    is_flag=True,
    help="Build the native observer and the reader of snapshots if they are not in the cache, as in a Dockerfile; exit "
    "with 1 if the observer cannot be built.",
)
@click.option("--rebuild", is_flag=True, help="Like --build, but build it anew, even if that has failed before.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; unknown values are null.")
@click.pass_context
def command(context: click.Context, as_json: bool, bandwidth: bool, build: bool, rebuild: bool) -> None:
    """Check the installation on this machine and list what is missing.

    \b
    Examples:
      memtrace doctor
      memtrace doctor --build
      memtrace doctor --bandwidth
    """
    report = DoctorReport(examine_environment(rebuild=rebuild), _measure_bandwidths() if bandwidth else None)
    if as_json:
        print_json(report)
    else:
        _print(report)
    if build or rebuild:
        with suppress(ScannerError):  # without it, snapshots are read in Python
            load_scanner()
        if report.environment.observer != "native":
            context.exit(_NOT_BUILT)


def _measure_bandwidths() -> CopyBandwidths:
    from memtrace.execution.host_bandwidth import measure_bandwidths

    return measure_bandwidths()


def _print(report: DoctorReport) -> None:
    environment, bandwidth = report.environment, report.bandwidth
    facts = [(name, version or "not installed") for name, version in environment.versions.items()]
    facts += [
        ("compiler", environment.compiler or "none"),
        ("torch headers", environment.torch_headers or "none"),
        ("build cache", environment.build_cache),
        ("observer", _describe_observer(environment)),
        ("CUDA events", _CUDA_EVENTS[environment.cuda_events]),
        ("CUDA headers", environment.cuda_headers or "none"),
        ("GPU", ", ".join(environment.gpus) or "none"),
    ]
    if bandwidth is not None:
        facts += [("D2H copies", _format_cost(bandwidth.d2h)), ("H2D copies", _format_cost(bandwidth.h2d))]
        facts.append(("copy source", bandwidth.source))
    for label, value in facts:
        print_line(f"{label:<15}{value}")
    for sentence in environment.advice:
        print_line(f"Warning: {sentence}")
    if not environment.advice:
        click.echo("No problems found.")


def _describe_observer(environment: Environment) -> str:
    if environment.observer != "native":
        return _OBSERVERS[environment.observer]
    if environment.build_seconds is None:
        return f"{_OBSERVERS[environment.observer]}, from the cache"
    return f"{_OBSERVERS[environment.observer]}, built in {environment.build_seconds:.0f} s"


def _format_cost(cost: CopyCost) -> str:
    return f"{cost.gb_per_s:.2f} GB/s, latency {format_duration(cost.latency_ns)}"
