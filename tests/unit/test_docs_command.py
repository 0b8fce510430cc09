"""``hvdkit docs``, and the pages that messages and help texts name: each must exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from hvdkit import errors
from hvdkit.commands import cli
from hvdkit.commands.docs import PAGES, find, pages

PACKAGE = Path(errors.__file__).parent
SOURCES = [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".md", ".sh", ".sbatch", ".yaml", ".cpp")]
NAMED = re.compile(r"`hvdkit docs ([a-z\d/_#-]+)`")


def named_pages():
    """Return the pages that the package names, with the files that name them."""
    found = {}
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        names = NAMED.findall(text)
        if path.suffix == ".py":
            calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
            sees = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "see" and call.args]
            names += [call.args[0].value for call in sees if isinstance(call.args[0], ast.Constant)]
        for name in names:
            found.setdefault(name, set()).add(path.relative_to(PACKAGE).as_posix())
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.HvdkitError) and kind.page is not None:
            found.setdefault(kind.page, set()).add(f"errors.py: {kind.__name__}")
    return found


def test_pages_that_are_named_exist():
    assert not {page: files for page, files in named_pages().items() if not find(page)}


def test_messages_name_pages_in_one_way():
    """An installed hvdkit has no folder docs/; only comments and docstrings name it."""
    assert {"failures", "launching", "gradients#xla", "compatibility", "checkpoints", "data#bad-files"} <= {
        *named_pages()
    }
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.HvdkitError)}
    assert {kind for kind in kinds if kind.page is None} == {errors.HvdkitError}
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
        docstrings = {ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, documented)}
        strings = {
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        assert not [text for text in strings - docstrings if "docs/" in text and ".md" in text], path


def test_the_list_and_a_page(capsys):
    assert cli.main(["docs"]) == 0
    shown = capsys.readouterr().out
    assert {line.split()[0] for line in shown.splitlines()[:-2]} == {*pages()}
    assert re.search(r"^pitfalls +Pitfalls: from one process to several ranks$", shown, re.MULTILINE)
    assert cli.main(["docs", "pitfalls"]) == 0
    assert capsys.readouterr().out == (PAGES / "pitfalls.md").read_text().rstrip() + "\n"
    assert cli.main(["docs", "first-steps"]) == 0
    shown = capsys.readouterr().out
    lines = (PAGES / "first-steps.md").read_text().splitlines()
    assert shown.splitlines() == [line for line in lines if not line.startswith("<!-- run by: ")]


def test_a_section_ends_at_the_next_one_of_its_level(capsys):
    assert cli.main(["docs", "launching#environment"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("## Environment\n") and "\n### Huge pages\n" in shown and "\n## Restarts" not in shown
    assert cli.main(["docs", "launching#huge-pages"]) == 0
    assert "\n## " not in capsys.readouterr().out


def test_a_page_that_does_not_exist(capsys):
    for wrong, remedy in (
        ("pitfals", "did you mean pitfalls? `hvdkit docs` shows them"),
        ("launching#restart", "did you mean restarts? `hvdkit docs launching` shows them"),
        ("launching#qqqq", "a section of launching; `hvdkit docs launching` shows them"),
        ("../README", "`hvdkit docs` shows them"),
    ):
        assert cli.main(["docs", wrong]) == 2, wrong
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and remedy in error, wrong


def test_an_error_of_a_command_ends_with_its_page(capsys):
    assert cli.main(["plan", "--tables", "items:1000000x64", "--ranks", "1", "--memory", "1MiB"]) == 2
    assert capsys.readouterr().err.endswith("; see `hvdkit docs embeddings#where-tables-go`\n")
