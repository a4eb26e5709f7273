"""Which of its pointer arguments a kernel reads and writes, by its source: C++ and Triton, generated or handwritten."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

READS: Final = 1
WRITES: Final = 2

_DEFINITION: Final = re.compile(r"^(\w+) = async_compile\.(\w+)\(", re.MULTILINE)
_CPP_FUNCTION: Final = re.compile(r'extern "C"\s+(?:__declspec\(dllexport\)\s+)?void\s+\w+\(([^)]*)\)')
_CPP_PARAMETER: Final = re.compile(r"(?P<type>[\w:<>\s*]*\*[\w\s*]*?)(?P<name>\w+)\s*$")
_TRITON_TEXT: Final = re.compile(r"'''(.*?)'''", re.DOTALL)
# Functions of these modules are those of the language, whose effects on memory are known.
_LANGUAGE: Final = frozenset(
    {"tl", "triton", "libdevice", "tl_math", "math", "triton_helpers", "language", "core", "extra", "gl", "gluon"}
)
_BUILT_IN: Final = frozenset(
    {"range", "min", "max", "abs", "float", "int", "bool", "len", "print", "str", "tuple", "isinstance"}
)
_LOADS: Final = ("load", "gather")
_STORES: Final = ("store", "scatter")


@dataclass(frozen=True)
class KernelSource:
    """A kernel that generated code defines."""

    language: str
    """The function of ``torch._inductor.async_compile`` that compiles it: ``cpp_pybinding``, ``triton``, ..."""
    accesses: bytes | None
    """READS and WRITES of each pointer argument in the order of the call; None: unknown."""


def parse_kernels(source: str) -> dict[str, KernelSource]:
    """Return the kernels that a generated module defines, by the name of the global variable that holds them."""
    definitions = list(_DEFINITION.finditer(source))
    ends = [definition.start() for definition in definitions[1:]] + [len(source)]
    kernels = {}
    for definition, end in zip(definitions, ends, strict=True):
        text, language = source[definition.start() : end], definition[2]
        accesses = None
        if language.startswith("cpp"):
            accesses = cpp_accesses(text)
        elif language == "triton" and (quoted := _TRITON_TEXT.search(text)) is not None:
            accesses = triton_accesses(quoted[1])
        kernels[definition[1]] = KernelSource(language, accesses)
    return kernels


def cpp_accesses(text: str) -> bytes | None:
    """Return the accesses of the pointer parameters of a C++ kernel; None where its definition is not recognised.

    What a kernel reads is const. ``in_out_ptr`` is what Inductor calls an argument that is updated in place.
    """
    functions = list(_CPP_FUNCTION.finditer(text))
    if not functions:
        return None
    accesses = []
    for parameter in functions[-1][1].split(","):
        match = _CPP_PARAMETER.search(parameter.replace("__restrict__", "").strip())
        if match is None:
            continue  # a size
        name = match["name"]
        is_updated = name.startswith("in_out_ptr") or re.search(rf"\batomic_add(?:_vec\w*)?\b[^;]*\b{name}\b", text)
        accesses.append(READS if "const" in match["type"].split() else WRITES | (READS if is_updated else 0))
    return bytes(accesses)


def triton_accesses(source: str) -> bytes | None:
    """Return the accesses of the pointer parameters of a Triton kernel; None where its source cannot be analysed.

    ``triton_meta`` in the source of a generated kernel tells pointers from numbers. In a handwritten kernel a parameter
    that is not accessed counts as a number.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    if not functions:
        return None
    by_parameter = parameter_accesses(functions[-1])
    signature = _signature(tree)
    if signature is None:
        return bytes(access for access in by_parameter.values() if access)
    return bytes(by_parameter.get(name, 0) for name, kind in signature.items() if kind.startswith("*"))


def _signature(tree: ast.Module) -> dict[str, str] | None:
    """The types of the parameters, as ``triton_meta`` in the decorator of a generated kernel lists them."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Dict):
            continue
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == "signature" and isinstance(value, ast.Dict):
                try:
                    entries = ast.literal_eval(value)
                except ValueError:
                    return None
                return {str(name): str(kind) for name, kind in entries.items()}
    return None


def parameter_accesses(function: ast.FunctionDef) -> dict[str, int]:
    """Return READS and WRITES of each parameter of a Triton kernel.

    Pointers are followed through assignments and pointer arithmetic. A pointer that the kernel passes to another
    function counts as read and written.
    """
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    flow = _PointerFlow(names)
    while flow.assign(function):  # until nothing changes: a loop can use what it assigns further down
        pass
    for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
        flow.add_accesses(call)
    return flow.accesses


class _PointerFlow:
    """The parameters that each variable of a kernel can point to."""

    def __init__(self, parameters: list[str]) -> None:
        self.accesses = dict.fromkeys(parameters, 0)
        self._origins: dict[str, set[str]] = {name: {name} for name in parameters}

    def assign(self, function: ast.FunctionDef) -> bool:
        """Follow all assignments once; return whether that changed anything."""
        before = sum(map(len, self._origins.values()))
        for node in ast.walk(function):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._add(target, node.value)
            elif isinstance(node, ast.AugAssign | ast.NamedExpr) or (isinstance(node, ast.AnnAssign) and node.value):
                self._add(node.target, node.value)
            elif isinstance(node, ast.For):
                self._add(node.target, node.iter)
        return sum(map(len, self._origins.values())) > before

    def _add(self, target: ast.expr, value: ast.expr | None) -> None:
        origins = self._origins_of(value)
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                self._origins.setdefault(node.id, set()).update(origins)

    def _origins_of(self, value: ast.AST | None) -> set[str]:
        if value is None:
            return set()
        if isinstance(value, ast.Name):
            return self._origins.get(value.id, set())
        if isinstance(value, ast.Call) and _last_name(value.func).startswith((*_LOADS, "atomic_")):
            return set()  # a value and not a pointer
        return set().union(*(self._origins_of(child) for child in ast.iter_child_nodes(value)))

    def add_accesses(self, call: ast.Call) -> None:
        """Take note of what a call reads and writes."""
        name, function = _last_name(call.func), call.func
        is_method = isinstance(function, ast.Attribute) and _first_name(function) not in _LANGUAGE
        pointer = function.value if isinstance(function, ast.Attribute) and is_method else _first_argument(call)
        if name.startswith("atomic_"):
            self._mark(pointer, READS | WRITES)
        elif name.startswith(_LOADS):
            self._mark(pointer, READS)
        elif name.startswith(_STORES):
            self._mark(pointer, WRITES)
        elif isinstance(function, ast.Name) and name not in _BUILT_IN:
            for argument in _all_arguments(call):
                self._mark(argument, READS | WRITES)

    def _mark(self, pointer: ast.AST | None, access: int) -> None:
        for parameter in self._origins_of(pointer):
            self.accesses[parameter] |= access


def _last_name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _first_name(function: ast.expr) -> str:
    while isinstance(function, ast.Attribute):
        function = function.value
    return function.id if isinstance(function, ast.Name) else ""


def _first_argument(call: ast.Call) -> ast.expr | None:
    return next(_all_arguments(call), None)


def _all_arguments(call: ast.Call) -> Iterator[ast.expr]:
    yield from call.args
    yield from (keyword.value for keyword in call.keywords)
