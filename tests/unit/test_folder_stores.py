"""Runs in file systems of fsspec other than object stores: with real folders, and without conditional writes."""

from __future__ import annotations

import shutil
from pathlib import Path

import fsspec
import keras
import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem

import hvdkit as hk


class RemoteFolders(LocalFileSystem):
    """A file system with real folders, such as SFTP. Like some clients, it knows no options of fsspec."""

    protocol = "folders"
    root: Path

    def __init__(self):
        super().__init__()

    @classmethod
    def _strip_protocol(cls, path):
        path = Path("/", path.removeprefix("folders://"))
        return str(path if path.is_relative_to(cls.root) else cls.root / path.relative_to("/"))

    def pipe_file(self, path, value):
        super().pipe_file(path, value)

    def put_file(self, local, path):
        shutil.copyfile(local, self._strip_protocol(path))

    def get_file(self, path, local):
        shutil.copyfile(self._strip_protocol(path), local)


@pytest.fixture
def logdir(tmp_path):
    hk.init()
    (tmp_path / "server").mkdir()
    RemoteFolders.root = tmp_path / "server"
    fsspec.register_implementation("folders", RemoteFolders, clobber=True)
    return "folders://team/run"


def train(logdir, epochs):
    keras.utils.set_random_seed(7)
    x = np.random.default_rng(7).normal(size=(16, 4)).astype("float32")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    hk.fit(model, x, x[:, :1], batch_size=4, epochs=epochs, logdir=logdir, verbose=0)
    return [weight.tobytes() for weight in model.get_weights()]


def test_a_run_continues_as_one_in_a_local_folder(logdir, tmp_path, caplog):
    train(logdir, 2)
    assert "its store has no conditional writes; make sure that no second run begins there" in caplog.text
    assert train(logdir, 4) == train(tmp_path / "local", 4)
    assert hk.checkpoint.latest(logdir).name == "step-000000016"
    assert (RemoteFolders.root / "team" / "run" / "checkpoints" / "step-000000016" / "manifest.json").is_file()
    assert not (RemoteFolders.root / "team" / "run" / ".lock").exists()
    hk.checkpoint.verify(logdir)
