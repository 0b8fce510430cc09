"""``hvdkit plan --measured``: predict a model's step time on more ranks than were measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hvdkit.commands.measure.cost import Link, StepCost, fit_link, step_cost
from hvdkit.commands.measure.measurements import BUCKET, CYCLE, Measurements
from hvdkit.machine.terminal import aligned

BUCKET_BYTES = 8 * 1024 * 1024
CYCLE_SECONDS = 0.2e-3


@dataclass(frozen=True)
class Scaling:
    """Predicted steps of one model. Its ``str()`` is a human-readable table.

    Attributes:
        measurements: the model.
        link: communication costs.
        steps: one for each number of ranks, the first for one rank.
    """

    measurements: Measurements
    link: Link
    steps: tuple[StepCost, ...]

    def efficiency(self, ranks: int) -> float:
        """Return the scaling efficiency: throughput of ``ranks`` ranks over ``ranks`` times that of one; 1 is ideal."""
        return self.steps[0].total / next(step.total for step in self.steps if step.ranks == ranks)

    def __str__(self) -> str:
        m = self.measurements
        link = self.link
        rows = f", {m.row_bytes / 1e6:.1f} MB of rows" if m.row_exchanges else ""
        head = [
            f"{m.model}, {m.batch} examples per rank: {m.gradient_bytes / 1e6:.1f} MB of gradients{rows}; "
            f"measured on {m.ranks} ranks",
            f"link: {8e-9 / link.byte:.2f} Gbit/s, {link.latency * 1e6:.0f} us; copies: {1e-9 / link.copy:.1f} GB/s",
            "",
        ]
        steps = [
            (
                str(s.ranks),
                *(f"{1e3 * seconds:.1f}" for seconds in (s.total, s.compute, s.exchange, s.hidden, s.wait)),
                f"{100 * self.efficiency(s.ranks):.0f} %",
            )
            for s in self.steps
        ]
        names = ("ranks", "step ms", "compute", "exchange", "hidden", "wait", "efficiency")
        return "\n".join([*head, *aligned([names, *steps], right=range(len(names)))])


def predict_scaling(
    measurements: Measurements, ranks: Sequence[int], *, bandwidth: float | None = None, latency: float | None = None
) -> Scaling:
    """Predict a model's steps.

    Args:
        measurements: measurements from ``hvdkit tune``.
        ranks: numbers of ranks.
        bandwidth: bandwidth in bits per second, if the link is not the measured one.
        latency: latency in seconds, if the link is not the measured one.

    Raises:
        ValueError: allreduces between ranks were not measured.

    Example::

        print(predict_scaling(Measurements.load(Path("resnet50.json")), [8, 64, 512, 4096], bandwidth=25e9))
    """
    settings = measurements.settings
    cycle = float(settings.get(CYCLE, 1e3 * CYCLE_SECONDS)) / 1e3
    link = fit_link(measurements.exchanges, measurements.copy, cycle)
    link = link if bandwidth is None else replace(link, byte=8 / bandwidth)
    link = link if latency is None else replace(link, latency=latency)
    slowdown = max(1.0, measurements.compute_together / measurements.compute_alone)
    limit = int(settings.get(BUCKET, BUCKET_BYTES))
    sizes = [1, *(n for n in sorted(set(ranks)) if n > 1)]
    # A single rank does not share its cores.
    return Scaling(
        measurements,
        link,
        tuple(step_cost(measurements, n, link, slowdown=slowdown if n > 1 else 1.0, bucket_bytes=limit) for n in sizes),
    )


def doublings(first: int, last: int) -> list[int]:
    """Return numbers of ranks from ``first`` to ``last``, doubling each time.

    Example:
        >>> doublings(8, 100)
        [8, 16, 32, 64, 100]
    """
    result = []
    while first < last:
        result.append(first)
        first *= 2
    return [*result, last]
