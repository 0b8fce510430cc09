"""Check in the sources that what a package hands to other packages, or to users, has a type, and how much has none."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parents[2] / "hvdkit"
# What stays ``Any``, by reason. Patterns of module, function and parameter; the last is "return" for a result.
STAYS_ANY = {
    "the kind and structure of what was passed": {
        "collectives.asynchronous.*",
        "keras.predicting.predict.return",
        "optimizer.tape.DistributedGradientTape.gradient.return",
    },
    "another rank's object": {
        "collectives.objects.broadcast_object.return",
    },
    "a batch of the user's data": {
        "supervisor.session.Supervisor.batches.return",
    },
}
PATTERNS = sorted(set().union(*STAYS_ANY.values()))


class Definition(NamedTuple):
    """A function or class at the top of a module."""

    module: str
    node: ast.FunctionDef | ast.ClassDef


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def definition_of(module: str, name: str) -> Definition | None:
    """Return what ``from module import name`` imports, also through ``__init__``; None for constants and modules."""
    base = PACKAGE.joinpath(*module.split(".")[1:])
    for path in (base.with_suffix(".py"), base / "__init__.py", base / "__init__.pyi"):
        for node in parsed(path).body if path.exists() else ():
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                return Definition(module, node)
            if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
                return definition_of(f"{module}.{node.module}" if node.level else str(node.module), name)
    return None


def imported_by(path: Path) -> Iterator[Definition]:
    """Yield what a file imports from other packages of hvdkit, also as attributes of a module."""
    package = path.relative_to(PACKAGE).with_suffix("").parts[0]
    nodes = list(ast.walk(parsed(path)))
    attributes = [(n.value.id, n.attr) for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)]
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.level or str(node.module).startswith("hvdkit")):
            module = f"hvdkit.{node.module}" if node.level else str(node.module)
            for alias in node.names:
                members = [name for owner, name in attributes if owner == (alias.asname or alias.name)]
                names = [(module, alias.name), *((f"{module}.{alias.name}", name) for name in members)]
                for found in (definition_of(*each) for each in names):
                    if found is not None and found.module.split(".")[1] != package:
                        yield found


def untyped(definition: Definition) -> Iterator[str]:
    """Yield the parameters and results that are annotated with Any, of a function or of a class's public methods.

    A dict of Any is a JSON document, a configuration or a user's state. ``*args`` and ``**kwargs`` are passed on.
    """
    module, node = definition
    prefix, nodes = (f"{node.name}.", node.body) if isinstance(node, ast.ClassDef) else ("", [node])
    for function in nodes:
        if isinstance(function, ast.FunctionDef) and (not function.name.startswith("_") or function.name == "__init__"):
            arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            annotations = {**{a.arg: a.annotation for a in arguments}, "return": function.returns}
            for name, annotation in annotations.items():
                text = ast.unparse(annotation) if annotation is not None else ""
                text = text.replace("dict[str, Any]", "").replace("Mapping[str, Any]", "")
                if re.search(r"\bAny\b", text):
                    yield f"{module.removeprefix('hvdkit.')}.{prefix}{function.name}.{name}"


@functools.cache
def found() -> set[str]:
    definitions = {each for path in [*PACKAGE.rglob("*.py"), PACKAGE / "__init__.pyi"] for each in imported_by(path)}
    return {name for definition in definitions for name in untyped(definition)}


def test_types_are_known_where_packages_meet():
    assert not [name for name in sorted(found()) if not any(fnmatchcase(name, pattern) for pattern in PATTERNS)]


def test_what_stays_any_is_still_needed():
    assert not [pattern for pattern in PATTERNS if not any(fnmatchcase(name, pattern) for name in found())]


def code_lines(text: str) -> int:
    """Return the number of lines with code: no docstrings, comments or blank lines."""
    docstrings = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, int(node.end_lineno or 0) + 1)
    }
    blank = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = [each for each in tokenize.generate_tokens(io.StringIO(text).readline) if each.type not in blank]
    lines = {line for each in tokens for line in range(each.start[0], each.end[0] + 1)}
    return len(lines - docstrings)


def test_most_code_has_types():
    """At most 15 uses of Any, or of aliases with it, per 1,000 lines; at most 10 errors of mypy are ignored."""
    texts = [path.read_text() for path in PACKAGE.rglob("*.py")]
    names = {"Any"}.union(*(re.findall(r"^(\w+): TypeAlias = .*\bAny\b", text, re.MULTILINE) for text in texts))
    assert names > {"Any"}
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    uses = sum(isinstance(node, ast.Name) and node.id in names for node in nodes)
    assert uses <= 15 * sum(map(code_lines, texts)) / 1000
    ignored = [line for text in texts for line in text.splitlines() if "# type: ignore" in line]
    assert len(ignored) <= 10
    assert not [line for line in ignored if not re.search(r"# type: ignore\[[\w, -]+\]  # \w", line)]  # a reason


def test_code_lines_are_counted():
    assert code_lines('"""Text."""\n\nx = 1  # one\n# none\ny = """\na\n"""\n') == 4


def test_the_check_sees_any():
    for signature, names in (
        ("f(a: Any, b: list[Any] = [], *args: Any, **kwargs: Any) -> None", ["a", "b"]),
        ("f(a: dict[str, Any] | None, b: AnyVariable) -> Callable[..., Any]", ["return"]),
        ("f(a: Mapping[str, Any] | Any) -> Iterator[tuple[int, Any]]", ["a", "return"]),
        ("_f(a: Any) -> Any", []),
    ):
        (node,) = ast.parse(f"def {signature}: ...").body
        assert list(untyped(Definition("hvdkit.m", node))) == [f"m.f.{name}" for name in names], signature
