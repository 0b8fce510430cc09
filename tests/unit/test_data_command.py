"""hvdkit data: what files have, how many ranks they feed."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from array_record.python.array_record_module import ArrayRecordWriter

import hvdkit as hk
from hvdkit.commands.cli import main
from hvdkit.data.files import offsets
from hvdkit.data.files.text_format import LineFormat


@pytest.fixture
def folder(tmp_path):
    for number in range(3):
        table = pa.table({"id": np.arange(10_000), "items": [[1, 2]] * 10_000})
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=1000)
    return tmp_path


def test_inspect_says_what_the_files_have(folder, capsys):
    assert main(["data", "inspect", str(folder), "--ranks", "3"]) == 0
    shown = capsys.readouterr().out
    for text in ("3 (parquet)", "30,000", "id: int64, items: list<int64>", "30 of 1,000 rows", "up to 3 read"):
        assert text in shown
    assert main(["data", "inspect", str(folder), "--ranks", "4", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["rows"], report["blocks"], report["ranks"]) == (30_000, 30, 3)
    assert report["remedies"] == ["too few blocks for 4 ranks: write row groups of at most 750 rows"]


def test_formats_are_recognized(tmp_path, capsys):
    with tf.io.TFRecordWriter(str(tmp_path / "a")) as file:
        file.write(b"record")
    np.save(tmp_path / "b.npy", np.zeros((5, 2)))
    (tmp_path / "c").write_text("line\n" * 7)
    (tmp_path / "day::2").write_text("line\n" * 7)  # fsspec takes "::" for a chain of file systems
    file = ArrayRecordWriter(str(tmp_path / "d"), "group_size:1")
    file.write(b"record")
    file.close()
    for name, format_name, rows in (
        ("a", "tfrecord", 1),
        ("b.npy", "npy", 5),
        ("c", "lines", 7),
        ("day::2", "lines", 7),
    ):
        assert main(["data", "inspect", str(tmp_path / name), "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["format"], report["rows"]) == (format_name, rows)
    assert main(["data", "inspect", str(tmp_path / "d")]) == 0
    assert "(array_record)" in capsys.readouterr().out


def test_text_from_files_is_shown_escaped(tmp_path, capsys):
    evil = "\x1b]0;title\x07"
    pq.write_table(pa.table({f"a{evil}": [1], "é": [2]}), tmp_path / "a.parquet")
    assert main(["data", "inspect", str(tmp_path / "a.parquet")]) == 0
    shown = capsys.readouterr().out
    assert "a\\x1b]0;title\\x07: int64, é: int64" in shown
    (tmp_path / f"b{evil}.npy").write_bytes(b"\x93NUMPY\x01\x00\x02\x00{}")
    assert main(["data", "inspect", str(tmp_path / f"b{evil}.npy")]) == 2
    shown = capsys.readouterr().err
    assert "b\\x1b]0;title\\x07.npy is not a whole .npy file" in shown and "\x1b" not in shown


def test_index_keeps_the_offsets(tmp_path, capsys):
    (tmp_path / "a.tsv").write_text("1\t2\n" * 1000)
    assert main(["data", "index", str(tmp_path / "a.tsv")]) == 0
    assert "1 files, 1000 rows" in capsys.readouterr().out
    assert [path.suffix for path in tmp_path.iterdir() if path.name != "a.tsv"] == [".offsets"]


def test_the_index_serves_programs_with_other_options(tmp_path, capsys, monkeypatch):
    (tmp_path / "a.tsv").write_text("first\tsecond\n" + "1\t2\n" * 1000)
    assert main(["data", "index", str(tmp_path / "a.tsv")]) == 0

    def refuse(*arguments):
        raise AssertionError("the lines are looked for again")

    monkeypatch.setattr(LineFormat, "find_offsets", refuse)
    source = hk.data.delimited(tmp_path, {"a": "int64", "b": "int64"}, delimiter="\t", header_lines=1)
    assert source.examples == 1000
    hk.data.delimited(tmp_path, {"a": "int64", "b": "int64"}, delimiter="\t", header_lines=1, on_error="skip")
    batch = next(hk.data.GlobalBatches(source, 1000, rank=0, size=1))
    assert batch["a"].tolist() == [1] * 1000


def test_an_index_that_cannot_be_kept_is_reported(tmp_path, capsys, monkeypatch, caplog):
    (tmp_path / "a.tsv").write_text("1\t2\n" * 1000)
    (tmp_path / "file").touch()
    (tmp_path / "b.tsv").write_text("1\t2\n" * 1000)
    folders = lambda file, kind: [tmp_path / "file" / "offsets"]  # noqa: E731
    monkeypatch.setattr(offsets, "_cache_paths", folders)
    assert main(["data", "index", str(tmp_path / "*.tsv")]) == 0
    shown = caplog.text, capsys.readouterr().err  # by pytest, or by the log's own handler
    assert max(text.count("cannot keep the offsets") for text in shown) == 1


def test_index_says_when_there_is_nothing_to_keep(folder, capsys):
    assert main(["data", "index", str(folder)]) == 0
    assert "nothing to keep: parquet files contain an index" in capsys.readouterr().out
    assert all(path.suffix == ".parquet" for path in folder.iterdir())


def test_too_few_blocks_of_records_have_another_remedy(tmp_path, capsys):
    (tmp_path / "a.tsv").write_text("1\t2\n" * 1000)
    assert main(["data", "inspect", str(tmp_path), "--ranks", "4", "--json"]) == 1
    (remedy,) = json.loads(capsys.readouterr().out)["remedies"]
    assert remedy == "too few blocks for 4 ranks: pass shuffle='full', which reads single rows"


def test_files_of_different_formats_are_an_error(folder, capsys):
    (folder / "README.md").write_text("line\n")
    (folder / "empty").touch()
    assert main(["data", "inspect", str(folder)]) == 2
    error = capsys.readouterr().err
    assert "got lines in" in error and "README.md" in error and "pass --format" in error
    assert main(["data", "inspect", str(folder), "--format", "parquet"]) == 0


def test_errors_are_one_line(tmp_path, capsys):
    (tmp_path / "a.gz").write_bytes(b"\x1f\x8b" + bytes(20))
    for arguments, text in (
        ([str(tmp_path / "missing")], "paths: got"),
        ([str(tmp_path / "a.gz")], "gzip"),
        (["/proc/self/mem"], "mem cannot be opened"),
        ([], "paths"),
        (["s4://bucket/a"], "got s4://bucket/a, expected a protocol of fsspec"),
        ([str(tmp_path), "--ranks", "0"], "--ranks: got 0, expected an integer of at least 1"),
    ):
        assert main(["data", "inspect", *arguments]) == 2
        error = capsys.readouterr().err
        assert text in error
