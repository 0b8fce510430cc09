"""The documentation site has an entry for every public name, and its navigation has every page."""

from __future__ import annotations

import ast
import fnmatch
import re
import runpy
from pathlib import Path

import yaml

from hvdkit import callbacks, checkpoint, data, layers, ray
from hvdkit.compat import horovod

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SOURCES = sorted((ROOT / "hvdkit").rglob("*.py"))
MODULES = (callbacks, checkpoint, data, layers, ray)
ENTRIES = [name for page in DOCS.glob("api/*.md") for name in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE)]


class Config(yaml.SafeLoader):
    """mkdocs.yml, without the functions that it names."""


Config.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def public_names() -> set[str]:
    """Return the full name of everything that users may import."""
    names = {f"hvdkit.{module.__name__.rpartition('.')[2]}.{name}" for module in MODULES for name in module.__all__}
    for node in ast.parse((ROOT / "hvdkit" / "__init__.pyi").read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module not in {None, "_version"}:
            names |= {f"hvdkit.{alias.asname}" for alias in node.names}
    schedules = ast.parse((ROOT / "hvdkit" / "schedules.py").read_text()).body
    return names | {f"hvdkit.schedules.{node.name}" for node in schedules if isinstance(node, ast.ClassDef)}


def navigation(entries: list) -> list[str]:
    """Return the pages and patterns of a part of the navigation."""
    found = []
    for entry in entries:
        target = next(iter(entry.values())) if isinstance(entry, dict) else entry
        found += navigation(target) if isinstance(target, list) else [target]
    return found


def test_every_public_name_has_one_entry():
    assert len(ENTRIES) == len({*ENTRIES})
    assert {*ENTRIES} == public_names() | {"hvdkit.compat.horovod"}


def test_the_names_of_horovod_are_described_where_they_are_listed():
    """The page of hvdkit.compat.horovod has an entry for each member of the module that has a docstring."""
    own = [name for name in horovod.__all__ if getattr(getattr(horovod, name), "__module__", None) == horovod.__name__]
    assert "allreduce" in own and all(getattr(horovod, name).__doc__ for name in own)


def test_every_page_is_in_the_navigation_once():
    listed = navigation(yaml.load((ROOT / "mkdocs.yml").read_text(), Config)["nav"])
    assert len(listed) == len({*listed})
    pages = [str(page.relative_to(DOCS)) for page in DOCS.rglob("*") if page.suffix in {".md", ".ipynb"}]
    assert [page for page in pages if not any(fnmatch.fnmatch(page, entry) for entry in listed)] == []


def test_code_is_shown_whole_next_to_the_navigation():
    """A screen of 1,280 pixels has room for 85 characters; output is shown as it is printed."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")]
    blocks = [
        (page.name, block)
        for page in pages
        for language, block in re.findall(r"^ *```(\w*).*?\n(.*?)^ *```$", page.read_text(), re.MULTILINE | re.DOTALL)
        if language not in {"", "text"}
    ]
    assert len(blocks) > 100
    assert not [(page, line) for page, block in blocks for line in block.splitlines() if len(line) > 85]


def test_messages_name_pages_that_exist():
    found = [(file, name) for file in SOURCES for name in re.findall(r"\bdocs/[\w./-]+\.md\b", file.read_text())]
    assert found
    assert [f"{file.relative_to(ROOT)}: {name}" for file, name in found if not (ROOT / name).exists()] == []


def test_a_page_that_loads_from_another_server_is_found(tmp_path):
    page = tmp_path / "page.html"
    page.write_text(
        '<link rel="canonical" href="https://a.org"><link rel="stylesheet" href="//b.org/c.css"><script src="d.js">'
        '</script><a href="https://e.org">e</a><a href="missing.html#a">g</a><a href="page.html">h</a><img alt="" src="https://f.org/g.png">'
    )
    check = runpy.run_path(str(ROOT / "tools" / "check_site.py"))
    found = ["loads //b.org/c.css", "loads https://f.org/g.png", "no file missing.html"]
    assert check["wrong_addresses"](page) == found
