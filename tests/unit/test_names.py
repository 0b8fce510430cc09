"""Public names are listed in ``__init__.pyi`` of their package; each of them must exist."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

import hvdkit as hk
from hvdkit import collectives

ROOT = Path(hk.__file__).parents[1]
STUBS = {".".join(path.parent.relative_to(ROOT).parts): path for path in (ROOT / "hvdkit").rglob("*.pyi")}


def names_in(package):
    """Return name and home of the imports of a package's stub."""
    nodes = [node for node in ast.parse(STUBS[package].read_text()).body if isinstance(node, ast.ImportFrom)]
    found = [(alias.asname, f"{package}.{node.module or ''}".rstrip(".")) for node in nodes for alias in node.names]
    assert len(dict(found)) == len(found), "a name has two homes"
    return dict(found)


def test_packages_have_stubs():
    assert {"hvdkit", "hvdkit.callbacks", "hvdkit.checkpoint", "hvdkit.collectives"} <= {*STUBS}


@pytest.mark.parametrize("package", STUBS)
def test_a_package_lists_the_names_of_its_stub(package):
    module = importlib.import_module(package)
    assert module.__all__ == dir(module) == sorted(names_in(package))


@pytest.mark.parametrize(("package", "name"), [(package, name) for package in STUBS for name in names_in(package)])
def test_a_public_name_is_what_its_home_has(package, name):
    home = importlib.import_module(names_in(package)[name])
    value = getattr(importlib.import_module(package), name)
    if home.__name__ == package:
        assert value is importlib.import_module(f"{package}.{name}")
        return
    assert value is getattr(home, name)
    assert name in getattr(home, "__all__", [name]), f"{home.__name__} does not list {name}"


def test_every_public_collective_is_a_public_name_of_hvdkit():
    homes = names_in("hvdkit")
    assert {*collectives.__all__} - {"ReduceOp"} == {n for n in homes if homes[n] == "hvdkit.collectives"}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'hvdkit' has no attribute 'alreduce'"):
        _ = hk.alreduce


def has(module, name):
    """Return whether a module has a name, or a package a module of this name."""
    is_package = hasattr(module, "__path__")
    return hasattr(module, name) or (is_package and importlib.util.find_spec(f"{module.__name__}.{name}") is not None)


def test_scripts_import_names_that_exist():
    """Benchmarks and proofs are run by hand: a name that has moved would be noticed late."""
    missing = []
    for folder in ("benchmarks", "models", "proofs", "tools", "launch"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "hvdkit":
                    home, names = importlib.import_module(node.module), [alias.name for alias in node.names]
                    place = f"{path.relative_to(ROOT)}:{node.lineno}: {node.module} has no"
                    missing += [f"{place} {name}" for name in names if not has(home, name)]
    assert not missing
