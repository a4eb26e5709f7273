"""``memtrace doctor``: what works on this machine, and what is missing."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

import click
from memtrace.cli.output import console, plain_table, print_json

from memtrace.units import format_duration

PACKAGES = ("memtrace", "torch", "numpy", "pandas", "pyarrow", "plotly")


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON.")
@click.option("--bandwidth", is_flag=True, help="Measure copies between the device and the host (some seconds).")
def command(as_json: bool, bandwidth: bool) -> None:
    """Tell versions, the compiler, the observer that would be used, the GPU, and how to get what is missing."""
    found = examine()
    if bandwidth:
        from memtrace.analysis.bandwidth import measure

        found["bandwidth"] = measure().as_dict()
    if as_json:
        print_json(found)
        return
    table = plain_table("", "")
    for name, value in found["versions"].items():
        table.add_row(name, value or "not installed")
    for name in ("compiler", "cache", "observer", "gpu", "cuda_headers"):
        table.add_row(name.replace("_", " "), str(found[name] or "none"))
    for way in ("out", "in"):
        if bandwidth:
            told = found["bandwidth"][way]
            cost = f"{told['gb_per_s']:.2f} GB/s, starting after {format_duration(told['start_ns'])}"
            table.add_row(f"copies {way}", f"{cost} ({found['bandwidth']['source']})")
    out = console()
    out.print(table)
    for advice in found["advice"] or ["Nothing is missing."]:
        out.print(f"* {advice}", markup=False)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def examine() -> dict[str, Any]:
    """What ``doctor --json`` prints: versions, compiler, cache, observer, gpu, cuda_headers, advice."""
    import torch

    from memtrace.recording.observers import build

    advice: list[str] = []
    observer = "dispatch"
    try:
        native = build.native_module()
        observer = "native"
        if torch.version.cuda and not native.status()["cuda"]:
            advice.append("The native observer was built without CUDA.")
    except build.BuildError as error:
        advice.append(f"The native observer cannot be used, recording is several times slower: {error}")
    headers = build.cuda_include()
    if torch.version.cuda and headers is None:
        advice.append(
            "CUDA's headers were not found, so CUDA allocations are not seen: set CUDA_HOME to a CUDA toolkit."
        )
    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "compiler": build.compiler(),
        "cache": str(build.cache_folder()),
        "observer": observer,
        "gpu": ", ".join(gpus) or None,
        "cuda_headers": str(headers) if headers else None,
        "advice": advice,
    }
