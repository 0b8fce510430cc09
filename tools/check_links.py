"""Check that every relative link in the project's documents leads to a file, and every anchor to a heading."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """Return the anchors of a document's headings, as GitHub generates them."""
    titles = (re.sub(r"[^\w\- ]", "", title.lower()) for title in HEADING.findall(FENCE.sub("", text)))
    return {title.strip().replace(" ", "-") for title in titles}


def read(document: Path) -> str:
    """Return the text of a document; of a notebook, that of its Markdown cells."""
    text = document.read_text(encoding="utf-8")
    if document.suffix != ".ipynb":
        return text
    cells = json.loads(text)["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def broken_links(document: Path) -> list[str]:
    """Return one message for each broken link in ``document``."""
    text = read(document)
    messages = []
    for link in LINK.findall(FENCE.sub("", text)):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        if not target.exists():
            messages.append(f"{document.relative_to(ROOT)}: no file {link}")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target.read_text(encoding="utf-8")):
            messages.append(f"{document.relative_to(ROOT)}: no heading for {link}")
    return messages


def main() -> int:
    """Print the broken links of all documents; return 1 if there are any."""
    patterns = ("*.md", "docs/**/*.md", "docs/**/*.ipynb", "launch/**/*.md")
    documents = [document for pattern in patterns for document in ROOT.glob(pattern)]
    messages = [message for document in documents for message in broken_links(document)]
    print("\n".join([*messages, f"{len(documents)} documents, {len(messages)} broken links"]))
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
