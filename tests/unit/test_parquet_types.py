"""Types of Parquet columns: each gives the values that were written, or an error that names the column."""

import base64
import datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
import pytest

import hvdkit as hk
from hvdkit.data import GlobalBatches
from hvdkit.data.aligned import Ragged
from hvdkit.data.files import parquet_format
from hvdkit.data.files.columns import kind_of, to_numpy

UUIDS = [bytes([i]) * 16 for i in range(4)]
TEXTS = ["", "a", "\x00", "longer than twelve bytes, which views keep elsewhere"]


def read(path, *arguments, **options):
    """Return all rows of files as one batch."""
    source = hk.data.parquet(path, *arguments, **options)
    return next(GlobalBatches(source, source.examples, rank=0, size=1))


# ---- times that are stored as INT96 ----------------------------------------------------------------------------------


def write_int96(path, times, unit="us", **options):
    """Write a column of times and one of lists of them, as Spark and Hive do."""
    lists = pa.array([[time] * (i % 3) for i, time in enumerate(times)], pa.list_(pa.timestamp(unit)))
    table = pa.table({"id": np.arange(len(times)), "day.end": pa.array(times, pa.timestamp(unit)), "days": lists})
    pq.write_table(table, path, use_deprecated_int96_timestamps=True, **options)


def microseconds(time):
    return (time - datetime.datetime(1970, 1, 1)) // datetime.timedelta(microseconds=1)


def test_old_times_are_microseconds_in_any_year(tmp_path):
    days = ((9999, 12, 31), (1, 1, 1), (1677, 9, 21), (2262, 4, 12), (1969, 12, 31), (2024, 2, 29))
    times = [datetime.datetime(*day, 23, 59, 59, 999999) for day in days]
    write_int96(tmp_path / "a.parquet", times, row_group_size=4)
    batch = read(tmp_path)
    assert batch["day.end"].tolist() == [microseconds(time) for time in times]
    expected = [[microseconds(time)] * (i % 3) for i, time in enumerate(times)]
    assert batch["days"].to_list() == expected
    batch = read(tmp_path, ["id"])
    assert [*batch] == ["id"]


def test_old_times_that_would_lose_digits_are_named(tmp_path):
    write_int96(tmp_path / "a.parquet", [0, 1000, 2000, 3000, 10**18 + 1, 5000], "ns", row_group_size=3)
    for columns in (["day.end"], ["days"]):
        text = rf"column '{columns[0]}' of .*a\.parquet: .*INT96.* in row 1 of row group 1 has nanoseconds"
        with pytest.raises(hk.DataError, match=text):
            read(tmp_path, columns)
    assert read(tmp_path, ["id"])["id"].tolist() == [*range(6)]


def test_missing_old_times_are_filled(tmp_path):
    write_int96(tmp_path / "a.parquet", [datetime.datetime(9999, 12, 31), None])
    with pytest.raises(TypeError, match=r"column 'day\.end' of .* 1 missing"):
        read(tmp_path, ["day.end"])
    fill = datetime.datetime(1970, 1, 1, 0, 0, 1)
    assert read(tmp_path, ["day.end"], fill={"day.end": fill})["day.end"].tolist()[1] == 1_000_000


# ---- text, and types of Arrow ----------------------------------------------------------------------------------------


def lists_of(values, kind):
    return pa.ListArray.from_arrays(pa.array([0, 1, 1, 4, 4], pa.int32()), pa.array(values, kind))


def test_text_and_lists_as_views_are_read(tmp_path):
    encoded = [text.encode() for text in TEXTS]
    columns = {
        "text": pa.array(TEXTS, pa.string_view()),
        "bytes": pa.array(encoded, pa.binary_view()),
        "texts": lists_of(TEXTS, pa.string_view()),
        "ids": pa.array([[1], [], [2, 3], [4]], pa.list_view(pa.int64())),
    }
    pq.write_table(pa.table(columns), tmp_path / "views.parquet")
    usual = {"text": pa.string(), "bytes": pa.binary(), "texts": pa.list_(pa.string()), "ids": pa.list_(pa.int64())}
    plain = {name: pa.array(columns[name].to_pylist(), kind) for name, kind in usual.items()}
    pq.write_table(pa.table(plain), tmp_path / "usual.parquet")
    batch = read(tmp_path)  # files of both kinds
    assert batch["text"].tolist() == batch["bytes"].tolist() == 2 * encoded
    assert batch["texts"].to_list() == 2 * [encoded[:1], [], encoded[1:], []]
    assert batch["ids"].to_list() == 2 * [[1], [], [2, 3], [4]]


def test_missing_text_in_views_is_filled(tmp_path):
    pq.write_table(pa.table({"text": pa.array(["a", None], pa.string_view())}), tmp_path / "a.parquet")
    with pytest.raises(TypeError, match=r"column 'text' of .*string with 1 missing"):
        read(tmp_path)
    assert read(tmp_path, fill={"text": "?"})["text"].tolist() == [b"a", b"?"]


