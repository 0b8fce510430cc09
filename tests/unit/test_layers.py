"""Check the architecture in the sources: imports only go down, and no files import each other."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from hvdkit import internals

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hvdkit"

# From the top: a module may only import from rows below its own. Commands of users are above training code.
LAYERS = [
    {"__main__", "__init__"},
    {"ray"},
    {"commands"},
    {"compat"},
    {"callbacks"},
    {"keras"},
    {"schedules", "registration"},
    {"supervisor"},
    {"checkpoint"},
    {"data"},
    {"layers"},
    {"optimizer"},
    {"sharding"},
    {"compiling"},
    {"collectives"},
    {"cluster"},
    {"profiling"},
    {"watchdog"},
    {"machine"},
    {"errors", "internals", "_version"},
]
LEVEL = {name: len(LAYERS) - row for row, names in enumerate(LAYERS) for name in names}
# Rooms and modules that run before Horovod is initialized: they import nothing that trains.
STANDALONE = {
    "commands",
    "sharding.layout",
    "sharding.optimizer_configs",
    "sharding.partition",
    "sharding.plan",
    "sharding.table",
    "optimizer.buckets",
    "cluster.log_filter",
    "cluster.rings",
    "cluster.tuned",
    "watchdog",
    "machine",
    "errors",
    "_version",
    "schedules",
}
# Commands that may train, or read variables or data; and the table of commands, which imports nothing until one runs.
MAY_TRAIN = {
    "commands.check",
    "commands.checkpoint",
    "commands.cli",
    "commands.data",
    *(f"commands.measure.{name}" for name in ("bench", "config", "jobs", "tune", "worker", "workloads")),
}
MAY_IMPORT = {
    "sharding.partition": {"__future__", "collections", "dataclasses", "typing", "math", "enum", "hvdkit"},
    "machine": {*sys.stdlib_module_names, "psutil", "hvdkit"},
}

# Without the programs that `hvdkit new` copies.
FILES = sorted(path for path in PACKAGE.rglob("*.py") if PACKAGE / "commands/new/project" not in path.parents)


def tree_of(path: Path) -> ast.Module:
    return _parsed(path.read_text())


@functools.cache
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def part_of(path: Path) -> str:
    """Return the module or subpackage of hvdkit that a file belongs to."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def is_in(name: str, names: Collection[str]) -> bool:
    """Return True if the dotted ``name`` is one of ``names`` or inside one of them.

    Example:
        >>> is_in("commands.run.job", {"commands"}), is_in("cluster.world", {"cluster.rings"})
        (True, False)
    """
    words = name.split(".")
    return any(".".join(words[:count]) in names for count in range(1, len(words) + 1))


def stands_alone(name: str) -> bool:
    """Return True if the module runs before Horovod is initialized."""
    return is_in(name, STANDALONE) and not is_in(name, MAY_TRAIN)


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of every import at any level, ``if TYPE_CHECKING`` included."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            for alias in node.names:
                module = PACKAGE.joinpath(*node.module.split(".")[1:], alias.name)
                whole = node.module == "hvdkit" or module.is_dir() or module.with_suffix(".py").exists()
                yield node.lineno, f"{node.module}.{alias.name}" if whole else node.module
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # A lazy import names its module in a string: "hvdkit.data", or "hvdkit.commands.doctor:doctor".
            words = node.value.partition(":")[0].split(".")
            if words[0] == "hvdkit" and len(words) > 1 and words[1] in LEVEL:
                yield node.lineno, ".".join(words)


def breaches(path: Path) -> Iterator[str]:
    """Yield a file's imports that do not point down."""
    mine, module = part_of(path), ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    for line, name in imports_of(path):
        words = name.split(".")
        theirs = words[1] if words[0] == "hvdkit" and len(words) > 1 else None
        where = f"{path.relative_to(ROOT)}:{line} imports {name}"
        if theirs is not None:
            if theirs not in LEVEL:
                yield f"{where}: {theirs} has no layer; add it to LAYERS"
            elif theirs != mine and LEVEL[theirs] >= LEVEL[mine]:
                yield f"{where}: {mine} is not above {theirs}"
            elif stands_alone(module) and not stands_alone(".".join(words[1:])):
                yield f"{where}: {module} stands alone"
        for part in MAY_IMPORT:
            if is_in(module, {part}) and words[0] not in MAY_IMPORT[part]:
                yield f"{where}: {part} does without {words[0]}"


def test_every_module_has_a_layer():
    assert {part_of(path) for path in FILES} <= set(LEVEL)


def test_imports_go_down_only():
    assert not [breach for path in FILES for breach in breaches(path)]


def import_circle(paths: Sequence[Path]) -> list[str]:
    """Return a circle of files that import each other, also in functions and for types; empty if there is none."""
    path_of = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    imported = {
        name: {each for _, each in imports_of(path)} & (set(path_of) - {name}) for name, path in path_of.items()
    }
    try:
        graphlib.TopologicalSorter(imported).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_no_files_import_each_other():
    # A package and the files in it may: the lazy names of its __init__.
    assert not import_circle([path for path in FILES if path.name != "__init__.py"])


def test_the_check_sees_a_circle(tmp_path, monkeypatch):
    """Of three files, one import in a function and one for types; a fourth file only imports them."""
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path / "hvdkit")
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "hvdkit/data").mkdir(parents=True)
    texts = {
        "reader": "from hvdkit.data import plan",
        "plan": "def f():\n    from hvdkit.data.batches import Batches",
        "batches": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from hvdkit.data.reader import Reader",
        "above": "from hvdkit.data import batches, plan",
    }
    paths = [tmp_path / f"hvdkit/data/{name}.py" for name in texts]
    for path, text in zip(paths, texts.values(), strict=True):
        path.write_text(text)
    assert set(import_circle(paths)) == {f"hvdkit.data.{name}" for name in ("reader", "plan", "batches")}
    paths[2].write_text("from hvdkit import errors")
    assert not import_circle(paths)


