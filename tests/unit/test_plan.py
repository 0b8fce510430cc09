"""hvdkit.data.batch_plan: the rows of each rank in each step, and positions, as pure values."""

import json
from dataclasses import FrozenInstanceError
from itertools import islice

import numpy as np
import pytest
import tensorflow as tf
from helpers.cases import case
from hypothesis import given, settings
from hypothesis import strategies as st

import hvdkit as hk
from hvdkit.data import order
from hvdkit.data.arrays import ArraySource
from hvdkit.data.batch_plan import BatchPlan
from hvdkit.data.growth import GrowingFiles
from hvdkit.data.stream import StreamSource


def plan_of(source, batch_size, rank=0, size=1, *, seed=None, remainder="pad", **options):
    rank_rows = order.RankRows(rank, size, batch_size)
    return BatchPlan(source, rank_rows, order.Shuffle(seed), remainder, **options)


def rows_of(plan, epoch, step=0, max_batches=1):
    """Return the examples and the number of real ones of each batch."""
    found = []
    for indices, counts in plan.rows_from(epoch, step, max_batches):
        found += zip(indices.reshape(len(counts), -1).tolist(), counts, strict=True)
    return found


@st.composite
def cases(draw):
    examples, size = draw(st.integers(1, 90)), draw(st.integers(1, 7))
    batch_size = draw(st.integers(size, size + 40))
    remainder = draw(st.sampled_from(["pad", "drop"])) if batch_size <= examples else "pad"
    seed = draw(st.none() | st.integers(0, 2**40))
    return examples, batch_size, size, {"seed": seed, "remainder": remainder}


@given(cases(), st.integers(0, 5), st.integers(0, 8), st.integers(2, 20))
@settings(max_examples=150, deadline=None)
def test_the_rows_of_all_ranks_are_the_order_of_the_epoch(drawn, epoch, step, max_batches):
    examples, batch_size, size, options = drawn
    source = ArraySource(np.arange(examples))
    plans = [plan_of(source, batch_size, rank, size, **options) for rank in range(size)]
    steps = plans[0].steps_per_epoch
    step = min(step, steps)
    whole = order.epoch_order(examples, options["seed"], epoch)
    whole = np.arange(examples) if whole is None else whole
    read = [rows_of(plan, epoch, step) for plan in plans]
    assert [len(each) for each in read] == [steps - step] * size
    for i in range(steps - step):
        start = (step + i) * batch_size
        expected = whole[np.arange(start, start + batch_size) % examples].tolist()
        assert [row for each in read for row in each[i][0]] == expected
        assert {each[i][1] for each in read} == {min(batch_size, examples - start)}
        assert [len(each[i][0]) for each in read] == [len(range(*plan.local_rows)) for plan in plans]
    for plan, each in zip(plans, read, strict=True):
        assert rows_of(plan, epoch, step, max_batches) == each
        assert rows_of(plan, epoch, step) == each, "a plan has no state"
        dividing = rows_of(plan.without_filler(), epoch, step, max_batches)
        for i, (rows, count) in enumerate(dividing):
            first, last = order.RankRows(plan.rank_rows.rank, size, batch_size, with_filler=False).rows(count)
            real = whole[(step + i) * batch_size :][:count].tolist()
            assert count == each[i][1] and rows == (real[first:last] or real[:1])


@given(cases(), st.integers(0, 200))
@settings(max_examples=150, deadline=None)
def test_positions_and_steps_are_one_to_one(drawn, global_step):
    examples, batch_size, size, options = drawn
    source = ArraySource(np.arange(examples))
    states = []
    for rank in range(size):
        plan = plan_of(source, batch_size, rank, size, **options)
        states.append(plan.state_at(global_step, read=0))
        assert plan.global_step(states[-1]["epoch"], states[-1]["step"]) == global_step
        assert states[-1]["step"] < plan.steps_per_epoch
        assert plan.checked_position(states[-1]["epoch"], states[-1]["step"]) == divmod(
            global_step, plan.steps_per_epoch
        )
    assert states == [states[0]] * size and json.loads(json.dumps(states[0])) == states[0]


