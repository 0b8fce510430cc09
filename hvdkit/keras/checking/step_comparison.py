"""Compare the first training steps of one process with those of several ranks: which values differ, and why.

With u and v the values of one process and of the ranks, and s the largest magnitude in both, values are

    equal       u = v, bit for bit
    rounding    |u - v| <= t s, t = 1e-5 for losses and metrics, 1e-4 for gradients and variables, 2e-2 with 16 bits
    different   anything else

Gradients that are zero but for rounding, as those of a bias before a normalization, have no digits to compare: of a
gradient, differences below 1e-6 of the largest gradient (4e-3 with 16 bits) count as rounding, and so does what an
optimizer makes of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from hvdkit.keras.checking.check_causes import causes_of, notes_of
from hvdkit.keras.checking.check_result import KINDS, ORDER, CheckResult, ComparedValue, Kind, Verdict
from hvdkit.keras.checking.step_records import RecordedArray, Recording, StepRecord

_NUMBER_TOLERANCE = 1e-5
_ARRAY_TOLERANCE = 1e-4
_HALF_TOLERANCE = 2e-2
_NOISE = 1e-6  # of the largest gradient of the model
_HALF_NOISE = 4e-3


def compare_recordings(one: Recording, many: Recording) -> CheckResult:
    """Compare the recording of one process with that of several ranks.

    Example:
        >>> loss = lambda value: StepRecord({"loss": value})
        >>> result = compare_recordings(Recording(1, [loss(0.5)]), Recording(2, [loss(1.0)]))
        >>> result.is_equal, result.causes[0].partition(":")[0]
        (False, 'the loss is 2 times that of one process')
    """
    found: dict[tuple[Kind, str], ComparedValue] = {}
    noise = _Noise()
    for number, (first, second) in enumerate(zip(one.steps, many.steps, strict=False), 1):
        noise.add(first.gradients)
        for value in [*_numbers(number, first, second), *_arrays(number, first, second, noise)]:
            key = value.kind, value.name
            found[key] = _worse(found[key], value) if key in found else value
    values = sorted(found.values(), key=lambda each: KINDS.index(each.kind))
    draws = one.draws or many.draws
    if draws:
        values = [each._replace(verdict="random") if each.verdict == "different" else each for each in values]
    result = CheckResult(many.ranks, min(len(one.steps), len(many.steps)), values)
    result.notes.extend(notes_of(one, many))
    if any(each.verdict in ("different", "random") for each in values):
        result.causes.extend(causes_of(one, many, values))
    return result


def _worse(known: ComparedValue, new: ComparedValue) -> ComparedValue:
    """Return the first difference; without one, the largest."""
    if known.verdict == "different":
        return known
    is_worse = ORDER.index(new.verdict) > ORDER.index(known.verdict) or new.difference > known.difference
    return new if is_worse else known


def _numbers(step: int, first: StepRecord, second: StepRecord) -> Iterator[ComparedValue]:
    is_half = any(each.is_half for each in first.gradients.values())
    tolerance = _HALF_TOLERANCE if is_half else _NUMBER_TOLERANCE
    for name in [*first.numbers, *(name for name in second.numbers if name not in first.numbers)]:
        kind: Kind = "loss" if name == "loss" or name.endswith("_loss") else "metric"
        one = first.numbers.get(name, math.nan)
        many = second.numbers.get(name, math.nan)
        scale = max(abs(one), abs(many))
        is_equal = one == many or (math.isnan(one) and math.isnan(many))
        difference = 0.0 if is_equal else abs(one - many) / scale if scale else 0.0
        verdict: Verdict = "equal" if is_equal else "rounding" if difference <= tolerance else "different"
        factor = many / one if one else math.nan
        yield ComparedValue(kind, name, verdict, step, difference, one, many, factor)


class _Noise:
    """Elements whose gradients have been too small to have digits.

    Attributes:
        largest: the largest gradient of the model.
        moves: whether an optimizer has made other updates of noise.
        moved_before: whether it had in an earlier step: means of what a layer computes then have other values, too.
    """

    def __init__(self) -> None:
        self.largest = 0.0
        self.moves = False
        self.moved_before = False
        self._elements: dict[str, np.ndarray] = {}

    def add(self, gradients: Mapping[str, RecordedArray]) -> None:
        self.moved_before = self.moves
        magnitudes = {name: np.abs(np.nan_to_num(each.values)) for name, each in gradients.items()}
        self.largest = max([self.largest, *(float(each.max(initial=0.0)) for each in magnitudes.values())])
        for name, each in magnitudes.items():
            part = _HALF_NOISE if gradients[name].is_half else _NOISE
            limit = max(_ARRAY_TOLERANCE * float(each.max(initial=0.0)), part * self.largest)
            before = self._elements.get(name)
            self._elements[name] = (each <= limit) if before is None else before | (each <= limit)

    def of(self, name: str, size: int) -> np.ndarray:
        """Return which of the ``size`` elements of a variable are moved by noise."""
        elements = self._elements.get(name)
        return np.zeros(size, bool) if elements is None or elements.size != size else elements


def _arrays(step: int, first: StepRecord, second: StepRecord, noise: _Noise) -> Iterator[ComparedValue]:
    groups: tuple[tuple[Kind, dict[str, RecordedArray], dict[str, RecordedArray]], ...] = (
        ("gradient", first.gradients, second.gradients),
        ("variable", first.variables, second.variables),
        ("state", first.states, second.states),
    )
    for kind, ones, manys in groups:
        for name in [*ones, *(name for name in manys if name not in ones)]:
            one = ones.get(name)
            many = manys.get(name)
            if one is None or many is None or one.values.size != many.values.size:
                yield ComparedValue(kind, name, "different", step, math.inf)
                continue
            yield _compared(kind, name, step, one, many, noise)


def _compared(
    kind: Kind, name: str, step: int, one: RecordedArray, many: RecordedArray, noise: _Noise
) -> ComparedValue:
    if np.array_equal(one.values, many.values, equal_nan=True):
        return ComparedValue(kind, name, "equal", step, 0.0, factor=1.0)
    tolerance = _HALF_TOLERANCE if one.is_half or many.is_half else _ARRAY_TOLERANCE
    is_finite = np.isfinite(one.values) & np.isfinite(many.values)
    scale = float(np.maximum(np.abs(one.values), np.abs(many.values)).max(initial=0.0, where=is_finite))
    errors = np.where(is_finite, np.abs(one.values - many.values), 0.0)
    limit = tolerance * scale
    if kind == "gradient":
        limit = max(limit, (_HALF_NOISE if one.is_half or many.is_half else _NOISE) * noise.largest)
    counted = ~noise.of(name, errors.size) if kind == "variable" else np.ones(errors.size, bool)
    same_finite = np.array_equal(np.isfinite(one.values), np.isfinite(many.values))
    is_rounding = same_finite and not np.any(errors[counted] > limit)
    noise.moves = noise.moves or bool(np.any(errors[~counted] > limit))
    is_rounding = is_rounding or (kind == "state" and noise.moved_before)
    difference = float(errors.max(initial=0.0)) / scale if scale else 0.0
    verdict: Verdict = "rounding" if is_rounding else "different"
    return ComparedValue(kind, name, verdict, step, difference, factor=_factor(one.values, many.values))


def _factor(one: np.ndarray, many: np.ndarray) -> float:
    """Return f with many = f one; NaN if there isn't one."""
    square = float(one @ one)
    if not math.isfinite(square) or square == 0.0:
        return math.nan
    factor = float(many @ one) / square
    residual = float(np.abs(many - factor * one).max())
    return factor if residual <= 1e-3 * float(np.abs(many).max(initial=0.0)) else math.nan
