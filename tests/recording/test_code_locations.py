"""Where the program lies: its file and the folder of its package belong to the user, even among installed packages."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import torch

from memtrace.code_owner import CodeOwner, Owner
from memtrace.frames import Frame
from memtrace.recording.code_locations import find_code_locations


def run_as(monkeypatch: pytest.MonkeyPatch, *, file: object, name: str | None = None, argv: object = ("x",)) -> None:
    """Make this process look as if it ran a program."""
    main = ModuleType("__main__")
    if file is not None:
        main.__file__ = file  # type: ignore[assignment]
    main.__spec__ = None if name is None else ModuleSpec(name, None)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", argv if argv is None else list(argv))  # type: ignore[call-overload]


def owner_of(file: str | Path) -> Owner:
    return CodeOwner(find_code_locations()).owner(Frame(str(file), 1, "f"))


@pytest.fixture
def site_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages with the package mytrain and the module single."""
    folder = tmp_path / "site-packages"
    (folder / "mytrain" / "deep").mkdir(parents=True)
    for name in ("mytrain/__init__.py", "mytrain/deep/__init__.py", "mytrain/deep/run.py", "single.py", "other.py"):
        (folder / name).touch()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_a_program_in_a_folder_called_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "train.py").touch()
    run_as(monkeypatch, file=str(tmp_path / "torch" / "train.py"))
    assert owner_of(tmp_path / "torch" / "train.py") is owner_of(tmp_path / "torch" / "nn" / "net.py") is Owner.USER
    assert owner_of(torch.nn.Module.__init__.__code__.co_filename) is Owner.INTERNAL
    assert owner_of(pytest.__file__) is Owner.PACKAGE


@pytest.mark.parametrize("how", ["-m", "script", "memtrace record -m", "memtrace record"])
def test_a_program_among_installed_packages(how: str, site_packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = site_packages / "mytrain" / "deep" / "run.py"
    name = {"-m": "mytrain.deep.run", "memtrace record -m": "memtrace.cli.__main__"}.get(how)
    file = script if "memtrace" not in how else Path("/venv/bin/memtrace")
    argv = {"memtrace record -m": ["mytrain.deep.run"], "memtrace record": [str(script)]}.get(how, ["x"])
    run_as(monkeypatch, file=str(file), name=name, argv=argv)
    assert owner_of(script) is owner_of(site_packages / "mytrain" / "model.py") is Owner.USER
    assert owner_of(site_packages / "other.py") is Owner.PACKAGE


def test_a_module_beside_installed_packages_is_alone_the_users(
    site_packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_as(monkeypatch, file=str(site_packages / "single.py"), name="single")
    assert owner_of(site_packages / "single.py") is Owner.USER
    assert owner_of(site_packages / "other.py") is owner_of(site_packages / "mytrain" / "x.py") is Owner.PACKAGE
    run_as(monkeypatch, file=str(site_packages / "single.py"))
    assert owner_of(site_packages / "single.py") is Owner.USER
    assert owner_of(site_packages / "other.py") is Owner.PACKAGE


def test_code_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    run_as(monkeypatch, file=None, argv=["-c"])
    assert owner_of("<string>") is Owner.USER


@pytest.mark.parametrize(("file", "argv"), [(object(), ["x"]), ("\0", ["x"]), ("/venv/bin/memtrace", None)])
def test_a_program_with_an_odd_main_module_is_recorded_without_its_place(
    file: object, argv: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_as(monkeypatch, file=file, argv=argv)
    locations = find_code_locations()
    assert locations.package_folders and locations.internal_folders
