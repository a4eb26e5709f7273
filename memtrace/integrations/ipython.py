"""IPython and Jupyter: ``%%memtrace`` records a cell and shows what held its peak.

%load_ext memtrace

%%memtrace --trace trace
train(model, loader)
"""

from __future__ import annotations

import ast
import re
import tempfile
import weakref
from pathlib import Path
from typing import Any

from memtrace.analysis.growth import measure_growth
from memtrace.analysis.steps import step_columns
from memtrace.integrations.adapter import RecorderAdapter
from memtrace.integrations.peak_text import added_peak_bytes, describe_peak_holders
from memtrace.trace import Trace, load
from memtrace.units import format_bytes, format_count


def load_ipython_extension(shell: Any) -> None:
    """Add the cell magic ``%%memtrace``; called by ``%load_ext memtrace``."""
    from IPython.core.magic import Magics, cell_magic, magics_class
    from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

    @magics_class
    class MemtraceMagics(Magics):
        @magic_arguments()
        @argument("-o", "--output", help="keep the trace in this folder, such as run.memtrace")
        @argument("-t", "--trace", metavar="NAME", help="assign the trace to this variable")
        @argument("--no-stacks", action="store_true", help="do not record call stacks")
        @argument("--no-accesses", action="store_true", help="do not record reads and writes")
        @argument("-q", "--quiet", action="store_true", help="do not show the summary")
        @cell_magic
        def memtrace(self, line: str, cell: str) -> Any:
            """Record the memory of the cell, and show what held its peak."""
            __tracebackhide__ = True  # in the tracebacks of IPython
            arguments = parse_argstring(self.memtrace, line)
            return _record_cell(self.shell, arguments, cell)

    shell.register_magics(MemtraceMagics)


def _record_cell(shell: Any, arguments: Any, cell: str) -> Any:
    """Run a cell in the namespace of the user, as ``%%time`` does, and return the value of its last expression."""
    __tracebackhide__ = True
    statements, expression = _compile(shell, cell)
    folder = None if arguments.output else tempfile.TemporaryDirectory(prefix="memtrace-")
    path = Path(arguments.output or Path(folder.name if folder else "") / "cell.memtrace")
    adapter = RecorderAdapter(path, stacks=not arguments.no_stacks, accesses=not arguments.no_accesses)
    try:
        adapter.start()
    except Exception as error:
        adapter.disable(error)
    try:
        exec(statements, shell.user_ns)
        value = None if expression is None else eval(expression, shell.user_ns)
    except BaseException as error:
        adapter.end(error)
        _show(adapter, arguments, shell, folder)
        raise
    adapter.end()
    _show(adapter, arguments, shell, folder)
    return value


def _compile(shell: Any, cell: str) -> tuple[Any, Any]:
    """Return the code of a cell, and of its last expression (None without one), with sources for tracebacks."""
    # Lines have the numbers that the notebook shows: IPython drops the line of the magic, and blank lines after it.
    num_dropped = 1 + cell[: len(cell) - len(cell.lstrip())].count("\n")
    source = "\n" * num_dropped + shell.transform_cell(cell)
    name = shell.compile.cache(source, max(_numbers_of_cells(shell).values(), default=0), raw_code=source)
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    shows = last is not None and not source.rstrip().endswith(";")
    if last is not None and not shows:
        tree.body.append(last)
    expression = compile(ast.Expression(last.value), name, "eval") if shows and last is not None else None
    return compile(tree, name, "exec"), expression


def _numbers_of_cells(shell: Any) -> dict[str, int]:
    """Return the number of each cell that has run, by the name of its code; the highest is that of the current cell."""
    return dict(getattr(shell.compile, "_filename_map", {}))


def _show(adapter: RecorderAdapter, arguments: Any, shell: Any, folder: Any) -> None:
    """Print the summary of the cell and assign its trace, as far as something was recorded."""
    try:
        if adapter.recording is None:
            return
        trace = load(adapter.recording.rank_folder)
        if not arguments.quiet:
            print("\n".join(_name_cells(line, shell) for line in summary_lines(trace)))
            if arguments.output:
                print(f"Next: memtrace report {adapter.path} -o report.html")
        if arguments.trace:
            if folder is not None:
                weakref.finalize(trace, folder.cleanup)  # tables are read when they are first used
            shell.user_ns[arguments.trace] = trace
    except Exception as error:
        adapter.disable(error)


def _name_cells(line: str, shell: Any) -> str:
    """Return a line of the summary with lines of cells as In[3]:7, in place of the names of temporary files."""
    for path, number in _numbers_of_cells(shell).items():
        file = re.escape(str(path).rpartition("/")[2])
        line = re.sub(rf"(?:[^\s/]*/)*{file}:(\d+)(?: <module>)?", rf"In[{number}]:\1", line)
    return line


def summary_lines(trace: Trace) -> list[str]:
    """Return what a cell shows: for each device the peak and what held it, then the steps and their growth."""
    lines = []
    for device in trace.devices:
        if added := added_peak_bytes(trace, device):
            lines += describe_peak_holders(trace, device)
            lines.append(f"  the cell adds {format_bytes(added)} to what was live when it began")
    if not lines:
        return ["The cell allocated no memory in PyTorch."]
    num_steps, growth = len(step_columns(trace)), measure_growth(trace)
    if num_steps:
        kept = "unknown, too few steps" if growth is None else format_bytes(max(growth.bytes_per_step, 0))
        lines.append(f"{format_count(num_steps, 'step')}; growth per step: {kept}")
    return lines
