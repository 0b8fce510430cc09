"""Columns of Parquet tables whose values are in the names of folders."""

import urllib.parse

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

import hvdkit as hk
from hvdkit.commands.cli import main
from hvdkit.data import GlobalBatches


def write(folder, parts, rows=5, **columns):
    """Write a file of rows into each folder; their ids follow each other."""
    for number, part in enumerate(parts):
        (folder / part).mkdir(parents=True, exist_ok=True)
        ids = np.arange(number * rows, (number + 1) * rows)
        pq.write_table(pa.table({"id": ids, **columns}), folder / part / "part-0.parquet", row_group_size=2)


def read(paths, *arguments, **options):
    source = hk.data.parquet(paths, *arguments, **options)
    return next(GlobalBatches(source, source.examples, rank=0, size=1))


def test_columns_of_folders_are_those_of_pyarrow(tmp_path):
    for name, parts in {
        "numbers": ["year=2023/month=01", "year=2023/month=12", "year=2024/month=02"],
        "text": ["day=2024-01-01", "day=2024-01-02"],
        "mixed": ["shop=1", "shop=2b"],
        "encoded": [f"shop={urllib.parse.quote('a b/c=ä')}", "shop=b=c"],
        "large": ["id2=1", "id2=12345678901"],
        "signs": ["delta=-1", "delta=+2"],
    }.items():
        write(tmp_path / name, parts)
        expected = ds.dataset(tmp_path / name, partitioning="hive").to_table().sort_by("id").to_pydict()
        for options in ({}, {"shuffle_seed": 1}, {"shuffle_seed": 1, "shuffle": "blocks"}):
            source = hk.data.parquet(tmp_path / name)
            batch = next(GlobalBatches(source, source.examples, rank=0, size=1, **options))
            order = np.argsort(batch["id"])
            assert [*batch] == [*expected], name
            for column, values in expected.items():
                found = batch[column][order].tolist()
                assert found == [each.encode() if isinstance(each, str) else each for each in values], (name, column)
        if name == "numbers":
            assert batch["year"].dtype == batch["month"].dtype == np.int32


def test_columns_of_folders_can_be_chosen(tmp_path):
    write(tmp_path, ["year=2023/month=1", "year=2024/month=2"])
    assert read(tmp_path, ["id"]).keys() == {"id"}
    assert read(tmp_path, ["month", "id"])["month"].tolist() == [1] * 5 + [2] * 5
    assert read(tmp_path, ["year"])["year"].tolist() == [2023] * 5 + [2024] * 5
    files = sorted(tmp_path.glob("*/*/*"))
    for paths in (f"{tmp_path}/year=*/month=*/*.parquet", files):
        assert read(paths)["year"].tolist() == [2023] * 5 + [2024] * 5
    assert read(tmp_path / "year=2023").keys() == {"id", "month"}  # as in pyarrow: below the path
    with pytest.raises(ValueError, match=r"columns: got \['year'\], expected .*below the paths; pass the folder above"):
        read(tmp_path / "year=2023", ["id", "year"])
    with pytest.raises(ValueError, match=r"columns: got \['day'\], expected columns of .*part-0\.parquet"):
        read(tmp_path, ["id", "day"])


def test_a_column_of_the_files_counts_before_that_of_their_folders(tmp_path):
    write(tmp_path, ["year=2023", "year=2024"], year=[7] * 5)
    assert read(tmp_path)["year"].tolist() == [7] * 10


def test_missing_values_of_folders_are_filled(tmp_path):
    write(tmp_path, ["year=2023", "year=__HIVE_DEFAULT_PARTITION__"])
    with pytest.raises(TypeError, match=r"column 'year' of year=__HIVE.*part-0\.parquet: .*1 missing.*fill="):
        read(tmp_path)
    assert read(tmp_path, fill={"year": -1})["year"].tolist() == [2023] * 5 + [-1] * 5


def test_files_with_other_folders_are_named(tmp_path):
    write(tmp_path, ["year=2023", "month=1"])
    with pytest.raises(ValueError, match=r"got \['year'\] in year=2023/.*expected \['month'\], as in month=1/"):
        read(tmp_path)
    assert sorted(read(tmp_path, ["id"])["id"]) == [*range(10)]


def test_new_files_keep_the_types_of_the_first(tmp_path):
    write(tmp_path, ["year=2023", "year=2024"])
    batches = GlobalBatches(hk.data.parquet(tmp_path), 10, growth="append", rank=0, size=1)
    write(tmp_path / "year=2025", [""])
    assert batches.add_new_files() == ["year=2025/part-0.parquet"]
    assert sorted(set(np.concatenate([batch["year"] for batch in batches.one_epoch()]))) == [2023, 2024, 2025]
    write(tmp_path / "year=unknown", [""])
    with pytest.raises(
        ValueError, match=r"column 'year' of year=unknown/part-0\.parquet: got unknown, expected an int32"
    ):
        batches.add_new_files()


def test_inspect_shows_the_columns_of_folders(tmp_path, capsys):
    write(tmp_path, ["year=2023"])
    assert main(["data", "inspect", str(tmp_path)]) == 0
    assert "id: int64, year: int32" in capsys.readouterr().out
