"""A URL is no folder: an error, where once a local folder named ``gs:`` held the run until the host was gone."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import hvdkit as hk
from hvdkit.commands.cli import main

URLS = ("gs://bucket/run", "s3://bucket/run", "memory://run", "file:///tmp/run", "hdfs://node:9000/run")


def model():
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    return made


@pytest.mark.core
def test_urls_are_refused_before_training_and_create_nothing(tmp_path, monkeypatch, capsys):
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
            with pytest.raises(ValueError, match=rf"got {url}.*expected a folder of a file system.*mount"):
                call(url)
    assert main(["checkpoint", "inspect", URLS[0]]) == 2
    assert "mount the store" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
