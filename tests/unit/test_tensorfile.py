"""Tensor files: round trips of every dtype, reading some rows without the rest, and damage located to the row."""

from __future__ import annotations

import os
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from helpers.cases import case
from helpers.faults import flip
from helpers.forged import array_tensor
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

from hvdkit.checkpoint import tensorfile
from hvdkit.checkpoint.tensorfile import BLOCK_BYTES, TensorFile, storable, write_file
from hvdkit.errors import CheckpointError, CorruptCheckpointError

DTYPES = [np.dtype(d) for d in ("?", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", "c8")]
SMALL = [np.dtype(d) for d in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)]
RNG = np.random.default_rng(11)


def some(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return random bytes as ``dtype``, with NaNs, infinities and subnormals."""
    raw = RNG.integers(0, 256, size=(*shape, dtype.itemsize), dtype=np.uint8)
    return (raw % 2 if dtype == np.bool_ else raw).view(dtype).reshape(shape)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes())


def write(path, **arrays):
    return write_file(path, [array_tensor(name, array) for name, array in arrays.items()])


def test_every_dtype_of_the_format_is_tested():
    assert {*DTYPES, *SMALL} == {*tensorfile.DTYPES.values()}
    assert not storable(np.dtype("U3")) and not storable(np.dtype(object)) and not storable(np.dtype("c16"))


SHAPES = ((), (1,), (7,), (0,), (0, 3), (3, 0), (5, 2, 3))


def test_every_dtype_and_shape_comes_back(tmp_path):
    for number, shape in enumerate(SHAPES):
        path = tmp_path / str(number)
        arrays = {str(dtype): some(shape, dtype) for dtype in (*DTYPES, *SMALL)}
        record = write(path, **arrays)
        assert record.bytes == path.stat().st_size
        with TensorFile(path, record) as file:
            assert [name for name in arrays if not same_bits(file.read(name), arrays[name])] == [], shape


def test_the_safetensors_package_reads_the_same(tmp_path):
    arrays = {f"a{n}": some((3, n + 1), dtype) for n, dtype in enumerate(DTYPES)}
    arrays |= {"scalar": np.float32(2.5).reshape(()), "empty": np.zeros((0, 4)), "large": some((3000, 300), DTYPES[10])}
    write(tmp_path / "f.safetensors", **arrays)
    loaded = load_file(tmp_path / "f.safetensors")
    assert {*loaded} == {*arrays}
    assert all(same_bits(loaded[name], array) for name, array in arrays.items())
    with safe_open(tmp_path / "f.safetensors", "numpy") as opened:
        assert same_bits(opened.get_slice("large")[10:20], arrays["large"][10:20])
    array = some((4, 3), np.dtype(ml_dtypes.bfloat16))
    write(tmp_path / "b.safetensors", x=array)
    assert same_bits(load_file(tmp_path / "b.safetensors")["x"].view(ml_dtypes.bfloat16), array)


def test_tensors_begin_at_multiples_of_their_items(tmp_path):
    write(tmp_path / "f", a=some((3,), np.dtype("u1")), b=some((2,), np.dtype("f8")), c=some((5,), np.dtype("f2")))
    with TensorFile(tmp_path / "f") as file:
        for location in file.locations.values():
            assert (file._data + location.start) % location.dtype.itemsize == 0


@pytest.fixture(scope="module")
def tall(tmp_path_factory):
    """Return a tensor of several blocks that its rows do not fill evenly, and one with rows longer than a block."""
    path = tmp_path_factory.mktemp("tall") / "f"
    arrays = {"tall": some((9001, 129), np.dtype("f4")), "long": some((5, 2**19 + 3), np.dtype("f4"))}
    return path, arrays, write(path, **arrays)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 9000), st.integers(0, 9001), st.integers(1, 4000), st.booleans())
def test_rows_are_those_of_numpy(tall, start, count, step, given_out):
    path, arrays, record = tall
    rows = range(9001)[start : start + count : step]
    out = np.empty((len(rows), 129), np.float32) if given_out else None
    with TensorFile(path, record) as file:
        read = file.read("tall", rows, out)
    assert same_bits(read, arrays["tall"][rows.start : rows.stop : rows.step])
    assert out is None or read is out


def test_rows_longer_than_a_block(tall):
    path, arrays, record = tall
    for rows in (range(5), range(1, 3), range(0, 5, 2), range(4, 5), range(3, 3)):
        with TensorFile(path, record) as file:
            assert same_bits(file.read("long", rows), arrays["long"][rows.start : rows.stop : rows.step]), rows
            assert file.bytes_read <= 10_000 + len(rows) * arrays["long"][0].nbytes, rows


def test_a_quarter_of_the_rows_reads_a_quarter_of_the_bytes(tmp_path):
    """For a ``div`` range: the blocks that overlap it. From 40 MB on, these are within 5 % of the rows' bytes."""
    for megabytes, quarter in product((30, 180), range(4)):
        path = tmp_path / str(megabytes)
        if quarter == 0:
            array = np.arange(250_000 * megabytes, dtype=np.float32).reshape(-1, 100)
            record = write(path, x=array)
        rows = range(len(array) // 4 * quarter, len(array) // 4 * (quarter + 1))
        with case(megabytes=megabytes, quarter=quarter), TensorFile(path, record) as file:
            header = file.bytes_read
            assert same_bits(file.read("x", rows), array[rows.start : rows.stop])
            assert header < 64 * 1024
            assert file.bytes_read - header <= array.nbytes / 4 + 2 * BLOCK_BYTES
            assert megabytes < 160 or file.bytes_read <= 1.05 * array.nbytes / 4


# --- damage


@pytest.fixture
def file(tmp_path):
    """Return a file of two tensors and its record; "x" has 1024 rows of 4 KiB, 256 per block."""
    arrays = {"x": some((1024, 1024), np.dtype("f4")), "y": some((10,), np.dtype("i4"))}
    return tmp_path / "part.safetensors", write(tmp_path / "part.safetensors", **arrays), arrays


def test_a_flipped_byte_names_file_tensor_and_rows(file):
    path, record, arrays = file
    with TensorFile(path, record) as opened:
        start = opened._data + opened.locations["x"].start
    for row in (0, 255, 256, 700, 1023):
        flip(path, start + 4096 * row + 17)
        first = row // 256 * 256
        with case(row=row), TensorFile(path, record) as opened:
            with pytest.raises(
                CorruptCheckpointError, match=rf"part.safetensors: 'x' .*rows {first} to {first + 255} "
            ):
                opened.read("x")
            assert same_bits(opened.read("y"), arrays["y"])
            good = range((first + 256) % 1024, (first + 256) % 1024 + 256)
            assert same_bits(opened.read("x", good), arrays["x"][good.start : good.stop])
        flip(path, start + 4096 * row + 17)


def test_a_flipped_byte_of_the_header_is_seen(file):
    path, record, _ = file
    with TensorFile(path) as opened:
        header = opened._data
    for at in (8, header // 2, header - 1):
        flip(path, at)
        with pytest.raises(CorruptCheckpointError, match=r"part.safetensors: its header is damaged"):
            TensorFile(path, record)
        flip(path, at)
    flip(path, 6)
    with pytest.raises(CorruptCheckpointError, match=r"is not a safetensors file \(a header of 11"):
        TensorFile(path, record)


def test_a_file_that_was_cut_short_is_seen(file):
    path, record, _ = file
    os.truncate(path, record.bytes - 5000)
    with pytest.raises(CorruptCheckpointError, match=rf"has {record.bytes - 5000} bytes, but {record.bytes} were"):
        TensorFile(path, record)
    with TensorFile(path) as opened, pytest.raises(CorruptCheckpointError, match=r"part.safetensors: .*truncated"):
        opened.read("x")
    for length in (20, 8, 5, 0):
        os.truncate(path, length)
        with case(length=length), pytest.raises(CorruptCheckpointError, match=r"part.safetensors"):
            TensorFile(path)


def test_a_missing_tensor_and_a_file_that_exists(file):
    path, record, arrays = file
    with TensorFile(path, record) as opened, pytest.raises(CorruptCheckpointError, match="contains no 'z'"):
        opened.read("z")
    with pytest.raises(CheckpointError, match=r"part.safetensors: cannot be written \(File exists\)"):
        write(path, **arrays)


def test_a_missing_file_and_another_programs_file(tmp_path):
    from safetensors.numpy import save_file

    with pytest.raises(CheckpointError, match="none: missing"):
        TensorFile(tmp_path / "none")
    save_file({"x": np.zeros(3)}, tmp_path / "theirs")
    with pytest.raises(CheckpointError, match="theirs: was not written by hvdkit"):
        TensorFile(tmp_path / "theirs")


def test_a_dtype_that_the_format_has_not(tmp_path):
    with pytest.raises(TypeError, match="x: got dtype <U1, expected a dtype of the safetensors format"):
        write(tmp_path / "f", x=np.array(["a"]))
    assert not (tmp_path / "f").exists()
