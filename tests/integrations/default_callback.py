"""pytest plugin that gives memtrace's callback to every Trainer, so that a framework's own tests run while it records.

The tests of Lightning and Transformers are not in their wheels. In a checkout near the installed version, with the folder
of this file in PYTHONPATH:

    cd pytorch-lightning/tests && python -m pytest -p default_callback --default-callback memtrace tests_pytorch/callbacks
    cd transformers && python -m pytest -p default_callback --default-callback memtrace tests/trainer/test_trainer_callback.py

Compare with ``--default-callback plain``, which adds a callback that does nothing: a test that counts callbacks fails with
either. The end of the output has the numbers of recordings and of callbacks that gave up.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, Final

import pytest

LIGHTNING_PACKAGES: Final = ("lightning.pytorch", "pytorch_lightning")
FOLDER: Final = Path(tempfile.mkdtemp(prefix="memtrace-frameworks-"))
_numbers: Final = count()
_counts: Final = Counter[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that says which callback every Trainer gets."""
    parser.addoption("--default-callback", choices=("memtrace", "plain"), default="memtrace")


def pytest_configure(config: pytest.Config) -> None:
    """Add the callback to each framework that is installed."""
    is_plain = config.getoption("default_callback") == "plain"
    for package in LIGHTNING_PACKAGES:
        if find_spec(package.partition(".")[0]) is not None:
            _add_to_lightning(package, is_plain)
    if find_spec("transformers") is not None:
        _add_to_transformers(is_plain)
    _count_recordings()


def _new_path() -> Path:
    return FOLDER / str(next(_numbers)) / "run.memtrace"


def _add_to_lightning(package: str, is_plain: bool) -> None:
    """Add a callback to each Trainer of a package, as a plugin with Lightning's entry point for callbacks would."""
    connector = import_module(f"{package}.trainer.connectors.callback_connector")
    load_others = connector._load_external_callbacks

    def load(group: str) -> list[Any]:
        if is_plain:
            return [*load_others(group), import_module(package).Callback()]
        integration = import_module("memtrace.integrations.lightning")
        return [*load_others(group), integration.MemtraceCallback(_new_path())]

    connector._load_external_callbacks = load


def _add_to_transformers(is_plain: bool) -> None:
    """Add a callback to the default callbacks of Trainers."""
    base: Any = import_module("memtrace.integrations.transformers").MemtraceCallback

    class MemtraceCallback(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(_new_path())

    plain = import_module("transformers").TrainerCallback
    import_module("transformers.trainer").DEFAULT_CALLBACKS.append(plain if is_plain else MemtraceCallback)


def _count_recordings() -> None:
    adapter: Any = import_module("memtrace.integrations.adapter").RecorderAdapter
    start, disable = adapter.start, adapter.disable

    def counted_start(self: Any, **objects: Any) -> None:
        start(self, **objects)
        _counts["recordings"] += self.is_recording

    def counted_disable(self: Any, error: Exception) -> None:
        _counts["callbacks that gave up"] += not self.is_disabled
        disable(self, error)

    adapter.start, adapter.disable = counted_start, counted_disable


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Write how many recordings the tests made."""
    names = ("recordings", "callbacks that gave up")
    terminalreporter.write_line("memtrace: " + ", ".join(f"{_counts[name]} {name}" for name in names))


def pytest_unconfigure() -> None:
    """Delete the traces."""
    shutil.rmtree(FOLDER, ignore_errors=True)
