"""Explain why the steps of several ranks differ from those of one process."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from hvdkit.errors import listed
from hvdkit.keras.checking.check_result import ComparedValue, Kind
from hvdkit.keras.checking.step_records import Recording

_NAMES_SHOWN = 3


def notes_of(one: Recording, many: Recording) -> Iterator[str]:
    """Yield what was not compared, or was changed to be comparable."""
    if silenced := one.silenced or many.silenced:
        yield f"switched off, as each rank draws its own random numbers: {_names(silenced)}"
    if draws := one.draws or many.draws:
        yield (
            f"steps draw random numbers ({_names(draws)}), of which each rank has its own: differences do not count as "
            "wrong; take them out for a comparison"
        )
    if not_compared := many.not_compared or one.not_compared:
        yield f"not compared, as ranks hold parts of it: {_names(not_compared)}"


def _names(names: Sequence[str]) -> str:
    return listed(names, _NAMES_SHOWN)


def causes_of(one: Recording, many: Recording, values: Sequence[ComparedValue]) -> Iterator[str]:
    """Yield the likely causes, beginning with those that explain everything else."""
    if one.first_rows and many.first_rows and one.first_rows != many.first_rows:
        yield (
            "the two runs read different rows in their first batch: seed what draws, splits or shuffles the data, "
            "np.random.default_rng(0)"
        )
        return
    if many.local_normalizations:
        names = _names(many.local_normalizations)
        yield f"BatchNormalization ({names}) uses the rows of its rank: pass synchronized=True"
        return
    if one.draws or many.draws:
        return
    first = min(each.step for each in values if each.verdict == "different")
    wrong = [each for each in values if each.verdict == "different" and each.step == first]
    by_kind: dict[Kind, list[ComparedValue]] = {}
    for each in wrong:
        by_kind.setdefault(each.kind, []).append(each)
    gradients = by_kind.get("gradient", [])
    losses = by_kind.get("loss", [])
    metrics = _names([each.name for each in by_kind.get("metric", [])])
    common = _common_factor(gradients) if gradients else _common_factor(losses)
    reads_ranks = "or it contains hk.rank() or hk.size(): hk.fit averages gradients and losses itself"
    if common is not None:
        what = "every gradient" if gradients else "the loss"
        yield (
            f"{what} is {common:.4g} times that of one process: the loss is a sum over rows, or is divided by a fixed "
            f"number of rows, {reads_ranks}; use the mean of the rows"
        )
    elif losses:
        yield (
            "the loss of a batch is not the mean of its rows' losses: compute it from hk.gather_rows(y_true) and "
            f"hk.gather_rows(y_pred), {reads_ranks}"
        )
    elif gradients:
        yield (
            f"gradients differ ({_names([each.name for each in gradients])}), but the loss does not: train_step "
            "computes them from something else, such as a norm or a part of its rank's rows; pass what depends on rows "
            "through hk.average_gradients or hk.gather_rows"
        )
    if by_kind.get("variable") and not gradients:
        names = _names([each.name for each in by_kind["variable"]])
        yield (
            f"gradients are equal, but variables differ ({names}): a step assigns them without the optimizer; compute "
            "what it assigns from hk.allreduce"
        )
    if by_kind.get("state"):
        names = _names([each.name for each in by_kind["state"]])
        yield (
            f"{names}: updated from the rows of a rank; declare how ranks combine it, hk.synchronize(variable, 'mean')"
        )
    if metrics:
        yield (
            f"metric {metrics}: its value for a batch is not the mean of its rows' values: keep sums and counts in its "
            f"variables, or compute it from hk.gather_rows, {reads_ranks}"
        )


def _common_factor(values: Sequence[ComparedValue]) -> float | None:
    factors = [each.factor for each in values]
    if not factors or any(math.isnan(factor) for factor in factors) or abs(factors[0] - 1) < 1e-3:
        return None
    return factors[0] if all(abs(factor - factors[0]) <= 2e-3 * abs(factors[0]) for factor in factors) else None
