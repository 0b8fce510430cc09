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


def test_packages_list_the_names_of_their_stubs():
    assert {"hvdkit", "hvdkit.checkpoint", "hvdkit.collectives"} <= {*STUBS}
    for package in STUBS:
        module = importlib.import_module(package)
        assert module.__all__ == dir(module) == sorted(names_in(package)), package


def test_public_names_are_what_their_homes_have():
    gaps = []
    listed = [(package, *found) for package in STUBS for found in names_in(package).items()]
    for package, name, home in listed:
        value, module = getattr(importlib.import_module(package), name), importlib.import_module(home)
        if home == package:
            gaps += [] if value is importlib.import_module(f"{package}.{name}") else [f"{package}.{name}: no module"]
        elif value is not getattr(module, name):
            gaps.append(f"{package}.{name} is not that of {home}")
        elif name not in getattr(module, "__all__", [name]):
            gaps.append(f"{home} does not list {name}")
    assert not gaps


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
