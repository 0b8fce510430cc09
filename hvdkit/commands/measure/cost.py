"""A cost model of a training step on N ranks: latency, bandwidth, copies, computation, and the wait for stragglers.

With S bytes in a message, N ranks, a seconds of latency per message, b seconds per byte on a link, c seconds to copy
and add a byte, and d seconds until Horovod has negotiated that every rank is ready:

    ring                 d + 2 (N-1) a + 2 (N-1)/N S b + S c
    recursive doubling   d + log2(N) (a + S b) + S c                    small messages, and two ranks
    halving, doubling    d + 2 log2(N) a + 1.8 x 2 (N-1)/N S b + S c    between the two; 1.8 as measured
    alltoall of rows     d + (N-1) a + (N-1)/N S b + S c

(Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19, 2005.)
Gradients are sent in buckets during the backward pass: a bucket is sent once its last gradient is computed and the
previous bucket is done. If all cores compute, copying and adding slow down the computation. Ranks wait for the slowest
rank: the largest of N normal variables (Blom, "Statistical Estimates and Transformed Beta-Variables", 1958).

Not modeled: input and saves, other traffic on the links, oversubscribed switches, ranks not numbered host by host, and
MPI or NCCL versions that choose other algorithms.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hvdkit.cluster import rings
from hvdkit.commands.measure.measurements import BUCKET, CYCLE, Measurements, TimedAllreduce
from hvdkit.machine.terminal import aligned
from hvdkit.optimizer.buckets import buckets

# Number of small collectives in which Horovod's thread negotiates what is ready on all ranks.
_NEGOTIATION_ROUNDS = 2
# Halving exchanges between distant ranks take this factor longer than their bytes: 1.7 to 2.1 on four hosts.
_HALVING = 1.8
# Messages up to _SMALL are bound by latency, messages from _LARGE on by bandwidth.
_SMALL = 64 * 1024
_LARGE = 2 * 1024 * 1024
BUCKET_BYTES = 8 * 1024 * 1024
CYCLE_SECONDS = 0.2e-3


@dataclass(frozen=True)
class Link:
    """The communication costs between ranks, in seconds; the letters are those of the formulas above."""

    latency: float  # a, for a small message
    byte: float  # b, per byte on a link: 8e-9 for 1 Gbit/s
    copy: float  # c, to copy and add a byte
    wakeup: float  # d without its messages: until Horovod's thread wakes up


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step on N ranks: ``total``, and its components."""

    ranks: int
    compute: float
    exchange: float
    hidden: float
    wait: float

    @property
    def total(self) -> float:
        """Seconds of a step; ``hidden`` is the part of the exchange that overlaps with computation."""
        return self.compute + self.exchange - self.hidden + self.wait


def allreduce_seconds(nbytes: int, ranks: int, link: Link) -> float:
    """Return the seconds of an allreduce of ``nbytes`` over ``ranks``, with the algorithm that hvdkit's rules choose.

    Example:
        >>> link = Link(latency=50e-6, byte=8e-9, copy=1e-9, wakeup=1e-4)
        >>> round(allreduce_seconds(25_000_000, 4, link), 3)  # 1 Gbit/s: the ring bound alone is 0.3
        0.326
    """
    if ranks == 1:
        return 0.0
    log_ranks = math.ceil(math.log2(ranks))
    negotiation = link.wakeup + _NEGOTIATION_ROUNDS * log_ranks * link.latency
    crossing = 2 * (ranks - 1) / ranks * nbytes * link.byte
    ring = 2 * (ranks - 1) * link.latency + crossing
    doubling = log_ranks * (link.latency + nbytes * link.byte)
    halving = 2 * log_ranks * link.latency + _HALVING * crossing
    algorithm = rings.allreduce_rule(ranks, nbytes)
    seconds = {rings.RING: ring, rings.RECURSIVE_DOUBLING: doubling}.get(algorithm, min(doubling, halving))
    return negotiation + seconds + nbytes * link.copy


