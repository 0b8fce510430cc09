"""Public names are listed three times, for users, type checkers and the lazy import; the lists must be equal."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import hvdkit as hk

SOURCE = Path(hk.__file__)


def imported(nodes, module):
    """Return public name and home of all ``from <module>... import`` statements among ``nodes``."""
    found = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == module:
            for alias in node.names:
                found[alias.asname or alias.name] = node.module
    return found


def tree_of(path):
    return ast.parse(path.read_text())


def type_checkers_see(path=SOURCE):
    """Return the imports under ``if TYPE_CHECKING:``."""
    blocks = [
        node
        for node in tree_of(path).body
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
    ]
    return imported([node for block in blocks for node in block.body], "hvdkit")


def loaded_at_once():
    """Return the public names that importing hvdkit itself loads."""
    found = imported(tree_of(SOURCE).body, "hvdkit")
    return {name: home for name, home in found.items() if not name.startswith("_") or name == "__version__"}


def test_type_checkers_and_the_lazy_import_know_the_same_names_and_homes():
    lazy = {name: home for home, names in hk._HOMES.items() for name in names}
    assert len(lazy) == sum(map(len, hk._HOMES.values())), "a name has two homes"
    assert type_checkers_see() == lazy | dict.fromkeys(hk._MODULES, "hvdkit")


def test_all_lists_every_public_name_in_order():
    assert hk.__all__ == sorted({*type_checkers_see(), *loaded_at_once()})
    assert dir(hk) == hk.__all__


@pytest.mark.parametrize("name", hk.__all__)
def test_a_public_name_is_what_its_home_has(name):
    homes = type_checkers_see() | loaded_at_once()
    home = importlib.import_module(homes[name])
    value = getattr(hk, name)
    if homes[name] == "hvdkit":
        assert value is importlib.import_module(f"hvdkit.{name}")
        return
    assert value is getattr(home, name)
    assert name in getattr(home, "__all__", [name]), f"{homes[name]} does not list {name}"


@pytest.mark.parametrize("module", ["collectives", *hk._MODULES])
def test_a_module_lists_what_it_has(module):
    part = importlib.import_module(f"hvdkit.{module}")
    for name in getattr(part, "__all__", []):
        assert hasattr(part, name), f"hvdkit.{module} lists {name}, which it has not"
    path = Path(part.__file__)
    if path.name == "__init__.py":
        known = imported(tree_of(path).body, "hvdkit") | type_checkers_see(path)
        assert part.__all__ == sorted(known), f"hvdkit.{module}.__all__"
        for name, home in known.items():
            assert getattr(part, name) is getattr(importlib.import_module(home), name)


def test_every_public_collective_is_a_public_name_of_hvdkit():
    from hvdkit import collectives

    assert {*collectives.__all__} - {"ReduceOp"} == {*hk._HOMES["hvdkit.collectives"]}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'hvdkit' has no attribute 'alreduce'"):
        _ = hk.alreduce
