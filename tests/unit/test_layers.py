"""Check the architecture in the sources: imports only go down, files and functions stay short."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hvdkit"

# From the top: a module may only import from rows below its own. Commands of users are above training code.
LAYERS = [
    {"__main__", "__init__"},
    {"cli"},
    {"bench"},
    {"commands"},
    {"compat"},
    {"training"},
    {"callbacks", "schedules", "build_horovod", "models", "registration"},
    {"supervisor"},
    {"checkpoint", "data"},
    {"optimizer"},
    {"layers"},
    {"gradients", "variable"},
    {"collectives", "planning"},
    {"cluster", "partition"},
    {"profiling"},
    {"watchdog"},
    {"arguments", "marks", "memory", "rings", "terminal", "tuned"},
    {"machine"},
    {"errors", "_version"},
]
LEVEL = {name: len(LAYERS) - row for row, names in enumerate(LAYERS) for name in names}
# Modules that run before Horovod is initialized: they import nothing that trains.
STANDALONE = {
    "commands",
    "build_horovod",
    "partition",
    "planning",
    "arguments",
    "rings",
    "tuned",
    "machine",
    "watchdog",
    "errors",
    "_version",
    "schedules",
    "terminal",
}
MAY_IMPORT = {
    "partition": {"__future__", "collections", "dataclasses", "typing", "math", "enum", "numpy", "hvdkit"},
    "machine": {*sys.stdlib_module_names, "psutil", "hvdkit"},
}

FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    """Return the module or subpackage of hvdkit that a file belongs to."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of every import at any level, ``if TYPE_CHECKING`` included."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            whole = node.module == "hvdkit"
            yield from (
                ((node.lineno, f"hvdkit.{a.name}") for a in node.names) if whole else [(node.lineno, node.module)]
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # A lazy import names its module in a string: "hvdkit.data", or "hvdkit.commands.doctor:doctor".
            words = node.value.partition(":")[0].split(".")
            if words[0] == "hvdkit" and len(words) > 1 and words[1] in LEVEL:
                yield node.lineno, ".".join(words)


def breaches(path: Path) -> Iterator[str]:
    """Yield every import of a file that does not go down."""
    mine = part_of(path)
    for line, name in imports_of(path):
        words = name.split(".")
        theirs = words[1] if words[0] == "hvdkit" and len(words) > 1 else None
        where = f"{path.relative_to(ROOT)}:{line} imports {name}"
        if theirs is not None and theirs != mine:
            if theirs not in LEVEL:
                yield f"{where}: {theirs} has no layer; add it to LAYERS"
            elif LEVEL[theirs] >= LEVEL[mine]:
                yield f"{where}: {mine} is not above {theirs}"
            elif mine in STANDALONE and theirs not in STANDALONE:
                yield f"{where}: {mine} stands alone"
        if mine in MAY_IMPORT and words[0] not in MAY_IMPORT[mine]:
            yield f"{where}: {mine} does without {words[0]}"


def test_every_module_has_a_layer():
    assert {part_of(path) for path in FILES} <= set(LEVEL)


def test_imports_go_down_only():
    assert not [breach for path in FILES for breach in breaches(path)]


@functools.cache
def state_of(path: Path) -> set[str]:
    """Return the names of a module's mutable state: containers, instances of its classes, and ``global`` variables.

    A dict that is declared as a Mapping is a constant: mypy rejects changes.
    """
    tree = ast.parse(path.read_text())
    classes = {c.name for c in tree.body if isinstance(c, ast.ClassDef) and "frozen=True" not in ast.unparse(c)}
    found = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation).startswith("Mapping"):
                continue
            made = ast.unparse(node.value.func) if isinstance(node.value, ast.Call) else None
            if isinstance(node.value, (ast.List, ast.Dict, ast.Set)) or made in {"set", "dict", "list", *classes}:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def test_no_mutable_state_is_shared_between_layers():
    found = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("hvdkit."):
                source = ROOT.joinpath(*node.module.split(".")).with_suffix(".py")
                if source.exists() and part_of(source) != part_of(path):
                    found |= {alias.name for alias in node.names} & state_of(source)
    assert not found


def test_the_check_sees_a_breach(tmp_path, monkeypatch):
    """Upward, sideways, lazy, in a function, and a third-party library in the pure part."""
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    for module, line in (
        ("cluster", "from hvdkit.collectives import allreduce"),
        ("cluster", "from hvdkit import gradients"),
        ("gradients", "def f():\n    import hvdkit.optimizer"),
        ("collectives", "import importlib\nimportlib.import_module('hvdkit.gradients')"),
        ("partition", "import tensorflow as tf"),
        ("commands", "from hvdkit.cluster import init"),
        ("cluster", "from hvdkit.commands.doctor import Doctor"),
        ("machine", "from hvdkit.terminal import parse"),
        ("machine", "import numpy as np"),
        ("errors", "from hvdkit import something_new"),
        ("data", "from hvdkit.checkpoint import save"),
    ):
        file = tmp_path / f"{module}.py"
        file.write_text(line + "\n")
        assert list(breaches(file)), line
        file.write_text("from hvdkit import errors\n" if module != "errors" else "")
        assert not list(breaches(file)), module


def test_no_patches_of_other_packages():
    """hvdkit does not assign to attributes of keras, tensorflow or horovod."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets:
                root = target
                while isinstance(root, ast.Attribute):
                    root = root.value
                if isinstance(target, ast.Attribute) and isinstance(root, ast.Name):
                    assert root.id not in {"keras", "tf", "tensorflow", "hvd", "horovod", "mpi_ops"}, (
                        f"{path}:{node.lineno}"
                    )
