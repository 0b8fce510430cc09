"""``hvdkit docs``: the documentation's pages, which are installed with hvdkit. ``pages`` links to the folder docs/."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from hvdkit.commands.docs.catalogue import entries, listing, search
from hvdkit.commands.docs.headings import anchor, headings
from hvdkit.errors import describe
from hvdkit.machine.terminal import aligned, on_terminal

PAGES = Path(__file__).parent / "pages"
_MESSAGES = "messages"  # the page whose contents are generated
_MESSAGES_MARK = "<!-- messages -->"
_COMMENT = re.compile(r"^<!--.*?-->\n", re.MULTILINE | re.DOTALL)  # for the checks of the documents


@dataclass(frozen=True, kw_only=True)
class Docs:
    """Show a page of the documentation, or list the pages.

    Exit code: 0; 2 if the page does not exist.

    For example:
        hvdkit docs                        lists the pages
        hvdkit docs pitfalls
        hvdkit docs launching#restarts     one section
        hvdkit docs messages batch_size    the error messages that contain all of these words
        hvdkit docs messages 'MESSAGE'     what an error message is about

    See `hvdkit docs first-steps#help`.
    """

    page: Positional[Annotated[str | None, arg(metavar="PAGE", help_behavior_hint="")]] = None
    """Name of a page, or PAGE#SECTION."""
    words: Positional[Annotated[tuple[str, ...], arg(metavar="WORDS", help_behavior_hint="")]] = ()
    """With the page "messages": words of an error message, or the message itself."""


def docs(config: Docs) -> None:
    """Print a page, formatted on a terminal and as Markdown otherwise; without a page, the list of pages."""
    if config.page is None:
        titles = [(name, next(iter(headings(text)), (name,))[0]) for name, text in pages().items()]
        print("\n".join([*aligned(titles), "", "`hvdkit docs PAGE` shows a page."]))
        return
    if config.words and config.page != _MESSAGES:
        words = shlex.join(config.words)
        remedy = f"to look up an error message, write: hvdkit docs messages {words}"
        raise ValueError(describe("WORDS", words, f"none with the page {config.page}", remedy))
    text = listing(search(config.words, entries())) if config.words else find(config.page)
    if not on_terminal():
        print(text)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(text, hyperlinks=False))


def pages() -> dict[str, str]:
    """Return the text of each page by its name, such as ``launching``."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(PAGES.glob("**/*.md"))}
    return {path.relative_to(PAGES).with_suffix("").as_posix(): _COMMENT.sub("", text) for path, text in texts.items()}


def find(reference: str) -> str:
    """Return the text of a page, or of the section of ``PAGE#SECTION``.

    Raises:
        ValueError: the page or the section does not exist.
    """
    name, _, section = reference.partition("#")
    known = pages()
    if name not in known:
        raise ValueError(describe("PAGE", name, "a page's name", _remedy(name, known, "hvdkit docs")))
    text = with_messages(known[name]) if name == _MESSAGES else known[name]
    if not section:
        return text.rstrip()
    found = headings(text)
    names = [anchor(title) for title, _, _ in found]
    if section not in names:
        remedy = _remedy(section, names, f"hvdkit docs {name}")
        raise ValueError(describe("PAGE", reference, f"a section of {name}", remedy))
    _, level, start = found[names.index(section)]
    end = next((at for _, other, at in found if at > start and other <= level), len(text))
    return text[start:end].rstrip()


def with_messages(text: str) -> str:
    """Return the text of the page of error messages, followed by their catalogue."""
    return f"{text.replace(_MESSAGES_MARK, '').rstrip()}\n\n{listing(entries())}\n"


def _remedy(name: str, known: Iterable[str], listing: str) -> str:
    near = difflib.get_close_matches(name, list(known), 1)
    return (f"did you mean {near[0]}? " if near else "") + f"`{listing}` shows them"
