"""A URL that no store serves is an error before training, where once a local folder ``gs:`` held the run."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import hvdkit as hk
from hvdkit.commands.cli import main

URLS = ("nosuch://bucket/run", "https://example.org/run", "hdfs://node:9000/run", "zip://a::s3://bucket/run")


def model():
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    return made


@pytest.mark.core
def test_urls_that_no_store_serves_are_refused_and_create_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    hk.init()
    x = np.zeros((4, 2))
    calls = (
        lambda url: hk.fit(model(), x, x[:, :1], logdir=url, verbose=0),
        lambda url: hk.Supervisor(url, model=model()),
        lambda url: hk.callbacks.SupervisorCallback(url),
        lambda url: hk.checkpoint.save(f"{url}/step-000000001", {"step": 1}),
        lambda url: hk.checkpoint.restore(url, {"step": 1}),
        lambda url: hk.checkpoint.latest(url),
        lambda url: hk.checkpoint.inspect(url),
        lambda url: hk.checkpoint.verify(url),
    )
    for url in URLS:
        for call in calls:
            with pytest.raises(ValueError, match=rf"got {url}.*expected a local folder, or a URL"):
                call(url)
    assert main(["checkpoint", "inspect", URLS[0]]) == 2
    assert "expected a local folder, or a URL" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.core
def test_a_file_url_is_a_local_folder(tmp_path):
    hk.init()
    x = np.zeros((4, 2))
    hk.fit(model(), x, x[:, :1], logdir=f"file://{tmp_path}/run", verbose=0)
    assert hk.checkpoint.latest(tmp_path / "run") == hk.checkpoint.latest(f"file://{tmp_path}/run")
    assert (tmp_path / "run" / "checkpoints").is_dir()
