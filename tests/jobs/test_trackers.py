"""Trackers and tuners: the programs of docs/howto/trackers.md with their packages, and callbacks that hang or raise."""

from __future__ import annotations

import json
import re
import sqlite3
import sys
from pathlib import Path

import pytest
from helpers.jobs import call, environment

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "howto" / "trackers.md"
PROGRAM = re.compile(r"^```python file=(\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PYTHON = ROOT / ".cache" / "trackers" / "bin" / "python"  # made by `make test-nightly`
with_packages = pytest.mark.skipif(not PYTHON.exists(), reason="make test-nightly installs them in .cache/trackers")
BAD = """
import sys
import threading

import job
import keras
import numpy as np

import hvdkit as hk

HOOK, ACTION, IS_PLAIN, IS_CAUGHT = sys.argv[1], sys.argv[2], sys.argv[3] == "plain", sys.argv[4] == "caught"


class Tracks(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        setattr(self, HOOK, self.act)

    def act(self, *_, **__):
        if ACTION == "hang":
            threading.Event().wait(1000)
        raise OSError("no server")


def tracker():
    return Tracks() if hasattr(keras.callbacks.Callback, HOOK) else Tracks.act(None)


try:
    callbacks = [hk.callbacks.BroadcastInitial(), hk.callbacks.on_chief(tracker)]
    model = job.build()
    if IS_PLAIN:
        model.fit(job.x, job.y, verbose=0, callbacks=callbacks)
    else:
        job.fit(model, callbacks)
except OSError:
    if not IS_CAUGHT:
        raise
np.asarray(hk.allreduce(np.ones(1)))
"""


def programs() -> dict[str, str]:
    return dict(PROGRAM.findall(PAGE.read_text()))


def run(folder, python, *words, **variables):
    for name, text in programs().items():
        (folder / name).write_text(text)
    command = [python, "-m", "hvdkit", "run", "-np", "2", "--", python, *words]
    return call(command, cwd=folder, env=environment(**{"PYTHONPATH": str(ROOT), **variables}))


@pytest.mark.nightly
@with_packages
def test_a_tracker_costs_no_exchange(tmp_path):
    """All loggers but those of batches: the collectives of three epochs of six steps; Python calls of a step."""
    (tmp_path / "cost.py").write_text(COST)
    path = f"{ROOT}:{ROOT / 'tests'}"
    trained(tmp_path, "cost.py", WANDB_MODE="offline", WANDB_SILENT="true", PYTHONPATH=path)
    found = json.loads((tmp_path / "cost.json").read_text())
    print(json.dumps(found))
    collectives = {name: count + eager for name, (count, eager, _) in found.items()}
    own = collectives["none"]
    assert {name for name, count in collectives.items() if count != own} == {"W&B, each batch"}, collectives


def test_the_page_has_short_programs():
    assert len(programs()) == 8
    lines = [line for text in programs().values() for line in text.splitlines()]
    assert max(map(len, lines)) <= 85
    commands = re.findall(r"-- python (\w+\.py)$", PAGE.read_text(), re.MULTILINE)
    assert sorted(["job.py", *commands]) == sorted(programs())


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("hook", "kind"), [("on_epoch_end", "hk.fit"), ("on_train_batch_end", "plain"), ("function", "hk.fit")]
)
def test_a_callback_of_the_chief_that_hangs_is_named(hook, kind, tmp_path):
    (tmp_path / "bad.py").write_text(BAD)
    job = run(tmp_path, sys.executable, "bad.py", hook, "hang", kind, "raised", HVDKIT_WATCHDOG_SECONDS="10")
    assert job.returncode, job.stdout
    name = r"hk\.callbacks\.on_chief\(tracker\)" if hook == "function" else rf"Tracks\.{hook}"
    assert re.search(rf"rank 0 on .* hangs: no progress for \d+ s \(in {name}; ", job.stdout + job.stderr)


@pytest.mark.parametrize(
    ("hook", "kind", "caught"),
    [
        ("on_epoch_end", "hk.fit", "raised"),
        pytest.param("on_epoch_end", "plain", "raised", marks=pytest.mark.nightly),
        pytest.param("on_train_batch_end", "plain", "caught", marks=pytest.mark.nightly),
        pytest.param("function", "hk.fit", "raised", marks=pytest.mark.nightly),
    ],
)
def test_a_callback_of_the_chief_that_raises_ends_the_job(hook, kind, caught, tmp_path):
    (tmp_path / "bad.py").write_text(BAD)
    job = run(tmp_path, sys.executable, "bad.py", hook, "raise", kind, caught)
    assert job.returncode, job.stdout
    assert re.search(r"hvdkit run: rank 0 on .* failed.*: OSError: no server", job.stdout + job.stderr)


