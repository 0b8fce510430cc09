"""Format results as Markdown: a section for each benchmark, and the page with all sections. Reads no files."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from figures import Measured, Record, Verdict

OPENING = (
    "Each table compares several variants of the same workload. Each round runs every variant once, in fresh "
    "processes and in random order. Ratios are taken within a round, and the table shows their median over the rounds. "
    "Compare ratios, not seconds, which differ from machine to machine. `make bench` runs all benchmarks and writes "
    'this page; `make bench BENCH="dense fit"` runs some of them; each section names its own command.'
)

# The picture at the top.
HEADLINE = "dense-cifar10-2"
CAPTION = "A step of the CIFAR-10 tutorial's network on two processes, with hvdkit and with its alternatives"


def page(records: Iterable[Record], notes: Mapping[str, str], pictures: str) -> str:
    """Return docs/benchmarks.md.

    Args:
        records: in the order of their sections.
        notes: hand-written Markdown by benchmark.
        pictures: folder with the pictures, relative to docs/.
    """
    records = list(records)
    parts = ["# Benchmarks"]
    if any(f"{record.name}-{measured.name}" == HEADLINE for record in records for measured in record.measured):
        parts += [f"![{CAPTION}]({pictures}/{HEADLINE}.png)", f"*{CAPTION}.*"]
    parts.append(_wrapped(OPENING))
    if rows := summary(records):
        parts += ["## Goals", rows]
    parts += [section(record, notes.get(record.name, ""), pictures) for record in records]
    return "\n\n".join(parts) + "\n"


def summary(records: Sequence[Record]) -> str:
    """Return a table of the headline goals, or an empty string without any."""
    lines = []
    for record, measured, verdict in [(r, m, v) for r in records for m in r.measured for v in m.verdicts()]:
        goal = verdict.goal
        link = f"[{goal.about or f'{measured.title}: {goal.formula}'}](#{anchor(record.title)})"
        value = "" if verdict.value is None else f"{verdict.value:.3g}"
        if goal.headline:
            lines.append(f"| {link} | {_sign(goal.relation)} {goal.limit:g} | {value} | {verdict.word} |")
    return "\n".join(["| what | goal | measured | |", "|---|---|---|---|", *lines]) if lines else ""


def section(record: Record, notes: str = "", pictures: str = "") -> str:
    """Return a benchmark's section; without a folder of ``pictures``, it shows none."""
    parts = [f"## {record.title}", _wrapped(f"`{record.command}`: {record.about}")]
    for measured in record.measured:
        if len(record.measured) > 1:
            parts.append(f"### {measured.title[0].upper()}{measured.title[1:]}")
        if pictures and measured.is_drawn:
            parts.append(f"![{measured.title}]({pictures}/{record.name}-{measured.name}.png)")
        parts.append(table(measured))
        if measured.goals:
            parts.append("\n".join(_goal_line(verdict, measured) for verdict in measured.verdicts()))
    for sheet in record.sheets:
        parts += [f"**{sheet.title}**"] if sheet.title else []
        parts.append("\n".join([_row(sheet.header), "|" + "---|" * len(sheet.header), *map(_row, sheet.rows)]))
    parts += [f"![{record.title}]({pictures}/{drawn.name}.png)" for drawn in record.pictures if pictures]
    parts += ["\n".join(f"- {note}" for note in record.notes)] if record.notes else []
    parts += [notes.strip()] if notes.strip() else []
    parts.append(_wrapped(environment(record)))
    return "\n\n".join(parts)


def table(measured: Measured) -> str:
    """Return a case's table: each variant's medians, the first metric's spread, and its ratio to the reference."""
    first, *rest = measured.metrics
    series = bool(measured.series)
    reference = None if series else measured.reference
    spread = "" if len(measured.rounds) < 2 or series else ": median (min-max)"
    head = ["variant", first.title + spread]
    if reference:
        head.append(f"/ {reference}")
    head += [metric.title for metric in rest]
    lines = [_row(head), "|" + "---|" * len(head)]
    for name, title in measured.variants.items():
        if not measured.values(name, first.name):
            lines.append(_row([title, measured.trouble(name), *[""] * (len(head) - 2)]))
            continue
        cells = [title, _spread(measured, name, first.name, first.digits, bare=series)]
        if reference:
            ratios = measured.compared(name, reference, first.name)
            cells.append("" if name == reference or not ratios else f"{statistics.median(ratios):.2f}")
        cells += [_spread(measured, name, metric.name, metric.digits, bare=True) for metric in rest]
        cells[0] += f" ({why})" if (why := measured.trouble(name)) else ""
        lines.append(_row(cells))
    return "\n".join(lines)


def environment(record: Record) -> str:
    """Return a sentence with the machine, the versions and the date."""
    found = record.environment
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items() if name != "hvdkit")
    revision = f" at {found['revision']}" if "revision" in found else ""
    loads = [r.load for m in record.measured for r in m.rounds if r.load is not None]
    # The benchmark itself may have run half a dozen processes just before.
    busy = (
        " **The machine was busy with other work: measure again.**" if loads and loads[0] > 3 * found["cores"] else ""
    )
    load = f"; load average before the rounds {min(loads):g} to {max(loads):g}" if loads else ""
    return (
        f"Measured {record.recorded}{load}; {found['cores']} cores of {found['cpu']}, {found['memory_gb']:g} GiB, "
        f"Linux {found['kernel']}, Python {found['python']}, {versions}, hvdkit{revision}.{busy}"
    )


def anchor(title: str) -> str:
    """Return the fragment of a heading's link.

    Example:
        >>> anchor("Saving, and restoring")
        'saving-and-restoring'
    """
    kept = "".join(letter for letter in title.lower() if letter.isalnum() or letter in " -_")
    return kept.replace(" ", "-")


def _goal_line(verdict: Verdict, measured: Measured) -> str:
    goal = verdict.goal
    plain = goal.lower is not None and goal.metric == measured.metrics[0].name and goal.lower_metric is None
    what = goal.formula if plain or not goal.about else goal.about
    value = "" if verdict.value is None else f" = {verdict.value:.3f}"
    return f"- {what}{value}, goal {_sign(goal.relation)} {goal.limit:g}: {verdict.word}"


def _sign(relation: str) -> str:
    return {"<=": "≤", ">=": "≥"}[relation]


def _spread(measured: Measured, variant: str, metric: str, digits: int | None, *, bare: bool) -> str:
    values = measured.values(variant, metric)
    if not values:
        return ""
    middle = number(statistics.median(values), digits)
    least, most = (number(value, digits) for value in (min(values), max(values)))
    return middle if bare or len(values) == 1 else f"{middle} ({least}-{most})"


def number(value: float, digits: int | None) -> str:
    """Return a figure with ``digits`` digits after the decimal point; None: with three significant digits.

    Example:
        >>> number(0.01234, None), number(1234.5, None)
        ('0.0123', '1234')
    """
    if digits is None:
        digits = 0 if not value else max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{digits}f}"


def _row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in cells)} |"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)
