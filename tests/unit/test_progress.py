"""Which source lines are the user's: records and messages name these."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import keras
import tensorflow as tf

import hvdkit
from hvdkit.cluster.progress import folder_of, is_user_file, source_line

OURS = Path(hvdkit.__file__).parent


def test_lines_of_the_user():
    """A folder of the user may have the name of a library."""
    for file in (
        "/home/me/horovod/train.py",
        "/home/me/keras/models/train.py",
        "/home/me/tensorflow/train.py",
        f"{OURS}_jobs/train.py",
        "train.py",
        "<stdin>",
        __file__,
    ):
        assert is_user_file(file), file


def test_lines_of_libraries():
    for file in (
        str(OURS / "cluster" / "progress.py"),
        str(Path(tf.__file__).parent / "python" / "eager" / "context.py"),
        str(Path(keras.__file__).parent / "src" / "trainers" / "trainer.py"),
        contextlib.__file__,
        "/tmp/__autograph_generated_file1.py",
    ):
        assert not is_user_file(file), file


def test_the_line_is_that_of_the_caller():
    assert source_line() == f"{__file__}:{sys._getframe().f_lineno}"


def test_a_folder_without_a_package_is_the_users(tmp_path, monkeypatch):
    """If Horovod is not installed, Python takes the user's folder of that name for a namespace package."""
    (tmp_path / "not_installed").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert folder_of("not_installed") is None and folder_of("missing") is None
    assert folder_of("keras") == str(Path(keras.__file__).parent)
