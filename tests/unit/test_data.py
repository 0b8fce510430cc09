"""hvdkit.data: the global order of examples, sharding by rank, state, weights, sources."""

import copy
import json
import os
import subprocess
import sys
from itertools import product

import h5py
import numpy as np
import pytest
from helpers.cases import case
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdkit.data import Concatenated, GlobalBatches, order
from hvdkit.data.position import DataPosition


def ranks(data, batch_size, size, **options):
    return [GlobalBatches(data, batch_size, rank=r, size=size, **options) for r in range(size)]


def global_batches(data, batch_size, size, steps=None, **options):
    """Return the ranks' local batches and masks, concatenated in rank order, for each step."""
    iterators = ranks(data, batch_size, size, **options)
    result = []
    while steps is None or len(result) < steps:
        local = [next(it, None) for it in iterators]
        if local[0] is None:
            assert all(batch is None for batch in local), "ranks end at different steps"
            break
        result.append((np.concatenate(local), np.concatenate([it.mask for it in iterators])))
    return result


def assert_same(actual, expected):
    assert len(actual) == len(expected)
    for (batch, mask), (other, other_mask) in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(batch, other)
        np.testing.assert_array_equal(mask, other_mask)


# ---- the order -----------------------------------------------------------------------------------------------------


@st.composite
def batches_of(draw):
    """Return examples, batch size, ranks, options and, for each epoch, the expected order of its real examples."""
    n, size = draw(st.integers(1, 120)), draw(st.integers(1, 9))
    batch = draw(st.integers(size, size + 50))
    remainder = draw(st.sampled_from(["pad", "drop"])) if batch <= n else "pad"
    seed, epochs = draw(st.none() | st.integers(0, 2**64)), draw(st.integers(1, 3))
    data = np.arange(1000, 1000 + n)
    orders = [data if seed is None else data[order.epoch_order(n, seed, epoch)] for epoch in range(epochs)]
    return data, batch, size, {"shuffle_seed": seed, "epochs": epochs, "remainder": remainder}, orders


@given(batches_of())
@settings(max_examples=200, deadline=None)
def test_ranks_together_read_the_global_order_and_average_to_its_mean(drawn):
    """A short batch is filled from the start of its epoch's order; the filler has no weight."""
    data, batch_size, size, options, orders = drawn
    iterators = ranks(data, batch_size, size, **options)
    for whole in orders:
        assert sorted(whole) == list(data)
        steps = len(data) // batch_size if options["remainder"] == "drop" else -(-len(data) // batch_size)
        for step in range(steps):
            local = [next(it) for it in iterators]
            lengths, count = [len(rows) for rows in local], min(batch_size, len(data) - step * batch_size)
            assert max(lengths) - min(lengths) <= 1 and [it.local_rows[1] for it in iterators] == [*np.cumsum(lengths)]
            rows, mask = np.concatenate(local), np.concatenate([it.mask for it in iterators])
            np.testing.assert_array_equal(rows, np.resize(np.roll(whole, -step * batch_size), batch_size))
            np.testing.assert_array_equal(mask, np.arange(batch_size) < count)
            assert {it.global_count for it in iterators} == {count} == {sum(it.count for it in iterators)}
            means = [np.mean(it.sample_weight * rows) for it, rows in zip(iterators, local, strict=True)]
            np.testing.assert_allclose(np.mean(means), rows[:count].mean(), rtol=1e-5)
            assert all(it.sample_weight.dtype == np.float32 for it in iterators)
    assert all(next(it, None) is None for it in iterators)


def test_weight_is_exactly_one_in_a_full_batch_that_divides():
    it = GlobalBatches(np.arange(12), 12, rank=2, size=3)
    next(it)
    np.testing.assert_array_equal(it.sample_weight, np.ones(4, np.float32))


def test_order_of_a_seed_is_the_one_written_down_here():
    # If NumPy's shuffle changes this, runs saved before cannot be continued.
    assert order.epoch_order(12, 7, 0).tolist() == [4, 6, 10, 0, 1, 3, 8, 7, 2, 5, 9, 11]
    assert order.epoch_order(12, 7, 1).tolist() == [7, 10, 6, 11, 0, 8, 9, 1, 3, 4, 2, 5]
    assert order.epoch_order(12, 7, 0).dtype == np.uint32


