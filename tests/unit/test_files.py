"""Files as sources: every format gives the same rows. Their order at any number of ranks: test_file_orders.py."""

import copy
import itertools
import os
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from helpers.cases import case
from helpers.data_files import (
    FEATURES,
    FORMATS,
    MODES,
    check_examples,
    damage,
    write_criteo,
    write_npy,
    write_parquet,
    write_tfrecord,
)
from helpers.tiers import after_core

import hvdkit as hk
from hvdkit.data import GlobalBatches
from hvdkit.data.files import formats, source, tfrecord_format
from hvdkit.data.files.listing import list_files
from hvdkit.data.files.text_format import _from_hex

ROWS = (310, 1, 157, 640)  # of the files
EXAMPLES = sum(ROWS)


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


def shuffled_order(files):
    """Return the examples of the global batches of a full shuffle, int64 ``[steps, batch]``."""
    source, check = files
    return np.stack([check(batch) for batch in GlobalBatches(source, 48, shuffle_seed=3, epochs=1, rank=0, size=1)])


def test_a_full_shuffle_of_few_examples_is_that_of_arrays(files):
    arrays = GlobalBatches(np.arange(EXAMPLES), 48, shuffle_seed=3, epochs=1, rank=0, size=1)
    np.testing.assert_array_equal(shuffled_order(files), np.stack([*arrays]))


def test_a_state_of_other_files_is_refused(files, tmp_path):
    source, _ = files
    state = GlobalBatches(source, 48, rank=0, size=1).state
    write_npy(tmp_path / "other", range(EXAMPLES))
    other = GlobalBatches(hk.data.npy(tmp_path), 48, rank=0, size=1)
    with pytest.raises(ValueError, match=r"state\['files'\]"):
        other.restore(state)


# ---- what is read --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", after_core(["tfrecord", "delimited", "npy"], but=["delimited"]))
def test_a_rank_reads_its_part_only(tmp_path, name, monkeypatch):
    write, read, check = FORMATS[name]
    write(tmp_path / "part", range(40_000))
    monkeypatch.setattr("hvdkit.data.files.records.BLOCK_BYTES", 2**14)
    source = read(tmp_path)
    size = sum(path.stat().st_size for path in tmp_path.iterdir() if not path.name.startswith("."))
    for mode, ranks in itertools.product(["in order", "blocks"], [1, 2, 4]):
        before = read_bytes()
        batches = GlobalBatches(source, 1024, rank=0, size=ranks, epochs=1, remainder="drop", **MODES[mode])
        with case(mode=mode, ranks=ranks):
            assert sum(len(check(batch)) for batch in batches) == 39 * 1024 // ranks
            if name != "npy":  # mapped pages are not counted
                assert read_bytes() - before < 1.1 * size / ranks + 2**16


def read_bytes():
    return int(Path("/proc/self/io").read_text().split()[1])


BLOCKS = {"shuffle": "blocks"}
WARNINGS = (
    ("parquet", {"shuffle_seed": 1}, 1, "about 100 times its part of the files; pass shuffle='blocks'"),
    ("parquet", {}, 4, "about 4 times its part of the files; pass shuffle='blocks'"),
    ("parquet", BLOCKS | {"interleave": 4}, 6, "about 3 times its part of the files; pass interleave=6"),
    # A multiple of 7 and 5 would be more than a batch has.
    ("parquet", BLOCKS | {"interleave": 7, "global_batch_size": 7}, 5, "about 2.14 times its part of the files; pass"
     " interleave=5"),
    ("parquet", BLOCKS, 4, ""),
    ("parquet", {}, 1, ""),
    ("npy", {"shuffle_seed": 1}, 4, ""),
)  # fmt: skip


