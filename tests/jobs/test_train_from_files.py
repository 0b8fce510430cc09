"""The commands that train on files: also stopped within an epoch, and continued by more or fewer ranks."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from helpers.jobs import MPI, call

MODELS = Path(__file__).parents[2] / "models"
CLICKS = ("--batch-size", "100", "--rows", "50", "--epochs", "3")
IMAGES = ("--batch-size", "50", "--log-every", "1", "--learning-rate", "0.01")


def python(script, *arguments, ranks=None):
    """Run a script; return what it printed."""
    launcher = () if ranks is None else (*MPI, str(ranks))
    done = call([*launcher, sys.executable, MODELS / script, *arguments])
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def numbers(output, pattern):
    (found,) = re.findall(pattern, output)
    return [float(number) for number in (found if isinstance(found, tuple) else [found])]


@pytest.mark.nightly
@pytest.mark.parametrize("form", ["parquet", "criteo"])
def test_clicks_in_files(tmp_path, form):
    folder = tmp_path / "clicks"
    python("write_files.py", "clicks", folder, "--format", form, "--examples", "2000", "--rows", "50", "--files", "4")
    train = ("train.py", "recommender", "--data-dir", folder, *CLICKS)
    result = r"held-out loss ([\d.]+), AUC ([\d.]+)"
    whole = numbers(python(*train, "--logdir", tmp_path / "whole"), result)
    stopped = python(*train, "--logdir", tmp_path / "run", "--max-steps", "20", ranks=2)
    assert "2000 examples" in stopped and numbers(stopped, result) != whole
    continued = python(*train, "--logdir", tmp_path / "run", ranks=3)
    assert "training begins at step 20" in continued
    loss, area = numbers(continued, result)
    assert loss == pytest.approx(whole[0], abs=2e-4) and area == pytest.approx(whole[1], abs=5e-3)


@pytest.mark.nightly
def test_images_in_files(tmp_path):
    folder, result = tmp_path / "images", r"step 40, loss = ([\d.]+)"
    python("write_files.py", "images", folder, "--files", "3")
    train = ("train.py", "cifar10", "--data-dir", folder, *IMAGES)
    whole = numbers(python(*train, "--steps", "40", "--logdir", tmp_path / "whole"), result)
    python(*train, "--steps", "31", "--logdir", tmp_path / "run", ranks=2)  # an epoch has 28 steps
    continued = python(*train, "--steps", "40", "--logdir", tmp_path / "run")
    assert "training begins at step 31" in continued and "on 360 images" in continued
    assert numbers(continued, result) == pytest.approx(whole, abs=2e-3)


def test_files_that_exist_are_kept(tmp_path):
    (tmp_path / "a").touch()
    done = call([sys.executable, MODELS / "write_files.py", "images", tmp_path])
    assert done.returncode == 1 and "expected an empty or new folder" in done.stderr
