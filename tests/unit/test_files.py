"""Files as sources: every format gives the same rows in the same order, at any number of ranks."""

import itertools
import os
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from array_record.python.array_record_module import ArrayRecordWriter

import hvdkit as hk
from hvdkit.data import GlobalBatches
from hvdkit.data.files import tfrecord_format
from hvdkit.data.files.listing import list_files

ROWS = (310, 1, 157, 640)  # of the files
EXAMPLES = sum(ROWS)
MODES = {
    "in order": {},
    "full": {"shuffle_seed": 3},
    "blocks": {"shuffle_seed": 3, "shuffle": "blocks", "shuffle_buffer": 200, "interleave": 4},
    "lanes": {"shuffle": "blocks", "interleave": 4},
}
FEATURES = {
    "id": tf.io.FixedLenFeature([], tf.int64),
    "x": tf.io.FixedLenFeature([2], tf.float32),
    "list": tf.io.RaggedFeature(tf.int64, row_splits_dtype=tf.int64),
}


def list_of(i):
    return [i + k for k in range(i % 4)]


def example(i):
    ints = lambda values: tf.train.Feature(int64_list=tf.train.Int64List(value=values))  # noqa: E731
    floats = tf.train.Feature(float_list=tf.train.FloatList(value=[i / 2, i / 4]))
    features = {"id": ints([i]), "x": floats, "list": ints(list_of(i))}
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def write_parquet(path, ids):
    columns = {
        "id": ids,
        "x": pa.FixedSizeListArray.from_arrays(np.array([[i / 2, i / 4] for i in ids], np.float32).ravel(), 2),
        "list": [list_of(i) for i in ids],
        "text": [f"r{i}" for i in ids],
    }
    pq.write_table(pa.table(columns), f"{path}.parquet", row_group_size=50)


def write_tfrecord(path, ids):
    with tf.io.TFRecordWriter(str(path)) as file:
        for i in ids:
            file.write(example(i))


def write_array_record(path, ids):
    file = ArrayRecordWriter(str(path), "group_size:1")
    for i in ids:
        file.write(example(i))
    file.close()


def write_delimited(path, ids):
    lines = [f"{i},{i / 2},r{i}" for i in ids]
    path.with_suffix(".csv").write_text("\n".join(["id,x,text", *lines]) + "\n" * (len(ids) % 2))


def write_criteo(path, ids):
    def line(i):
        counts = [str(i + k) if (i + k) % 5 else "" for k in range(13)]
        return "\t".join([str(i % 2), *counts, f"{i:08x}", *(f"{i + k:08x}" if i % 3 else "" for k in range(25))])

    path.write_text("".join(f"{line(i)}\n" for i in ids))


def write_npy(path, ids):
    np.save(path, np.array(ids)[:, None] + np.array([0, 0.5]))


def check_examples(batch):
    ids = batch["id"]
    np.testing.assert_allclose(batch["x"], np.stack([ids / 2, ids / 4], axis=1))
    assert batch["list"].to_list() == [list_of(i) for i in ids.tolist()]
    return ids


def check_parquet(batch):
    assert batch["text"].tolist() == [b"r%d" % i for i in batch["id"]]
    return check_examples(batch)


def check_delimited(batch):
    assert batch["text"].tolist() == [b"r%d" % i for i in batch["id"]]
    np.testing.assert_array_equal(batch["x"], np.float32(batch["id"] / 2))
    return batch["id"]


def check_criteo(batch):
    inputs, labels = batch
    ids = inputs["categories"][:, 0]
    np.testing.assert_array_equal(labels, ids % 2)
    counts = ids[:, None] + np.arange(13)
    np.testing.assert_array_equal(inputs["counts"], np.where(counts % 5, counts, 0))
    others = ids[:, None] + np.arange(25)
    np.testing.assert_array_equal(inputs["categories"][:, 1:], np.where(ids[:, None] % 3, others, -1))
    return ids


def check_npy(batch):
    np.testing.assert_array_equal(batch[:, 1], batch[:, 0] + 0.5)
    return batch[:, 0].astype(np.int64)


COLUMNS = {"id": "int64", "x": "float32", "text": "S"}
FORMATS = {
    "parquet": (write_parquet, hk.data.parquet, check_parquet),
    "tfrecord": (write_tfrecord, lambda paths: hk.data.tfrecord(paths, FEATURES), check_examples),
    "array_record": (write_array_record, lambda paths: hk.data.array_record(paths, FEATURES), check_examples),
    "delimited": (write_delimited, lambda paths: hk.data.delimited(paths, COLUMNS, header_lines=1), check_delimited),
    "criteo": (write_criteo, hk.data.criteo, check_criteo),
    "npy": (write_npy, hk.data.npy, check_npy),
}


