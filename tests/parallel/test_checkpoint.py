"""Saving and restoring by all ranks: every kind of state comes back, and all ranks report the same errors."""

from __future__ import annotations

import contextlib
import random
import resource
import shutil
import time
from functools import partial
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.faults import flip, limited

import hvdkit as hk
from hvdkit.checkpoint.folder import record_damage
from hvdkit.sharding.partition import rows_of

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.core(2)]
EVERY_SIZE = pytest.mark.ranks(1, 2, 3, 4)

GATHER = pytest.mark.parametrize("gather", [False, True], ids=["shared", "through the chief"])


class Cut:
    """A table sharded along one axis, the minimal implementation of ``hk.checkpoint.ShardedState``."""

    def __init__(self, array: np.ndarray, partition: str, axis: int = 0, dtype: str | None = None):
        self.shape, self.dtype, self.partition = array.shape, dtype or array.dtype.name, partition
        index = [range(n) for n in array.shape]
        index[axis] = rows_of(partition, array.shape[axis], hk.rank(), hk.size())
        self._index = tuple(index)
        self.local = tf.Variable(array[np.ix_(*index)], dtype=self.dtype)

    @property
    def local_index(self) -> tuple[range, ...]:
        return self._index

    def assign_local(self, values) -> None:
        self.local.assign(values)


