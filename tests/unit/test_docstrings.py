"""Public docstrings are complete, in the format that the documentation's generator reads, with examples that run.

The rules, for each name that ``import hvdkit`` and its public modules export, and their methods and properties:

- A docstring with a summary of one sentence. No reST roles, no section that Google style does not have.
- Functions, methods and classes list all their parameters under Args, and no others; classes also list their class
  attributes and fields, under Args or Attributes, or their base class in hvdkit does.
- A function with a result and parameters has Returns (or Yields). Without parameters, a summary with "Return" will do.
- Raises lists exceptions that exist, and at least those that the body raises itself.
- Functions and classes have an example that ``pytest --doctest-modules`` collects, which uses the name and skips no
  line. Methods and properties are used in their own example or in that of their class.

A method that overrides one of Keras's needs only the summary: Keras documents its arguments, and calls it.
"""

from __future__ import annotations

import ast
import builtins
import doctest
import functools
import importlib
import inspect
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import griffe
from griffe import DocstringSectionKind as Section

import hvdkit as hk

ROOTS = ("hvdkit", "hvdkit.compat.horovod")
BUILTINS = {
    name for name, value in vars(builtins).items() if inspect.isclass(value) and issubclass(value, BaseException)
}
# Public by name for other packages of hvdkit, not for users: an example would show a use that is not meant.
WITHOUT_EXAMPLE = {
    "hvdkit.supervisor.session.Supervisor.advance",  # SupervisorCallback and hk.fit call these four
    "hvdkit.supervisor.session.Supervisor.close",
    "hvdkit.supervisor.session.Supervisor.end_epoch",
    "hvdkit.supervisor.session.Supervisor.enter_fit",
    "hvdkit.keras.step_callbacks._StepCounter.count",  # SupervisorCallback calls it
}
ROLE = re.compile(r":[a-z]+:`|::\n")
PROSE_RAISES = re.compile(r"\braises? (?:an? )?[A-Z]\w+(?:Error|Exception)\b", re.IGNORECASE)


@functools.cache
def package() -> griffe.Module:
    """Return hvdkit as griffe reads it, without importing it."""
    folder = hk.__path__[0].rpartition("/")[0]
    return griffe.load("hvdkit", search_paths=[folder], docstring_parser="google", allow_inspection=False)


def exported(module: griffe.Object) -> list[str]:
    """Return the public names of a module: ``__all__``, or without it what the module defines."""
    own = [name for name, member in module.members.items() if not member.is_alias and not name.startswith("_")]
    return list(getattr(importlib.import_module(module.path), "__all__", own))


def find(path: str) -> griffe.Object:
    """Return the object with a dotted path, at the place that defines it."""
    found = package()[path.partition(".")[2]] if "." in path else package()
    return found.final_target if found.is_alias else found


def public() -> dict[str, griffe.Object]:
    """Return the public objects by their first public name, modules included."""
    found, paths = {}, [*ROOTS]
    while paths:
        path = paths.pop(0)
        target = find(path)
        if target in found.values():
            continue
        found[path] = target
        if target.is_module:
            paths += [f"{path}.{name}" for name in exported(target)]
    return found


PUBLIC = public()


def overrides(cls: griffe.Class, name: str) -> bool:
    """Return True if a base class outside hvdkit has the attribute ``name``."""
    found = getattr(importlib.import_module(cls.module.path), cls.name)
    bases = [base for base in found.__mro__ if not base.__module__.startswith("hvdkit")]
    return any(name in vars(base) for base in bases)


@functools.cache
def collected(module: str) -> Mapping[str, str]:
    """Return the code of a module's examples, and the errors that they show, by the name that pytest gives them."""
    tests = doctest.DocTestFinder().find(importlib.import_module(module), module)
    shown = {test.name: [each.source + (each.exc_msg or "") for each in test.examples] for test in tests}
    return {name: "".join(lines) for name, lines in shown.items() if lines}


