"""Port a plain Keras program to hvdkit mechanically.

A port inserts two lines, ``import hvdkit as hk`` and ``hk.init()``, and turns ``model.fit(`` into ``hk.fit(model, ``,
and the same for ``evaluate`` and ``predict``. A program that needs more marks the place: a line with a comment
``# port: CODE`` becomes the line CODE.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = Path(__file__).parents[1] / "programs"
CALL = re.compile(r"\b([A-Za-z_][\w.]*)\.(fit|evaluate|predict)\(")
EXTRA = re.compile(r"^(?P<indent>\s*)(?P<before>.*)# port: (?P<code>.*)$")


@dataclass(frozen=True)
class Port:
    """A ported script and the number of lines inserted or changed."""

    text: str
    inserted: int
    calls: int
    extra: int
    changed: tuple[int, ...]
    """Numbers, from 1, of the lines that were inserted or changed."""

    @property
    def lines(self) -> int:
        """Return the number of lines that differ from the plain script."""
        return self.inserted + self.calls + self.extra


def port(source: str) -> Port:
    """Return the port of a plain script to hvdkit."""
    lines = source.splitlines()
    calls = []
    extra = []
    for index, line in enumerate(lines):
        if marked := EXTRA.match(line):
            lines[index] = marked["indent"] + marked["code"]
            extra.append(index)
        elif CALL.search(line):
            lines[index] = CALL.sub(r"hk.\2(\1, ", line)
            calls.append(index)
    first = first_statement(source)
    added = ["import hvdkit as hk", "hk.init()"]
    lines[first:first] = added
    shifted = (index + len(added) if index >= first else index for index in (*calls, *extra))
    changed = sorted([*range(first, first + len(added)), *shifted])
    text = "\n".join(lines) + "\n"
    return Port(text, len(added), len(calls), len(extra), tuple(index + 1 for index in changed))


def first_statement(source: str) -> int:
    """Return the number of lines before the first statement after the docstring."""
    return ast.parse(source).body[1].lineno - 1


def names() -> list[str]:
    """Return the names of all programs."""
    return sorted(path.stem for path in PROGRAMS.glob("*.py"))


def source(name: str) -> str:
    """Return a program's text."""
    return (PROGRAMS / f"{name}.py").read_text()
