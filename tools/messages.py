"""The site's page of error messages, from the calls of ``describe`` in the sources."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

PLACEHOLDER = "…"


class Message(NamedTuple):
    """An error: what it is about, what was expected, and the remedy; parts that vary are placeholders."""

    argument: str
    expected: str
    remedy: str


def messages(package: Path) -> list[Message]:
    """Return the messages in the sources of a package, sorted, each once."""
    found: set[Message] = set()
    for path in package.rglob("*.py"):
        found |= set(_messages_of(ast.parse(path.read_text(encoding="utf-8"))))
    return sorted(found)


def page(package: Path) -> str:
    """Return Markdown with a heading for each argument, and a line for each of its messages."""
    by_argument: defaultdict[str, list[Message]] = defaultdict(list)
    for message in messages(package):
        by_argument[message.argument].append(message)
    parts = []
    for argument in sorted(by_argument, key=lambda name: name.lstrip("-").lower()):
        lines = [f"- expected {each.expected}; *{each.remedy}*" for each in by_argument[argument]]
        parts += [f"## `{argument}`", "\n".join(lines)]
    return "\n\n".join(parts)


def _messages_of(module: ast.Module) -> Iterator[Message]:
    constants = {
        target.id: node.value
        for node in ast.walk(module)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(module):
        if not isinstance(node, ast.Call) or len(node.args) != 4 or ast.unparse(node.func) != "describe":
            continue
        argument, _, expected, remedy = (_text(each, constants) for each in node.args)
        if argument != PLACEHOLDER:
            yield Message(argument, _escaped(expected), _escaped(remedy))


def _text(node: ast.expr, constants: Mapping[str, ast.expr]) -> str:
    """Return the text of an expression, with placeholders for what is known only when the program runs."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, constants) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left, constants) + _text(node.right, constants)
    if isinstance(node, ast.FormattedValue):
        return _text(node.value, constants)
    if isinstance(node, ast.Name) and node.id in constants and not isinstance(constants[node.id], ast.Name):
        return _text(constants[node.id], {})
    return PLACEHOLDER


def _escaped(text: str) -> str:
    return text.replace("*", r"\*").replace("_", r"\_").replace("<", "&lt;").replace("[", r"\[")
