"""Hooks of the site's build (mkdocs.yml): generated contents, and patterns in the navigation."""

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
# For hvdkit's command line, which needs no TensorFlow, and for the programs of the cookbook.
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "tests")]

import cookbook  # noqa: E402

from hvdkit.commands.cli import COMMANDS, main  # noqa: E402
from hvdkit.commands.docs import with_messages  # noqa: E402

# A fence's first line: the language, a file's name, what else tools/check_docs.py reads.
FENCE = re.compile(r"^(```\w+)(?: file=(\S+)| [^\n]*)?$", re.MULTILINE)
# A link to one of the project's sources, which the site does not contain; its text remains.
SOURCE = re.compile(r"\[([^\]]*)\]\(\.\./[^)]+\)")
# A relative link to a document or a notebook, up to the suffix.
NOTEBOOK_LINK = re.compile(r'(<a [^>]*href="(?!https?:)[^"#]+)\.(?:md|ipynb)(?=["#])')
# Text that is left alone (code, headings, links), or a public name: `hk.fit`, `hk.fit(model, ...)`.
NAME = re.compile(
    r"^```.*?^```|^#.*?$|\[[^\]]*\]\([^)]*\)|`hk\.(?P<name>[\w.]+)(?:\([^`\n]*\))?`", re.MULTILINE | re.DOTALL
)
# The first line of a help text, with the names of nested commands.
NESTED = re.compile(r"^usage: hvdkit \S+ \[-h\] \{([\w,-]+)\}")


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
    """Add the documents of the root folder, with links that are relative to docs/."""
    for name in ("CHANGELOG.md", "CONTRIBUTING.md"):
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, name.lower(), content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Adapt a page's Markdown, which follows the conventions of tools/check_docs.py and of GitHub."""
    markdown = FENCE.sub(lambda fence: fence[1] + (f' title="{fence[2]}"' if fence[2] else ""), markdown)
    if page.file.src_uri == "commands.md":
        markdown = markdown.replace("<!-- commands -->", help_texts())
    if page.file.src_uri == "messages.md":
        markdown = with_messages(markdown)
    if page.file.src_uri == "cookbook.md":
        markdown = cookbook.page(markdown)
    if "/" not in page.file.src_uri:
        markdown = SOURCE.sub(r"\1", markdown)
    return linked(markdown, Path(config.docs_dir))


def on_page_content(html: str, page: Page, **_: Any) -> str:
    """Adapt a notebook's links to documents and notebooks, which MkDocs does only in Markdown."""
    return NOTEBOOK_LINK.sub(r"\1.html", html) if page.file.src_uri.endswith(".ipynb") else html


def linked(markdown: str, docs: Path) -> str:
    """Link the first mention of each public name to its entry in the reference."""
    entries = {entry for page in docs.glob("api/*.md") for entry in re.findall(r"^::: (\S+)", page.read_text(), re.M)}

    def link(match: re.Match[str]) -> str:
        entry = f"hvdkit.{match['name']}"
        if entry not in entries:
            return match[0]
        entries.remove(entry)
        return f"[{match[0]}][{entry}]"

    return NAME.sub(link, markdown)


def help_texts() -> str:
    """Return the help texts of all commands, under headings."""
    parts = [block(printed("--help"))]
    for name, command in COMMANDS.items():
        text = printed(name, "--help")
        parts += [f"## hvdkit {name}", f"{command.summary}.", block(text)]
        nested = NESTED.match(text)
        for sub in nested[1].split(",") if nested else ():
            parts += [f"### hvdkit {name} {sub}", block(printed(name, sub, "--help"))]
    return "\n\n".join(parts)


def printed(*arguments: str) -> str:
    """Return what ``hvdkit ARGUMENTS`` prints, in lines of 100 characters."""
    out = io.StringIO()
    with mock.patch.dict(os.environ, COLUMNS="100"), contextlib.redirect_stdout(out):
        main(arguments)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def block(text: str) -> str:
    """Return a fenced block of plain text."""
    return f"```text\n{text.rstrip()}\n```"
