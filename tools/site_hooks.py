"""Hooks of the site's build (mkdocs.yml): pages that are generated, entries of the navigation that are patterns."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for hvdkit's command line, which needs no TensorFlow

from hvdkit.commands.cli import COMMANDS, main  # noqa: E402

# A fence's first line: the language, a file's name, what else tools/check_docs.py reads.
FENCE = re.compile(r"^(```\w+)(?: file=(\S+)| [^\n]*)?$", re.MULTILINE)
# A link to one of the project's sources, which the site does not contain; its text remains.
SOURCE = re.compile(r"\[([^\]]*)\]\(\.\./[^)]+\)")
# In the first line of a help text: the names of nested commands.
NESTED = re.compile(r"\{([\w,-]+)\}")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace patterns in the navigation by the files that match them."""
    config.nav = expanded(config.nav, Path(config.docs_dir))
    return config


def expanded(entries: list[Any], docs: Path) -> list[Any]:
    """Return entries of the navigation with the files that match ``folder/*``, index.md first, in their place."""
    result = []
    for entry in entries:
        if isinstance(entry, dict):
            result += [{title: expanded(v, docs) if isinstance(v, list) else v} for title, v in entry.items()]
        elif entry.endswith("/*"):
            files = (file for file in docs.glob(entry) if file.suffix in {".md", ".ipynb"})
            result += [str(f.relative_to(docs)) for f in sorted(files, key=lambda f: (f.stem != "index", f.name))]
        else:
            result.append(entry)
    return result


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are generated."""
    for name, text in {
        "commands.md": commands_page(),
        "changelog.md": from_root("CHANGELOG.md"),
        "contributing.md": from_root("CONTRIBUTING.md"),
    }.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Adapt a page's Markdown, which follows the conventions of tools/check_docs.py and of GitHub."""
    markdown = FENCE.sub(lambda fence: fence[1] + (f' title="{fence[2]}"' if fence[2] else ""), markdown)
    if "/" not in page.file.src_uri:
        markdown = SOURCE.sub(r"\1", markdown)
    return markdown


def from_root(name: str) -> str:
    """Return a document of the root folder, with links relative to docs/."""
    return (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")


def commands_page() -> str:
    """Return a page with the help texts of all commands."""
    parts = ["# Command line", "The texts of `hvdkit --help` and `hvdkit COMMAND --help`.", block(printed("--help"))]
    for name, command in COMMANDS.items():
        text = printed(name, "--help")
        parts += [f"## hvdkit {name}", f"{command.summary}.", block(text)]
        nested = NESTED.search(text.partition("\n\n")[0])
        for sub in nested[1].split(",") if nested else ():
            parts += [f"### hvdkit {name} {sub}", block(printed(name, sub, "--help"))]
    return "\n\n".join(parts) + "\n"


def printed(*arguments: str) -> str:
    """Return what ``hvdkit ARGUMENTS`` prints, in lines of 100 characters."""
    out = io.StringIO()
    with mock.patch.dict(os.environ, COLUMNS="100"), contextlib.redirect_stdout(out):
        main(arguments)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def block(text: str) -> str:
    """Return a fenced block of plain text."""
    return f"```text\n{text.rstrip()}\n```"
