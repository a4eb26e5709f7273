"""Records what code that torch.compile generated reads and writes: its kernels, with the lines they come from.

Generated code calls its kernels through global variables of its module. While a recording runs, these hold observed
kernels in their place (``Observer.observed_kernel``); the code itself, its guards and what Dynamo has cached stay the
same. Operators that the code calls by the dispatcher are seen there. Code without such variables (``cpp_wrapper``,
AOTInductor, the replay of a CUDA graph) is opaque: it counts as one operator that reads its arguments and writes its
results, and the recording counts their bytes.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

import torch

from memtrace.format.schema import NAME_KINDS, PHASES
from memtrace.recording.generated_lines import LineSite, TracedGraph, find_modules, line_sites, read_graph
from memtrace.recording.imports import after_import
from memtrace.recording.instrument import InstrumentError, instrument
from memtrace.recording.kernel_sources import READS, WRITES, KernelSource, parse_kernels
from memtrace.recording.labels import Labeller
from memtrace.recording.observers import Observer
from memtrace.recording.plain_access import tensors_in
from memtrace.recording.qualified_names import with_qualified_name
from memtrace.recording.triton_launches import watch_triton_launches
from memtrace.recording.untraced import never_compiled

_OPERATOR: Final = NAME_KINDS.index("operator")
_FRAME: Final = NAME_KINDS.index("frame")
_FORWARD, _OPTIMIZER, _OTHER = (PHASES.index(name) for name in ("forward", "optimizer", "other"))
_FORWARD_CODE: Final = re.compile(r"^# AOT ID: \['\w*_forward'\]", re.MULTILINE)
_LAUNCHED_BY_METHOD: Final = ("triton", "multi_kernel", "pallas", "cutedsl", "nv_universal_gemm")
_MAX_ARGUMENTS: Final = 4096
_ALL_READ: Final = bytes([READS]) * _MAX_ARGUMENTS
_ALL_WRITTEN: Final = bytes([WRITES]) * _MAX_ARGUMENTS


class CompiledRegions:
    """Watches the generated code of the process during one recording.

    Args:
        observer: records the kernels.
        labeller: knows the modules, and reports errors.

    Attributes:
        opaque_bytes: bytes of the arguments and results of the code whose kernels were not observed; None: unknown.
    """

    def __init__(self, observer: Observer, labeller: Labeller) -> None:
        self._observer = observer
        self._labeller = labeller
        self._undo = ExitStack()
        self._has_reported = False
        self._observed: dict[int, ModuleType] = {}  # by id
        self._lock = threading.Lock()
        self.opaque_bytes: int | None = 0

    def watch(self, undo: ExitStack) -> None:
        """Observe the generated code that exists and all that is generated or loaded until ``undo`` is closed."""
        self._undo = undo
        watch_triton_launches(self._observer, self._report, undo)
        after_import("torch._inductor.codecache", self._guarded(self._watch_code_cache), undo)
        after_import("torch._inductor.cudagraph_trees", self._guarded(self._watch_cuda_graphs), undo)
        after_import("torch._inductor.package.package", self._guarded(self._watch_packages), undo)

    def _guarded(self, work: Callable[[Any], None]) -> Callable[[Any], None]:
        """``work``, after whose failure the program goes on: what it was to watch is opaque then."""

        @never_compiled
        def guarded(argument: Any) -> None:
            try:
                work(argument)
            except Exception as error:
                self._report(f"{type(error).__name__}: {error}")

        return guarded

    def _report(self, reason: str) -> None:
        self.opaque_bytes = None
        if not self._has_reported:
            self._has_reported = True
            self._labeller.errors.report(f"reads and writes of some compiled code are missing: {reason}")

    # Code that Inductor generated.

    def _watch_code_cache(self, codecache: Any) -> None:
        cache = codecache.PyCodeCache
        original = cache.__dict__["load_by_key_path"]
        observe = self._guarded(self._observe_module)

        def load_by_key_path(cls: Any, *args: Any, **kwargs: Any) -> Any:
            module = original.__func__(cls, *args, **kwargs)
            observe(module)
            return module

        self._observer.hide_frames_of(load_by_key_path.__code__)
        loading = classmethod(never_compiled(load_by_key_path))
        cache.load_by_key_path = loading

        def restore() -> None:
            if cache.__dict__.get("load_by_key_path") is loading:
                cache.load_by_key_path = original

        self._undo.callback(restore)
        for module in list(cache.modules):
            observe(module)

    def _observe_module(self, module: ModuleType) -> None:
        """Observe a module of generated code, once."""
        names = vars(module)
        with self._lock:
            if "call" not in names or id(module) in self._observed:
                return
            self._observed[id(module)] = module
        if "inductor_entry" in names:
            self._watch_opaque(names["call"], ("args",), f"inductor::{Path(str(module.__file__)).stem}")
            return
        source = Path(str(module.__file__)).read_text()
        kernels = parse_kernels(source)
        for name, kernel in kernels.items():
            self._observe_kernel(names, name, kernel)
        self._observe_lines(module, source, kernels)

    def _observe_kernel(self, names: dict[str, Any], name: str, source: KernelSource) -> None:
        kernel = names.get(name)
        if kernel is None:
            return
        if source.accesses is None:
            self._labeller.errors.note(
                f"arguments of compiled kernels of kind {source.language} count as read and written"
            )
        method = "run" if source.language in _LAUNCHED_BY_METHOD else None
        name_id = self._observer.name_id(_OPERATOR, f"inductor::{name}")
        observed = self._observer.observed_kernel(kernel, method, name_id, source.accesses or b"")
        names[name] = observed
        self._undo.callback(partial(_put_back, names, name, observed, kernel))

    def _observe_lines(self, module: ModuleType, source: str, kernels: dict[str, KernelSource]) -> None:
        from torch._inductor.codecache import PyCodeCache  # loaded, because the module is

        linemap: Sequence[Sequence[Any]] = PyCodeCache.linemaps.get(str(module.__file__), ())
        sites = line_sites(source, linemap, kernels)
        modules = find_modules(sites, self._traced_graphs())
        is_forward = _FORWARD_CODE.search(source) is not None
        for code in _codes_of_file(vars(module), str(module.__file__)):
            rows = [
                self._site_row(site, name, code, is_forward=is_forward)
                for site, name in zip(sites, modules, strict=True)
            ]
            self._observer.watch_region(code, rows)

    def _site_row(
        self, site: LineSite, module: int, code: CodeType, *, is_forward: bool
    ) -> tuple[int, int, int, int, list[int]]:
        phase = _OPTIMIZER if site.is_optimizer else _FORWARD if is_forward else _OTHER
        nodes = f" [{', '.join(site.nodes)}]" if site.nodes else ""
        generated = f"{code.co_filename}\t{site.first_line}\t{code.co_name}{nodes}"
        frames = [self._observer.name_id(_FRAME, with_qualified_name(frame).text) for frame in site.frames]
        return site.first_line, module, phase, self._observer.name_id(_FRAME, generated), frames

    def _traced_graphs(self) -> list[TracedGraph]:
        # torch.compile creates graphs while it traces, when the hooks for new modules are off.
        [graphs] = self._observer.live_instances((torch.fx.GraphModule,))
        return [read_graph(graph.graph.nodes, self._labeller) for graph in graphs]

    # Opaque code.

    def _watch_cuda_graphs(self, trees: Any) -> None:
        self._watch_opaque(trees.CUDAGraphNode.run, ("new_inputs",), "inductor::cuda_graph")

    def _watch_packages(self, package: Any) -> None:
        self._watch_opaque(package.AOTICompiledModel.__call__, ("args", "kwargs"), "inductor::aot_package")

    def _watch_opaque(self, call: Callable[..., Any], arguments: Sequence[str], name: str) -> None:
        """Record each call of ``call`` as an operator that reads its arguments and one that writes its results."""
        name_id = self._observer.name_id(_OPERATOR, name)
        read = self._observer.observed_kernel(_do_nothing, None, name_id, _ALL_READ)
        write = self._observer.observed_kernel(_do_nothing, None, name_id, _ALL_WRITTEN)

        def enter(*values: object) -> int:
            guarded_read(values)
            return -1

        def result(_: int, value: object) -> None:
            guarded_write(value)

        guarded_read = self._guarded(lambda values: self._touch(read, values))
        guarded_write = self._guarded(lambda value: self._touch(write, value))
        self._observer.hide_frames_of(enter.__code__)
        self._observer.hide_frames_of(result.__code__)
        try:
            instrument(call, self._undo, arguments=tuple(arguments), enter=enter, result=result)
        except InstrumentError as error:
            self._report(str(error))

    def _touch(self, touch: Callable[..., Any], values: object) -> None:
        tensors = [tensor for tensor in tensors_in(values) if type(tensor) in (torch.Tensor, torch.nn.Parameter)]
        touch(*tensors[:_MAX_ARGUMENTS])
        with torch._C.DisableTorchFunction():
            storages = {storage.data_ptr(): storage.nbytes() for storage in (t.untyped_storage() for t in tensors)}
        with self._lock:
            if self.opaque_bytes is not None:
                self.opaque_bytes += sum(storages.values())


def _do_nothing(*_: object) -> None:
    pass


def _put_back(names: dict[str, Any], name: str, observed: object, kernel: object) -> None:
    if names.get(name) is observed:
        names[name] = kernel


def _codes_of_file(names: dict[str, Any], file: str) -> Iterable[CodeType]:
    """The code of the functions and methods that a generated module defines."""
    for value in list(names.values()):
        members = list(vars(value).values()) if isinstance(value, type) else [value]
        for member in members:
            if isinstance(member, FunctionType) and member.__code__.co_filename == file:
                yield member.__code__