def test_reading_much_more_than_a_part_is_a_warning(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(source, "_SMALL_BYTES", 1)
    pq.write_table(pa.table({"id": np.arange(1000)}), tmp_path / "a.parquet", row_group_size=100)
    write_npy(tmp_path / "a.npy", range(1000))
    for name, options, size, text in WARNINGS:
        caplog.clear()
        data = FORMATS[name][1](tmp_path / f"a.{name}")
        GlobalBatches(data, **{"global_batch_size": 32, **options}, rank=0, size=size)
        assert text in caplog.text and bool(text) == bool(caplog.text), (name, options, size)


def test_mapped_batches(files):
    source, check = files
    pairs = source.map(lambda batch: (check(batch), np.ones(len(check(batch))))).map(
        lambda pair: (pair[0] * 2, pair[1])
    )
    batches = [*GlobalBatches(pairs, 48, shuffle_seed=3, epochs=1, rank=0, size=1)]
    np.testing.assert_array_equal(np.stack([x for x, _ in batches]), 2 * shuffled_order(files))
    dataset = GlobalBatches(pairs, 48, rank=1, size=2, remainder="drop").as_keras()
    assert [tuple(spec.shape) for spec in dataset.element_spec] == [(24,)] * 3
    np.testing.assert_array_equal(next(iter(dataset))[0], 2 * np.arange(24, 48))
    for function in (lambda batch: np.ones(3), lambda batch: None, lambda batch: (np.ones(2), None), lambda batch: {}):
        with pytest.raises(ValueError, match=r"function: got .*expected arrays \[rows"):
            source.map(function)


def of_lists(tmp_path, **options):
    lists = [[k * 1.0 for k in range(i % 4)] for i in range(11)]
    pq.write_table(pa.table({"x": [[i, i] for i in range(11)], "list": lists, "text": [f"{i}" for i in range(11)]}),
                   tmp_path / "a.parquet", row_group_size=4)  # fmt: skip
    return hk.data.parquet(tmp_path / "a.parquet", **options)


def test_maps_may_return_any_structure_of_tensors(tmp_path):
    source = of_lists(tmp_path)
    pairs = source.map(lambda batch: ([batch["list"], {"s": batch["list"].to_sparse()}, batch["text"]], batch["list"]))
    for remainder in ("pad", "drop"):
        dataset = GlobalBatches(pairs, 4, rank=1, size=2, remainder=remainder).as_keras()
        (ragged, wide, text), labels, weight = [*dataset][1]
        assert ragged.to_list() == labels.to_list() == [[0, 1], [0, 1, 2]], remainder
        assert tf.sparse.to_dense(wide["s"]).numpy().tolist() == [[0, 1, 0], [0, 1, 2]], remainder
        assert text.numpy().tolist() == [b"6", b"7"] and weight.shape == [2, 1], remainder


def test_batches_of_changing_width_are_named(tmp_path):
    pairs = of_lists(tmp_path).map(lambda batch: (batch["list"].to_tensor(), batch["text"]))
    dataset = GlobalBatches(pairs, 4, rank=0, size=1, remainder="drop").as_keras()
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"got a batch of shape \[4, 3\], expected \[4, 0\]"):
        next(iter(dataset))


def parse_list(record):
    return tf.io.parse_single_example(record, {"list": FEATURES["list"]})


def test_features_that_records_do_not_have_are_named(tmp_path):
    write_tfrecord(tmp_path / "a", range(16))
    row = "row 0 .* cannot be parsed: .*parse: got .*"
    for parse, error, text in (
        ({"nope": FEATURES["id"]}, hk.DataError, f"{row}Feature: nope .* is required but could not be found"),
        ({"id": FEATURES["x"]}, hk.DataError, f"{row}Key: id.*Data types don't match"),
        (
            parse_list,
            ValueError,
            "parse: got Cannot batch tensors with different shapes.*pass a dict with tf.io.Ragged",
        ),
    ):
        with case(parse=parse), pytest.raises(error, match=text):
            read_whole(hk.data.tfrecord(tmp_path / "a", parse))


def test_several_sources_do_not_make_tensorflow_warn_of_retracing(tmp_path, monkeypatch):
    """For example one for each fold of a cross validation."""
    import tensorflow as tf

    logged = []
    monkeypatch.setattr(tf.get_logger(), "warning", lambda text, *_: logged.append(text))
    write_tfrecord(tmp_path / "a", range(16))
    for _ in range(8):
        read_whole(hk.data.tfrecord(tmp_path / "a", lambda record: tf.strings.length(record)))
    assert not logged


