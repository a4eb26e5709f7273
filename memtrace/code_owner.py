"""Whose code a stack frame is: the user's, that of an installed package, or PyTorch's.

A recording knows where the files of its process lie (``Manifest.code``). For files of other tools, the paths themselves
decide: they are compared with where PyTorch, Python's library and installed packages lie on every system, and PyTorch
is recognised by files that only it has.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from pathlib import Path
from typing import Final

from memtrace.format.manifest import CodeLocations
from memtrace.frames import AUTOGRAD_NODE, DISPATCHED_OPERATOR, Frame, normalize_path

SITE_SEPARATOR: Final = " \N{RIGHTWARDS ARROW} "
"""Stands between the user's line of an allocation site and the innermost line of an installed package."""
_SITE_PATH_PARTS: Final = 2
_NATIVE_SUFFIXES: Final = (".cpp", ".cc", ".c", ".cxx", ".h", ".hpp", ".cu", ".cuh", ".so", ".o")
_PACKAGE_FOLDERS: Final = ("/site-packages/", "/dist-packages/")
# Source that torch.compile, torch.fx, PyTorch Geometric and dataclasses generate. "<ipython-input-..." and "<stdin>"
# are typed by the user.
_GENERATED: Final = re.compile(
    r"^<(?!ipython-input|stdin|ipykernel)|/torchinductor_[^/]+/|/torch_compile_debug/|_pyg/|/torch_geometric\.[\w.]+_\w+\.py$|"
    r"^(torch_compiled_fx|fx_generated)_|/triton/cache/|/\.triton/"
)
_STANDARD_LIBRARY: Final = re.compile(r"/lib(64)?/python3(\.\d+t?)?/")
_WINDOWS_LIBRARY: Final = re.compile(r"^[a-z]:/.*/lib/(\w+)(\.py$|/)", re.IGNORECASE)
# Files of PyTorch that are on almost every stack: what precedes them is where PyTorch is installed.
_TORCH_FILES: Final = re.compile(
    r"^(?P<root>(?:.*/)?torch/)(?:nn/modules/\w+|optim/(?:optimizer|adam\w*|sgd)|autograd/(?:__init__|graph|function)|_tensor|"
    r"nn/functional|utils/_contextlib|_dynamo/eval_frame|_compile)\.py$"
)
_TORCH_PARTS: Final = re.compile(
    r"(?:^|/)torch/(?:_\w+|__init__|nn|optim|autograd|utils|cuda|distributed|fx|jit|func|amp|ao|backends|library|overrides|"
    r"storage|serialization|random|profiler|sparse|special|linalg|fft|distributions|quantization|export|onnx|package|csrc|"
    r"multiprocessing|masked|nested|testing|hub|signal|mps|xpu|cpu|compiler|accelerator|functional|include)(?:/|\.py$|\.\w+$)"
)


class Owner(Enum):
    """Whose code a frame is."""

    USER = auto()
    PACKAGE = auto()
    """An installed package other than PyTorch, such as transformers."""
    INTERNAL = auto()
    """PyTorch, Python's library, memtrace, C++ code, generated code, or unknown."""


