"""Code that torch.compile generated, for the dispatch observer: its kernels and the lines it comes from."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

from memtrace.recording.observers.dispatch_operators import ArgumentAccess, OperatorInfo
from memtrace.recording.plain_access import is_tensor

_READS, _WRITES = 1, 2
_BOTH: Final = ArgumentAccess(reads=True, writes=True)
_MAX_FRAMES_ABOVE_REGION: Final = 16
"""Frames between generated code and the observer: the dispatch mode, ``torch.ops`` and the observer itself."""


class RegionSite(NamedTuple):
    """What some lines of generated code come from; see ``Observer.watch_region``."""

    first_line: int
    module: int
    phase: int
    generated_frame: int
    frames: list[int]


class Regions:
    """The generated code of the process."""

    def __init__(self) -> None:
        self._sites: dict[CodeType, tuple[list[int], list[RegionSite]]] = {}

    def add(self, code: CodeType, sites: list[tuple[int, int, int, int, list[int]]]) -> None:
        """Take note of a function of generated code."""
        self._sites[code] = [site[0] for site in sites], [RegionSite(*site) for site in sites]

    def find(self, code: CodeType, line: int) -> RegionSite | None:
        """The site of a line; None if ``code`` is not generated code."""
        known = self._sites.get(code)
        if known is None:
            return None
        number = bisect_right(known[0], line)
        return known[1][number - 1] if number else None

    def running(self) -> RegionSite | None:
        """The site of the generated code that made the call which is being recorded; None if none did."""
        if not self._sites:
            return None
        frame: FrameType | None = sys._getframe(1)
        for _ in range(_MAX_FRAMES_ABOVE_REGION):
            if frame is None:
                break
            if (site := self.find(frame.f_code, frame.f_lineno)) is not None:
                return site
            frame = frame.f_back
        return None


class ObservedKernel:
    """A kernel in generated code; see ``Observer.observed_kernel``.

    Args:
        call: records a call: it receives this object, the function that launches the kernel, and the arguments.
        kernel: the kernel.
        method: name of the method that launches it; None if it is called itself.
        name: name id of the operator.
        accesses: of the tensor arguments.
    """

    def __init__(
        self,
        call: Callable[[ObservedKernel, Callable[..., Any], Any, Any], Any],
        kernel: Callable[..., Any],
        method: str | None,
        name: int,
        accesses: bytes,
    ) -> None:
        self._call = call
        self._kernel = kernel
        self._method = method
        self._accesses = [ArgumentAccess(bool(access & _READS), bool(access & _WRITES)) for access in accesses]
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Launch the kernel and record what it reads and writes."""
        launch = self._kernel if self._method is None else getattr(self._kernel, self._method)
        return self._call(self, launch, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return self if name == self._method else getattr(self._kernel, name)

    def info(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OperatorInfo:
        """The accesses of a call with these arguments."""
        keys = [key for key, value in _with_keys(args, kwargs) if is_tensor(value)]
        unknown = [_BOTH] * max(0, len(keys) - len(self._accesses))
        accesses = dict(zip(keys, [*self._accesses, *unknown], strict=False))
        return OperatorInfo("", accesses, writes_result=False, is_recorded=True)


def _with_keys(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[int | str, Any]]:
    yield from enumerate(args)
    yield from kwargs.items()
