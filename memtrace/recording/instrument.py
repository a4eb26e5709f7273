"""Adds calls to Python functions of torch while the function objects, their frames and their tracebacks stay the same.

A wrapper in place of ``Module.__call__`` is visible to programs: to those that compare or replace it, to torch.compile,
to ``warnings.warn(stacklevel=...)`` and at the recursion limit. Therefore the code of the function is exchanged for a
copy with the calls compiled in, and put back when the recording ends.
"""

from __future__ import annotations
import __future__

import ast
import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import CodeType, FunctionType, MethodType
from typing import Any, Final, cast

from memtrace.recording.untraced import never_compiled

_TOKEN: Final = "_memtrace_token"
_RESULT: Final = "_memtrace_result"


class InstrumentError(Exception):
    """The code of a function cannot be exchanged. The message says why."""


def instrument(
    function: Callable[..., Any],
    undo: ExitStack,
    *,
    arguments: Sequence[str] = (),
    enter: Callable[..., Any] | None = None,
    result: Callable[..., Any] | None = None,
    result_arguments: Sequence[str] = (),
    leave: Callable[..., Any] | None = None,
) -> None:
    """Exchange the code of ``function`` until ``undo`` is closed.

    While torch.compile or torch.export traces the function, it makes none of the calls. torch.compile never compiles
    what is called.

    Args:
        function: a Python function in whose module ``torch`` is a global name.
        undo: puts the code back.
        arguments: names of the function's parameters that ``enter`` receives.
        enter: called before the body; its result is the token.
        result: called with the token, ``result_arguments`` and the result of the function.
        result_arguments: names of the function's parameters that ``result`` receives.
        leave: called with the token after the body, also after an exception.

    Raises:
        InstrumentError: the source of the function is missing or not as expected.
    """
    target = cast(FunctionType, function)
    original = target.__code__
    calls = {role: call for role, call in (("enter", enter), ("result", result), ("leave", leave)) if call is not None}
    for call in calls.values():
        if isinstance(call, FunctionType | MethodType):  # and not a function written in C
            never_compiled(call)
    names = {role: f"_memtrace_{original.co_name.strip('_')}_{role}" for role in calls}
    code = _compile(target, names, tuple(arguments), tuple(result_arguments))
    target.__globals__.update({names[role]: call for role, call in calls.items()})
    target.__code__ = code

    def restore() -> None:
        if target.__code__ is code:
            target.__code__ = original
        # A call that is running, on another thread or further up the stack, still looks the names up.
        target.__globals__.update(dict.fromkeys(names.values(), _do_nothing))

    undo.callback(restore)


@never_compiled
def _do_nothing(*_: Any) -> int:
    return -1


_compiled: dict[tuple[CodeType, tuple[str, ...]], CodeType] = {}


def _compile(
    function: FunctionType, names: dict[str, str], arguments: tuple[str, ...], result_arguments: tuple[str, ...]
) -> CodeType:
    """The code of ``function`` with calls of the global ``names``; compiled once."""
    original = function.__code__
    key = (original, tuple(names))
    if key not in _compiled:
        if "torch" not in function.__globals__:
            raise InstrumentError(f"{function.__module__} does not import torch")
        definition = _definition(original)
        definition.body = _instrumented_body(definition.body, names, arguments, result_arguments)
        _compiled[key] = _compile_definition(definition, original)
    return _compiled[key]


def _definition(original: CodeType) -> ast.FunctionDef:
    """The syntax tree of a function with the lines and columns of its source."""
    try:
        lines, first_line = inspect.getsourcelines(original)
        is_indented = lines[0][:1].isspace()
        tree = ast.parse("".join((["if 1:\n"] if is_indented else []) + lines))
    except (OSError, SyntaxError) as error:
        raise InstrumentError(f"the source of {original.co_name} is missing: {error}") from error
    ast.increment_lineno(tree, first_line - (2 if is_indented else 1))
    outer = tree.body[0]
    definition = outer.body[0] if isinstance(outer, ast.If) else outer
    if not isinstance(definition, ast.FunctionDef) or definition.name != original.co_name:
        raise InstrumentError(f"the source of {original.co_name} does not match its code")
    definition.decorator_list = []
    definition.returns = None
    parameters = definition.args
    parameters.defaults, parameters.kw_defaults = [], [None] * len(parameters.kwonlyargs)
    named = (*parameters.posonlyargs, *parameters.args, *parameters.kwonlyargs, parameters.vararg, parameters.kwarg)
    for parameter in named:
        if parameter is not None:
            parameter.annotation = None
    return definition


