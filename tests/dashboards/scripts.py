"""Runs the page's own scripts in Node.js: the one on the path, or the one that playwright brings."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import playwright

TEMPLATES: Final = Path(__file__).parents[2] / "dashboards" / "templates"
_NODE: Final = shutil.which("node") or str(Path(playwright.__file__).parent / "driver" / "node")
_WORKER: Final = "const self = {};"
"""What a worker's script uses of its surroundings."""
_LOOP: Final = """
require("readline").createInterface({ input: process.stdin }).on("line", async (line) => {
  process.stdout.write(JSON.stringify(await answer(JSON.parse(line))) + "\\n");
});
"""


class Scripts:
    """A running Node.js with some scripts of the page, which answers questions one by one."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, question: Any) -> Any:
        """Return what the function ``answer`` returns for a JSON value."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@contextmanager
def running_scripts(names: tuple[str, ...], answer: str) -> Iterator[Scripts]:
    """Run scripts of ``templates/`` followed by the JavaScript function ``answer``."""
    program = "\n".join([_WORKER, *((TEMPLATES / name).read_text() for name in names), answer, _LOOP])
    with subprocess.Popen([_NODE, "-e", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Scripts(process)
        assert process.stdin is not None
        process.stdin.close()