def test_epochs_and_seeds_give_different_orders():
    orders = {tuple(order.epoch_order(50, seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_epochs_none_goes_on():
    it = GlobalBatches(np.arange(4), 3, rank=0, size=1)
    epochs = []
    for _ in range(7):
        next(it)
        epochs.append(it.epoch)
    assert epochs == [0, 0, 1, 1, 2, 2, 3]
    assert it.step == 7 and it.steps_per_epoch == 2


# ---- structures ----------------------------------------------------------------------------------------------------


def test_structure_comes_back_as_given():
    data = {"ids": np.arange(6), "pair": (np.eye(6, dtype=np.float32), [np.arange(6) * 2])}
    batch = next(GlobalBatches(data, 4, rank=1, size=2))
    assert list(batch) == ["ids", "pair"]
    assert isinstance(batch["pair"], tuple) and isinstance(batch["pair"][1], list)
    assert batch["ids"].tolist() == [2, 3]
    assert batch["pair"][0].dtype == np.float32 and batch["pair"][0].shape == (2, 6)
    assert batch["pair"][1][0].tolist() == [4, 6]


def test_batches_are_copies():
    data = np.arange(6)
    batch = next(GlobalBatches(data, 6, rank=0, size=1))
    batch[:] = -1
    assert data.tolist() == list(range(6))


def test_with_sample_weight():
    it = GlobalBatches((np.arange(5), np.arange(5) * 10), 4, epochs=1, with_sample_weight=True, rank=1, size=2)
    (x, y, weight), (_, _, weight2) = it
    assert x.tolist() == [2, 3] and y.tolist() == [20, 30] and weight.tolist() == [1, 1]
    assert weight2.tolist() == [0, 0]


def test_tensors_pandas_like_and_foreign_byte_order():
    tf = pytest.importorskip("tensorflow")

    class Series:
        def to_numpy(self):
            return np.arange(4)

    data = (tf.range(4), Series(), np.arange(4, dtype=">i4"), tf.Variable([1.0, 2.0, 3.0, 4.0]))
    batch = next(GlobalBatches(data, 2, rank=0, size=1))
    assert all(isinstance(leaf, np.ndarray) and leaf.dtype.isnative for leaf in batch)
    assert batch[2].tolist() == [0, 1] and batch[3].tolist() == [1.0, 2.0]


# ---- files ---------------------------------------------------------------------------------------------------------


class Recorder:
    """An array's rows, with a record of the requests."""

    def __init__(self, array):
        self.array, self.asked = array, []

    def __len__(self):
        return len(self.array)

    def __getitem__(self, indices):
        assert isinstance(indices, np.ndarray) and (np.diff(indices) > 0).all()
        self.asked.append(indices)
        return self.array[indices]


def test_sources_read_as_the_array_does(tmp_path):
    array = np.random.default_rng(0).normal(size=(23, 4, 3)).astype(np.float32)
    array.tofile(tmp_path / "rows")
    np.save(tmp_path / "rows.npy", array)
    sources = {
        "memmap": np.memmap(tmp_path / "rows", np.float32, "r", shape=array.shape),
        "strided": np.ascontiguousarray(array.transpose(0, 2, 1)).transpose(0, 2, 1),
        "npy": np.load(tmp_path / "rows.npy", mmap_mode="r"),
        "h5py": h5py.File(tmp_path / "rows.h5", "w").create_dataset("rows", data=array),
        "concatenated": Concatenated([array[:7], array[7:8], array[8:]]),
        "object": Recorder(array),
    }
    assert not sources["strided"].flags.c_contiguous
    for seed, kind in product([None, 1], sources):
        options = {"shuffle_seed": seed, "epochs": 2}
        with case(seed=seed, kind=kind):
            assert_same(global_batches(sources[kind], 6, 4, **options), global_batches(array, 6, 1, **options))


def test_only_the_rows_of_this_rank_are_read():
    source = Recorder(np.arange(100))
    it = GlobalBatches(source, 10, rank=2, size=5)
    source.asked.clear()
    next(it), next(it)
    assert np.concatenate(source.asked).tolist() == [4, 5, 14, 15]


def test_memmap_of_a_strided_view_is_not_copied_whole(tmp_path):
    rows, width = 50_000, 1024
    with (tmp_path / "big").open("wb") as file:
        file.truncate(rows * width)  # sparse: 51 MB
    view = np.memmap(tmp_path / "big", np.uint8, "r", shape=(rows, width))[:, 1:]
    import tracemalloc

    it = GlobalBatches(view, 8, shuffle_seed=0, rank=0, size=1)
    next(it)
    tracemalloc.start()
    next(it)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


def test_concatenated_takes_slices_and_refuses_strange_indices():
    rows = Concatenated([np.arange(3), np.arange(3, 8)])
    assert (
        rows[1:6:2].tolist() == [1, 3, 5] and rows[:].tolist() == list(range(8)) and len(rows[np.array([], int)]) == 0
    )
    for key in (np.array([-1]), np.array([8]), 3):
        with pytest.raises(IndexError, match="from 0 to 7"):
            rows[key]
    with pytest.raises(IndexError, match="expected a slice or integers"):
        rows[np.arange(8) > 4]  # a mask is not taken for indices


def test_concatenated_names_what_differs():
    with pytest.raises(ValueError, match="one shape and one dtype"):
        Concatenated([np.zeros((2, 3)), np.zeros((2, 4))])
    with pytest.raises(ValueError, match="at least one"):
        Concatenated([])


# ---- bad arguments -------------------------------------------------------------------------------------------------


BAD_ARGUMENTS = (
    ({"global_batch_size": 2, "size": 3}, ValueError, "global_batch_size: got 2, expected at least 3"),
    ({"global_batch_size": 0}, ValueError, "global_batch_size: got 0"),
    ({"global_batch_size": 2.0}, TypeError, "global_batch_size: got 2.0"),
    ({"epochs": 0}, ValueError, "epochs: got 0"),
    ({"remainder": "keep"}, ValueError, "remainder: got keep, expected 'pad' or 'drop'"),
    ({"shuffle_seed": -1}, ValueError, "shuffle_seed: got -1"),
    ({"shuffle_seed": True}, TypeError, "shuffle_seed: got True"),
    ({"remainder": "drop", "global_batch_size": 11}, ValueError, "10 examples, expected at least one batch of 11"),
    ({"rank": 1}, ValueError, "rank: got 1, expected less than size"),
    ({"rank": None}, ValueError, "both or neither"),
    ({"map_fn": abs}, TypeError, "map_fn"),
    ({"shuffle_buffer": 10}, TypeError, "shuffle_buffer"),
    ({"with_sample_weight": True}, TypeError, r"a tuple \(x, y\)"),
    ({"arrays_or_source": np.zeros((0, 3))}, ValueError, "arrays: got an empty data set"),
    ({"arrays_or_source": (np.zeros(3), np.zeros(4))}, ValueError, r"len\(arrays\[0\]\) = 3, len\(arrays\[1\]"),
    ({"arrays_or_source": {"x": np.zeros(2), "y": np.array([{}, 1])}}, TypeError, r"\['y'\]: got dtype object"),
    ({"arrays_or_source": ()}, TypeError, "at least one array"),
    ({"arrays_or_source": [1, 2, 3]}, TypeError, r"arrays\[0\]: got int"),
    ({"arrays_or_source": np.float32(3)}, TypeError, "without a length"),
    ({"arrays_or_source": ("rows", np.zeros(4))}, TypeError, r"arrays\[0\]: got str"),
)  # fmt: skip


def test_bad_arguments():
    defaults = {"arrays_or_source": np.arange(10), "global_batch_size": 4, "rank": 0, "size": 1}
    for arguments, error, message in BAD_ARGUMENTS:
        with case(arguments=arguments), pytest.raises(error, match=message):
            GlobalBatches(**{**defaults, **arguments})


def test_asking_about_a_batch_before_there_is_one():
    it = GlobalBatches(np.arange(10), 4, rank=0, size=1)
    with pytest.raises(RuntimeError, match="next"):
        _ = it.mask


def test_arrays_need_no_tensorflow():
    code = "import hvdkit.data as d, numpy as np, sys; next(d.GlobalBatches(np.arange(4), 2, rank=0, size=1)); "
    code += "sys.exit('tensorflow' in sys.modules or 'keras' in sys.modules)"
    environment = {key: value for key, value in os.environ.items() if "OMPI" not in key and "HOROVOD" not in key}
    assert subprocess.run([sys.executable, "-c", code], check=False, env=environment).returncode == 0


# ---- state ---------------------------------------------------------------------------------------------------------


def test_restore_at_another_number_of_ranks_continues_the_global_order():
    data = np.arange(34)
    options = {"shuffle_seed": 2, "epochs": 3}
    expected = list(GlobalBatches(data, 6, rank=0, size=1, **options))
    for (before, after), done in product([(1, 4), (4, 1), (2, 3), (3, 5), (3, 3)], [0, 3, 5, 6, 7, 12, 18]):
        with case(before=before, after=after, done=done):
            first = ranks(data, 6, before, **options)
            for it in first * done:
                next(it)
            states = [it.state for it in first]
            assert states == [states[0]] * before
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


def test_restore_of_another_run_is_refused():
    args = {"arrays_or_source": np.arange(20), "global_batch_size": 4, "shuffle_seed": 2, "rank": 0, "size": 1}
    state = GlobalBatches(**args).state
    for change, name in (
        ({"shuffle_seed": 3}, "seed"),
        ({"shuffle_seed": None}, "seed"),
        ({"global_batch_size": 5}, "batch_size"),
        ({"remainder": "drop"}, "remainder"),
        ({"arrays_or_source": np.arange(21)}, "examples"),
    ):
        it = GlobalBatches(**{**args, **change})
        expected = rf"state\['{name}'\]: got .* expected .* as now; "
        with case(change=change), pytest.raises(ValueError, match=expected):
            it.restore(state)


def test_restore_notices_another_shuffle_and_a_stranger():
    it = GlobalBatches(np.arange(20), 4, shuffle_seed=2, rank=0, size=1)
    with pytest.raises(ValueError, match="NumPy"):
        it.restore({**it.state, "order_check": 1})
    with pytest.raises(ValueError, match=r"no \['batch_size'"):
        it.restore({"epoch": 0, "step": 0})
    with pytest.raises(TypeError, match="state"):
        it.restore({**it.state, "step": "3"})


# ---- fingerprint ---------------------------------------------------------------------------------------------------


def test_fingerprint_tells_data_apart():
    def fingerprint(array, **options):
        return GlobalBatches((array, np.arange(30)), 6, rank=0, size=1, **options).fingerprint()

    base = np.random.default_rng(0).normal(size=(30, 2))
    other = base.copy()
    other[-1, 0] += 1
    assert fingerprint(base) == fingerprint(base.copy()) == json.loads(json.dumps(fingerprint(base)))
    variants = [fingerprint(other), fingerprint(base.astype(np.float32)), fingerprint(base, shuffle_seed=1)]
    assert all(variant != fingerprint(base) for variant in variants)
    ranked = [GlobalBatches(base, 6, rank=r, size=3).fingerprint() for r in range(3)]
    assert ranked[0] == ranked[1] == ranked[2]


def test_places_that_do_not_exist_are_refused():
    it = GlobalBatches(np.arange(6), 2, rank=0, size=1)
    position = DataPosition(it.plan)

    def restore(epoch, step):
        it.restore({**it.state, "epoch": epoch, "step": step})

    for change, place in (((0, 4), "step"), ((-1, 0), "epoch"), ((0, 0.5), "step"), (("1", 0), "epoch")):
        for move in (position.move_to, restore):
            with pytest.raises((ValueError, TypeError), match=rf"(state\[')?{place}('\])?: got"):
                move(*change)
    assert (position.epoch, position.step, position.moves) == (0, 0, 0) and it.step == 0
    restore(0, 3)
    assert next(it).tolist() == [0, 1] and it.epoch == 1


def test_a_copy_has_its_own_position():
    it = GlobalBatches(np.arange(8), 2, rank=0, size=1)
    next(it)
    other = copy.copy(it)
    assert next(other).tolist() == next(it).tolist() == [2, 3]
    other.restore(other.state_at(0))
    assert (it.step, other.step) == (2, 0) and next(it).tolist() == [4, 5]


def test_masked_values_are_refused():
    masked = np.ma.masked_array(np.arange(4), [False, True, False, False])
    for make in (lambda: GlobalBatches({"x": masked}, 2, rank=0, size=1), lambda: Concatenated([masked])):
        with pytest.raises(TypeError, match=r"got a masked array with masked values.*\.filled\(value\)"):
            make()
    assert next(GlobalBatches(np.ma.masked_array(np.arange(4)), 2, rank=0, size=1)).tolist() == [0, 1]
