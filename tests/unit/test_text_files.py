"""Lines of text: marks, encodings, cut ends, and numbers that do not fit."""

import itertools
import logging

import numpy as np
import pytest
from helpers.data_files import MODES, write_criteo

import hvdkit as hk
from hvdkit.data import GlobalBatches

MARK = b"\xef\xbb\xbf"
COLUMNS = {"user": "S", "item": "int64"}


def rows_of(source, size, batch_size, **options):
    """Return the rows of all ranks, in global order."""
    ranks = [GlobalBatches(source, batch_size, rank=r, size=size, epochs=1, **options) for r in range(size)]
    batches = itertools.chain.from_iterable(zip(*ranks, strict=True))
    return [pair for batch in batches for pair in zip(batch["user"].tolist(), batch["item"].tolist(), strict=True)]


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_marks_of_joined_files_are_never_a_part_of_a_value(tmp_path, end):
    expected = [(b"u%d" % i, i) for i in range(15)]
    marks = {0: MARK, 5: MARK, 6: MARK * 2, 10: MARK}
    lines = [marks.get(i, b"") + b"u%d,%d" % (i, i) + end for i in range(15)]
    (tmp_path / "a.csv").write_bytes(b"".join(lines))
    # Numbers first, where a mark is no part of a number.
    (tmp_path / "b.csv").write_bytes(b"".join(marks.get(i, b"") + b"%d,u%d" % (i, i) + end for i in range(15)))
    for path, columns in (("a.csv", COLUMNS), ("b.csv", {"item": "int64", "user": "S"})):
        source = hk.data.delimited(tmp_path / path, columns)
        for (name, options), size, batch_size in itertools.product(MODES.items(), (1, 2, 3), (4, 5, 15)):
            found = rows_of(source, size, batch_size, **options)
            assert set(found) == set(expected), (path, name, size)
            assert name != "in order" or found[:15] == expected


def test_a_mark_within_a_line_belongs_to_its_value(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"u" + MARK + b",1\nv,2\n")
    for batch_size in (1, 2):
        source = hk.data.delimited(tmp_path, COLUMNS)
        assert rows_of(source, 1, batch_size) == [(b"u" + MARK, 1), (b"v", 2)]


def test_marks_of_criteos_lines(tmp_path):
    write_criteo(tmp_path / "plain", range(6))
    lines = (tmp_path / "plain").read_bytes().splitlines(keepends=True)
    (tmp_path / "marked").write_bytes(b"".join(MARK + line for line in lines))
    for batch_size in (1, 6):
        plain, marked = (
            [*GlobalBatches(hk.data.criteo(tmp_path / name), batch_size, rank=0, size=1, epochs=1)]
            for name in ("plain", "marked")
        )
        for (inputs, labels), (others, other_labels) in zip(plain, marked, strict=True):
            np.testing.assert_array_equal(labels, other_labels)
            for name in inputs:
                np.testing.assert_array_equal(inputs[name], others[name])


def test_a_line_of_a_mark_alone_is_no_line_of_values(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"u,1\n" + MARK + b"\nv,2\n")
    source = hk.data.delimited(tmp_path, COLUMNS)
    with pytest.raises(hk.DataError, match=r"line 2 of .*a\.csv has 1 values"):
        rows_of(source, 1, 3)


def test_utf_16_is_named(tmp_path):
    for encoding in ("utf-16-le", "utf-16-be"):
        (tmp_path / "a.csv").write_bytes("\ufeffu,1\nv,2\n".encode(encoding))
        for read in (hk.data.criteo, lambda path: hk.data.delimited(path, {"user": "S", "item": "S"})):
            with pytest.raises(hk.DataError, match=r"a\.csv is UTF-16; convert it with `iconv"):
                read(tmp_path / "a.csv")


