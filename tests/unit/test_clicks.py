"""Examples for recommenders: synthetic ones, and files in the formats that users have."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from inputs import click_files, load_criteo, load_movielens, planted_clicks, write_criteo, write_parquet

from hvdkit.data import GlobalBatches


def test_planted_examples_know_their_best_loss():
    data = planted_clicks(20_000, features=4, rows=100)
    loss, area = data.best
    assert 0.3 < loss < np.log(2) and 0.6 < area < 1
    (inputs, labels), (_, trained_on) = data.part(True), data.part(False)
    assert len(labels) == data.held_out and len(trained_on) == 20_000 - data.held_out
    assert inputs["ids"].max() < 100 and set(np.unique(labels)) == {0.0, 1.0}
    again = planted_clicks(20_000, features=4, rows=100)
    assert (again.ids == data.ids).all() and again.best == data.best


def test_criteo_lines_are_read(tmp_path):
    counts = ["1", "", "-1"] + ["0"] * 10
    lines = [["1", *counts, "68fd1e64", *([""] * 25)], ["0", *(["5"] * 13), *(["ff"] * 26)]]
    path = tmp_path / "day_0"
    path.write_text("".join("\t".join(line) + "\n" for line in lines))
    data = load_criteo(path, rows=1000)
    clicked = int(np.argmax(data.labels[:, 0]))
    np.testing.assert_allclose(data.dense[clicked][:3], np.log1p([1, 0, 0]), rtol=1e-6)
    assert data.ids[clicked, 0] == 0x68FD1E64 % 1000 and data.ids[clicked, 1] == 0
    assert (data.ids[1 - clicked] == 255).all() and data.rows == (1000,) * 26
    path.write_text("1\t2\n")
    with pytest.raises(ValueError, match="line 1 has 2 columns, expected 40"):
        load_criteo(path)
    path.write_text("\t".join(lines[0]) + "\n" + "broken\n")
    assert len(load_criteo(path, limit=1).labels) == 1


def test_movielens_ratings_are_read(tmp_path):
    path = tmp_path / "ratings.csv"
    path.write_text("userId,movieId,rating,timestamp\n1,31,2.5,1260759144\n7,10,4.0,1260759179\n")
    data = load_movielens(path)
    assert data.rows == (8, 32) and sorted(data.labels[:, 0]) == [0.0, 1.0]
    assert sorted(map(tuple, data.ids)) == [(1, 31), (7, 10)]


@pytest.mark.parametrize("write", [write_parquet, write_criteo])
def test_written_clicks_are_read(tmp_path, write):
    """The last of more than ten files is held out, sorted by number."""
    data = planted_clicks(120, rows=40)
    write(data, tmp_path, 12)
    found = click_files(str(tmp_path), rows=30)
    assert (found.examples, found.held_out) == (120, 10) and found.rows == (30,) * (22 + 4 * (write is write_criteo))
    for held_out, rows in ((False, slice(0, 110)), (True, slice(110, 120))):
        whole = GlobalBatches(found.part(held_out), len(range(120)[rows]), rank=0, size=1)
        inputs, labels = next(whole)
        np.testing.assert_array_equal(labels, data.labels[rows])
        np.testing.assert_array_equal(inputs["ids"], data.ids[rows, : len(found.rows)] % 30)
        if write is write_parquet:
            np.testing.assert_array_equal(inputs["dense"], data.dense[rows])
            listed = [[i % 30 for i in ids if i] for ids in data.ids[rows, 22:].tolist()]
            assert inputs["lists"]["items"].to_list() == listed and found.lists == ("items",)
        else:
            np.testing.assert_allclose(np.expm1(inputs["dense"]), np.rint(np.expm1(inputs["dense"])), atol=1e-4)


def test_columns_of_parquet_are_recognized(tmp_path):
    columns = {
        "shop": ["a", "b", "a"],
        "label": [True, False, True],
        "words": [["a"], [], ["b", "a"]],
        "price": [1.0, None, 2.0],
        "user": np.array([2**64 - 1, 8, 3], np.uint64),
    }
    for name in ("1.parquet", "2.parquet"):
        pq.write_table(pa.table(columns), tmp_path / name)
    inputs, labels = next(GlobalBatches(click_files(str(tmp_path), rows=7).part(True), 3, rank=0, size=1))
    assert labels.tolist() == [[1], [0], [1]] and inputs["dense"].tolist() == [[1], [0], [2]]
    assert inputs["ids"][:, 1].tolist() == [(2**64 - 1) % 7, 1, 3]
    ((word,), (), pair), shops = inputs["lists"]["words"].to_list(), inputs["ids"][:, 0].tolist()
    assert pair == [shops[1], shops[0]] and word == shops[0] == shops[2] != shops[1]
    pq.write_table(pa.table({"user": [1]}), tmp_path / "1.parquet")
    (tmp_path / "2.parquet").unlink()
    with pytest.raises(ValueError, match=r"--data-dir: got .* with 1 file, expected at least two"):
        click_files(str(tmp_path), rows=7)
    pq.write_table(pa.table({"user": [1]}), tmp_path / "2.parquet")
    with pytest.raises(ValueError, match=r"--data-dir: got the columns \['user'\], expected 'label'"):
        click_files(str(tmp_path), rows=7)