@functools.cache
def state_of(path: Path) -> set[str]:
    """Return the names of a module's mutable state: containers, instances of its classes, and ``global`` variables.

    A dict that is declared as a Mapping is a constant: mypy rejects changes.
    """
    tree = tree_of(path)
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
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("hvdkit."):
                source = ROOT.joinpath(*node.module.split(".")).with_suffix(".py")
                if source.exists() and part_of(source) != part_of(path):
                    found |= {alias.name for alias in node.names} & state_of(source)
    assert not found


def test_the_check_sees_a_breach(tmp_path, monkeypatch):
    """Imports up, sideways, lazily or in a function, and a third-party library in a pure module."""
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    for module, line in (
        ("cluster", "from hvdkit.collectives import allreduce"),
        ("cluster", "from hvdkit import sharding"),
        ("sharding", "def f():\n    import hvdkit.optimizer"),
        ("collectives", "import importlib\nimportlib.import_module('hvdkit.optimizer')"),
        ("sharding/partition", "import tensorflow as tf"),
        ("sharding/plan", "from hvdkit.sharding.partitioned_variable import PartitionedVariable"),
        ("commands/run", "from hvdkit.cluster import init"),
        ("cluster", "from hvdkit.commands.doctor import Doctor"),
        ("machine", "from hvdkit.cluster import rings"),
        ("machine", "import numpy as np"),
        ("errors", "from hvdkit import something_new"),
        ("data", "from hvdkit.checkpoint import save"),
    ):
        file = tmp_path / f"{module}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(line + "\n")
        assert list(breaches(file)), line
        file.write_text("from hvdkit import errors\n" if module != "errors" else "")
        assert not list(breaches(file)), module


def private_names(path: Path) -> Iterator[str]:
    """Yield the imports of names that Keras and TensorFlow do not publish, also those in the text of a program."""
    for node in ast.walk(tree_of(path)):
        found = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = re.findall(r"(?:from|import)\s+([\w.]+)", node.value)
        yield from (f"{path.name}: {name}" for name in found if name.startswith(("keras.src", "tensorflow.python.")))


def test_private_names_are_imported_in_one_file():
    assert not [name for path in FILES if path.name != "internals.py" for name in private_names(path)]
    assert list(private_names(PACKAGE / "internals.py"))


def test_private_names_exist():
    """Each name of the table, and none that no file imports."""
    assert not [name for name in internals._HOMES if getattr(internals, name) is None]
    tree = tree_of(PACKAGE / "internals.py")
    typed = {alias.asname for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert set(internals._HOMES) == {name for name in typed if name}
    nodes = [node for path in FILES for node in ast.walk(tree_of(path))]
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module == "hvdkit.internals"]
    assert set(internals._HOMES) == {alias.name for node in imports for alias in node.names}


# Where frames of the stack are read, and why. Nothing that trains looks there for a model or an optimizer.
READS_FRAMES = {
    "cluster/progress.py": "the line of the user's program that a rank has reached",
    "collectives/graphs.py": "the line of the user's program that calls a collective, for messages",
    "watchdog/training_thread.py": "the stacks of a rank that hangs",
}
FRAME_FUNCTIONS = {"_getframe", "currentframe", "_current_frames"}


def test_frames_are_read_for_messages_only():
    readers = set()
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None
            is_stack = isinstance(node, ast.Attribute) and ast.unparse(node) in ("inspect.stack", "inspect.trace")
            imported = {alias.name for alias in node.names} if isinstance(node, ast.ImportFrom) else set()
            if name in FRAME_FUNCTIONS or is_stack or imported & (FRAME_FUNCTIONS | {"stack"}):
                readers.add(str(path.relative_to(PACKAGE)))
    assert readers == set(READS_FRAMES)


def test_no_patches_of_other_packages():
    """hvdkit does not assign to attributes of keras, tensorflow or horovod."""
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets:
                root = target
                while isinstance(root, ast.Attribute):
                    root = root.value
                if isinstance(target, ast.Attribute) and isinstance(root, ast.Name):
                    assert root.id not in {"keras", "tf", "tensorflow", "hvd", "horovod", "mpi_ops"}, (
                        f"{path}:{node.lineno}"
                    )


# Modules that have the same part in each command or package.
SAME_PART = {"__init__", "__main__", "command", "config", "settings"}


def test_a_name_stands_for_one_thing():
    """No two classes, and no two modules of different packages, share a name."""
    classes, modules = defaultdict(list), defaultdict(list)
    for path in FILES:
        if path.stem not in SAME_PART:
            modules[path.stem].append(path)
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(path)
    assert not {name: paths for name, paths in [*classes.items(), *modules.items()] if len(paths) > 1}


def test_an_assignment_has_one_value_per_line():
    """``a, b = x, y`` saves a line and costs reading; only a swap needs it, whose values read what it assigns."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(tree_of(path)):
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Tuple)
                and isinstance(node.targets[0], ast.Tuple)
            ):
                targets = {ast.unparse(target) for target in node.targets[0].elts}
                read = {
                    ast.unparse(each) for each in ast.walk(node.value) if isinstance(each, ast.Name | ast.Attribute)
                }
                if not targets & read:
                    found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}")
    assert not found, "\n".join(found)


def test_no_file_is_longer_than_450_lines():
    lines = {path.relative_to(ROOT): len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert not {str(path): count for path, count in lines.items() if count > 450}