def test_hexadecimal_digits_do_not_become_negative(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("0x10,-1\n0xFF,0x7f\n")
    source = hk.data.delimited(path, {"user": "int16", "item": "int8"})
    assert rows_of(source, 1, 2) == [(16, -1), (255, 127)]
    path.write_text("x,1\n0xFF,-1\ny,0xFF\n")
    with pytest.raises(hk.DataError, match=r"line 3 of .*a\.csv, column 'item': got 0xff, expected int8"):
        rows_of(hk.data.delimited(path, {"user": "S", "item": "int8"}), 1, 3)
    assert rows_of(hk.data.delimited(path, {"user": "S", "item": "int16"}), 1, 3)[2] == (b"y", 255)


# ---- a last line without an end --------------------------------------------------------------------------------------


def test_a_last_line_without_an_end_is_reported_once(tmp_path, caplog):
    (tmp_path / "a.csv").write_text("1,2\n1234567,1")
    (tmp_path / "b.csv").write_text("1,2\n3,4\n")
    (tmp_path / "c.csv").write_text("5,6")
    read = lambda **options: hk.data.delimited(tmp_path, {"user": "int64", "item": "int64"}, **options)  # noqa: E731
    for _ in range(2):  # the second time, with offsets from the cache
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert rows_of(read(), 1, 5) == [(1, 2), (1234567, 1), (1, 2), (3, 4), (5, 6)]
        (record,) = [each for each in caplog.records if "no line end" in each.getMessage()]
        assert f"{tmp_path / 'a.csv'} and 1 other file(s): the last line has no line end" in record.getMessage()
        with pytest.raises(hk.DataError, match=r"[ac]\.csv ends without a line end"):
            read(expect_final_newline=True)
    source = read(expect_final_newline=True, on_error="skip")
    assert rows_of(source, 1, 2) == [(1, 2), (3, 4)]
    assert source.skipped == {str(tmp_path / "a.csv"): -1, str(tmp_path / "c.csv"): -1}


def test_a_log_of_clicks_may_have_to_end_with_a_line_end(tmp_path, caplog):
    write_criteo(tmp_path / "day", range(4))
    assert hk.data.criteo(tmp_path / "day", expect_final_newline=True).examples == 4
    assert not caplog.records
    (tmp_path / "day").write_bytes((tmp_path / "day").read_bytes()[:-1])
    with pytest.raises(hk.DataError, match=r"day ends without a line end"):
        hk.data.criteo(tmp_path / "day", expect_final_newline=True)
    assert hk.data.criteo(tmp_path / "day").examples == 4
    assert "day: the last line has no line end" in caplog.text


def test_quotes_are_reported(tmp_path, caplog):
    """pandas, R and spreadsheets write text with delimiters or line ends in double quotes."""
    wrong = {
        "delimiter": ('"Smith, John",1\n', "line 2 .* has 3 values"),
        "line end": ('"Dear\nJohn",1\n', "line 2 .* has 1 values"),
        "number": ('John,"1"\n', "line 2 .* cannot be parsed"),
    }
    for name, (line, message) in wrong.items():
        (tmp_path / name).write_text("user,item\n" + line)
        with pytest.raises(hk.DataError, match=message + ".*write the file again without quotes"):
            rows_of(hk.data.delimited(tmp_path / name, COLUMNS, header_lines=1), 1, 1)

    (tmp_path / "text.csv").write_text('a,1\n"c",2\n"d",3\n')
    with caplog.at_level(logging.WARNING):
        found = rows_of(hk.data.delimited(tmp_path / "text.csv", COLUMNS), 1, 3)
    assert found == [(b"a", 1), (b'"c"', 2), (b'"d"', 3)]
    (record,) = caplog.records
    assert "column 'user' begin with a double quote" in record.getMessage()


def test_an_archive_of_arrays_is_passed_as_a_dict(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", x=np.arange(6))
    with pytest.raises(TypeError, match=r"NpzFile.*pass dict\(arrays\)"):
        GlobalBatches(np.load(tmp_path / "a.npz"), 2, rank=0, size=1)
    batch = next(GlobalBatches(dict(np.load(tmp_path / "a.npz")), 2, rank=0, size=1))
    np.testing.assert_array_equal(batch["x"], [0, 1])
