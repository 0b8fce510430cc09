"""Placement of tables and its cost: every row placed once, unique keys, and bytes that add up."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdkit.errors import PlanError
from hvdkit.sharding.keys import key_dtype, keys_of
from hvdkit.sharding.layout import lay_out
from hvdkit.sharding.partition import rows_of
from hvdkit.sharding.plan import plan_tables
from hvdkit.sharding.table import PLACEMENTS, Table

SIZES = st.integers(1, 9)
PLACED = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 10), st.sampled_from(PLACEMENTS)), min_size=1, max_size=6
)


def tables_of(drawn):
    tables = [Table(f"t{i}", rows, width) for i, (rows, width, _) in enumerate(drawn)]
    return tables, {f"t{i}": placement for i, (*_, placement) in enumerate(drawn)}


@given(PLACED, SIZES)
def test_every_number_of_every_table_has_one_place(drawn, size):
    tables, placements = tables_of(drawn)
    layout = lay_out(tables, placements, size)
    seen = {t.name: np.zeros((t.input_dim, t.output_dim), int) for t in tables}
    for rank in range(size):
        for group in layout.groups:
            taken = []
            for part, rows in group.parts_on(rank):
                seen[part.table.name][np.ix_(rows, part.columns)] += 1
                taken += range(part.base, part.base + len(rows))
            assert len(set(taken)) == len(taken) and all(row < group.rows[rank] for row in taken)
    for table in layout.replicated:
        seen[table.name] += 1
    assert all((count == 1).all() for count in seen.values())


@settings(max_examples=25, deadline=None)
@given(PLACED, SIZES)
def test_a_key_is_the_place_of_its_row(drawn, size):
    tables, placements = tables_of(drawn)
    layout = lay_out(tables, placements, size)
    for group in layout.groups:
        for part in group.slices:
            rows = part.table.input_dim
            ids = np.arange(rows)
            keys = keys_of(tf.constant(ids), part.rule, rows, size, base=part.base, rank=part.rank).numpy()
            for rank in {part.rank} if part.rule == "whole" else range(size):
                held = ids if part.rule == "whole" else np.array(rows_of(part.rule, rows, rank, size), int)
                np.testing.assert_array_equal(keys[held] % size, rank)
                np.testing.assert_array_equal(keys[held] // size, np.arange(len(held)) + part.base)
            assert keys.max() < group.keys


def test_rows_are_shared_out_evenly_and_tables_by_size():
    tables = [Table("a", 1001, 8), *(Table(f"t{i}", 100 * (i + 1), 8) for i in range(6))]
    layout = lay_out(tables, {"a": "row", **{f"t{i}": "table" for i in range(6)}}, 3)
    (group,) = layout.groups
    assert max(group.rows) - min(group.rows) <= 100
    assert sum(group.rows) == sum(t.input_dim for t in tables)


def test_keys_of_all_groups_fit_one_dtype():
    """Only one of two tables needs 64-bit keys, but their ids are sent in one message."""
    layout = lay_out([Table("small", 9, 2), Table("huge", 2**31, 4)], {"small": "row", "huge": "row"}, 2)
    assert [key_dtype(group.keys) for group in layout.groups] == [tf.int32, tf.int64]
    assert key_dtype(layout.keys) == tf.int64


def test_bytes_are_those_of_the_formulas():
    plan = plan_tables([Table("t", 1_000_000, 64)], 4, optimizer="adagrad", batch_size=1000, ids_per_example=2)
    (first, *_) = plan.ranks
    row = 64 * 4
    assert first.weights == 250_000 * row and first.slots == first.weights
    assert first.gradients == 2000 * 4 * row and first.exchange == 2000 * (4 + 2 * row)
    assert "t      1,000,000     64  244.1 MiB  row" in str(plan)
    alone = plan_tables([Table("t", 1_000_000, 64)], 1)
    assert alone.ranks[0].exchange == 0 and alone.ranks[0].slots == 0


def test_a_plan_that_cannot_fit_says_what_is_missing():
    tables = [Table("big", 10_000_000, 128), Table("tiny", 10, 4)]
    assert plan_tables(tables, 8).placements == {"big": "row", "tiny": "replicated"}
    with pytest.raises(
        PlanError, match=r"memory_bytes: got 1,000,000,000 .* which rank 0 of 4 needs; start more ranks"
    ):
        plan_tables(tables, 4, memory_bytes=10**9)
    assert plan_tables(tables, 8, memory_bytes=10**9).memory_bytes == 10**9


def test_bad_arguments_name_themselves():
    for arguments, words in (
        ({"optimizer": "lion"}, "optimizer: got lion"),
        ({"size": 0}, "size: got 0"),
        ({"batch_size": 0}, "batch_size: got 0"),
        ({"placements": {"x": "row"}}, "placements: got table 'x'"),
        ({"placements": {"t": "rows"}}, r"placements\['t'\]: got rows"),
    ):
        with pytest.raises(ValueError, match=words):
            plan_tables([Table("t", 3, 2)], **{"size": 2, **arguments})
    with pytest.raises(ValueError, match="tables: got none"):
        plan_tables([], 2)
    with pytest.raises(ValueError, match="name 't' twice"):
        plan_tables([Table("t", 3, 2), Table("t", 3, 2)], 2)
    with pytest.raises(ValueError, match="name: got a/b"):
        Table("a/b", 3, 2)
    with pytest.raises(ValueError, match="combiner of table 't': got max"):
        Table("t", 3, 2, combiner="max")
    with pytest.raises(TypeError, match="features of table 't': got user"):
        Table("t", 3, 2, features="user")


def test_the_command_plans_what_its_words_say():
    from hvdkit.commands.measure.planning import PlanConfig, bytes_of, plan

    made = plan(PlanConfig(tables=("items:1_000_000x64", "tags:500x8=column"), ranks="8", memory="1GiB"))
    assert made.placements == {"items": "row", "tags": "column"}
    assert made.ranks[0].weights == 125_000 * 64 * 4 + 500 * 4
    assert [bytes_of(text) for text in ("1K", "1 KB", "2GiB", "7")] == [1024, 1000, 2 << 30, 7]
    with pytest.raises(ValueError, match="--tables: got items, expected NAME:ROWSxWIDTH"):
        plan(PlanConfig(tables=("items",)))
    with pytest.raises(ValueError, match="--memory: got lots"):
        plan(PlanConfig(tables=("items:3x2",), memory="lots"))
    for latency in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=r"--latency-us: got .*, expected microseconds"):
            plan(PlanConfig(measured=Path("m.json"), ranks="8", latency_us=latency))
    for ranks in ("0", "4..0", "0..4"):
        with pytest.raises(ValueError, match=r"--ranks: got .*, expected a number of ranks, or FIRST..LAST"):
            plan(PlanConfig(measured=Path("m.json"), ranks=ranks))


def test_few_wide_rows_are_cut_by_columns_where_that_fits():
    wide = [Table("wide", 2, 10**7)]
    assert plan_tables(wide, 8, batch_size=1).placements == {"wide": "row"}
    tight = plan_tables(wide, 8, batch_size=1, memory_bytes=100 * 2**20)
    assert tight.placements == {"wide": "column"} and max(r.total for r in tight.ranks) <= 100 * 2**20


def test_optimizers_of_whole_shards_need_a_whole_gradient():
    table = [Table("t", 1_000_000, 64)]
    rows, whole = (plan_tables(table, 1, optimizer=name, batch_size=10).ranks[0] for name in ("adagrad", "momentum"))
    assert rows.weights + rows.slots == whole.weights + whole.slots
    assert (rows.gradients, whole.gradients) == (10 * 64 * 4, 2 * 1_000_000 * 64 * 4)


def test_a_single_table_is_no_list():
    with pytest.raises(TypeError, match="tables: got a single Table, expected a list of them"):
        plan_tables(Table("t", 3, 2), 1)