class CodeOwner:
    """Tells whose code the frames of a trace are.

    Args:
        locations: where the files of the recorded process lie; None: unknown.
        files: the files of all frames of the trace, from which PyTorch's folder is recognised where ``locations`` is
            None.
    """

    def __init__(self, locations: CodeLocations | None = None, files: Iterable[str] = ()) -> None:
        self._locations = locations
        self._owner_by_file: dict[str, Owner] = {}
        self._folders: list[tuple[str, Owner]] = [(folder, Owner.INTERNAL) for folder in _OWN_FOLDERS]
        self._torch_roots: tuple[str, ...] = ()
        if locations is None:
            matches = (_TORCH_FILES.match(normalize_path(file)) for file in files)
            self._torch_roots = tuple(sorted({match["root"] for match in matches if match}))
            return
        for folders, owner in (
            (locations.package_folders, Owner.PACKAGE),
            (locations.internal_folders, Owner.INTERNAL),
            (locations.user_paths, Owner.USER),
        ):
            self._folders += [(normalize_path(folder), owner) for folder in folders]

    def owner(self, frame: Frame) -> Owner:
        """Return whose code a frame is."""
        if frame.file not in self._owner_by_file:
            self._owner_by_file[frame.file] = self._find_owner(normalize_path(frame.file))
        return self._owner_by_file[frame.file]

    def is_library(self, frame: Frame) -> bool:
        """Return whether a frame is not the user's code."""
        return self.owner(frame) is not Owner.USER

    def innermost_user_frame(self, frames: Sequence[Frame]) -> Frame | None:
        """Return the innermost frame of the user's code, the innermost of all if there is none, None without frames.

        Args:
            frames: a call stack, innermost frame first.
        """
        return next((frame for frame in frames if not self.is_library(frame)), frames[0] if frames else None)

    def format_site(self, frames: Sequence[Frame]) -> str | None:
        """Format the place in the program that a call stack stands for, such as ``train.py:12 forward``.

        The place is the innermost line of the user's code. Where an installed package lies between it and PyTorch, the
        innermost line of that package follows: ``train.py:12 main → timm/models/resnet.py:540 forward``. Autograd's
        threads run no Python; their stacks are named by the node of the autograd graph (``MmBackward0 (autograd)``),
        otherwise by the outermost operator (``aten::mm (torch)``).

        Args:
            frames: a call stack, innermost frame first.

        Returns:
            The place, or None for an empty stack.
        """
        owners = [self.owner(frame) for frame in frames]
        package = next((n for n, owner in enumerate(owners) if owner is not Owner.INTERNAL), None)
        if package is None:
            return _format_internal(frames)
        if owners[package] is Owner.USER:
            return _format_frame(frames[package])
        library = self._format_package_frame(frames[package])
        user = next((n for n, owner in enumerate(owners) if owner is Owner.USER), None)
        return library if user is None else f"{_format_frame(frames[user])}{SITE_SEPARATOR}{library}"

    def _format_package_frame(self, frame: Frame) -> str:
        file = normalize_path(frame.file)
        folders = [folder for folder, owner in self._folders if owner is Owner.PACKAGE and file.startswith(folder)]
        rest = file[len(max(folders, key=len, default="")) :]
        for part in _PACKAGE_FOLDERS:
            rest = rest.rpartition(part)[2]
        return f"{rest}:{frame.line} {frame.function}"

    def _find_owner(self, file: str) -> Owner:
        if self._is_script(file):
            return Owner.USER
        if file in ("", "??") or _GENERATED.search(file) or file.endswith(_NATIVE_SUFFIXES):
            return Owner.INTERNAL
        known = [(len(folder), owner) for folder, owner in self._folders if file.startswith(folder)]
        if known:
            longest = max(length for length, _ in known)
            owners = [owner for length, owner in known if length == longest]
            return Owner.USER if Owner.USER in owners else owners[-1]
        if self._locations is None and self._is_internal_path(file):
            return Owner.INTERNAL
        return Owner.PACKAGE if any(part in file for part in _PACKAGE_FOLDERS) else Owner.USER

    def _is_script(self, file: str) -> bool:
        return self._locations is not None and file in self._locations.user_paths

    def _is_internal_path(self, file: str) -> bool:
        """Return whether a path is one of PyTorch or of Python's library; it may come from another machine."""
        if self._torch_roots:
            if file.startswith(self._torch_roots):
                return True
        elif _TORCH_PARTS.search(file):
            return True
        windows = _WINDOWS_LIBRARY.match(file)
        if windows is not None:
            return windows[1] in sys.stdlib_module_names
        return bool(_STANDARD_LIBRARY.search(file)) and not any(part in file for part in _PACKAGE_FOLDERS)


def as_prefix(folder: str | Path) -> str:
    """Return a folder as the beginning of the paths in it."""
    return normalize_path(str(folder)).rstrip("/") + "/"


# In an editable install the packages memtrace.cli and memtrace.dashboards are next to the package memtrace.
_OWN_FOLDERS: Final = (
    as_prefix(sysconfig.get_paths()["stdlib"]),
    as_prefix(Path(__file__).parent),
    as_prefix(Path(__file__).parents[1] / "cli"),
    as_prefix(Path(__file__).parents[1] / "dashboards"),
)


def _format_internal(frames: Sequence[Frame]) -> str | None:
    """Format a stack without any frame of the user or of a package."""
    if not frames:
        return None
    node = _first_match(AUTOGRAD_NODE, frames)
    if node is not None:
        return f"{node} (autograd)"
    operator = _first_match(DISPATCHED_OPERATOR, reversed(frames))
    return f"aten::{operator} (torch)" if operator is not None else _format_frame(frames[0])


def _format_frame(frame: Frame) -> str:
    parts = Path(normalize_path(frame.file)).parts
    return f"{'/'.join(parts[-_SITE_PATH_PARTS:])}:{frame.line} {frame.function}"


def _first_match(pattern: re.Pattern[str], frames: Iterable[Frame]) -> str | None:
    return next((match[1] for frame in frames if (match := pattern.match(frame.function))), None)
