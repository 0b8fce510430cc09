"""Sharded tables and their slots in checkpoints: bit for bit with the same plan, by rows on other numbers of ranks."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.as_one import same_values

import hvdkit as hk
from hvdkit.checkpoint.matching import without_numbers
from hvdkit.checkpoint.state import flatten
from hvdkit.sharding.shards import PieceState

Table = hk.layers.Table
TABLES = [
    Table("users", 23, 8),
    Table("items", 40, 4, combiner="mean"),
    Table("tags", 9, 4, combiner="sum"),
    Table("small", 3, 2),
]
PLANS = {
    "rows": {"users": "row", "items": "row", "tags": "row", "small": "replicated"},
    "mixed": {"users": "column", "items": "table", "tags": "div", "small": "replicated"},
}


class Model(keras.Model):
    def __init__(self, plan, seed=1):
        super().__init__()
        self.embed = hk.layers.ShardedEmbeddingCollection(TABLES, PLANS[plan], seed=seed)
        self.out = keras.layers.Dense(1)

    def call(self, inputs):
        return self.out(tf.concat([v for _, v in sorted(self.embed(inputs).items())], 1))

    def tables(self):
        return {t.name: self.embed.gather(t.name) for t in TABLES}


def inputs_of(rank, step):
    rng = np.random.default_rng([rank, step])
    made = {t.name: rng.integers(0, t.input_dim, (6, 2) if t.combiner else (6,)) for t in TABLES}
    return made, rng.normal(size=(6, 1)).astype("f4")


def trained(plan, steps, seed=1, optimizer=None):
    keras.utils.set_random_seed(seed)
    model = Model(plan, seed)
    inputs, _ = inputs_of(0, 0)
    model(inputs)
    hk.broadcast_variables(model.variables)
    optimizer = hk.DistributedOptimizer(optimizer or keras.optimizers.Adam(0.05), accumulate_steps=1)
    optimizer.build(model.trainable_variables)
    for step in steps:
        train(model, optimizer, step)
    return model, optimizer


def train(model, optimizer, step):
    inputs, y = inputs_of(hk.rank(), step)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(inputs) - y))
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)


def test_a_save_reads_each_row_of_stacked_tables_once(shared_path, monkeypatch):
    model, _ = trained("rows", range(1))
    rows, read_rows = [], PieceState.read_rows

    def reading(piece, start, stop):
        rows.extend((piece.name, row) for row in range(start, stop))
        return read_rows(piece, start, stop)

    monkeypatch.setattr(PieceState, "read_rows", reading)
    flatten({"model": model})
    assert not rows
    hk.checkpoint.save(shared_path / "saved", {"model": model})
    assert len(rows) == len(set(rows))
    total = hk.allreduce(np.array([len(rows)]), op=hk.Sum)
    assert total == sum(t.input_dim for t in TABLES if t.name != "small")


@pytest.mark.core(2)
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize(("plan", "gather"), [("rows", True), pytest.param("mixed", False, marks=pytest.mark.full)])
def test_a_restored_model_trains_on_as_if_never_stopped(plan, gather, shared_path, rank):
    model, optimizer = trained(plan, range(3))
    path = hk.checkpoint.save(shared_path / "step-3", {"model": model, "optimizer": optimizer}, gather=gather)
    again, fresh = trained(plan, [], seed=2)
    hk.checkpoint.restore(path, {"model": again, "optimizer": fresh}, gather=gather)
    same_values([*again.variables, *fresh.variables], [*model.variables, *optimizer.variables])
    for step in range(3, 5):
        train(model, optimizer, step)
        train(again, fresh, step)
    for name, table in model.tables().items():
        np.testing.assert_array_equal(again.embed.gather(name), table, err_msg=name)


def test_another_plan_takes_the_same_tables_and_slots(shared_path, rank, size):
    """The same rows under other rules, as on another number of ranks: equal tables and slots, wherever they are."""
    model, optimizer = trained("rows", range(2))
    path = hk.checkpoint.save(shared_path / "step-2", {"model": model, "optimizer": optimizer})
    again, fresh = trained("mixed", [], seed=2)
    hk.checkpoint.restore(path, {"model": again, "optimizer": fresh})
    for name, table in model.tables().items():
        np.testing.assert_array_equal(again.embed.gather(name), table, err_msg=name)
    hk.checkpoint.save(shared_path / "step-3", {"model": again, "optimizer": fresh})
    own = shared_path / str(rank)
    exported = []
    for number, folder in ((2, own / "a"), (3, own / "b")):
        hk.checkpoint.export_npy(shared_path / f"step-{number}", folder)
        files = {without_numbers(str(p.relative_to(folder))): np.load(p) for p in folder.rglob("*.npy")}
        exported.append(files)
    assert sum("users" in name for name in exported[0]) == 3  # the table and Adam's two slots
    assert exported[0].keys() == exported[1].keys()
    for name, values in exported[0].items():
        np.testing.assert_array_equal(values, exported[1][name], err_msg=name)
    kinds = json.loads((path / "manifest.json").read_text())["variables"]
    assert sum(v["kind"] == "sharded" for v in kinds.values()) == 9


def test_a_table_that_was_cut_is_restored_whole(shared_path):
    """As on one machine that serves a model trained by many ranks."""
    cut = hk.layers.ShardedEmbedding(13, 3, seed=1, name="table")
    whole = hk.layers.ShardedEmbedding(13, 3, seed=2, partition="replicated", name="table")
    cut.build(), whole.build()
    path = hk.checkpoint.save(shared_path / "cut", {"layer": cut})
    hk.checkpoint.restore(path, {"layer": whole})
    np.testing.assert_array_equal(whole.gather(), cut.gather())
    back = hk.layers.ShardedEmbedding(13, 3, seed=3, partition="div", name="table")
    back.build()
    hk.checkpoint.restore(hk.checkpoint.save(shared_path / "whole", {"layer": whole}), {"layer": back})
    np.testing.assert_array_equal(back.gather(), cut.gather())


@pytest.mark.parametrize("partition", ["div", "mod"])
def test_a_variable_is_saved_by_its_rows(partition, shared_path):
    state = {"v": hk.PartitionedVariable((11, 2), initializer="uniform", partition=partition, seed=1, name="v")}
    whole = state["v"].gather()
    path = hk.checkpoint.save(shared_path / "step-1", state)
    state["v"].apply(tf.zeros_like)
    hk.checkpoint.restore(path, state)
    np.testing.assert_array_equal(state["v"].gather(), whole)
    other = hk.PartitionedVariable((11, 2), partition="mod" if partition == "div" else "div", name="v")
    hk.checkpoint.restore(path, {"v": other})
    np.testing.assert_array_equal(other.gather(), whole)


def test_under_the_supervisor_shards_are_each_ranks_own(shared_path, rank, size):
    def session(steps):
        model, optimizer = trained("rows", [])
        with hk.Supervisor(shared_path / "run", model=model, optimizer=optimizer, check_steps=1, save_steps=2) as sv:
            for step in range(sv.global_step, steps):
                train(model, optimizer, step)
                sv.step()
        return model.tables()

    session(3)
    continued = session(6)
    straight, _ = trained("rows", range(6))
    for name, table in straight.tables().items():
        np.testing.assert_allclose(continued[name], table, rtol=1e-6, atol=1e-7, err_msg=name)
