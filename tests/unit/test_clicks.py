"""Examples for recommenders: synthetic ones, and files in the formats that users have."""

from __future__ import annotations

import numpy as np
import pytest
from inputs import load_criteo, load_movielens, planted_clicks


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
