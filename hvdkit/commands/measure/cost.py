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
from dataclasses import dataclass

from hvdkit.cluster import rings
from hvdkit.commands.measure.measurements import Measurements, TimedAllreduce
from hvdkit.optimizer.buckets import buckets

# Number of small collectives in which Horovod's thread negotiates what is ready on all ranks.
_NEGOTIATION_ROUNDS = 2
# Halving exchanges between distant ranks take this factor longer than their bytes: 1.7 to 2.1 on four hosts.
_HALVING = 1.8
# Messages up to _SMALL are bound by latency, messages from _LARGE on by bandwidth.
_SMALL = 64 * 1024
_LARGE = 2 * 1024 * 1024


@dataclass(frozen=True)
class Link:
    """The communication costs between ranks.

    Attributes:
        latency: a, seconds for a small message.
        byte: b, seconds per byte on a link: 8e-9 for 1 Gbit/s.
        copy: c, seconds to copy and add a byte.
        wakeup: d without its messages: seconds until Horovod's thread wakes up.
    """

    latency: float
    byte: float
    copy: float
    wakeup: float


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
    doublings = math.ceil(math.log2(ranks))
    negotiation = link.wakeup + _NEGOTIATION_ROUNDS * doublings * link.latency
    crossing = 2 * (ranks - 1) / ranks * nbytes * link.byte
    ring = 2 * (ranks - 1) * link.latency + crossing
    doubling = doublings * (link.latency + nbytes * link.byte)
    halving = 2 * doublings * link.latency + _HALVING * crossing
    algorithm = rings.allreduce_rule(ranks, nbytes)
    seconds = {rings.RING: ring, rings.RECURSIVE_DOUBLING: doubling}.get(algorithm, min(doubling, halving))
    return negotiation + seconds + nbytes * link.copy


def alltoall_seconds(nbytes: int, ranks: int, link: Link) -> float:
    """Return the seconds of an alltoall in which each rank sends ``nbytes``, including the part for itself."""
    if ranks == 1:
        return 0.0
    doublings = math.ceil(math.log2(ranks))
    negotiation = link.wakeup + _NEGOTIATION_ROUNDS * doublings * link.latency
    pairs = (ranks - 1) * link.latency + (ranks - 1) / ranks * nbytes * link.byte
    # Small parts are relayed (Bruck's algorithm): more bytes in fewer messages.
    relayed = doublings * (link.latency + nbytes / 2 * link.byte)
    return negotiation + min(pairs, relayed) + nbytes * link.copy


def fit_link(exchanges: Sequence[TimedAllreduce], copy: float, cycle: float) -> Link:
    """Estimate the link from timed allreduces.

    Args:
        exchanges: some small and some large allreduces, over two or more ranks.
        copy: seconds to copy one byte.
        cycle: Horovod's cycle time in seconds.

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
        measurements: the model, and the time of one rank's computation.
        ranks: number of ranks.
        link: communication costs.
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