@dataclass
class Checked:
    """One docstring, and what is wrong with it."""

    target: griffe.Object
    name: str

    def sections(self) -> Mapping[Section, list]:
        """Return the contents of all sections by kind."""
        found: dict[Section, list] = {}
        for section in self.target.docstring.parsed:
            values = section.value if isinstance(section.value, list) else [section.value]
            found.setdefault(section.kind, []).extend(values)
        return found

    def format_problems(self) -> Iterator[str]:
        text = self.target.docstring.value
        summary, _, rest = text.partition("\n")
        if not summary.endswith(".") or (rest and not rest.startswith("\n")):
            yield f"the first line is not one sentence: {summary!r}"
        if role := ROLE.search(text):
            yield f"reST: {role[0]!r}"
        if prose := PROSE_RAISES.search("\n".join(map(str, self.sections().get(Section.text, [])))):
            yield f"list under Raises: {prose[0]!r}"
        for admonition in self.sections().get(Section.admonition, []):
            yield f"not a section of Google style: {admonition.kind!r}"

    def parameter_problems(self) -> Iterator[str]:
        sections = self.sections()
        arguments = {each.name.lstrip("*") for each in sections.get(Section.parameters, [])}
        attributes = {each.name for each in sections.get(Section.attributes, [])}
        names = self.parameters()
        yield from (f"parameter {name} is not documented" for name in sorted(names - arguments - attributes))
        yield from (f"unknown parameter {name}" for name in sorted(arguments - names))
        if self.target.is_class:
            fields = {name for name, each in self.target.members.items() if "class-attribute" in each.labels}
            bases = [Checked(base, base.name).sections() for base in self.target.mro() if base.docstring is not None]
            inherited = {each.name for sections in bases for each in sections.get(Section.attributes, [])}
            missing = {name for name in fields - arguments - attributes - inherited if not name.startswith("_")}
            yield from (f"attribute {name} is not documented" for name in sorted(missing))

    def result_problems(self) -> Iterator[str]:
        returns = str(self.target.returns)
        sections = self.sections()
        described = [*sections.get(Section.returns, []), *sections.get(Section.yields, [])]
        if returns in {"None", "NoReturn"} and described:
            yield "Returns without a result"
        if len(described) > 1:
            yield "indent the second line of Returns, which is read as a second result"
        if returns != "None" and not described and (self.parameters() or "eturn" not in self.target.docstring.value):
            yield f"no Returns, but the result is {returns}"

    def error_problems(self) -> Iterator[str]:
        listed = [str(each.annotation).strip("()") for each in self.sections().get(Section.raises, [])]
        names = [name for each in listed for name in each.split(", ")]
        known = BUILTINS | {*hk.__all__}
        yield from (f"no such exception: {name}" for name in names if name not in known and "tf.errors" not in name)
        yield from (f"raises {name}, which is not documented" for name in sorted(self.raised() - {*names}))

    def raised(self) -> set[str]:
        """Return the exceptions that the body of a function, or of a class's constructor, raises itself."""
        function = self.constructor() if self.target.is_class else self.target
        if function is None:
            return set()
        nodes = [ast.parse(inspect.cleandoc("\n" + function.source))]
        found = set()
        while nodes:
            node = nodes.pop()
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                error = node.exc.func
                either = [error.body, error.orelse] if isinstance(error, ast.IfExp) else [error]
                found |= {ast.unparse(each) for each in either}
            nested = isinstance(node, ast.FunctionDef) and node.name != function.name
            nodes += [] if nested else list(ast.iter_child_nodes(node))
        return found

    def constructor(self) -> griffe.Function | None:
        """Return the ``__init__`` of a class in hvdkit."""
        found = self.target.all_members.get("__init__")
        found = found.final_target if found is not None and found.is_alias else found
        return found if found is not None and found.is_function else None

    def parameters(self) -> set[str]:
        """Return the names of the parameters of a function, or of a class's constructor."""
        function = self.constructor() if self.target.is_class else self.target
        return {each.name for each in function.parameters} - {"self", "cls"} if function is not None else set()

    def example(self) -> str:
        """Return the code of the docstring's example that pytest runs; "" without one."""
        return collected(self.target.module.path).get(self.target.path, "")

    def example_problems(self, code: str) -> Iterator[str]:
        if not re.search(rf"\b{self.name}\b", code):
            yield f"no example that uses {self.name}"
        if "+SKIP" in self.target.docstring.value:
            yield "an example is skipped"
        if ">>>" in self.target.docstring.value and Section.examples not in self.sections():
            yield "the example is not in a section Examples"


