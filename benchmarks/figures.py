"""The statistics of a measurement: medians and spreads, ratios within a round, goals; and their form as JSON.

A ratio is taken within a round, between variants that run at most minutes apart, and the result is the median of the
rounds' ratios. If the machine is slow for some minutes, both variants slow down. A ratio of medians would compare
different minutes.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A quantity that every run of a variant returns; less is better.

    Attributes:
        name: its key in a run's results.
        title: column header, with the unit.
        digits: digits after the decimal point; None: three significant digits.
        at: position on the x axis if the metrics are a series, e.g. the bytes of a message.
    """

    name: str
    title: str
    digits: int | None = 1
    at: float | None = None


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A limit on ``upper / lower`` of a metric, or on ``upper`` alone without ``lower``; the median over rounds counts.

    Attributes:
        about: description for readers.
        lower_metric: the lower variant's metric, if different.
        difference: compare ``upper - lower`` instead of the ratio.
        headline: include it in the summary.
    """

    upper: str
    lower: str | None = None
    metric: str = "ms"
    lower_metric: str | None = None
    relation: Literal["<=", ">="] = "<="
    limit: float
    about: str = ""
    difference: bool = False
    headline: bool = False

    @property
    def formula(self) -> str:
        """The compared figures, e.g. ``hvdkit / alone``."""
        if self.lower is None:
            return f"{self.upper}, {self.metric}"
        return f"{self.upper} {'-' if self.difference else '/'} {self.lower}"


@dataclass(frozen=True, kw_only=True)
class Round:
    """One run of every variant: results and failures by variant, their order, and the load average before the round."""

    results: Mapping[str, Mapping[str, float]]
    failed: Mapping[str, str] = field(default_factory=dict)
    order: Sequence[str] = ()
    load: float | None = None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A goal and its measured value; if a variant has no figures, ``value`` is None and ``why`` is the reason."""

    goal: Goal
    value: float | None
    why: str = ""

    @property
    def met(self) -> bool:
        """True if it was measured and reached."""
        if self.value is None:
            return False
        return self.value <= self.goal.limit if self.goal.relation == "<=" else self.value >= self.goal.limit

    @property
    def word(self) -> str:
        """``met``, ``MISSED`` or the reason for a missing figure."""
        return f"not measured: {self.why}" if self.value is None else "met" if self.met else "MISSED"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Variants of the same workload, compared over rounds.

    Attributes:
        variants: titles by name, in the order of the table.
        reference: the variant that ratios are relative to.
        unavailable: reasons for variants that could not be run, by name.
    """

    name: str
    title: str
    metrics: Sequence[Metric]
    variants: Mapping[str, str]
    goals: Sequence[Goal] = ()
    reference: str | None = None
    rounds: Sequence[Round] = ()
    unavailable: Mapping[str, str] = field(default_factory=dict)

    def values(self, variant: str, metric: str) -> list[float]:
        """Return a variant's figures from the rounds that have one."""
        return [r.results[variant][metric] for r in self.rounds if metric in r.results.get(variant, {})]

    def compared(self, upper: str, lower: str, metric: str, lower_metric: str | None = None, *, difference=False):
        """Return the ratios (or differences) within each round that has both figures."""
        other = lower_metric or metric
        found = []
        for each in self.rounds:
            if metric in each.results.get(upper, {}) and other in each.results.get(lower, {}):
                above, below = each.results[upper][metric], each.results[lower][other]
                found.append(above - below if difference else above / below)
        return found

    @property
    def series(self) -> list[Metric]:
        """The metrics that have positions on an x axis."""
        return [metric for metric in self.metrics if metric.at is not None]

    @property
    def is_drawn(self) -> bool:
        """True for a series, or if at least three variants have figures."""
        return (
            bool(self.series) or sum(bool(self.values(variant, self.metrics[0].name)) for variant in self.variants) >= 3
        )

    def trouble(self, variant: str) -> str:
        """Return why a variant lacks figures from some or all rounds, or an empty string if it has all."""
        if variant in self.unavailable:
            return f"not available: {self.unavailable[variant]}"
        reasons = [r.failed[variant] for r in self.rounds if variant in r.failed]
        if not reasons:
            return "" if self.values(variant, self.metrics[0].name) else "not run"
        often = f" in {len(reasons)} of {len(self.rounds)} rounds" if len(self.rounds) > 1 else ""
        return f"failed{often}: {reasons[0]}"

    def verdicts(self) -> list[Verdict]:
        """Return every goal with its measured value."""
        return [self._verdict(goal) for goal in self.goals]

    def _verdict(self, goal: Goal) -> Verdict:
        if goal.lower is None:
            values = self.values(goal.upper, goal.metric)
        else:
            values = self.compared(goal.upper, goal.lower, goal.metric, goal.lower_metric, difference=goal.difference)
        if values:
            return Verdict(goal=goal, value=statistics.median(values))
        variants = [goal.upper, *([goal.lower] if goal.lower else [])]
        return Verdict(goal=goal, value=None, why="; ".join(f"{w} {t}" for w in variants if (t := self.trouble(w))))


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """A table that does not compare variants."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[object]]


@dataclass(frozen=True, kw_only=True)
class Picture:
    """Curves to draw: label to (x, y); ``y_log`` for a logarithmic axis.

    With ``doubling``, x grows by powers of two, and labels of the form "MODEL, LINK" have one color per model.
    Otherwise, the other curves should lie on top of the first.
    """

    name: str
    x_label: str
    y_label: str
    curves: Mapping[str, Sequence[Sequence[float]]]
    y_log: bool = False
    doubling: bool = False


@dataclass(frozen=True, kw_only=True)
class Record:
    """A benchmark's results, as stored in benchmarks/results."""

    name: str
    title: str
    about: str
    command: str
    recorded: str
    environment: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    measured: Sequence[Measured] = ()
    sheets: Sequence[Sheet] = ()
    pictures: Sequence[Picture] = ()
    notes: Sequence[str] = ()

    def drawn(self) -> dict[str, Measured | Picture]:
        """Return what the report draws, by the name of the picture's file."""
        cases = {f"{self.name}-{measured.name}": measured for measured in self.measured if measured.is_drawn}
        return {f"{name}.png": what for name, what in (cases | {p.name: p for p in self.pictures}).items()}

    def write(self, path: Path) -> None:
        """Write the record as JSON, with one line for each round."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(as_lines(asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read a file written by :meth:`write`.

        Raises:
            ValueError: The file is not such a record.
        """
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            found["measured"] = [_measured(**m) for m in found["measured"]]
            found["sheets"] = [Sheet(**s) for s in found["sheets"]]
            found["pictures"] = [Picture(**p) for p in found["pictures"]]
            return cls(**found)
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{path}: got {error!r}, expected a benchmark's results; run the benchmark again"
            ) from error


def _measured(*, metrics: list, goals: list, rounds: list, **rest: Any) -> Measured:
    return Measured(
        metrics=[Metric(**m) for m in metrics],
        goals=[Goal(**g) for g in goals],
        rounds=[Round(**r) for r in rounds],
        **rest,
    )


def as_lines(value: Any, depth: int = 0) -> str:
    """Return JSON with one line for each round, metric, goal, row and curve, which a record has at depth 4."""
    named = isinstance(value, dict)
    items = list(value.values()) if named else value if isinstance(value, list | tuple) else []
    if depth == 4 or not any(isinstance(item, dict | list | tuple) for item in items):
        return json.dumps(value, ensure_ascii=False)
    names = [f"{json.dumps(name)}: " for name in value] if named else [""] * len(items)
    margin = "\n" + " " * depth
    lines = [f"{margin} {name}{as_lines(item, depth + 1)}" for name, item in zip(names, items, strict=True)]
    begin, end = "{}" if named else "[]"
    return f"{begin}{','.join(lines)}{margin}{end}"
