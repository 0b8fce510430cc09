"""What a training step costs on N ranks: latency, bandwidth, copies, computation, and the wait for the slowest.

With S bytes in a message, N ranks, a seconds for a message to arrive, b for a byte to cross a link, c for a byte to
be copied and added up, and d until Horovod has found that every rank is ready:

    ring                 d + 2 (N-1) a + 2 (N-1)/N S b + S c
    recursive doubling   d + log2(N) (a + S b) + S c                    small messages, and two ranks
    halving, doubling    d + 2 log2(N) a + 1.8 x 2 (N-1)/N S b + S c    between the two; 1.8 as measured
    alltoall of rows     d + (N-1) a + (N-1)/N S b + S c

(Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19, 2005.)
Gradients travel in buckets while the backward pass goes on: a bucket goes out once its last gradient is there and
the one before is through. Where all cores compute, what copies and adds takes its time from the computation. Ranks wait
for the slowest of them: the largest of N normal variables (Blom, "Statistical Estimates and Transformed
Beta-Variables", 1958).

Left out: input and saves, other traffic on the links, switches that carry less than all their links together, ranks
numbered in another order than host by host, and MPIs and NCCL that choose other algorithms.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hvdkit import rings
from hvdkit.planning.buckets import buckets
from hvdkit.planning.measured import Exchange, Measured

# Horovod's thread finds out in so many small collectives of its own what all ranks have ready.
_ROUNDS_TO_AGREE = 2
# Partners far apart exchange halves, and take so many times as long as the bytes: 1.7 to 2.1 on four hosts.
_HALVING = 1.8
# Gradients larger than this go by bandwidth; smaller messages tell the latency.
_SMALL, _LARGE = 64 * 1024, 2 * 1024 * 1024


@dataclass(frozen=True)
class Link:
    """How messages travel.

    Attributes:
        latency: a, seconds for a small message.
        byte: b, seconds for a byte to cross a link: 8e-9 for 1 Gbit/s.
        copy: c, seconds for a byte to be copied and added up.
        agreement: d without its messages: seconds until Horovod's thread looks.
    """

    latency: float
    byte: float
    copy: float
    agreement: float


@dataclass(frozen=True)
class Step:
    """Seconds of a step on N ranks: ``total``, and what it is made of."""

    ranks: int
    compute: float
    exchange: float
    hidden: float
    wait: float

    @property
    def total(self) -> float:
        """What a step takes: ``hidden`` is that part of the exchange that passes while the rank computes."""
        return self.compute + self.exchange - self.hidden + self.wait


def allreduce_seconds(nbytes: int, ranks: int, link: Link) -> float:
    """Return the seconds of one allreduce of ``nbytes`` between ``ranks``, by the algorithm that hvdkit's rules choose.

    Example:
        >>> link = Link(latency=50e-6, byte=8e-9, copy=1e-9, agreement=1e-4)
        >>> round(allreduce_seconds(25_000_000, 4, link), 3)  # 1 Gbit/s: the ring bound alone is 0.3
        0.326
    """
    if ranks == 1:
        return 0.0
    doublings = math.ceil(math.log2(ranks))
    agree = link.agreement + _ROUNDS_TO_AGREE * doublings * link.latency
    crossing = 2 * (ranks - 1) / ranks * nbytes * link.byte
    ring = 2 * (ranks - 1) * link.latency + crossing
    doubling = doublings * (link.latency + nbytes * link.byte)
    halving = 2 * doublings * link.latency + _HALVING * crossing
    algorithm = rings.rule(ranks, nbytes)
    chosen = {rings.RING: ring, rings.RECURSIVE_DOUBLING: doubling}.get(algorithm, min(doubling, halving))
    return agree + chosen + nbytes * link.copy


def alltoall_seconds(nbytes: int, ranks: int, link: Link) -> float:
    """Return the seconds of an alltoall of which each rank sends ``nbytes``, its own part included."""
    if ranks == 1:
        return 0.0
    doublings = math.ceil(math.log2(ranks))
    agree = link.agreement + _ROUNDS_TO_AGREE * doublings * link.latency
    pairs = (ranks - 1) * link.latency + (ranks - 1) / ranks * nbytes * link.byte
    # Small parts go through others' hands (Bruck): more bytes in fewer messages.
    relayed = doublings * (link.latency + nbytes / 2 * link.byte)
    return agree + min(pairs, relayed) + nbytes * link.copy


def fit(exchanges: Sequence[Exchange], copy: float, cycle: float) -> Link:
    """Return the link that timed allreduces tell of.

    Args:
        exchanges: some small ones and some large ones, between two ranks or more.
        copy: seconds for one byte to be copied.
        cycle: seconds between two looks of Horovod's thread.

    Raises:
        ValueError: there are too few of them.
    """
    small = [e for e in exchanges if e.ranks > 1 and e.nbytes <= _SMALL]
    large = [e for e in exchanges if e.ranks > 1 and e.nbytes >= _LARGE]
    if not small or not large:
        raise ValueError(f"exchanges: got {len(small)} small and {len(large)} large ones, expected some of both")
    # Copied in, added up, and copied out.
    moved, agreement = 3 * copy, cycle / 2
    rounds = [(_ROUNDS_TO_AGREE + 1) * math.ceil(math.log2(e.ranks)) for e in small]
    latency = max(1e-7, statistics.median([(e.seconds - agreement) / n for e, n in zip(small, rounds, strict=True)]))
    unhindered = Link(latency, 0.0, moved, agreement)
    bytes_seconds = [
        (e.seconds - allreduce_seconds(e.nbytes, e.ranks, unhindered)) / (2 * (e.ranks - 1) / e.ranks * e.nbytes)
        for e in large
    ]
    return Link(latency, max(1e-12, statistics.median(bytes_seconds)), moved, agreement)


def step(measured: Measured, ranks: int, link: Link, *, crowd: float = 1.0, bucket_bytes: int) -> Step:
    """Return what a step of ``measured`` costs on ``ranks`` ranks, each with as many examples as then.

    Args:
        measured: the model, and what one rank's computation takes.
        ranks: how many.
        link: how messages travel.
        crowd: how many times as long a rank computes because others compute on the same cores; from 1 on.
        bucket_bytes: that travel together at least.
    """
    compute = measured.compute_alone * crowd
    if ranks == 1:
        return Step(1, compute, 0.0, 0.0, 0.0)
    exchange = through = 0.0
    for places in buckets([gradient.nbytes for gradient in measured.gradients], bucket_bytes):
        seconds = allreduce_seconds(sum(measured.gradients[i].nbytes for i in places), ranks, link)
        ready = compute * max(measured.gradients[i].ready for i in places)
        exchange, through = exchange + seconds, max(through, ready) + seconds
    # Cores that compute all the time do the copying as well.
    busy = compute + (measured.gradient_bytes * link.copy * crowd if crowd > 1 else 0.0)
    end = max(busy, through)
    for _ in range(measured.row_exchanges):  # nothing computes that does not wait for rows
        seconds = alltoall_seconds(measured.row_bytes // measured.row_exchanges, ranks, link)
        exchange, end = exchange + seconds, end + seconds
    wait = measured.spread * crowd * statistics.NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    return Step(ranks, compute, exchange, compute + exchange - end, wait)