def problems_of(target: griffe.Object, name: str, cls: griffe.Class | None = None) -> Iterator[str]:
    """Yield what a public docstring lacks; ``cls`` is the class of a method or property."""
    if target.docstring is None:
        yield "no docstring"
        return
    checked = Checked(target, name)
    yield from checked.format_problems()
    if target.is_module or (target.is_attribute and cls is None):
        return
    if cls is not None and overrides(cls, name):
        return
    if not target.is_attribute:
        yield from checked.parameter_problems()
        yield from checked.error_problems()
    if target.is_function:
        yield from checked.result_problems()
    code = checked.example()
    if cls is not None:
        classes = (cls, target.parent)  # the class, and its base that defines the method
        code = "\n".join([code, *(Checked(each, each.name).example() for each in classes)])
    if target.path not in WITHOUT_EXAMPLE:
        yield from checked.example_problems(code)


def methods(cls: griffe.Class) -> Iterator[tuple[str, griffe.Object]]:
    """Yield the public methods and properties of a class, those of its bases in hvdkit included."""
    for name, member in cls.all_members.items():
        target = member.final_target if member.is_alias else member
        if not name.startswith("_") and (target.is_function or "property" in target.labels):
            yield name, target


def test_public_docstrings_are_complete(caplog):
    found = []
    with caplog.at_level(logging.WARNING, logger="griffe"):
        for path, target in PUBLIC.items():
            found += [f"{path}: {problem}" for problem in problems_of(target, target.name)]
            for name, method in methods(target) if target.is_class else ():
                found += [f"{path}.{name}: {problem}" for problem in problems_of(method, name, target)]
    found += [record.getMessage() for record in caplog.records]
    assert not found, "\n".join(["", *found])


def test_every_exported_name_is_checked():
    homes = {target.path for target in PUBLIC.values()}
    names = [f"{path}.{name}" for path, target in PUBLIC.items() if target.is_module for name in exported(target)]
    assert {find(name).path for name in names} <= homes
    assert {"hvdkit.allreduce", "hvdkit.data.mixture", "hvdkit.compat.horovod.callbacks.MetricAverageCallback"} <= {
        *names
    }
    assert {package()[path.partition(".")[2]].path for path in WITHOUT_EXAMPLE} == WITHOUT_EXAMPLE


COMPLETE = '''
def f(x: int, y: int = 0) -> int:
    """Add two numbers.

    Args:
        x: a number.
        y: another.

    Returns:
        Their sum.

    Raises:
        ValueError: ``x`` is negative.

    Examples:
        >>> f(1, 2)
        3
    """
    if x < 0:
        raise ValueError(x)
    return x + y
'''


GAPS = (
    ("numbers.", "numbers", "one sentence"),
    ("Add two", "Add :func:`two`", "reST"),
    ("a number.", "a number. Raises TypeError otherwise.", None),  # only in the text
    ("numbers.", "numbers.\n\n    Raises TypeError for text.", "list under Raises"),
    ("        x: a number.\n", "", "parameter x is not documented"),
    ("y: another", "z: another", "unknown parameter z"),
    ("    Returns:\n        Their sum.\n\n", "", "no Returns"),
    ("Their sum.", "Their sum,\n        rounded.", "second line of Returns"),
    ("-> int", "-> None", "without a result"),
    ("ValueError: ", "ValueMistake: ", "no such exception: ValueMistake"),
    ("    Raises:\n        ValueError: ``x`` is negative.\n\n", "", "raises ValueError, which is not documented"),
    ("Examples:", "Example:", "not a section"),
    (">>> f(1, 2)", ">>> 1 + 2", "no example that uses f"),
    (">>> f(1, 2)", ">>> f(1, 2)  # doctest: +SKIP", "skipped"),
)


def test_the_check_sees_a_gap(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for number, (old, new, problem) in enumerate([("", "", None), *GAPS]):
        module = f"docstring_{number}"
        (tmp_path / f"{module}.py").write_text(COMPLETE.replace(old, new))
        function = griffe.load(module, search_paths=[tmp_path], docstring_parser="google", allow_inspection=False)["f"]
        found = list(problems_of(function, "f"))
        assert any(problem in each for each in found) if problem else not found, (old, new, found)
