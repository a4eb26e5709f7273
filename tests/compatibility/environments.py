"""Empty environments with a given Python and torch: interpreters of this machine, torch from pip or another environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution
from pathlib import Path
from typing import Final

from memtrace.recording.observers.versions import Version, format_version

PROGRAMS_SECONDS: Final = 3600


class Unavailable(Exception):
    """A combination cannot be tried on this machine. The message says why."""


def run(command: Sequence[str | Path], *, cwd: Path, variables: dict[str, str] | None = None) -> str:
    """Run a program and return what it printed.

    Raises:
        subprocess.CalledProcessError: it failed; ``stderr`` has its messages.
    """
    # Nothing of this checkout is visible to the program, nor of the environment that runs this one.
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in hidden} | (variables or {})
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=PROGRAMS_SECONDS,
    )
    return result.stdout


def find_interpreter(version: Version) -> Path:
    """Return an interpreter of a version: one on the path, or one that pyenv or uv has installed.

    Raises:
        Unavailable: there is none.
    """
    name = f"python{format_version(version)}"
    for path in _interpreters(name):
        try:
            shown = run([path, "-c", "import sys, venv; print(*sys.version_info[:2])"], cwd=Path("/"))
        except (OSError, subprocess.SubprocessError):  # such as a shim of pyenv for a version that is not selected
            continue
        if tuple(map(int, shown.split())) == version:
            return path
    raise Unavailable(f"no Python {format_version(version)} on this machine")


def _interpreters(name: str) -> Iterator[Path]:
    if (found := shutil.which(name)) is not None:
        yield Path(found)
    installed = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    managed = Path(os.environ.get("UV_PYTHON_INSTALL_DIR") or Path.home() / ".local/share/uv/python")
    for folder in (installed, managed):
        yield from sorted(folder.glob(f"*/bin/{name}"))


def create(folder: Path, interpreter: Path) -> Path:
    """Create an empty environment and return its interpreter."""
    run([interpreter, "-m", "venv", folder], cwd=folder.parent)
    return folder / "bin" / "python"


def install_torch(python: Path, version: Version, pip_arguments: Sequence[str], donors: Sequence[Path]) -> None:
    """Install a version of torch into an environment.

    Args:
        python: interpreter of the environment.
        version: version of torch.
        pip_arguments: where pip finds torch.
        donors: other environments; if one has this torch for this Python, its files are linked instead of downloaded.

    Raises:
        Unavailable: pip cannot install it.
    """
    (site,) = (python.parent.parent / "lib").glob("python*/site-packages")
    for donor in donors:
        source = donor / "lib" / site.parent.name / "site-packages"
        if _torch_version(source) == version:
            _link_torch(source, site)
            return
    try:
        requirement = f"torch=={format_version(version)}.0"
        run([python, "-m", "pip", "install", "-q", "--no-compile", requirement, *pip_arguments], cwd=site)
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if line.startswith("ERROR")] or error.stderr.splitlines()
        raise Unavailable(
            f"pip cannot install torch {format_version(version)}: {lines[-1] if lines else ''}"
        ) from error


def _torch_version(site: Path) -> Version | None:
    for path in site.glob("torch-*.dist-info"):
        if (numbers := re.match(r"torch-(\d+)\.(\d+)", path.name)) is not None:
            return int(numbers[1]), int(numbers[2])
    return None


def _link_torch(source: Path, target: Path) -> None:
    """Give an environment the torch of another one, with the libraries of CUDA that it loads, as hard links."""
    names = {"nvidia"}  # a folder that several packages share
    for distribution in Distribution.discover(path=[str(source)]):
        name = str(distribution.metadata["Name"]).lower()
        if name == "torch" or name.startswith(("nvidia-", "nvidia_", "cuda-", "cuda_", "triton")):
            names |= {path.parts[0] for path in distribution.files or () if path.parts[0] != ".."}
    entries = [source / name for name in sorted(names - {"__pycache__"}) if (source / name).exists()]
    # Copied where the other environment lies on another file system.
    for option in ("-al", "-a"):
        if subprocess.run(["cp", option, "-f", *entries, target], check=False, capture_output=True).returncode == 0:
            return
    raise Unavailable(f"torch cannot be copied from {source}")