COST = """
import json
from pathlib import Path

import job
import keras
import mlflow
import optuna
import wandb
from helpers.counting import PythonCalls, counting
from optuna_integration import TFKerasPruningCallback
from wandb.integration.keras import WandbMetricsLogger

import hvdkit as hk


class Profile(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.calls = PythonCalls()
        self.epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if self.epoch == 1 and batch == 1:
            self.calls.start()
        elif self.epoch == 1 and batch == 5:
            self.calls.stop()


def wandb_logger(**options):
    wandb.init(project="cost")
    return WandbMetricsLogger(**options)


def mlflow_logger():
    mlflow.set_tracking_uri("sqlite:///cost.db")
    mlflow.start_run()
    return mlflow.keras.MlflowCallback()


def pruning():
    study = optuna.create_study(storage="sqlite:///study.db", pruner=optuna.pruners.NopPruner())
    return TFKerasPruningCallback(study.ask(), "val_loss")


class Nothing(keras.callbacks.Callback):
    pass


trackers = {
    "none": lambda: Nothing(),
    "W&B": wandb_logger,
    "W&B, each batch": lambda: wandb_logger(log_freq="batch"),
    "MLflow": mlflow_logger,
    "TensorBoard": lambda: keras.callbacks.TensorBoard("tensorboard"),
    "Optuna": pruning,
}
found = {}
for name, tracker in trackers.items():
    model = job.build()
    profile = Profile()
    with counting() as counts:
        job.fit(model, [profile, hk.callbacks.on_chief(tracker)])
        exchanges = sum(each.runs for each in counts.exchanges())
        found[name] = [exchanges, counts.eager(), profile.calls.total() / 4]
if hk.is_chief():
    Path("cost.json").write_text(json.dumps(found))
"""


# ---- with the packages -----------------------------------------------------------------------------------------------


def trained(folder, name, **variables):
    """Run a program of the page with the packages."""
    job = run(folder, str(PYTHON), name, **variables)
    assert job.returncode == 0, job.stdout + job.stderr


def rows(path, query):
    with sqlite3.connect(path) as database:
        return database.execute(query).fetchall()


@pytest.mark.nightly
@with_packages
def test_wandb(tmp_path):
    trained(tmp_path, "use_wandb.py", WANDB_MODE="offline", WANDB_SILENT="true")
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 1
    assert (tmp_path / "model.keras").exists()


@pytest.mark.nightly
@with_packages
@pytest.mark.parametrize(("name", "database"), [("use_mlflow.py", "mlflow.db"), ("use_autolog.py", "autolog.db")])
def test_mlflow(name, database, tmp_path):
    trained(tmp_path, name)
    assert rows(tmp_path / database, "select count(*) from runs") == [(1,)]
    steps = rows(tmp_path / database, "select step, value from metrics where key = 'val_loss' order by step")
    assert [step for step, _ in steps] == [0, 1, 2]
    assert steps[0][1] > steps[-1][1] > 0


@pytest.mark.nightly
@with_packages
def test_optuna(tmp_path):
    trained(tmp_path, "use_optuna.py")
    states = rows(tmp_path / "optuna.db", "select state, count(*) from trials group by state")
    assert sum(number for _, number in states) == 5
    assert {state for state, _ in states} == {"COMPLETE", "PRUNED"}


@pytest.mark.nightly
@with_packages
def test_keras_tuner(tmp_path):
    trained(tmp_path, "use_keras_tuner.py")
    found = []
    for rank in range(2):
        files = sorted((tmp_path / "tuner" / f"rank-{rank}").glob("trial_*/trial.json"))
        found.append([json.loads(file.read_text())["score"] for file in files])
    assert len(found[0]) == 3
    assert found[0] == found[1]


@pytest.mark.nightly
@with_packages
def test_callbacks_of_keras(tmp_path):
    trained(tmp_path, "use_tensorboard.py")
    assert len(list((tmp_path / "tensorboard" / "train").glob("events*"))) == 1
    trained(tmp_path, "use_orbax.py")
    assert [path.name for path in (tmp_path / "orbax").iterdir()] == ["2"]