def _instrumented_body(
    body: list[ast.stmt], names: dict[str, str], arguments: tuple[str, ...], result_arguments: tuple[str, ...]
) -> list[ast.stmt]:
    enter = f"{names['enter']}({', '.join(arguments)})" if "enter" in names else "-1"
    template = ast.parse(f"if torch.compiler.is_compiling():\n  pass\nelse:\n  {_TOKEN} = {enter}").body[0]
    assert isinstance(template, ast.If)
    traced = copy.deepcopy(body)
    if "result" in names:
        passed_on = ", ".join((_TOKEN, *result_arguments, _RESULT))
        body = _ReportReturns(f"{names['result']}({passed_on})").report(body)
    if "leave" in names:
        guarded = ast.parse(f"try:\n  pass\nfinally:\n  {names['leave']}({_TOKEN})").body[0]
        assert isinstance(guarded, ast.Try)
        _place(guarded, body[0])
        guarded.body = body
        body = [guarded]
    _place(template, traced[0])
    template.body = traced
    template.orelse += body
    return [template]


class _ReportReturns(ast.NodeTransformer):
    """Replaces every ``return value``, and the end of the body, by a call with the value and the return."""

    def __init__(self, call: str) -> None:
        self._call = call

    def report(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """The statements with the calls."""
        end = ast.copy_location(ast.Return(value=None), body[-1])
        statements = [*body] if isinstance(body[-1], ast.Return) else [*body, end]
        module = self.visit(ast.Module(body=statements, type_ignores=[]))
        return cast(ast.Module, module).body

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Functions within the function are left alone."""
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        """Functions within the function are left alone."""
        return node

    def visit_Return(self, node: ast.Return) -> list[ast.stmt]:
        """One return statement."""
        statements = ast.parse(f"{_RESULT} = None\n{self._call}\nreturn {_RESULT}").body
        for statement in statements:
            _place(statement, node)
        assignment = statements[0]
        assert isinstance(assignment, ast.Assign)
        if node.value is not None:
            assignment.value = node.value
        return statements


def _place(tree: ast.AST, where: ast.stmt) -> None:
    """Give all nodes of a generated tree the position of a statement of the source."""
    for node in ast.walk(tree):
        ast.copy_location(node, where)


def _compile_definition(definition: ast.FunctionDef, original: CodeType) -> CodeType:
    """The code of a function that has the free variables of the original, such as ``__class__`` for ``super()``."""
    factory = ast.parse(f"def _factory({', '.join(original.co_freevars)}):\n  pass").body[0]
    assert isinstance(factory, ast.FunctionDef)
    factory.body = [definition]
    module = ast.fix_missing_locations(ast.Module(body=[factory], type_ignores=[]))
    features = (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
    flags = sum(flag for flag in set(features) if flag & original.co_flags)
    code = _function_in(_function_in(compile(module, original.co_filename, "exec", flags, dont_inherit=True)))
    if code.co_freevars != original.co_freevars:
        raise InstrumentError(f"the code of {original.co_name} has other variables when it is compiled again")
    changes: dict[str, Any] = {"co_firstlineno": original.co_firstlineno}
    if sys.version_info >= (3, 11):
        changes["co_qualname"] = original.co_qualname
    return code.replace(**changes)


def _function_in(code: CodeType) -> CodeType:
    def codes() -> Iterator[CodeType]:
        yield from (constant for constant in code.co_consts if isinstance(constant, CodeType))

    return next(codes())