def write_all(folder, write):
    folder.mkdir()
    starts = np.cumsum([0, *ROWS])
    for number, (start, stop) in enumerate(itertools.pairwise(starts.tolist())):
        write(folder / f"part_{number}", range(start, stop))
    return folder


@pytest.fixture(scope="module", params=FORMATS)
def files(request, tmp_path_factory):
    """Return a source, and the function that checks a batch and returns its examples."""
    write, read, check = FORMATS[request.param]
    return read(write_all(tmp_path_factory.mktemp("files") / request.param, write)), check


def order_of(files, size, batch_size=48, epochs=1, **options):
    """Return the examples of the global batches, int64 ``[steps, batch]``, and the masks."""
    source, check = files
    ranks = [GlobalBatches(source, batch_size, rank=r, size=size, epochs=epochs, **options) for r in range(size)]
    steps = [np.concatenate([check(batch) for batch in batches]) for batches in zip(*ranks, strict=True)]
    return np.stack(steps)


@pytest.mark.parametrize("mode", MODES)
def test_the_global_order_is_the_same_at_any_number_of_ranks(files, mode):
    whole = order_of(files, 1, epochs=2, **MODES[mode])
    for size in (2, 3, 4):
        np.testing.assert_array_equal(order_of(files, size, epochs=2, **MODES[mode]), whole)
    epochs = whole.reshape(2, -1)[:, :EXAMPLES]
    for epoch in epochs:
        assert sorted(epoch) == list(range(EXAMPLES))
    assert (epochs[0] == range(EXAMPLES)).all() == (mode == "in order")
    assert (epochs[0] == epochs[1]).all() == (mode in ("in order", "lanes"))


