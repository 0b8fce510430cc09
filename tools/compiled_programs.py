"""Write the table of docs/tuning.md: what XLA compiles of the programs of tests/programs on 2 ranks.

Run the nightly tests first, which add a line to a file for each program:

export COMPILED_PROGRAMS=/tmp/programs.jsonl
mpirun -np 2 python -m pytest tests/parallel/test_programs.py --tier nightly -k xla_equals
python tools/compiled_programs.py /tmp/programs.jsonl
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "tuning.md"
BEGIN = "<!-- written by tools/compiled_programs.py -->"
END = "<!-- end -->"
_LINE = re.compile(
    r"train_step of .*?: XLA compiles "
    r"(?:(?P<inside>[\d,]+) of (?P<total>[\d,]+) operations, in (?P<number>\d+) programs?|nothing)"
    r"(?:; not compiled: (?P<reasons>.*))?"
)
_REASON = re.compile(r"(\w+) '[^']*' \(([^()]*(?:\([^()]*\)[^()]*)*)\)|a program: ([^;]*)|; and \d+ more")
_OWN = re.compile(r"jit_compile: (make_\w+ is the model's own)")


def main(path: Path) -> None:
    """Write the table."""
    found = {row["name"]: row for row in map(json.loads, path.read_text().splitlines())}
    rows = [described(row) for _, row in sorted(found.items())]
    number = {kind: sum(row[1] == kind for row in rows) for kind in ("wholly", "partly", "not")}
    head = (
        f"Of {len(rows)} programs, {number['wholly']} are compiled wholly but for exchanges, {number['partly']} "
        f"partly, {number['not']} not."
    )
    lines = [head, "", "| program | compiled | operations | programs | not compiled |", "|---|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    text = PAGE.read_text()
    before = text[: text.index(BEGIN) + len(BEGIN)]
    after = text[text.index(END) :]
    PAGE.write_text(before + "\n" + "\n".join(lines) + "\n" + after)


def described(row: Mapping[str, object]) -> tuple[str, str, str, str, str]:
    """Return the cells of a program's row: of the step with the most operations, if it trains several models."""
    texts = [str(text) for text in _list(row["lines"])]
    steps = [match for text in texts if (match := _LINE.match(text))]
    name = f"`{row['name']}`"
    if not steps:
        own = [match[1] for text in texts if (match := _OWN.match(text))]
        return name, "not", "", "", own[0] if own else "eager steps"
    step = max(steps, key=lambda match: _number(match["total"]))
    reasons = short(step["reasons"] or "")
    if step["inside"] is None:
        return name, "not", "", "", reasons
    kind = "partly" if reasons else "wholly"
    return name, kind, f"{step['inside']} of {step['total']}", step["number"], reasons


def short(reasons: str) -> str:
    """Return reasons without the names of operations, each reason once."""
    kinds: dict[str, list[str]] = {}
    for match in _REASON.finditer(reasons):
        if match[1]:
            kinds.setdefault(match[2], []).append(f"`{match[1]}`")
        elif match[3]:
            kinds.setdefault(match[3].strip(), [])
    return "; ".join(f"{reason}: {', '.join(names)}" if names else reason for reason, names in kinds.items())


def _number(text: str | None) -> int:
    return int((text or "0").replace(",", ""))


def _list(value: object) -> Iterable[object]:
    return value if isinstance(value, list) else []


if __name__ == "__main__":
    main(Path(sys.argv[1]))
