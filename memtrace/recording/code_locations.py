"""Where the files of this process lie: the user's program, installed packages, and what belongs to none of them."""

from __future__ import annotations

import functools
import logging
import os
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path

import torch

import memtrace
from memtrace.format.manifest import CodeLocations

logger = logging.getLogger("memtrace")

_NOT_PROGRAMS = ("memtrace", "torch")
"""Packages that start programs of the user."""


def find_code_locations() -> CodeLocations:
    """Return where the files of this process lie. Nothing is imported, and no code of the program runs."""
    paths = _interpreter_paths()
    packages = [paths["purelib"], paths["platlib"], *site.getsitepackages(), site.getusersitepackages()]
    packages += [folder for folder in sys.path if Path(folder).name in ("site-packages", "dist-packages")]
    internal = [
        paths["stdlib"],
        paths["platstdlib"],
        str(Path(torch.__file__).parent),
        str(Path(memtrace.__file__).parent),
        os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""),
        os.environ.get("TRITON_CACHE_DIR", ""),
    ]
    package_folders = tuple(_spellings(packages))
    return CodeLocations(
        package_folders=package_folders,
        internal_folders=(*_spellings(internal), str(Path(paths["scripts"]) / "memtrace")),
        user_paths=_user_paths(package_folders),
    )


def _user_paths(package_folders: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return tuple(_program_paths(package_folders))
    except Exception:  # a program can replace sys.argv, its __main__ and the finders of modules with anything
        logger.debug("cannot tell where the program lies", exc_info=True)
        return ()


def _spellings(folders: Iterable[str]) -> Iterator[str]:
    """Return folders as prefixes of paths, as they are written and with symbolic links resolved, each once."""
    return iter(dict.fromkeys(f"{name.rstrip('/')}/" for folder in folders if folder for name in _both(folder)))


def _both(path: str) -> tuple[str, ...]:
    """Return a path as it is written, which is how the interpreter names files, and with symbolic links resolved."""
    return _resolved(str(Path(path).absolute()))


@functools.cache
def _resolved(path: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((path, str(Path(path).resolve()))))


@functools.cache
def _interpreter_paths() -> dict[str, str]:
    return sysconfig.get_paths()


def _program_paths(package_folders: tuple[str, ...]) -> Iterator[str]:
    """Return the file of the program and the folder of its package, as far as it has one."""
    main = sys.modules.get("__main__")
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    name = getattr(spec, "name", "") or ""
    if sys.argv[:1] == ["-c"]:  # python -c, or memtrace record -c
        yield "<string>"
        return
    if file is None:
        yield "<stdin>"
        return
    if name.partition(".")[0] == "memtrace" or Path(file).name == "memtrace":
        # `memtrace record` runs the program: its name is the first argument.
        yield from _of_argument(sys.argv[0], package_folders)
    elif name and name not in ("__main__", "pdb"):
        yield from _of_module(name.removesuffix(".__main__"))
    else:
        yield from _of_script(file, package_folders)


def _of_argument(program: str, package_folders: tuple[str, ...]) -> Iterator[str]:
    if Path(program).is_file():
        yield from _of_script(program, package_folders)
    else:
        yield from _of_module(program)


def _of_script(file: str, package_folders: tuple[str, ...]) -> Iterator[str]:
    yield file
    yield from _both(file)
    folder = Path(file).absolute().parent
    if folder == Path(_interpreter_paths()["scripts"]):
        yield from _of_command(Path(file).name)
        return
    while (folder / "__init__.py").exists() and (folder.parent / "__init__.py").exists():
        folder = folder.parent
    # Beside the script there may be other packages, if it lies directly in the folder of all packages.
    if f"{folder}/" not in package_folders:
        yield from _spellings([str(folder)])


def _of_command(name: str) -> Iterator[str]:
    """Return the package whose installed command the program is, such as lm_eval."""
    from importlib.metadata import entry_points

    for entry_point in entry_points(group="console_scripts", name=name):
        yield from _of_module(entry_point.module)


def _of_module(name: str) -> Iterator[str]:
    """Return the folder of the top-level package of a module, or the file of a module outside all packages."""
    top = name.partition(".")[0]
    if top in _NOT_PROGRAMS:
        return
    spec = PathFinder.find_spec(top)
    if spec is None:
        return
    if spec.submodule_search_locations:
        yield from _spellings(spec.submodule_search_locations)
    elif spec.origin is not None:
        yield from _both(spec.origin)
