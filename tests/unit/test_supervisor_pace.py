"""The interval between agreements, with a simulated clock."""

from __future__ import annotations

from itertools import pairwise

import pytest
from helpers.cases import case

from hvdkit.supervisor.pace import GROWTH, Pace


class Run:
    """A run with given step times; it records the steps that end in an agreement, and when."""

    def __init__(self, seconds=1.0, start=0):
        self.now, self.step = 100.0, start
        self.pace = Pace(seconds, clock=lambda: self.now)
        self.agreed: list[tuple[int, float]] = []

    def steps(self, count, step_seconds, interval=None):
        for _ in range(count):
            self.step += 1
            self.now += step_seconds
            if self.step >= self.pace.next_step:
                self.agreed.append((self.step, self.now))
                self.pace.settle(self.step, interval or self.pace.proposal(self.step))

    def gaps(self):
        """Return the numbers of steps between agreements."""
        steps = [step for step, _ in self.agreed]
        return [b - a for a, b in pairwise(steps)]


def test_the_first_two_steps_agree():
    for start in (0, 1200):
        run = Run(start=start)
        run.steps(1, 60.0)  # compilation
        run.steps(9, 0.001)
        assert [step - start for step, _ in run.agreed[:2]] == [1, 2], start


def test_the_first_step_counts_for_nothing():
    run = Run()
    run.now += 60.0
    assert run.pace.proposal(1) == 1
    run.steps(1, 60.0)
    assert run.pace.proposal(1) == 1, "no step since the agreement: nothing new"
    run.steps(1, 0.001)
    assert run.gaps() == [1] and run.pace.next_step == 2 + GROWTH


def test_intervals_grow_fourfold_to_the_seconds_between_agreements():
    for seconds, count, step_seconds, first, then in (
        (1.0, 10_000, 0.001, [1, 4, 16, 64, 256], {998, 999, 1000}),
        (1.0, 200, 0.1, [1, 4], {9, 10}),
        (1.0, 20, 10.0, [1], {1}),
        (5.0, 1000, 0.125, [1, 4, 16], {40}),
        (1.0, 100, 0.0, [1, 4, 16, 64], set()),  # a clock that stands still
    ):
        run = Run(seconds)
        run.steps(count, step_seconds)
        gaps = run.gaps()
        assert gaps[: len(first)] == first and {*gaps[len(first) :]} <= then, (seconds, count, step_seconds)


def test_steps_that_become_slow_delay_one_agreement_only():
    run = Run()
    run.steps(5000, 0.001)
    before = len(run.agreed)
    run.steps(1200, 0.1)
    assert run.agreed[before][0] - run.agreed[before - 1][0] <= 1000
    # The agreement already due measured both step times; after it, agreements are one second apart.
    times = [now for _, now in run.agreed[before + 2 :]]
    assert len(times) > 5
    assert all(b - a <= 1.01 for a, b in pairwise(times))


def test_steps_that_become_quick_grow_at_most_fourfold():
    run = Run()
    run.steps(20, 10.0)
    run.steps(20_000, 0.001)
    gaps = run.gaps()
    assert all(b <= GROWTH * a for a, b in pairwise(gaps))
    assert gaps[-1] in (998, 999, 1000)


def test_one_long_pause_does_not_last():
    run = Run()
    run.steps(5000, 0.001)
    run.steps(1, 120.0)  # an evaluation
    run.steps(4000, 0.001)
    assert run.gaps()[-1] in (998, 999, 1000)


def test_a_save_in_flight_is_looked_at_after_every_step():
    run = Run()
    run.steps(2, 0.001)
    run.steps(4, 0.001, interval=1)
    before = len(run.agreed)
    run.steps(5, 0.001, interval=1)
    assert len(run.agreed) == before + 5


def test_seconds_must_be_positive():
    for seconds in (0, -1.0, float("nan")):
        with case(seconds=seconds), pytest.raises(ValueError, match="seconds: got"):
            Pace(seconds)


def test_an_interval_is_a_step_or_more():
    with pytest.raises(ValueError, match="interval: got 0"):
        Pace().settle(1, 0)