def test_extension_types_are_read_as_they_are_stored(tmp_path):
    tensors = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    columns = {
        "uuid": pa.array(UUIDS, pa.uuid()),
        "json": pa.array(['{"a": 1}', "[]", "1", '"b"'], pa.json_()),
        "flag": pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, 0, 1, 1], pa.int8())),
        "tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(tensors),
        "uuids": pa.ListArray.from_arrays(pa.array([0, 1, 1, 4, 4], pa.int32()), pa.array(UUIDS, pa.uuid())),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    batch = read(tmp_path)
    assert batch["uuid"].tolist() == UUIDS
    assert batch["json"].tolist() == [b'{"a": 1}', b"[]", b"1", b'"b"']
    assert batch["flag"].dtype == np.int8 and batch["flag"].tolist() == [1, 0, 1, 1]
    np.testing.assert_array_equal(batch["tensor"], tensors.reshape(4, 6))
    assert batch["uuids"].to_list() == [UUIDS[:1], [], UUIDS[1:], []]


def test_a_column_in_several_chunks_is_joined():
    for kind, chunks in (
        (pa.string(), [["a", "b"], [], ["c"]]),
        (pa.string_view(), [["a", "b"], ["c"]]),
        (pa.dictionary(pa.int8(), pa.string()), [["a", "b"], ["b", "a", "c"]]),
        (pa.list_(pa.int64()), [[[1], []], [[2, 3]]]),
        (pa.list_(pa.int64(), 2), [[[1, 2]], [[3, 4], [5, 6]]]),
        (pa.float32(), [[1.0, None], [2.0]]),
        (pa.int16(), [[], [5]]),
        (pa.int16(), []),
    ):
        found = to_numpy(pa.chunked_array([pa.array(chunk, kind) for chunk in chunks], kind), None)
        whole = to_numpy(pa.chunked_array([pa.array([each for chunk in chunks for each in chunk], kind)]), None)
        if isinstance(whole, Ragged):
            np.testing.assert_array_equal(found.values, whole.values)
            np.testing.assert_array_equal(found.splits, whole.splits)
        else:
            assert found.dtype == whole.dtype, kind_of(kind)
            np.testing.assert_array_equal(found, whole)


def test_more_text_in_lists_than_arrow_reads_is_an_error_at_the_start(tmp_path, monkeypatch):
    lists = [["a" * 100] * 300, [], ["b" * 100] * 400]
    table = pa.table({"id": [1, 2, 3], "text": ["a" * 1000] * 3, "texts": lists})
    for options in ({"use_dictionary": False}, {}):
        pq.write_table(table, tmp_path / "a.parquet", **options)
        monkeypatch.setattr(parquet_format, "_MOST_TEXT_IN_LISTS", 2**31 - 1)
        assert read(tmp_path)["texts"].to_list()[2] == [b"b" * 100] * 400
        monkeypatch.setattr(parquet_format, "_MOST_TEXT_IN_LISTS", 60_000)
        with pytest.raises(
            hk.DataError, match=r"column 'texts' of row group 0 of .*a\.parquet: got .* in lists.*fewer"
        ):
            read(tmp_path)
        assert read(tmp_path, ["id", "text"])["id"].tolist() == [1, 2, 3]


# ---- encryption and damage -------------------------------------------------------------------------------------------


class KeysInMemory(pe.KmsClient):
    """Keeps no secret."""

    def __init__(self, configuration):
        super().__init__()

    def wrap_key(self, key, name):
        return base64.b64encode(key)

    def unwrap_key(self, key, name):
        return base64.b64decode(key)


def write_encrypted(path, **options):
    factory = pe.CryptoFactory(KeysInMemory)
    configuration = pe.EncryptionConfiguration(footer_key="footer", **options)
    properties = factory.file_encryption_properties(pe.KmsConnectionConfig(), configuration)
    table = pa.table({"item": np.arange(10), "secret": np.arange(10), "name": ["x"] * 10})
    with pq.ParquetWriter(path, table.schema, encryption_properties=properties) as writer:
        writer.write_table(table)


def test_the_plain_columns_of_a_file_with_encrypted_ones_are_read(tmp_path):
    write_encrypted(tmp_path / "a.parquet", column_keys={"key": ["secret"]}, plaintext_footer=True)
    batch = read(tmp_path, ["item", "name"])
    assert batch["item"].tolist() == [*range(10)] and batch["name"].tolist() == [b"x"] * 10
    for columns in (["secret"], ["item", "secret"], None):
        with pytest.raises(hk.DataError, match=r"column 'secret' of .*a\.parquet is encrypted.*columns="):
            read(tmp_path, columns)


def test_an_encrypted_footer_is_named(tmp_path):
    write_encrypted(tmp_path / "a.parquet", column_keys={"key": ["secret"]}, plaintext_footer=False)
    with pytest.raises(hk.DataError, match=r"a\.parquet is encrypted"):
        read(tmp_path, ["item"])


def test_a_name_that_is_not_utf8_is_an_error_with_the_file(tmp_path):
    pq.write_table(pa.table({"id": [1], "colxumn": [2]}), tmp_path / "a.parquet", store_schema=False)
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(whole.replace(b"colxumn", b"col\xffumn"))
    for columns in (None, ["id"]):
        with pytest.raises(hk.DataError, match=r"a\.parquet: the name of a column is no UTF-8"):
            read(tmp_path, columns)
