"""docs/guarantees.md: each test that it names exists, and runs as often as it says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| .+ \| `(tests/[\w/]+\.py)::(\w+)` \| `make (test[\w-]*)` \|$")
TARGETS = {"core": "test", "full": "test-all", "nightly": "test-nightly"}


def target_of(path: Path, name: str) -> str:
    """Return the target that runs a test: the mark of the function, or of its module.

    A mark "nightly" with numbers of ranks says nothing about the others.
    """
    module = ast.parse(path.read_text())
    (function,) = (one for one in module.body if isinstance(one, ast.FunctionDef) and one.name == name)
    own = [ast.unparse(one) for one in function.decorator_list if "nightly(" not in ast.unparse(one)]
    of_module = [ast.unparse(one.value) for one in module.body if isinstance(one, ast.Assign) and is_marks(one)]
    for marks in (own, of_module):
        for mark in TARGETS:
            if any(re.search(rf"\bmark\.{mark}\b", text) and "parametrize" not in text for text in marks):
                return TARGETS[mark]
    return TARGETS["core" if "unit" in path.parts else "full"]


def is_marks(one: ast.Assign) -> bool:
    return [ast.unparse(target) for target in one.targets] == ["pytestmark"]


def test_each_promise_names_a_test_and_how_often_it_runs():
    rows = [line for line in (ROOT / "docs" / "guarantees.md").read_text().splitlines() if "::" in line]
    assert len(rows) > 30
    wrong = []
    for row in rows:
        match = ROW.match(row)
        assert match, row
        file, name, target = match.groups()
        try:
            expected = target_of(ROOT / file, name)
        except (ValueError, FileNotFoundError):
            expected = "no such test"
        if expected != target:
            wrong.append(f"{file}::{name}: {expected}, not {target}")
    assert not wrong, "\n".join(wrong)


def test_pages_link_to_it():
    for page in ("SECURITY.md", "mkdocs.yml", "README.md"):
        assert "guarantees.md" in (ROOT / page).read_text(), page
