"""hvdkit.data: save the position in the data and continue from it, also with another number of ranks."""

import json

import numpy as np
import pytest

from hvdkit.data import GlobalBatches


def ranks(data, batch_size, size, **options):
    return [GlobalBatches(data, batch_size, rank=r, size=size, **options) for r in range(size)]


@pytest.mark.parametrize("before, after", [(1, 4), (4, 1), (2, 3), (3, 5), (3, 3)])
@pytest.mark.parametrize("done", [0, 3, 5, 6, 7, 12, 18])
def test_restore_at_another_number_of_ranks_continues_the_global_order(before, after, done):
    data = np.arange(34)
    options = {"shuffle_seed": 2, "epochs": 3}
    expected = list(GlobalBatches(data, 6, rank=0, size=1, **options))
    first = ranks(data, 6, before, **options)
    for it in first:
        for _ in range(done):
            next(it)
    states = [it.state for it in first]
    assert all(state == states[0] for state in states)
    state = json.loads(json.dumps(states[0]))
    second = ranks(data, 6, after, **options)
    for it in second:
        it.restore(state)
        assert it.state == state and it.step == done
    rest = [np.concatenate(parts) for parts in zip(*[list(it) for it in second], strict=True)]
    assert len(rest) == 18 - done
    np.testing.assert_array_equal(rest, expected[done:])


def test_state_at_is_the_state_after_so_many_steps():
    it = GlobalBatches(np.arange(34), 6, shuffle_seed=2, rank=0, size=1)
    for done in range(20):
        assert it.state == it.state_at(done)
        assert it.state["epoch"] * 6 + it.state["step"] == it.state["global_step"] == done
        next(it)


def test_restore_may_extend_the_epochs():
    it = GlobalBatches(np.arange(4), 2, epochs=1, rank=0, size=1)
    list(it)
    assert next(it, None) is None
    longer = GlobalBatches(np.arange(4), 2, epochs=2, rank=0, size=1)
    longer.restore(it.state)
    assert [batch.tolist() for batch in longer] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    "change, name",
    [
        ({"shuffle_seed": 3}, "seed"),
        ({"shuffle_seed": None}, "seed"),
        ({"global_batch_size": 5}, "batch_size"),
        ({"remainder": "drop"}, "remainder"),
        ({"arrays_or_source": np.arange(21)}, "examples"),
    ],
)
def test_restore_of_another_run_is_refused(change, name):
    args = {"arrays_or_source": np.arange(20), "global_batch_size": 4, "shuffle_seed": 2, "rank": 0, "size": 1}
    state = GlobalBatches(**args).state
    it = GlobalBatches(**{**args, **change})
    with pytest.raises(ValueError, match=rf"state\['{name}'\]: got .* expected .* as now; "):
        it.restore(state)


def test_restore_notices_another_shuffle_and_a_stranger():
    it = GlobalBatches(np.arange(20), 4, shuffle_seed=2, rank=0, size=1)
    with pytest.raises(ValueError, match="NumPy"):
        it.restore({**it.state, "order_check": 1})
    with pytest.raises(ValueError, match=r"no \['batch_size'"):
        it.restore({"epoch": 0, "step": 0})
    with pytest.raises(TypeError, match="state"):
        it.restore({**it.state, "step": "3"})
