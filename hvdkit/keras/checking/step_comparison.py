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
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from hvdkit.errors import listed
from hvdkit.keras.checking.check_result import KINDS, ORDER, CheckResult, ComparedValue, Kind, Verdict
from hvdkit.keras.checking.step_records import RecordedArray, Recording, StepRecord

_NUMBER_TOLERANCE = 1e-5
_ARRAY_TOLERANCE = 1e-4
_HALF_TOLERANCE = 2e-2
_NOISE = 1e-6  # of the largest gradient of the model
_HALF_NOISE = 4e-3
_NAMES_SHOWN = 3


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
    if one.draws or many.draws:
        values = [each._replace(verdict="random") if each.verdict == "different" else each for each in values]
    result = CheckResult(many.ranks, min(len(one.steps), len(many.steps)), values)
    result.notes.extend(_notes(one, many))
    if any(each.verdict in ("different", "random") for each in values):
        result.causes.extend(_causes(one, many, values))
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
    kinds: dict[Kind, tuple[Mapping[str, RecordedArray], Mapping[str, RecordedArray]]] = {
        "gradient": (first.gradients, second.gradients),
        "variable": (first.variables, second.variables),
        "state": (first.states, second.states),
    }
    for kind, (ones, manys) in kinds.items():
        for name in [*ones, *(name for name in manys if name not in ones)]:
            one = ones.get(name)
            many = manys.get(name)
            if one is None or many is None or one.values.size != many.values.size:
                yield ComparedValue(kind, name, "different", step, math.inf)
            else:
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


# ---- notes and causes -----------------------------------------------------------------------------------------------


def _notes(one: Recording, many: Recording) -> Iterator[str]:
    """Yield what was not compared, or was changed to be comparable."""
    if silenced := one.silenced or many.silenced:
        yield f"switched off, as each rank draws its own random numbers: {listed(silenced, _NAMES_SHOWN)}"
    if draws := one.draws or many.draws:
        yield (
            f"steps draw random numbers ({listed(draws, _NAMES_SHOWN)}), of which each rank has its own: differences "
            "do not count as wrong; take them out for a comparison"
        )
    if not_compared := many.not_compared or one.not_compared:
        yield f"not compared, as ranks hold parts of it: {listed(not_compared, _NAMES_SHOWN)}"


def _causes(one: Recording, many: Recording, values: Iterable[ComparedValue]) -> Iterator[str]:
    """Yield the likely causes, beginning with those that explain everything else."""
    if one.first_rows and many.first_rows and one.first_rows != many.first_rows:
        yield (
            "the two runs read different rows in their first batch: seed what draws, splits or shuffles the data, "
            "np.random.default_rng(0)"
        )
        return
    if many.local_normalizations:
        names = listed(many.local_normalizations, _NAMES_SHOWN)
        yield f"BatchNormalization ({names}) uses the rows of its rank: pass synchronized=True"
        return
    if one.draws or many.draws:
        return
    different = [each for each in values if each.verdict == "different"]
    first_step = min(each.step for each in different)
    wrong = {kind: [each for each in different if (each.kind, each.step) == (kind, first_step)] for kind in KINDS}
    names_of = {kind: listed([each.name for each in of_kind], _NAMES_SHOWN) for kind, of_kind in wrong.items()}
    common = _common_factor(wrong["gradient"] or wrong["loss"])
    reads_ranks = "or it contains hk.rank() or hk.size(): hk.fit averages gradients and losses itself"
    if common is not None:
        what = "every gradient" if wrong["gradient"] else "the loss"
        yield (
            f"{what} is {common:.4g} times that of one process: the loss is a sum over rows, or is divided by a fixed "
            f"number of rows, {reads_ranks}; use the mean of the rows"
        )
    elif wrong["loss"]:
        yield (
            "the loss of a batch is not the mean of its rows' losses: compute it from hk.gather_rows(y_true) and "
            f"hk.gather_rows(y_pred), {reads_ranks}"
        )
    elif wrong["gradient"]:
        yield (
            f"gradients differ ({names_of['gradient']}), but the loss does not: train_step computes them from "
            "something else, such as a norm or a part of its rank's rows; pass what depends on rows through "
            "hk.average_gradients or hk.gather_rows"
        )
    if wrong["variable"] and not wrong["gradient"]:
        yield (
            f"gradients are equal, but variables differ ({names_of['variable']}): a step assigns them without the "
            "optimizer; compute what it assigns from hk.allreduce"
        )
    if wrong["state"]:
        yield (
            f"{names_of['state']}: updated from the rows of a rank; declare how ranks combine it, "
            "hk.synchronize(variable, 'mean')"
        )
    if wrong["metric"]:
        yield (
            f"metric {names_of['metric']}: its value for a batch is not the mean of its rows' values: keep sums and "
            f"counts in its variables, or compute it from hk.gather_rows, {reads_ranks}"
        )


def _common_factor(values: Sequence[ComparedValue]) -> float | None:
    factors = [each.factor for each in values]
    if not factors or any(math.isnan(factor) for factor in factors) or abs(factors[0] - 1) < 1e-3:
        return None
    return factors[0] if all(abs(factor - factors[0]) <= 2e-3 * abs(factors[0]) for factor in factors) else None
