"""The package that is built has every module and every other file of the sources."""

from __future__ import annotations

import configparser
import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = {"memtrace": ROOT / "memtrace", "memtrace.cli": ROOT / "cli", "memtrace.dashboards": ROOT / "dashboards"}


def read_setup() -> configparser.ConfigParser:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return setup


def test_every_package_is_listed() -> None:
    packages = {
        ".".join((name, *path.parent.relative_to(folder).parts))
        for name, folder in FOLDERS.items()
        for path in folder.rglob("__init__.py")
    }
    assert sorted(packages) == sorted(read_setup()["options"]["packages"].split())


def test_every_other_file_belongs_to_the_data_of_a_package() -> None:
    patterns = {
        package: text.split()
        for package, text in read_setup()["options.package_data"].items()
        if not package.startswith("_")
    }
    packages = read_setup()["options"]["packages"].split()
    for name, folder in FOLDERS.items():
        for path in folder.rglob("*"):
            if not path.is_file() or path.suffix in (".py", ".pyc") or "__pycache__" in path.parts:
                continue
            parts = path.relative_to(folder).parts
            package = next(
                candidate
                for length in range(len(parts), -1, -1)
                if (candidate := ".".join((name, *parts[:length]))) in packages
            )
            inside = "/".join(parts[len(package.split(".")) - len(name.split(".")) :])
            assert any(fnmatch.fnmatchcase(inside, pattern) for pattern in patterns.get(package, [])), path