def test_tensors_share_the_memory_of_batches(tmp_path, monkeypatch):
    """Numbers are not copied on the way to TensorFlow, neither the values of lists nor their splits."""
    made, empty = [], formats.aligned_empty
    monkeypatch.setattr(formats, "aligned_empty", lambda *args: made.append(empty(*args)) or made[-1])
    write_parquet(tmp_path / "a", range(100))
    batches = GlobalBatches(hk.data.parquet(tmp_path, ["id", "x", "list"]), 32, rank=0, size=1, remainder="drop")
    in_keras = next(iter(batches.as_keras()))
    as_tensors = next(GlobalBatches(batches.plan.source, 32, rank=0, size=1, as_tensors=True))
    tensors = tf.nest.flatten([in_keras, as_tensors], expand_composites=True)
    assert len(tensors) == 8
    for tensor in map(np.asarray, tensors):
        assert any(np.shares_memory(tensor, array) for array in made)


# ---- bad input -----------------------------------------------------------------------------------------------------


def read_whole(source, **options):
    return [*GlobalBatches(source, 16, rank=0, size=1, epochs=1, **options)]


def read_until_it_fails(source):
    while True:
        read_whole(source, shuffle_seed=0)  # keeps no row groups


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


def test_damage_can_be_skipped(tmp_path, caplog):
    write_tfrecord(tmp_path / "a", range(100))
    write_tfrecord(tmp_path / "b", range(100, 150))
    (tmp_path / "c").write_bytes(bytes(100))
    offsets = tfrecord_format.TFRecordFormat(None)._offsets_of(list_files(tmp_path)[0])
    for record in (0, 1, 57, 98):
        damage(tmp_path / "a", int(offsets[record]) + 20)
    os.truncate(tmp_path / "b", (tmp_path / "b").stat().st_size - 5)
    kept = {*range(149)} - {0, 1, 57, 98}
    for mode, options in MODES.items():
        source = hk.data.tfrecord(tmp_path, FEATURES, on_error="skip")
        assert source.skipped == {str(tmp_path / "a"): 4, str(tmp_path / "b"): 1, str(tmp_path / "c"): 1}
        seen = np.concatenate([check_examples(batch) for batch in read_whole(source, remainder="drop", **options)])
        assert len(seen) == len(kept) // 16 * 16 and {*seen} <= kept and len({*seen}) == len(seen), mode
    assert "skipped 4 record(s)" in caplog.text
    assert caplog.text.count("b from record 49, byte ") == len(MODES)  # also if the offsets were cached


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


@pytest.mark.parametrize("name", ["parquet", "criteo"])  # every format: test_bad_files.py
def test_a_file_that_changes_or_disappears_is_named(name, tmp_path):
    write, read, _ = FORMATS[name]
    write(tmp_path / "part", range(100))
    source = read(tmp_path)
    (path,) = [each for each in tmp_path.iterdir() if not each.name.startswith(".")]
    path.rename(tmp_path / "_kept")
    # Open files are checked once a second.
    with pytest.raises(hk.DataError, match=rf"{path.name}.* has disappeared"):
        read_until_it_fails(source)
    write(tmp_path / "part", range(99))
    with pytest.raises(hk.DataError, match=rf"{path.name}.* has changed"):
        read_until_it_fails(source)
    path.unlink()
    (tmp_path / "_kept").rename(path)
    read_whole(source)  # what was open is not used again after an error


def test_lines_without_all_values_are_named(tmp_path):
    columns = {"a": "float32", "b": "float32"}
    texts = (["1,2", "", "3,4"], ["", "1,2", "3,4"], ["1,2", "3,4", ""], ["1,2", "3", "4,5"])
    for end, lines, seed in itertools.product(["\n", "\r\n"], texts, [None, 0]):
        (tmp_path / "a.csv").write_text("".join(line + end for line in lines), newline="")
        number = next(i + 1 for i, line in enumerate(lines) if line.count(",") != 1)
        words = rf"line {number} of .*a\.csv has 1 values"
        with case(end=end, lines=lines, seed=seed), pytest.raises(hk.DataError, match=words):
            read_whole(hk.data.delimited(tmp_path / "a.csv", columns), shuffle_seed=seed)


