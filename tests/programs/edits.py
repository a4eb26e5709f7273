"""Programs that carry their own fixes: the source of a program, the edits in its comments, and the edited source.

A comment ``#! PATTERN -> CODE`` at the end of a line names a planted defect and the code that fixes it; ``#? PATTERN ->
CODE`` names a change that is possible although nothing is wrong. ``PATTERN@TEXT`` ties an edit to findings whose
allocation site is a line that contains TEXT. All lines of one pattern and text make one edit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROGRAMS: Final = Path(__file__).parent / "edited"
RECIPES: Final = "recipes"
"""Folder of the training recipes as people write them."""
_EDIT: Final = re.compile(r"#(?P<mark>[!?]) (?P<pattern>[^@]+?)(?:@(?P<text>.+?))? -> (?P<code>.+?)(?=\s+#[!?] |$)")


@dataclass(frozen=True)
class Edit:
    """One fix of a program: the changed lines."""

    pattern: str
    """Name of the pattern of wasted memory that the edit fixes."""
    site_text: str
    """Text of the line of the allocation site; empty: any line."""
    is_planted: bool
    """Whether the program has a defect that the edit fixes."""
    lines: tuple[tuple[int, str], ...]
    """Line numbers from 1, and the code that replaces each."""


@dataclass(frozen=True)
class EditedProgram:
    """A program and its edits."""

    path: Path
    source: str
    edits: tuple[Edit, ...]

    @property
    def name(self) -> str:
        """Name of the program's file, without its suffix."""
        return self.path.stem

    @property
    def is_recipe(self) -> bool:
        """Whether it is a training recipe as people write it, and not a program made for one pattern."""
        return self.path.parent.name == RECIPES

    def apply(self, edit: Edit) -> str:
        """Return the source with one edit."""
        lines = self.source.splitlines()
        for number, code in edit.lines:
            indentation = lines[number - 1][: -len(lines[number - 1].lstrip())]
            lines[number - 1] = indentation + code
        return "\n".join(lines) + "\n"

    def find_edit(self, pattern: str, line: int) -> Edit | None:
        """Return the edit for a finding of a pattern at a line (0: unknown); None if the program has none."""
        text = self.source.splitlines()[line - 1] if line else ""
        fitting = [edit for edit in self.edits if edit.pattern == pattern and edit.site_text in text]
        return max(fitting, key=lambda edit: len(edit.site_text), default=None)


def read_program(path: Path) -> EditedProgram:
    """Return the program in a file with the edits that its comments describe."""
    source = path.read_text(encoding="utf-8")
    edits: dict[tuple[str, str], tuple[bool, list[tuple[int, str]]]] = {}
    for number, line in enumerate(source.splitlines(), 1):
        for match in _EDIT.finditer(line):
            _, lines = edits.setdefault((match["pattern"], match["text"] or ""), (match["mark"] == "!", []))
            lines.append((number, match["code"]))
    return EditedProgram(
        path,
        source,
        tuple(Edit(pattern, text, planted, tuple(lines)) for (pattern, text), (planted, lines) in edits.items()),
    )


def read_programs() -> tuple[EditedProgram, ...]:
    """Return all programs, by path."""
    return tuple(read_program(path) for path in sorted(PROGRAMS.rglob("*.py")))