def test_the_keys_of_a_state_are_those_of_earlier_checkpoints():
    state = plan_of(ArraySource(np.arange(10)), 4, seed=3).state_at(4, read=0)
    assert json.dumps(state) == (
        '{"epoch": 1, "step": 1, "global_step": 4, "seed": 3, "examples": 10, "batch_size": 4, "remainder": "pad", '
        f'"steps_per_epoch": 3, "shuffle_buffer": null, "order_check": {order.order_check(3)}}}'
    )


def test_plans_do_not_change(tmp_path):
    np.save(tmp_path / "0.npy", np.arange(10))
    np.save(tmp_path / "1.npy", np.arange(6))
    both = hk.data.npy(tmp_path)
    first, second = both.selected(["0.npy"]), both.selected(["1.npy"])
    plan = plan_of(first, 4, epochs=9, files=GrowingFiles("replace", both, first))
    before = rows_of(plan, 0), plan.identity
    with pytest.raises(FrozenInstanceError):
        plan.epochs = 3
    later = plan.with_files(GrowingFiles("replace", both, second, ("0.npy",), 5, 15))
    assert (plan.available_epochs, plan.steps_per_epoch, plan.first_epoch, plan.first_step) == (1, 3, 0, 0)
    assert (later.available_epochs, later.steps_per_epoch, later.first_epoch, later.first_step) == (6, 2, 5, 15)
    assert later.global_step(5, 1) == 16 and later.state_at(16, read=0)["file_names"] == ["1.npy"]
    assert later.has_epoch(5) and not later.has_epoch(6) and later.without_limit().has_epoch(99)
    with pytest.raises(ValueError, match="epoch: got 4, expected at least 5; earlier epochs read other files"):
        later.checked_position(4, 0)
    with pytest.raises(ValueError, match="global_step: got 14, expected an integer of at least 15"):
        later.state_at(14, read=0)
    with pytest.raises(ValueError, match="got 6 examples, expected at least one batch of 8"):
        plan_of(first, 8, remainder="drop").with_files(GrowingFiles("append", both, second))
    assert (rows_of(plan, 0), plan.identity) == before


def test_a_stream_has_the_length_that_was_read():
    source = StreamSource(tf.data.Dataset.range(20).filter(lambda x: x < 7), map_fn=None)
    plan = plan_of(source, 2)
    assert plan.steps_per_epoch is None and not plan.is_even
    assert plan.state_at(3, read=3)["step"] == 3
    with pytest.raises(ValueError, match="global_step: got 4, expected at most 3, the batches read so far"):
        plan.state_at(4, read=3)
    known = plan.with_length(4)
    assert (known.state_at(5, read=0)["epoch"], known.with_length(9)) == (1, known)
    assert plan.steps_per_epoch is None


def test_only_full_and_equal_shares_are_even():
    for examples, batch_size, size, remainder, is_even in (
        (12, 4, 2, "pad", True),
        (13, 4, 2, "pad", False),
        (13, 4, 2, "drop", True),
        (12, 4, 3, "drop", False),
    ):
        with case(examples=examples, batch_size=batch_size, size=size, remainder=remainder):
            plan = plan_of(ArraySource(np.arange(examples)), batch_size, size=size, remainder=remainder)
            assert plan.is_even == is_even


def test_a_plan_of_many_examples_is_read_from_any_step():
    plan = plan_of(ArraySource(np.broadcast_to(np.float32(0), [10**9])), 1000, rank=3, size=4)
    (rows, counts), *_ = islice(plan.rows_from(7, 999_999), 1)
    assert (rows[0], rows[-1], counts) == (10**9 - 250, 10**9 - 1, [1000])