def test_arrays_of_both_byte_orders(tmp_path):
    for number, dtype in enumerate([">f4", "<f4"]):
        np.save(tmp_path / f"{number}.npy", np.arange(10 * number, 10 * number + 10).astype(dtype))
    for seed in (None, 1):
        batches = GlobalBatches(hk.data.npy(tmp_path).map(lambda x: (x, x)), 20, shuffle_seed=seed, rank=0, size=1)
        for x in (next(batches)[0], next(iter(batches.as_keras()))[0].numpy()):
            assert x.dtype.isnative and sorted(x.tolist()) == [*range(20)], seed


def test_carriage_returns_within_lines_are_named(tmp_path):
    for text, seed in itertools.product(["1,2\r3,4\n", "1,2\n3,4\r5,6\n", "1,2\n3,4\r\r\n", "1,2\r3,4\r"], [None, 0]):
        (tmp_path / "a.csv").write_text(text, newline="")
        words = rf"line {1 + text.partition(chr(13))[0].count(chr(10))} of .*a\.csv has a carriage return within it"
        with case(text=text, seed=seed), pytest.raises(hk.DataError, match=words):
            read_whole(hk.data.delimited(tmp_path / "a.csv", {"a": "int64", "b": "int64"}), shuffle_seed=seed)
    (tmp_path / "b.csv").write_text("x\ry\nz\n", newline="")
    lines = hk.data.delimited(tmp_path / "b.csv", {"a": "S"}, on_error="skip")
    assert lines.skipped == {str(tmp_path / "b.csv"): 1} and lines.read(np.array([0]))["a"] == b"z"


def test_categories_that_are_not_hexadecimal_are_named(tmp_path):
    write_criteo(tmp_path / "a", range(3))
    good = (tmp_path / "a").read_text()
    for category in ("0000000g", "hello", "123456789", "0x12", "-1", "1 "):
        (tmp_path / "a").write_text(good.replace("00000001", category, 1))
        words = rf"line 2 of .*a cannot be parsed: .*{category}.* hexadecimal digits"
        with case(category=category), pytest.raises(hk.DataError, match=words):
            read_whole(hk.data.criteo(tmp_path / "a"))


def test_hexadecimal_digits_of_any_length():
    texts = [b"", b"0", b"fF", b"DEADBEEF", b"", b"7fffffff", b"00000001"]
    expected = [-1, *(int(text or b"-1", 16) for text in texts[1:])]
    for kept in (slice(None), slice(1, 4), slice(4, 7), slice(0, 1)):
        assert _from_hex(pa.array(texts, pa.binary())[kept]).tolist() == expected[kept]


def test_unlike_columns_are_named(tmp_path):
    pq.write_table(pa.table({"a": [1, 2]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"a": [1.0, 2.0]}), tmp_path / "2.parquet")
    with pytest.raises(ValueError, match=r"a: double in .*2\.parquet, expected a: int64, as in .*1\.parquet"):
        hk.data.parquet(tmp_path)
    with pytest.raises(ValueError, match=r"columns: got \['b'\]"):
        hk.data.parquet(tmp_path / "1.parquet", ["a", "b"])
    for names in ("a", []):
        with pytest.raises(TypeError, match=r"columns: got .*expected a sequence of names"):
            hk.data.parquet(tmp_path / "1.parquet", names)
    pq.write_table(pa.Table.from_arrays([pa.array([1])] * 2, names=["a", "a"]), tmp_path / "1.parquet")
    with pytest.raises(ValueError, match=r"columns: got \['a', 'a'\], expected columns of .* each once"):
        hk.data.parquet(tmp_path / "1.parquet")


def test_files_without_rows_may_have_other_columns(tmp_path):
    """Writers do not know the types of columns without values."""
    pq.write_table(pa.table({"a": pa.nulls(0)}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"a": ["x"]}), tmp_path / "2.parquet")
    assert hk.data.parquet(tmp_path).structure["a"].tolist() == [b"x"]


