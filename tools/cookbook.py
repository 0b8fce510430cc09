"""The site's cookbook: the programs that docs/cookbook.md lists, with the code of their ports."""

from __future__ import annotations

import re

from helpers import ports

_ENTRY = re.compile(
    r"^- \[`(?P<name>\w+)`\]\(\.\./tests/programs/\w+\.py\)(?P<mark>[^:]*): (?P<text>.*)$", re.MULTILINE
)


def page(markdown: str) -> str:
    """Return the page with a folded block of code for each program; the lines that the port changes are highlighted."""
    return _ENTRY.sub(
        lambda entry: _block(entry["name"], entry["mark"].replace("*", "").strip(), entry["text"]), markdown
    )


def _block(name: str, mark: str, text: str) -> str:
    made = ports.port(ports.source(name))
    code = made.text.partition("\nresult = ")[0].rstrip().splitlines()  # what the tests compare
    numbers = " ".join(str(number) for number in made.changed if number <= len(code))
    lines = [f'```python title="{name}.py" hl_lines="{numbers}"', *code, "```"]
    title = text.replace('"', "'") + (f" ({mark} lines)" if mark else "")
    return "\n".join([f'??? example "{title}"', "", *(f"    {line}".rstrip() for line in lines), ""])
