"""The result of comparing steps: a table with a verdict for each value."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Verdict = Literal["equal", "rounding", "different", "random"]
Kind = Literal["loss", "metric", "gradient", "variable", "state"]
KINDS: tuple[Kind, ...] = ("loss", "metric", "gradient", "variable", "state")
ORDER: tuple[Verdict, ...] = ("equal", "rounding", "random", "different")
_ROWS_SHOWN = 40
_NO_DIGITS = 0.1  # relative difference of values without a digit in common


class ComparedValue(NamedTuple):
    """A value of one process compared with that of the ranks.

    Attributes:
        kind: what it is.
        name: of the loss, metric or variable.
        verdict: whether it differs.
        step: the step, from 1, of the first difference, or else of the largest.
        difference: the largest difference in that step, relative to the largest magnitude.
        one, many: the value, if it is a number.
        factor: the ranks' gradient as a multiple of the other one; NaN if it is no multiple.
    """

    kind: Kind
    name: str
    verdict: Verdict
    step: int
    difference: float
    one: float = math.nan
    many: float = math.nan
    factor: float = math.nan


@dataclass(frozen=True)
class CheckResult:
    """Training steps of one process compared with those of all ranks. ``str`` is a table with causes and remedies.

    Attributes:
        ranks: number of ranks.
        steps: number of steps.
        values: the compared losses, metrics, gradients and variables.
        causes: the likely causes of differences, each with its remedy.
        notes: what was not compared, or was changed to be comparable.

    Example:
        >>> result = CheckResult(ranks=2, steps=1, values=[ComparedValue("loss", "loss", "equal", 1, 0.0, 0.5, 0.5)])
        >>> result.is_equal
        True
        >>> print(result)
        1 step on 1 rank and on 2 ranks
        <BLANKLINE>
        kind  name      1 rank     2 ranks  relative difference
        loss  loss         0.5         0.5                    0  equal
        <BLANKLINE>
        equal: 2 ranks compute what one process does
    """

    ranks: int
    steps: int
    values: list[ComparedValue] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        """True if nothing is different, up to rounding and random numbers."""
        return all(each.verdict != "different" for each in self.values)

    def __str__(self) -> str:
        lines = [f"{_count(self.steps, 'step')} on 1 rank and on {self.ranks} ranks", "", *self._table(), ""]
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"likely cause: {cause}" for cause in self.causes]
        counts = {verdict: sum(each.verdict == verdict for each in self.values) for verdict in ORDER}
        if not self.is_equal:
            last = f"different: {counts['different']} of {_count(len(self.values), 'value')}"
        elif counts["random"]:
            last = f"not comparable: {_count(counts['random'], 'value')} after random numbers; the others are equal"
        else:
            rounded = " up to rounding" if counts["rounding"] else ""
            last = f"equal: {self.ranks} ranks compute what one process does{rounded}"
        return "\n".join([*lines, last])

    def _table(self) -> Iterator[str]:
        shown = self.values
        if len(shown) > _ROWS_SHOWN:  # the rows with a difference, and those of losses and metrics
            differing = [each for each in shown if each.verdict in ("different", "random")]
            numbers = [each for each in shown if each.kind in ("loss", "metric") and each not in differing]
            shown = [*numbers, *differing][:_ROWS_SHOWN]
        width = max([4, *(len(each.name) for each in shown)])
        kinds = max([4, *(len(each.kind) for each in shown)])
        ranks = f"{self.ranks} ranks"
        yield f"{'kind':{kinds}}  {'name':{width}}  {'1 rank':>10}  {ranks:>10}  relative difference"
        for each in shown:
            cells = [("" if math.isnan(value) else f"{value:.6g}") for value in (each.one, each.many)]
            where = f" in step {each.step}" if each.verdict in ("different", "random") else ""
            if each.verdict == "rounding" and each.difference > _NO_DIGITS:
                where = " of zero"
            yield (
                f"{each.kind:{kinds}}  {each.name:{width}}  {cells[0]:>10}  {cells[1]:>10}  "
                f"{each.difference:>19.2g}  {each.verdict}{where}"
            )
        for kind in dict.fromkeys(each.kind for each in self.values):
            hidden = [each for each in self.values if each.kind == kind and each not in shown]
            counts = {verdict: sum(each.verdict == verdict for each in hidden) for verdict in ORDER}
            if hidden:
                yield f"{kind}: {', '.join(f'{n} more {verdict}' for verdict, n in counts.items() if n)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)