def test_missing_values_need_a_replacement(tmp_path):
    pq.write_table(pa.table({"i": [1, None], "x": [None, 0.5]}), tmp_path / "a.parquet")
    with pytest.raises(TypeError, match=r"column 'i' of .*: got int64 with 1 missing value.*fill="):
        hk.data.parquet(tmp_path)
    (batch,) = GlobalBatches(hk.data.parquet(tmp_path, fill={"i": -1}), 2, rank=0, size=1, epochs=1)
    assert batch["i"].tolist() == [1, -1]
    np.testing.assert_array_equal(batch["x"], [np.nan, 0.5])
    for value in (0.5, "x"):
        with pytest.raises(TypeError, match=rf"column 'i' of .*: got int64 with missing values and fill={value!r}"):
            hk.data.parquet(tmp_path, fill={"i": value})
    with pytest.raises(ValueError, match=r"fill: got \['j'\]"):
        hk.data.parquet(tmp_path, fill={"i": -1, "j": 0})
    pq.write_table(pa.table({"day": pa.array([3, None], pa.date32())}), tmp_path / "a.parquet")
    assert hk.data.parquet(tmp_path, fill={"day": 0}).read(np.arange(2))["day"].tolist() == [3, 0]
    later = pa.table({"i": pa.array(["a"] * 50 + [None]).dictionary_encode()})
    pq.write_table(later, tmp_path / "a.parquet", row_group_size=10)
    with pytest.raises(TypeError, match=r"column 'i' of .*: got string with 1 missing value.*fill="):
        hk.data.parquet(tmp_path)


def column_in(folder, values):
    """Return a column written with pyarrow, as a batch, and the same as a batch for Keras."""
    pq.write_table(pa.table({"c": values}), folder / "a.parquet")
    batches = GlobalBatches(hk.data.parquet(folder), len(values), rank=0, size=1)
    in_keras = next(iter(batches.as_keras()))["c"]
    return next(batches)["c"], in_keras.to_list() if isinstance(
        in_keras, tf.RaggedTensor
    ) else in_keras.numpy().tolist()


TYPES = (
    (pa.array([2**64 - 1, 3], pa.uint64()), [2**64 - 1, 3]),
    (pa.array([True, False]), [True, False]),
    (pa.array(["b", "a"]).dictionary_encode(), [b"b", b"a"]),
    (pa.array([["a", "bc"], []]), [[b"a", b"bc"], []]),
    (pa.array([[1, 2], None], pa.large_list(pa.int8())), [[1, 2], []]),
    (pa.array([[[1, 2], [3, 4]], []], pa.list_(pa.list_(pa.int64(), 2))), [[[1, 2], [3, 4]], []]),
    (pa.array([[[1, 2]], [[3, 4]]], pa.list_(pa.list_(pa.int64(), 2), 1)), [[[1, 2]], [[3, 4]]]),
    (pa.array([b"ab", b"c\0"], pa.binary(2)), [b"ab", b"c\0"]),
    (pa.array([0.5, 2], pa.float16()), [0.5, 2.0]),
    (pa.array([np.datetime64(5, "us")] * 2), [5, 5]),
)
REFUSED_TYPES = (
    (pa.array([[[1], []]]), "type list<.*>, lists of lists"),
    (pa.array([{"a": 1}]), "type struct"),
    (pa.array([1]).cast(pa.decimal128(22, 2)), "type decimal128"),
    (pa.array([[None]], pa.list_(pa.int32())), "int32 with 1 missing"),
)


def test_types_of_columns(tmp_path):
    for values, expected in TYPES:
        batch, in_keras = column_in(tmp_path, values)
        in_batch = batch.to_list() if isinstance(batch, tf.RaggedTensor) else batch.tolist()
        assert in_batch == expected == in_keras, values.type
    for values, text in REFUSED_TYPES:
        words = rf"column 'c' of .*a\.parquet: got {text}.*leave it out with columns="
        with case(type=values.type), pytest.raises(TypeError, match=words):
            column_in(tmp_path, values)


