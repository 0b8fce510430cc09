"""Check in the sources that what a package hands to other packages, or to users, has a type."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parents[2] / "hvdkit"
# What stays ``Any``, by reason. Patterns of module, function and parameter; the last is "return" for a result.
STAYS_ANY = {
    "anything that TensorFlow converts to a tensor; the result is of the same kind": {
        "collectives.asynchronous.*",
        "collectives.gathers.*",
        "collectives.reductions.*",
    },
    "objects that are pickled and compared": {
        "collectives.objects.*",
    },
    "arguments of users, before they are checked": {
        "collectives.digests.*",
    },
    "data in a structure of the user's choice": {
        "data.batches.GlobalBatches.__init__.arrays_or_source",
        "data.batches.GlobalBatches.__init__.map_fn",
        "data.batches.GlobalBatches.one_epoch.return",
        "data.files.*.load*.return",
        "data.files.*.take.return",
        "data.files.source.FileSource.*",
        "data.mixtures.Mixture.*.return",
        "optimizer.tape.DistributedGradientTape.gradient.*",
        "compiling.compiled_step.CompiledStep.__init__.step",
        "supervisor.session.Supervisor.batches.return",
        "keras.*.sample_weight",
        "keras.*.x",
        "keras.*.y",
        "keras.fitting.fit.validation_data",
        "keras.predicting.predict.return",
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


def test_the_check_sees_any():
    for signature, names in (
        ("f(a: Any, b: list[Any] = [], *args: Any, **kwargs: Any) -> None", ["a", "b"]),
        ("f(a: dict[str, Any] | None, b: AnyVariable) -> Callable[..., Any]", ["return"]),
        ("f(a: Mapping[str, Any] | Any) -> Iterator[tuple[int, Any]]", ["a", "return"]),
        ("_f(a: Any) -> Any", []),
    ):
        (node,) = ast.parse(f"def {signature}: ...").body
        assert list(untyped(Definition("hvdkit.m", node))) == [f"m.f.{name}" for name in names], signature