@pytest.mark.parametrize("mode", MODES)
def test_a_run_continues_at_another_number_of_ranks(files, mode):
    source, check = files
    whole = order_of(files, 1, epochs=2, **MODES[mode])
    for stop, size in ((5, 3), (len(whole) // 2 + 2, 2)):
        first = GlobalBatches(source, 48, rank=0, size=4, epochs=2, **MODES[mode])
        for _ in range(stop):
            next(first)
        ranks = [GlobalBatches(source, 48, rank=r, size=size, epochs=2, **MODES[mode]) for r in range(size)]
        for each in ranks:
            each.restore(first.state)
        rest = [np.concatenate([check(batch) for batch in batches]) for batches in zip(*ranks, strict=True)]
        np.testing.assert_array_equal(np.stack(rest), whole[stop:])


def test_a_full_shuffle_of_few_examples_is_that_of_arrays(files):
    arrays = GlobalBatches(np.arange(EXAMPLES), 48, shuffle_seed=3, epochs=1, rank=0, size=1)
    np.testing.assert_array_equal(order_of(files, 1, shuffle_seed=3), np.stack([*arrays]))


def test_a_state_of_other_files_is_refused(files, tmp_path):
    source, _ = files
    state = GlobalBatches(source, 48, rank=0, size=1).state
    write_npy(tmp_path / "other", range(EXAMPLES))
    other = GlobalBatches(hk.data.npy(tmp_path), 48, rank=0, size=1)
    with pytest.raises(ValueError, match=r"state\['files'\]"):
        other.restore(state)


# ---- what is read --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tfrecord", "delimited", "npy"])
@pytest.mark.parametrize("mode", ["in order", "blocks"])
def test_a_rank_reads_its_part_only(tmp_path, name, mode, monkeypatch):
    write, read, check = FORMATS[name]
    folder = tmp_path / name
    folder.mkdir()
    write(folder / "part", range(40_000))
    monkeypatch.setattr("hvdkit.data.files.records.BLOCK_BYTES", 2**14)
    source = read(folder)
    size = sum(path.stat().st_size for path in folder.iterdir() if not path.name.startswith("."))
    for ranks in (1, 2, 4):
        before = read_bytes()
        batches = GlobalBatches(source, 1024, rank=0, size=ranks, epochs=1, remainder="drop", **MODES[mode])
        assert sum(len(check(batch)) for batch in batches) == 39 * 1024 // ranks
        if name != "npy":  # mapped pages are not counted
            assert read_bytes() - before < 1.1 * size / ranks + 2**16


def read_bytes():
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize(
    ("name", "options", "size", "text"),
    [
        ("parquet", {"shuffle_seed": 1}, 1, "about 100 times its part of the files; pass shuffle='blocks'"),
        ("parquet", {}, 4, "about 4 times its part of the files; pass shuffle='blocks'"),
        (
            "parquet",
            {"shuffle": "blocks", "interleave": 4},
            6,
            "about 3 times its part of the files; pass interleave=6",
        ),
        ("parquet", {"shuffle": "blocks"}, 4, ""),
        ("parquet", {}, 1, ""),
        ("npy", {"shuffle_seed": 1}, 4, ""),
    ],
)
def test_reading_much_more_than_a_part_is_a_warning(tmp_path, caplog, name, options, size, text):
    write, read, _ = FORMATS[name]
    write(tmp_path / "a", range(1000))
    if name == "parquet":
        pq.write_table(pa.table({"id": np.arange(1000)}), tmp_path / "a.parquet", row_group_size=100)
    GlobalBatches(read(tmp_path), 32, rank=0, size=size, **options)
    assert text in caplog.text and bool(text) == bool(caplog.text)


def test_mapped_batches(files):
    source, check = files
    pairs = source.map(lambda batch: (check(batch), np.ones(len(check(batch))))).map(
        lambda pair: (pair[0] * 2, pair[1])
    )
    batches = [*GlobalBatches(pairs, 48, shuffle_seed=3, epochs=1, rank=0, size=1)]
    np.testing.assert_array_equal(np.stack([x for x, _ in batches]), 2 * order_of(files, 1, shuffle_seed=3))
    dataset = GlobalBatches(pairs, 48, rank=1, size=2, remainder="drop").as_keras()
    assert [tuple(spec.shape) for spec in dataset.element_spec] == [(24,)] * 3
    np.testing.assert_array_equal(next(iter(dataset))[0], 2 * np.arange(24, 48))
    with pytest.raises(ValueError, match=r"function: got .*expected arrays \[rows"):
        source.map(lambda batch: np.ones(3))


# ---- bad input -----------------------------------------------------------------------------------------------------


def damage(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def read_whole(source, **options):
    return [*GlobalBatches(source, 16, rank=0, size=1, epochs=1, **options)]


def test_a_damaged_record_is_named(tmp_path):
    write_tfrecord(tmp_path / "a", range(100))
    offsets = tfrecord_format.TFRecordFormat(None)._offsets_of(list_files(tmp_path)[0])
    damage(tmp_path / "a", int(offsets[57]) + 20)
    for options in MODES.values():
        with pytest.raises(hk.DataError, match=rf"a: record 57, at byte {offsets[57]}, is damaged"):
            read_whole(hk.data.tfrecord(tmp_path / "a"), **options)
    damage(tmp_path / "a", int(offsets[30]) + 1)
    with pytest.raises(hk.DataError, match=r"a: record 30, .* damaged length"):
        hk.data.tfrecord(tmp_path / "a")


@pytest.mark.parametrize("mode", MODES)
def test_damage_can_be_skipped(tmp_path, mode, caplog):
    write_tfrecord(tmp_path / "a", range(100))
    write_tfrecord(tmp_path / "b", range(100, 150))
    (tmp_path / "c").write_bytes(bytes(100))
    offsets = tfrecord_format.TFRecordFormat(None)._offsets_of(list_files(tmp_path)[0])
    for record in (0, 1, 57, 98):
        damage(tmp_path / "a", int(offsets[record]) + 20)
    os.truncate(tmp_path / "b", (tmp_path / "b").stat().st_size - 5)
    for _ in range(2):
        source = hk.data.tfrecord(tmp_path, FEATURES, on_error="skip")
        assert source.skipped == {str(tmp_path / "a"): 4}
        seen = np.concatenate([check_examples(batch) for batch in read_whole(source, remainder="drop", **MODES[mode])])
        kept = [i for i in range(149) if i not in (0, 1, 57, 98)]
        assert len(seen) == len(kept) // 16 * 16 and set(seen) <= set(kept) and len(set(seen)) == len(seen)
    assert "skipped 4 record(s)" in caplog.text and "ends within record 49" in caplog.text


def test_files_and_lines_can_be_skipped(tmp_path, caplog):
    write_parquet(tmp_path / "a", range(100))
    (tmp_path / "b.parquet").write_bytes(b"PAR1")
    source = hk.data.parquet(tmp_path, on_error="skip")
    assert source.examples == 100 and source.skipped == {str(tmp_path / "b.parquet"): -1}
    assert "skipped the file" in caplog.text
    (tmp_path / "a.csv").write_text("1,2\n3\n4,5\n")
    lines = hk.data.delimited(tmp_path / "a.csv", {"id": "int64", "x": "int64"}, on_error="skip")
    assert lines.skipped == {str(tmp_path / "a.csv"): 1}
    (batch,) = GlobalBatches(lines, 2, rank=0, size=1, epochs=1)
    assert batch["x"].tolist() == [2, 5]
    with pytest.raises(ValueError, match="on_error"):
        hk.data.npy(tmp_path, on_error="ignore")


def test_a_truncated_file_is_named(tmp_path):
    for name, (write, read, _) in FORMATS.items():
        folder = tmp_path / name
        folder.mkdir()
        write(folder / "part", range(100))
        (path,) = folder.iterdir()
        os.truncate(path, path.stat().st_size - 7)
        with pytest.raises(hk.DataError, match=path.name):
            read_whole(read(folder))


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_that_changes_or_disappears_is_named(name, tmp_path):
    write, read, _ = FORMATS[name]
    write(tmp_path / "part", range(100))
    source = read(tmp_path)
    (path,) = [each for each in tmp_path.iterdir() if not each.name.startswith(".")]
    path.rename(tmp_path / "_kept")
    with pytest.raises(hk.DataError, match=rf"{path.name}.* has disappeared"):
        read_whole(source)
    write(tmp_path / "part", range(99))
    with pytest.raises(hk.DataError, match=rf"{path.name}.* has changed"):
        read_whole(source)


def test_compressed_files_are_refused(tmp_path):
    (tmp_path / "a.gz").write_bytes(b"\x1f\x8b" + bytes(50))
    for read in (hk.data.tfrecord, hk.data.criteo):
        with pytest.raises(hk.DataError, match=r"a\.gz is compressed with gzip"):
            read(tmp_path / "a.gz")


def test_unlike_columns_are_named(tmp_path):
    pq.write_table(pa.table({"a": [1, 2]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"a": [1.0, 2.0]}), tmp_path / "2.parquet")
    with pytest.raises(ValueError, match=r"a: double in .*2\.parquet, expected a: int64, as in .*1\.parquet"):
        hk.data.parquet(tmp_path)
    with pytest.raises(ValueError, match=r"columns: got \['b'\]"):
        hk.data.parquet(tmp_path / "1.parquet", ["a", "b"])


def test_missing_values_need_a_replacement(tmp_path):
    pq.write_table(pa.table({"i": [1, None], "x": [None, 0.5]}), tmp_path / "a.parquet")
    with pytest.raises(TypeError, match=r"column 'i' of .*: got int64 with 1 missing value.*fill="):
        hk.data.parquet(tmp_path)
    (batch,) = GlobalBatches(hk.data.parquet(tmp_path, fill={"i": -1}), 2, rank=0, size=1, epochs=1)
    assert batch["i"].tolist() == [1, -1]
    np.testing.assert_array_equal(batch["x"], [np.nan, 0.5])


def test_a_line_with_other_columns_is_named(tmp_path):
    (tmp_path / "a.csv").write_text("id,x\n1,2\n3\n")
    source = hk.data.delimited(tmp_path / "a.csv", {"id": "int64", "x": "float32"}, header_lines=1)
    with pytest.raises(hk.DataError, match=r"line 3 of .*a\.csv has 1 value"):
        read_whole(source)


@pytest.mark.parametrize("paths", ["missing", "empty", "missing/*.parquet", []])
def test_no_files_are_an_error(paths, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="paths"):
        hk.data.parquet(paths)
    with pytest.raises(TypeError, match="paths"):
        hk.data.parquet([1])


# ---- offsets -------------------------------------------------------------------------------------------------------


def test_offsets_are_found_once_per_version_of_a_file(tmp_path, monkeypatch):
    write_tfrecord(tmp_path / "a", range(50))
    scans, find = [], tfrecord_format.TFRecordFormat.find_offsets

    def counted(self, file):
        scans.append(file)
        return find(self, file)

    monkeypatch.setattr(tfrecord_format.TFRecordFormat, "find_offsets", counted)
    assert [hk.data.tfrecord(tmp_path / "a").examples for _ in range(3)] == [50] * 3 and len(scans) == 1
    write_tfrecord(tmp_path / "a", range(60))
    assert hk.data.tfrecord(tmp_path / "a").examples == 60 and len(scans) == 2
    (cache,) = [each for each in tmp_path.iterdir() if each.suffix == ".offsets"]
    damage(cache, 4096 + 8 * 17)
    assert hk.data.tfrecord(tmp_path / "a").examples == 60 and len(scans) == 3
    cache.write_bytes(b"")
    assert hk.data.tfrecord(tmp_path / "a").examples == 60 and len(scans) == 4


def test_offsets_of_long_and_short_records(tmp_path):
    lengths = [0, 1, 5000, 3, 2**20, 0, 70_000, *range(300)]
    with (tmp_path / "a").open("wb") as file:
        for i, length in enumerate(lengths):
            data = bytes([i % 251]) * length
            header = struct.pack("<Q", length)
            crc = lambda x: struct.pack("<I", tfrecord_format._masked(tfrecord_format.google_crc32c.value(x)))  # noqa: E731
            file.write(header + crc(header) + data + crc(data))
    assert [*map(len, np.concatenate(read_whole(hk.data.tfrecord(tmp_path / "a"), remainder="drop")))] == lengths[
        : len(lengths) // 16 * 16
    ]