def numbers(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


class State:
    """One of each kind of state, determined by ``seed``; per-rank state also by the rank."""

    def __init__(self, seed: int):
        keras.utils.clear_session()
        keras.utils.set_random_seed(seed)
        layers = keras.layers
        self.model = keras.Sequential(
            [keras.Input((4,)), layers.Dense(3), layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(1)]
        )
        self.optimizer = hk.DistributedOptimizer(keras.optimizers.Adam(0.01 * seed), accumulate_steps=2)
        self.optimizer.build(self.model.trainable_variables)
        for variable in self.optimizer.variables:
            if variable.shape.rank and "accum" not in variable.path:
                variable.assign(numbers(tuple(variable.shape), seed + 1))
        for statistic in self.model.layers[1].non_trainable_variables[:2]:
            statistic.assign(np.arange(3.0) + 10 * seed + hk.rank())
        for total in self.optimizer._accumulated_gradients:
            total.assign(np.full(total.shape, seed + hk.rank()))
        self.half = tf.Variable(numbers((5,), seed), dtype=tf.bfloat16)
        self.tables = {
            "mod": Cut(numbers((11, 3), seed), "mod"),
            "div": Cut(numbers((11, 3), seed + 1), "div"),
            "few": Cut(numbers((2, 2), seed + 2), "mod"),
            "none": Cut(numbers((0, 2), seed), "div"),
            "columns": Cut(numbers((3, 7), seed + 3), "div", axis=1),
            "half": Cut(numbers((6, 2), seed + 4), "mod", dtype="bfloat16"),
        }
        self.array = numbers((2, 2), seed)
        own = 100 * seed + hk.rank()
        self.generators = {
            "numpy": np.random.default_rng(own),
            "old": np.random.RandomState(own),
            "python": random.Random(own),
            "keras": keras.random.SeedGenerator(own),
            "tf": tf.random.Generator.from_seed(own),
        }
        self.values = {"step": 10 * seed, "name": f"run {seed}", "nothing": None, "list": [1, 2.5, seed]}

    def mapping(self) -> dict:
        return dict(vars(self))

    def bits(self) -> list:
        """Return all variables of this rank, and the next draw of each generator."""
        tables = [table.local for table in self.tables.values()]
        variables = [*self.model.variables, *self.optimizer.variables, self.half, *tables]
        g = self.generators
        drawn = [g["numpy"].random(), g["old"].random(), g["python"].random()]
        drawn += [keras.random.uniform((), seed=g["keras"]).numpy(), g["tf"].uniform(()).numpy()]
        return [
            *(tf.convert_to_tensor(v).numpy().tobytes() for v in variables),
            *(np.float64(x).tobytes() for x in drawn),
        ]


def raises_on_every_rank(kind: type[Exception] | tuple[type[Exception], ...], action) -> list[str]:
    """Return every rank's message, after all ranks have raised an error of ``kind`` or one that names it."""
    with pytest.raises(kind) as caught:
        action()
    return hk.allgather_object(str(caught.value))


@pytest.mark.core(2, 3)
@GATHER
@EVERY_SIZE
def test_everything_comes_back_to_the_bit(shared_path, gather):
    saved, other = State(1), State(2)
    hk.broadcast_variables([*saved.model.trainable_variables, saved.half])
    hk.checkpoint.save(shared_path / "step-000000010", saved.mapping(), gather=gather)
    restored = hk.checkpoint.restore(shared_path / "step-000000010", other.mapping(), gather=gather)
    assert other.bits() == saved.bits()
    np.testing.assert_array_equal(restored["array"], saved.array)
    assert restored["values"] == saved.values
    assert restored["model"] is other.model
    assert [p.name for p in shared_path.iterdir()] == ["step-000000010"]
    assert hk.checkpoint.inspect(shared_path / "step-000000010").step == 10
    hk.checkpoint.verify(shared_path)


@EVERY_SIZE
def test_each_rank_writes_its_own_part_and_the_chief_what_is_common(shared_path, size):
    hk.checkpoint.save(shared_path / "a", State(1).mapping())
    shards = [f"shard-{r:05d}-of-{size:05d}.safetensors" for r in range(size)]
    assert sorted(p.name for p in (shared_path / "a").iterdir()) == ["manifest.json", "replicated.safetensors", *shards]
    found = {v.name: v for v in hk.checkpoint.inspect(shared_path / "a").variables}
    parts = {"mod": size, "div": size, "few": min(2, size), "none": 0, "columns": size, "half": size}
    assert {n: found[f"tables/{n}"].parts for n in parts} == parts
    assert found["tables/columns"].partition == "div"
    kinds = {n.rsplit("/", 1)[-1]: v.kind for n, v in found.items() if n.startswith("model/")}
    assert kinds == {
        "kernel": "replicated",
        "bias": "replicated",
        "gamma": "replicated",
        "beta": "replicated",
        "moving_mean": "per_rank",
        "moving_variance": "per_rank",
        "seed_generator_state": "per_rank",
    }


def test_replicated_state_is_the_chiefs(shared_path, rank):
    """Ranks that have diverged, which is an error, are equal after a restore."""
    variable = tf.Variable(numbers((4,), 5) + rank)
    array = np.full(3, 7.0 + rank)
    hk.checkpoint.save(shared_path / "a", {"v": variable, "x": array})
    restored = hk.checkpoint.restore(shared_path / "a", {"v": variable, "x": array})
    np.testing.assert_array_equal(variable, numbers((4,), 5))
    np.testing.assert_array_equal(restored["x"], np.full(3, 7.0))
    np.testing.assert_array_equal(array, np.full(3, 7.0 + rank))


@EVERY_SIZE
def test_some_keys_of_what_was_saved(shared_path):
    saved, other = State(1), State(2)
    before = other.half.numpy()
    hk.checkpoint.save(shared_path / "a", saved.mapping())
    hk.checkpoint.restore(shared_path / "a", {"tables": other.tables})
    for name, table in other.tables.items():
        np.testing.assert_array_equal(table.local, saved.tables[name].local)
    np.testing.assert_array_equal(other.half, before)


@GATHER
def test_a_restore_makes_three_agreements(shared_path, monkeypatch, gather):
    """Through the chief there are also messages, without a name, which announce each transfer and the end."""
    saved, other = State(1), State(2)
    kinds: list[str] = []
    exchange = type(hk.cluster.exchange())
    real = exchange.allgather_bytes
    monkeypatch.setattr(exchange, "allgather_bytes", lambda *args: kinds.append((*args, None)[2]) or real(*args))
    hk.checkpoint.save(shared_path / "a", saved.mapping(), gather=gather)
    prepared = ["state to save or restore", "hk.checkpoint.save()"]
    prepared += ["a save through the chief"] if gather else ["a folder to save in", "a look into the folder"]
    named = [kind for kind in kinds if kind is not None]
    assert named[: len(prepared)] == prepared and {*named[len(prepared) :]} == {"the end of a save"}
    assert not gather or len(named) == len(prepared) + 1
    kinds.clear()
    hk.checkpoint.restore(shared_path / "a", other.mapping(), gather=gather)
    agreements = ["state and checkpoint to restore", "values of a checkpoint", "tensors of a checkpoint"]
    assert [kind for kind in kinds if kind is not None] == agreements
    assert gather == (None in kinds)


@GATHER
def test_a_checkpoint_of_the_same_name_is_replaced(shared_path, gather):
    for seed in (1, 2):
        hk.checkpoint.save(shared_path / "a", {"v": tf.Variable(numbers((4,), seed))}, gather=gather)
    variable = tf.Variable(tf.zeros(4))
    hk.checkpoint.restore(shared_path / "a", {"v": variable})
    np.testing.assert_array_equal(variable, numbers((4,), 2))
    assert [p.name for p in shared_path.iterdir()] == ["a"]


@EVERY_SIZE
def test_the_result_is_the_same_either_way(shared_path):
    """Through the chief or by each rank: the files are interchangeable."""
    saved, other = State(1), State(2)
    hk.checkpoint.save(shared_path / "a", saved.mapping(), gather=True)
    other.array = hk.checkpoint.restore(shared_path / "a", other.mapping())["array"]
    hk.checkpoint.save(shared_path / "b", other.mapping())
    for file in (shared_path / "a").glob("*.safetensors"):
        assert file.read_bytes() == (shared_path / "b" / file.name).read_bytes()


# --- ranks or models that differ


def test_ranks_with_different_models_are_named_before_a_file_is_touched(shared_path, rank, size):
    units = 4 if rank == size - 1 else 3
    keras.utils.clear_session()
    state = {"model": keras.Sequential([keras.Input((2,)), keras.layers.Dense(units, name="out")])}
    errors = raises_on_every_rank(hk.CollectiveMismatchError, lambda: hk.checkpoint.save(shared_path / "a", state))
    assert len(set(errors)) == 1
    assert errors[0].startswith("state: got 'model/") and "out/kernel' (float32[2, 4], replicated) on rank" in errors[0]
    assert f" on rank {size - 1}, expected " in errors[0] and "(float32[2, 3], replicated), as on rank 0" in errors[0]
    assert not [*shared_path.iterdir()]


def test_a_rank_with_one_variable_more_is_named(shared_path, rank, size):
    state = {"a": tf.Variable(1.0)} | ({"b": tf.Variable(2.0)} if rank == size - 1 else {})
    errors = raises_on_every_rank(hk.CollectiveMismatchError, lambda: hk.checkpoint.save(shared_path / "a", state))
    assert set(errors) == {errors[0]}
    assert f"got 'b' (float32[], replicated) on rank {size - 1}, expected no further tensor, as on rank 0" in errors[0]


def test_a_partition_that_differs_is_another_state(shared_path, rank, size):
    table = Cut(numbers((8, 2), 1), "mod" if rank == 0 else "div")
    errors = raises_on_every_rank(
        hk.CollectiveMismatchError, lambda: hk.checkpoint.save(shared_path / "a", {"t": table})
    )
    tables = [f"'t' (float32[8, 2], sharded {partition})" for partition in ("mod", "div")]
    odd, usual = (1, 0) if size == 2 else (0, 1)  # with two ranks, rank 0 is right
    assert f"got {tables[odd]} on rank {odd}, expected {tables[usual]}, as on rank {usual}" in errors[0]


@pytest.mark.parametrize(
    ("other", "errors"),
    [
        (lambda: {"w": tf.Variable(tf.ones((3, 3)))}, r"'w' was saved as float32\[3, 2\] .*is float32\[3, 3\]"),
        (lambda: {"w": tf.Variable(tf.ones((3, 2), tf.float64))}, r"'w' was saved as float32.*is float64"),
        (lambda: {"u": tf.Variable(tf.ones((3, 2)))}, r"contains no 'u', only \['m', 'w'\]"),
        (lambda: {"m": [tf.Variable(tf.ones(2), name="a")]}, r"only the checkpoint has 'm/b:0'"),
        (lambda: {"w": tf.Variable(tf.ones((3, 2))), "n": 3}, r"contains no value 'n'"),
    ],
)
def test_another_model_is_refused_and_nothing_is_changed(shared_path, other, errors):
    pair = [tf.Variable(tf.zeros(2), name="a"), tf.Variable(tf.zeros(2), name="b")]
    hk.checkpoint.save(shared_path / "a", {"w": tf.Variable(tf.zeros((3, 2))), "m": pair})
    into = other()
    with pytest.raises(hk.CheckpointError, match=errors):
        hk.checkpoint.restore(shared_path / "a", into)
    for item in tf.nest.flatten([into.get("w", 1.0), into.get("m", 1.0)]):
        np.testing.assert_array_equal(tf.convert_to_tensor(getattr(item, "local", item)), 1.0)


@EVERY_SIZE
def test_what_was_whole_may_be_cut_now_and_the_other_way_round(shared_path):
    numbers = np.arange(14, dtype=np.float32).reshape(7, 2)
    hk.checkpoint.save(shared_path / "whole", {"w": tf.Variable(numbers)})
    cut = Cut(np.zeros_like(numbers), "mod")
    hk.checkpoint.restore(shared_path / "whole", {"w": cut})
    np.testing.assert_array_equal(cut.local, numbers[hk.rank() :: hk.size()])
    hk.checkpoint.save(shared_path / "cut", {"w": cut})
    whole = tf.Variable(tf.zeros((7, 2)))
    hk.checkpoint.restore(shared_path / "cut", {"w": whole})
    np.testing.assert_array_equal(whole, numbers)


@GATHER
def test_a_rank_that_cannot_take_its_part_is_named_by_all(shared_path, gather, rank, size):
    table = Cut(numbers((8, 2), 1), "div")
    hk.checkpoint.save(shared_path / "a", {"t": table})
    if rank == size - 1:
        table.assign_local = lambda values: table.local.assign(values[:, :1])
    errors = raises_on_every_rank(
        (hk.CheckpointError, ValueError),
        lambda: hk.checkpoint.restore(shared_path / "a", {"t": table}, gather=gather),
    )
    start = f"tensors of a checkpoint: rank {size - 1} raised ValueError: "
    assert all(text.startswith(start) for text in errors[:-1]) and "shape" in errors[-1]


@GATHER
def test_names_that_differ_in_a_number_are_the_chiefs(shared_path, gather, rank):
    """Tensors and values alike; the checkpoint is the same as if all ranks had the chief's names."""
    saved, other = (
        {f"w_{rank}": tf.Variable(x), f"n_{rank}": int(x), f"r_{rank}": random.Random(int(x) + rank)}
        for x in (1.0, 2.0)
    )
    drawn = random.Random(1 + rank).random()
    hk.checkpoint.save(shared_path / "a", saved, gather=gather)
    restored = hk.checkpoint.restore(shared_path / "a", other, gather=gather)
    assert restored[f"n_{rank}"] == 1 and restored[f"w_{rank}"].numpy() == 1.0
    assert restored[f"r_{rank}"].random() == drawn


def test_values_of_other_kinds_are_another_state(shared_path, rank):
    """A value for all ranks, and one of each rank."""
    state = {"v": 3 if rank == 0 else random.Random(3)}
    errors = raises_on_every_rank(hk.CollectiveMismatchError, lambda: hk.checkpoint.save(shared_path / "a", state))
    assert all("'v' ([], value)" in text and "'v' ([], value of each rank)" in text for text in errors)


def test_a_checkpoint_that_the_chief_has_just_copied(shared_path, rank):
    """The others look for it before it is there."""
    variable = tf.Variable(1.0)
    hk.checkpoint.save(shared_path / "a", {"v": variable})
    variable.assign(2.0)
    if rank == 0:
        time.sleep(0.5)
        shutil.copytree(shared_path / "a", shared_path / "b")
    hk.checkpoint.restore(shared_path / "b", {"v": variable})
    assert variable.numpy() == 1.0


def test_what_is_not_there_is_refused_on_every_rank(shared_path):
    errors = raises_on_every_rank(
        hk.CheckpointError, lambda: hk.checkpoint.restore(shared_path / "none", {"v": tf.Variable(1.0)})
    )
    assert all("none: is not a checkpoint: it has no manifest.json" in text for text in errors)


def test_what_cannot_be_saved_is_named_on_every_rank(shared_path):
    errors = raises_on_every_rank(TypeError, lambda: hk.checkpoint.save(shared_path / "a", {"f": {"g": print}}))
    assert all(text.startswith("state['f/g']: got builtin_function_or_method") for text in errors)


# --- damage and disks that fail


@GATHER
def test_damage_that_one_rank_meets_is_told_by_all(shared_path, gather, rank, size):
    table = Cut(numbers((40, 8), 3), "div")
    hk.checkpoint.save(shared_path / "a", {"t": table})
    victim = size - 1
    file = shared_path / "a" / f"shard-{victim:05d}-of-{size:05d}.safetensors"
    if rank == 0:
        flip(file)
    hk.barrier()
    errors = raises_on_every_rank(
        hk.CorruptCheckpointError, lambda: hk.checkpoint.restore(shared_path / "a", {"t": table}, gather=gather)
    )
    rows = f"'t' is damaged in rows 0 to {len(table.local_index[0]) - 1 if rank == victim else ''}"
    assert all(file.name in text and rows in text for text in errors)
    reader = 0 if gather else victim
    prefix = f"tensors of a checkpoint: rank {reader} raised CorruptCheckpointError: "
    assert all(text.startswith(prefix) for r, text in enumerate(errors) if r != reader)


def test_only_restoring_everything_removes_the_note_of_damage(shared_path, rank):
    state = {"a": tf.Variable([1.0]), "b": tf.Variable([2.0])}
    path = hk.checkpoint.save(shared_path / "step-000000001", state)
    if rank == 0:
        record_damage(path, "'b' is damaged")
    hk.checkpoint.restore(path, {"a": state["a"]})
    hk.barrier()
    assert hk.checkpoint.latest(shared_path) is None
    hk.barrier()
    hk.checkpoint.restore(path, state)
    hk.barrier()
    assert hk.checkpoint.latest(shared_path) == path


@pytest.mark.parametrize("victim", ["chief", "last"])
def test_a_rank_that_cannot_write_fails_the_save_on_all(shared_path, rank, size, victim):
    """Simulate a full disk on that rank with a limit on the length of files."""
    victim = 0 if victim == "chief" else size - 1
    table = Cut(numbers((4000, 64), 3), "mod")
    path = hk.checkpoint.save(shared_path / "step-000000001", {"t": table})
    kept = {p.name: p.read_bytes() for p in path.iterdir()}
    table.assign_local(table.local + 1)
    with limited(resource.RLIMIT_FSIZE, 2**15) if rank == victim else contextlib.nullcontext():
        errors = raises_on_every_rank(
            hk.CheckpointError, lambda: hk.checkpoint.save(shared_path / "step-000000002", {"t": table})
        )
    name = f"shard-{victim:05d}-of-{size:05d}.safetensors"
    for text in errors:
        assert f"not saved, rank {victim} failed: " in text and f"{name}: cannot be written (File too large)" in text
    assert [p.name for p in shared_path.iterdir()] == ["step-000000001"]
    assert {p.name: p.read_bytes() for p in path.iterdir()} == kept
    hk.checkpoint.save(shared_path / "step-000000002", {"t": table})  # the next save works
    assert hk.checkpoint.latest(shared_path) == shared_path / "step-000000002"


def test_a_chief_that_cannot_write_for_all_tells_all(shared_path, rank):
    table = Cut(numbers((4000, 64), 3), "mod")
    with limited(resource.RLIMIT_FSIZE, 2**15) if rank == 0 else contextlib.nullcontext():
        errors = raises_on_every_rank(
            hk.CheckpointError, lambda: hk.checkpoint.save(shared_path / "a", {"t": table}, gather=True)
        )
    assert all("not saved, rank 0 failed: " in text and "(File too large)" in text for text in errors)
    assert not [*shared_path.iterdir()]


@GATHER
def test_a_rank_that_cannot_read_its_rows_fails_the_save_on_all(shared_path, gather, rank, size):
    victim = size - 1
    table = Cut(numbers((1000 * size, 512), 3), "div")  # two transfers of each rank through the chief

    def save() -> Path:
        return hk.checkpoint.save(shared_path / "a", {"before": tf.Variable(1.0), "t": table}, gather=gather)

    for readable in (0, 600):
        if rank == victim:
            table.read_rows = partial(_rows_until, table.local.numpy(), readable)
        errors = raises_on_every_rank(hk.CheckpointError, save)
        assert all(f"not saved, rank {victim} failed: LookupError: the rows are gone" in text for text in errors)
        assert not [*shared_path.iterdir()]
    if rank == victim:
        table.read_rows = None
        local = table.local
        table.local = local.numpy().view(Gone)
    errors = raises_on_every_rank((hk.CheckpointError, LookupError), save)
    start = f"hk.checkpoint.save(): rank {victim} raised LookupError: "
    assert {text.removeprefix(start) for text in errors} == {"the rows are gone"}
    assert not [*shared_path.iterdir()]
    if rank == victim:
        table.local = local
    assert save() == shared_path / "a"


def _rows_until(array: np.ndarray, end: int, start: int, stop: int) -> np.ndarray:
    if stop > end:
        raise LookupError("the rows are gone")
    return array[start:stop]


class Gone(np.ndarray):
    """An array that cannot be read."""

    def copy(self, order="C"):
        raise LookupError("the rows are gone")


# --- folders


def test_a_file_where_the_folder_should_be(shared_path, rank):
    if rank == 0:
        (shared_path / "file").write_text("mine")
    hk.barrier()
    errors = raises_on_every_rank(
        hk.CheckpointError, lambda: hk.checkpoint.save(shared_path / "file" / "a", {"v": tf.Variable(1.0)})
    )
    assert all("cannot be" in text and str(shared_path / "file") in text for text in errors)
    assert (shared_path / "file").read_text() == "mine"


def test_ranks_that_do_not_share_a_folder(shared_path, rank, size):
    """Simulate hosts without a common file system with a different folder on each rank."""
    own = shared_path / f"host-{rank}"
    saved, other = State(1), State(2)
    hk.broadcast_variables([*saved.model.trainable_variables, saved.half])
    errors = raises_on_every_rank(hk.CheckpointError, lambda: hk.checkpoint.save(own / "a", saved.mapping()))
    assert all("does not share with rank 0" in text and "gather=True" in text for text in errors)
    hk.checkpoint.save(own / "a", saved.mapping(), gather=True)
    assert Path(own / "a").exists() == (rank == 0)
    hk.checkpoint.restore(own / "a", other.mapping(), gather=True)
    assert other.bits() == saved.bits()
    if rank == 0:  # every host has another checkpoint of this name
        for other_rank in range(1, size):
            shutil.copytree(own / "a", shared_path / f"host-{other_rank}" / "a")
    hk.barrier()
    hk.checkpoint.save(own / "a", {**saved.mapping(), "array": saved.array + 1}, gather=True)
    errors = raises_on_every_rank(hk.CheckpointError, lambda: hk.checkpoint.restore(own / "a", other.mapping()))
    assert all("a different manifest on rank 1" in text and "gather=True" in text for text in errors[:2])
