"""The headings of a page of the documentation, and their anchors."""

from __future__ import annotations

import re

# Headings outside of code blocks; a heading ends at the end of its line.
_FENCE_OR_HEADING = re.compile(r"^```.*?^```|^(?P<marks>#+) +(?P<title>.+?) *$", re.MULTILINE | re.DOTALL)


def headings(text: str) -> list[tuple[str, int, int]]:
    """Return the headings of a page: title, level and position.

    Example:
        >>> headings("# Data\\n\\n## Who gets which rows\\n")
        [('Data', 1, 0), ('Who gets which rows', 2, 8)]
    """
    found = _FENCE_OR_HEADING.finditer(text)
    return [(match["title"], len(match["marks"]), match.start()) for match in found if match["title"]]


def anchor(title: str) -> str:
    """Return the anchor of a heading, as GitHub and the site generate it.

    Example:
        >>> anchor("Launching: `hvdkit run`")
        'launching-hvdkit-run'
    """
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")
