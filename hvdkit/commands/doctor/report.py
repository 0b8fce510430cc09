"""Shows the findings as text or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hvdkit._version import __version__
from hvdkit.commands.doctor.finding import Finding, Status
from hvdkit.errors import counted
from hvdkit.machine.terminal import is_terminal

FORMAT_VERSION = 1
MARKS: dict[Status, tuple[str, str]] = {
    "ok": ("ok", "green"),
    "note": ("note", "cyan"),
    "warning": ("WARN", "yellow"),
    "problem": ("FAIL", "bold red"),
}
WIDTH_WITHOUT_TERMINAL = 120


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 1 if a finding is a problem, else 0."""
    return int(any(finding.status == "problem" for finding in findings))


def as_json(findings: Sequence[Finding]) -> str:
    """Return the findings as JSON; docs/doctor.md documents the keys."""
    document = {
        "format_version": FORMAT_VERSION,
        "hvdkit": __version__,
        "exit_code": exit_code(findings),
        "counts": {status: _count(findings, status) for status in MARKS},
        "findings": {f.name: {key: value for key, value in vars(f).items() if key != "name"} for f in findings},
    }
    return json.dumps(document, indent=2)


def print_text(findings: Sequence[Finding], stream: TextIO) -> None:
    """Print a line per finding with its remedy below, and a summary. Colors are used only on a terminal."""
    terminal = is_terminal(stream)
    width = None if terminal else WIDTH_WITHOUT_TERMINAL
    console = Console(file=stream, force_terminal=terminal, width=width, highlight=False, soft_wrap=False)
    table = Table.grid(padding=(0, 1))
    table.add_column(width=4)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        mark, style = MARKS[finding.status]
        what = Text(finding.what)
        if finding.remedy:
            what.append(f"\n-> {finding.remedy}", style="bold" if finding.status != "note" else "dim")
        table.add_row(Text(mark, style=style), finding.name, what)
    console.print(table)
    console.print(Text(summary(findings)))


def summary(findings: Sequence[Finding]) -> str:
    """Return the report's last line.

    Example:
        >>> summary([Finding("python", "ok", "3.12")])
        'Training can start: 0 problems, 0 warnings.'
    """
    problems = _count(findings, "problem")
    warnings = _count(findings, "warning")
    counts = f"{counted(problems, 'problem')}, {counted(warnings, 'warning')}"
    return f"{'Training cannot start' if problems else 'Training can start'}: {counts}."


def _count(findings: Sequence[Finding], status: Status) -> int:
    return sum(finding.status == status for finding in findings)
