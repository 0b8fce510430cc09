"""Keras with another backend than TensorFlow: the error names the setting, not Horovod's build."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("variable", "file", "words"),
    [
        ("jax", None, "KERAS_BACKEND: got jax"),
        pytest.param(None, "torch", "keras.json: got torch", marks=pytest.mark.full),
        pytest.param("tensorflow", "jax", "", marks=pytest.mark.full),
    ],
)
def test_init_names_the_setting_of_another_backend(tmp_path, variable, file, words):
    environment = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}
    environment["KERAS_HOME"] = str(tmp_path)
    if variable is not None:
        environment["KERAS_BACKEND"] = variable
    if file is not None:
        (tmp_path / "keras.json").write_text(json.dumps({"backend": file}))
    program = [sys.executable, "-c", "import hvdkit as hk; hk.init(); import keras; print(keras.config.backend())"]
    result = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    if not words:
        assert result.returncode == 0 and result.stdout.split()[-1] == "tensorflow"
        return
    last = result.stderr.strip().splitlines()[-1]
    assert result.returncode == 1 and words in last and "KERAS_BACKEND=tensorflow" in last
    assert "build-horovod" not in last
