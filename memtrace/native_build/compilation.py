"""Compiles a module in a temporary folder."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Literal

from memtrace.native_build.compilers import Compiler
from memtrace.processors import count_cores

BUILD_SECONDS: Final = 900
"""A build that takes longer is given up."""
PROBE_SECONDS: Final = 30
"""A compiler that needs longer for an empty program is not used."""
MAX_MODULE_BYTES: Final = 64 << 20
MAX_ERROR_BYTES: Final = 1 << 20
_POLL_SECONDS: Final = 0.05
_PROBE: Final = "#include <concepts>\nstatic_assert(__cplusplus > 201703L);\nint probe = 0;\n"
_LACK_OF_RESOURCES: Final = (
    "No space left",
    "Killed",
    "Cannot allocate memory",
    "out of memory",
    "quota",
    "Terminated",
)


class CompileError(Exception):
    """A module cannot be compiled. The message says why.

    Attributes:
        is_transient: whether the same build may succeed later: the machine lacked time, memory or disk space.
    """

    def __init__(self, message: str, *, is_transient: bool = False) -> None:
        super().__init__(message)
        self.is_transient = is_transient


@dataclass(frozen=True)
class Recipe:
    """How a module is compiled."""

    sources: tuple[Path, ...]
    generated: Mapping[str, str]
    """Files that are written to the temporary folder before the sources are compiled, by their names."""
    compile_flags: tuple[str, ...]
    link_flags: tuple[str, ...]


class BuildFolder:
    """A temporary folder in which commands run.

    It is used through its descriptor, so that another user who can rename it cannot put a folder of his in its place.
    """

    def __init__(self, descriptor: int, on_progress: Callable[[], None]) -> None:
        self._descriptor = descriptor
        self._on_progress = on_progress

    def _open(self, name: str, mode: Literal["rb", "wb"]) -> BinaryIO:
        flags = os.O_RDONLY if mode == "rb" else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._descriptor)
        return os.fdopen(descriptor, mode)

    def write(self, name: str, text: str) -> None:
        """Write a file of the folder."""
        with self._open(name, "wb") as file:
            file.write(text.encode())

    def read(self, name: str) -> bytes:
        """Return the content of a file that a command wrote.

        Raises:
            CompileError: there is none, although the command succeeded.
        """
        try:
            with self._open(name, "rb") as file:
                content = file.read(MAX_MODULE_BYTES)
        except OSError as error:
            raise CompileError(f"the compiler wrote nothing ({error})") from error
        if not content:
            raise CompileError("the compiler wrote an empty file")
        return content

    def run(self, commands: Sequence[Sequence[str]], seconds: float) -> None:
        """Run commands, as many at a time as there are processors, and end them all if one fails.

        Raises:
            CompileError: a command failed or took too long.
        """
        deadline = time.monotonic() + seconds
        waiting = list(enumerate(commands))
        running: dict[int, subprocess.Popen[bytes]] = {}
        try:
            while waiting or running:
                while waiting and len(running) < count_cores():
                    number, command = waiting.pop(0)
                    running[number] = self._start(command, f"errors-{number}")
                for number in [number for number, process in running.items() if process.poll() is not None]:
                    self._check(commands[number], running.pop(number).returncode, f"errors-{number}")
                if time.monotonic() > deadline:
                    raise CompileError(f"{_name(commands[0])} took longer than {seconds:.0f} s", is_transient=True)
                self._on_progress()
                time.sleep(_POLL_SECONDS)
        finally:
            for process in running.values():
                _kill(process)

    def _start(self, command: Sequence[str], errors: str) -> subprocess.Popen[bytes]:
        # English messages, and no input: a program that is no compiler may wait for it.
        environment = os.environ | {"LC_ALL": "C", "TMPDIR": "."}
        with self._open(errors, "wb") as file:
            return subprocess.Popen(
                command,
                cwd=f"/proc/self/fd/{self._descriptor}",
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=file,
                start_new_session=True,
            )

    def _check(self, command: Sequence[str], status: int, errors: str) -> None:
        if status == 0:
            return
        with self._open(errors, "rb") as file:
            lines = file.read(MAX_ERROR_BYTES).decode(errors="replace").splitlines()
        reasons = [line for line in lines if "error" in line] or lines
        lacks = status < 0 or any(word in line for line in lines for word in _LACK_OF_RESOURCES)
        reason = reasons[0].strip()[:300] if reasons else f"exit status {status}"
        raise CompileError(f"{_name(command)} failed: {reason}", is_transient=lacks)


def _name(command: Sequence[str]) -> str:
    return Path(command[0]).name


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)  # a compiler's own processes too: each command leads a process group
    process.wait()


def compile_module(
    compilers: Sequence[Compiler], recipe: Recipe, on_progress: Callable[[], None]
) -> tuple[bytes, Compiler]:
    """Return the compiled module and the compiler that compiled it.

    Args:
        compilers: the first one that compiles an empty program is used.
        recipe: how the module is compiled.
        on_progress: called several times a second.

    Raises:
        CompileError: the module cannot be compiled.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="memtrace-build-", ignore_cleanup_errors=True) as path:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if os.fstat(descriptor).st_uid != os.geteuid():
                    raise OSError(f"{path} belongs to another user")
                folder = BuildFolder(descriptor, on_progress)
                compiler = _working_compiler(compilers, folder)
                return _compile(compiler, recipe, folder), compiler
            finally:
                os.close(descriptor)
    except OSError as error:
        raise CompileError(f"no compiler could be run in a temporary folder ({error})", is_transient=True) from error


def _working_compiler(compilers: Sequence[Compiler], folder: BuildFolder) -> Compiler:
    folder.write("probe.cpp", _PROBE)
    failures = []
    for number, compiler in enumerate(compilers):
        target = f"probe-{number}.o"
        try:
            folder.run([[*compiler.command, "-std=c++20", "-fPIC", "-c", "probe.cpp", "-o", target]], PROBE_SECONDS)
            folder.read(target)
        except (CompileError, OSError) as error:
            failures.append(error)
        else:
            return compiler
    is_transient = any(isinstance(error, OSError) or error.is_transient for error in failures)
    raise CompileError(f"no working C++20 compiler found: {failures[0]}", is_transient=is_transient)


def _compile(compiler: Compiler, recipe: Recipe, folder: BuildFolder) -> bytes:
    for name, text in recipe.generated.items():
        folder.write(name, text)
    started = time.monotonic()
    commands = [
        [*compiler.command, *recipe.compile_flags, "-c", str(source), "-o", f"{source.stem}.o"]
        for source in recipe.sources
    ]
    folder.run(commands, BUILD_SECONDS)
    objects = [f"{source.stem}.o" for source in recipe.sources]
    link = [*compiler.command, *objects, *recipe.link_flags, "-o", "module.so"]
    folder.run([link], max(BUILD_SECONDS - (time.monotonic() - started), 1))
    return folder.read("module.so")
