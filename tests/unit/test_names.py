"""Public names are listed in ``__init__.pyi`` of their package; each of them must exist."""

from __future__ import annotations

import ast
import importlib
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
