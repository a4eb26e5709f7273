"""The C++ compilers of this machine."""

from __future__ import annotations

import os
import shlex
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_COMPILERS: Final = ("c++", "g++", "clang++")


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler that is installed. Whether it works shows when it is used."""

    command: tuple[str, ...]
    """Path of the program and any arguments that $CXX gives it."""

    def __str__(self) -> str:
        """The command, for users."""
        return shlex.join(self.command)

    @property
    def identity(self) -> str:
        """Changes when another program takes its place, such as a newer version."""
        with suppress(OSError):
            status = Path(self.command[0]).resolve().stat()
            return f"{self} {status.st_size} {status.st_mtime_ns}"
        return str(self)


def find_compilers() -> tuple[Compiler, ...]:
    """Return the compilers to try, in order: $CXX, which may have arguments (``ccache g++``), c++, g++ and clang++."""
    commands = []
    with suppress(ValueError):  # unbalanced quotes
        commands.append(shlex.split(os.environ.get("CXX", "")))
    commands += [[name] for name in _COMPILERS]
    found: dict[str, Compiler] = {}
    for command in commands:
        if command and (path := shutil.which(command[0])):
            # The real path tells apart, but is not called: programs such as ccache look at the name they are called by.
            key = shlex.join([os.path.realpath(path), *command[1:]])
            found.setdefault(key, Compiler((str(Path(path).absolute()), *command[1:])))
    return tuple(found.values())