def alltoall_seconds(nbytes: int, ranks: int, link: Link) -> float:
    """Return the seconds of an alltoall in which each rank sends ``nbytes``, including the part for itself."""
    if ranks == 1:
        return 0.0
    log_ranks = math.ceil(math.log2(ranks))
    negotiation = link.wakeup + _NEGOTIATION_ROUNDS * log_ranks * link.latency
    pairs = (ranks - 1) * link.latency + (ranks - 1) / ranks * nbytes * link.byte
    # Small parts are relayed (Bruck's algorithm): more bytes in fewer messages.
    relayed = log_ranks * (link.latency + nbytes / 2 * link.byte)
    return negotiation + min(pairs, relayed) + nbytes * link.copy


def fit_link(exchanges: Sequence[TimedAllreduce], copy: float, cycle: float) -> Link:
    """Estimate the link from timed allreduces, the seconds to copy a byte, and those of Horovod's cycle.

    Raises:
        ValueError: small or large allreduces are missing.
    """
    small = [e for e in exchanges if e.ranks > 1 and e.nbytes <= _SMALL]
    large = [e for e in exchanges if e.ranks > 1 and e.nbytes >= _LARGE]
    if not small or not large:
        raise ValueError(f"exchanges: got {len(small)} small and {len(large)} large ones, expected some of both")
    wakeup = cycle / 2
    per_byte = 3 * copy  # copy in, add, and copy out
    rounds = [(_NEGOTIATION_ROUNDS + 1) * math.ceil(math.log2(e.ranks)) for e in small]
    latency = max(1e-7, statistics.median([(e.seconds - wakeup) / n for e, n in zip(small, rounds, strict=True)]))
    latency_only = Link(latency, 0.0, per_byte, wakeup)
    bytes_seconds = [
        (e.seconds - allreduce_seconds(e.nbytes, e.ranks, latency_only)) / (2 * (e.ranks - 1) / e.ranks * e.nbytes)
        for e in large
    ]
    return Link(latency, max(1e-12, statistics.median(bytes_seconds)), per_byte, wakeup)


def step_cost(
    measurements: Measurements, ranks: int, link: Link, *, slowdown: float = 1.0, bucket_bytes: int
) -> StepCost:
    """Return the cost of a step of ``measurements`` on ``ranks`` ranks, with the measured number of examples per rank.

    Args:
        slowdown: factor by which the computation is slower if ranks share cores; >= 1.
        bucket_bytes: minimum size of a bucket.
    """
    compute = measurements.compute_alone * slowdown
    if ranks == 1:
        return StepCost(1, compute, 0.0, 0.0, 0.0)
    exchange = last_sent = 0.0
    for bucket in buckets([gradient.nbytes for gradient in measurements.gradients], bucket_bytes):
        seconds = allreduce_seconds(sum(measurements.gradients[i].nbytes for i in bucket), ranks, link)
        ready = compute * max(measurements.gradients[i].ready for i in bucket)
        exchange = exchange + seconds
        last_sent = max(last_sent, ready) + seconds
    # Fully used cores also do the copying.
    busy = compute + (measurements.gradient_bytes * link.copy * slowdown if slowdown > 1 else 0.0)
    end = max(busy, last_sent)
    for _ in range(measurements.row_exchanges):  # not hidden: the computation waits for rows
        seconds = alltoall_seconds(measurements.row_bytes // measurements.row_exchanges, ranks, link)
        exchange = exchange + seconds
        end = end + seconds
    wait = measurements.spread * slowdown * statistics.NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    return StepCost(ranks, compute, exchange, compute + exchange - end, wait)


@dataclass(frozen=True)
class Scaling:
    """Predicted steps of one model, as a table."""

    measurements: Measurements
    link: Link
    steps: tuple[StepCost, ...]  # one for each number of ranks, the first for one rank

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
    """Predict a model's steps on each number of ranks.

    Args:
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
    steps = [step_cost(measurements, 1, link, bucket_bytes=limit)]  # a single rank does not share its cores
    for number in sorted(set(ranks) - {1}):
        steps.append(step_cost(measurements, number, link, slowdown=slowdown, bucket_bytes=limit))
    return Scaling(measurements, link, tuple(steps))


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