def test_files_may_differ_in_the_sizes_of_indices(tmp_path):
    """Writers choose the types of dictionaries and offsets by size, for each file."""
    names = ["a", "b"]
    pq.write_table(pa.table({"c": pa.array(names).dictionary_encode(), "l": [[1], [2]]}), tmp_path / "1.parquet")
    large = pa.array([[3], [4]], pa.large_list(pa.int64()))
    pq.write_table(pa.table({"c": pa.array(names, pa.large_string()), "l": large}), tmp_path / "2.parquet")
    (batch,) = read_whole(hk.data.parquet(tmp_path))
    assert batch["c"].tolist()[:4] == [b"a", b"b"] * 2 and batch["l"].to_list()[:4] == [[1], [2], [3], [4]]


def test_no_files_are_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for paths in ("missing", "empty", "missing/*.parquet", []):
        with case(paths=paths), pytest.raises(ValueError, match="paths"):
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


def test_a_copy_within_an_epoch_is_independent(tmp_path):
    write_parquet(tmp_path / "a", range(30))
    batches = hk.data.GlobalBatches(hk.data.parquet(tmp_path, ["id"]), 3, rank=0, size=1)
    next(batches)
    other = copy.copy(batches)
    for expected in ([3, 4, 5], [6, 7, 8]):
        assert next(other)["id"].tolist() == next(batches)["id"].tolist() == expected
    assert other.state == batches.state
    with pytest.raises(TypeError, match=r"^state: got None, expected what GlobalBatches\.state returned"):
        batches.restore(None)


def test_files_with_other_suffixes_are_counted(tmp_path):
    (tmp_path / "000000_0").write_bytes(b"")
    (tmp_path / "000001_0").write_bytes(b"")
    with pytest.raises(ValueError, match=r"a folder with 2 other files, expected files that end in \.parquet"):
        hk.data.parquet(tmp_path)
    with pytest.raises(ValueError, match="check the spelling"):
        hk.data.parquet(tmp_path / "missing")


def test_a_pattern_finds_names_that_go_on_with_an_underscore_or_a_dot(tmp_path):
    names = ["train-3.parquet", "train.parquet", "train_2.parquet"]
    for name in (*names, "_train.parquet"):
        write_parquet(tmp_path / name.removesuffix(".parquet"), range(3))
    assert [Path(file.url).name for file in list_files(tmp_path / "train*")] == names
    assert [Path(file.url).name for file in list_files(tmp_path / "*.parquet")] == names
    assert [Path(file.url).name for file in list_files(tmp_path / "_tr*")] == ["_train.parquet"]


@pytest.mark.full
def test_the_size_of_row_groups_is_that_in_memory(tmp_path):
    rows = 50_000
    table = pa.table({"text": ["x" * 1000] * rows, "zero": np.zeros(rows, np.int64), "list": [[1.0, 2.0]] * rows})
    pq.write_table(table, tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 50_000
    (layout,) = hk.data.parquet(tmp_path).layouts
    assert 1000 * rows < layout.largest_block < 1100 * rows
    for name, size in (("zero", 8), ("list", 16)):
        (layout,) = hk.data.parquet(tmp_path, [name]).layouts
        assert layout.largest_block == size * rows


def test_columns_of_any_name_and_text_are_measured(tmp_path):
    rows = 50_000
    words = [f"word {i % 1000}" for i in range(rows)]
    columns = {
        "user.id": np.arange(rows),
        "half": np.zeros(rows, np.float16),
        "latin": pa.array([b"caf\xe9 %d" % (i % 7) for i in range(rows)]).view(pa.string()),
        "words": [*words[:-2], "x" * 4000, "y" * 4000],
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    for name, least, most in (("user.id", 8, 8), ("half", 2, 2), ("latin", 40, 60), ("words", 40, 120)):
        (layout,) = hk.data.parquet(tmp_path, [name]).layouts
        assert least * rows <= layout.largest_block <= most * rows, name


def test_a_file_named_like_a_pattern_is_found_with_the_others(tmp_path):
    for name in ("a*.npy", "ab.npy", "c[1].npy", "c1.npy", "d*[1].npy"):
        np.save(tmp_path / name, np.arange(2))
    for pattern, names in (
        ("a*.npy", ["a*.npy", "ab.npy"]),
        ("c[1].npy", ["c[1].npy"]),
        ("d*[1].npy", ["d*[1].npy"]),
    ):
        assert [Path(file.url).name for file in hk.data.npy(tmp_path / pattern).files] == names
