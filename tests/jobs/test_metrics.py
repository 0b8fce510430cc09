"""Metrics of real jobs: under ``hvdkit run`` and other launchers, through a restart, and a port that is taken."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
from helpers.jobs import BIN, MARK, call, environment, marked
from helpers.speed import WAIT, wait_until
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parents[2]
URL = re.compile(r"metrics: (http://\S+)")
# Rank 1 sleeps before each step, and is killed once there is a file of that name.
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
import keras
import numpy as np
import hvdkit as hk

hk.init()
logdir = sys.argv[1] if len(sys.argv) > 1 else None
x = np.random.default_rng(0).normal(size=(640, 8)).astype("float32")
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")


class Slow(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(0.1 if hk.rank() == 1 else 0.0)
        if hk.rank() == 1 and Path("kill").exists():
            Path("kill").unlink()
            os.kill(os.getpid(), signal.SIGKILL)


hk.fit(model, x, x[:, :1], batch_size=64, epochs=1000, verbose=0, callbacks=[Slow()], logdir=logdir)
"""

CAUGHT = """
import hvdkit as hk
try:
    hk.init()
except Exception as error:
    print(f"{type(error).__name__}: {error}", flush=True)
    raise
"""


class Started:
    """A job that is started in ``folder``, and ended with the context."""

    def __init__(self, folder: Path, *command: str, **variables: str) -> None:
        (folder / "program.py").write_text(PROGRAM)
        self._folder = folder
        self._command = command
        self._env = environment(PYTHONPATH=str(ROOT), **{MARK: str(folder)}, **variables)

    def __enter__(self) -> Started:
        self.log = self._folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                self._command, cwd=self._folder, env=self._env, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        return self

    def __exit__(self, *problem: object) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(WAIT)
        wait_until(lambda: not marked(str(self._folder)), self.log.read_text)

    def url(self) -> str:
        wait_until(lambda: URL.search(self.log.read_text()) or self.process.poll() is not None, self.log.read_text)
        found = URL.search(self.log.read_text())
        assert found, self.log.read_text()
        return found[1]


def scrape(url: str) -> dict[str, dict[tuple[str, ...], float]]:
    try:
        with urllib.request.urlopen(url, timeout=WAIT) as answer:
            text = answer.read().decode()
    except urllib.error.URLError:
        return {}
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def await_value(job: Started, url: str, name: str, least: float) -> dict[str, dict[tuple[str, ...], float]]:
    """Return the metrics once ``name`` is at least ``least``."""
    found: dict[str, dict[tuple[str, ...], float]] = {}

    def is_reached() -> bool:
        found.clear()
        found.update(scrape(url))
        return found.get(name, {}).get((), -1.0) >= least

    wait_until(is_reached, lambda: f"{found}\n{job.log.read_text()}")
    return found


@pytest.mark.nightly
def test_a_job_is_scraped_while_it_trains_and_after_a_restart(tmp_path):
    command = [sys.executable, "-m", "hvdkit", "run", "-np", "2", "--max-restarts", "1", "--metrics-port", "0"]
    with Started(tmp_path, *command, "--", sys.executable, "program.py", "logs") as job:
        url = job.url()
        assert url.startswith("http://127.0.0.1:")
        found = await_value(job, url, "hvdkit_straggler_rank", 1)
        assert found["hvdkit_ranks"][()] == 2 and found["hvdkit_restarts_total"][()] == 0
        await_value(job, url, "hvdkit_last_save_step", 1)
        (tmp_path / "kill").touch()
        found = await_value(job, url, "hvdkit_restarts_total", 1)
        assert found["hvdkit_failures_total"][()] == 1
        ((rank, _, code, cause),) = found["hvdkit_last_failure_info"]
        assert (rank, code) == ("1", "137") and "SIGKILL" in cause
        saved = found["hvdkit_last_save_step"][()]
        assert await_value(job, url, "hvdkit_step", 1)["hvdkit_step"][()] > saved
        found = await_value(job, url, "hvdkit_examples_per_second", 1)
        assert found["hvdkit_step_duration_seconds"][()] > 0.1
        assert found["hvdkit_examples_per_second"][()] < 640 and found["hvdkit_loss"][()] >= 0
        assert found["hvdkit_rank_collectives_total"].keys() == found["hvdkit_rank_idle_seconds"].keys()


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", [("mpirun", "-np"), ("horovodrun", "--gloo", "-np")], ids=["mpirun", "gloo"])
def test_other_launchers_serve_from_the_sentinel_of_rank_0(launcher, tmp_path):
    """hk.fit without a logdir counts its steps, too."""
    words = [str(BIN / launcher[0]), *launcher[1:], "2", sys.executable, "program.py"]
    with Started(tmp_path, *words, HVDKIT_METRICS="localhost:0") as job:
        url = job.url()
        found = await_value(job, url, "hvdkit_straggler_rank", 1)
        assert found["hvdkit_step_duration_seconds"][()] > 0.1 and found["hvdkit_steps_trained_total"][()] > 0
        assert found["hvdkit_examples_per_second"][()] < 640
        rank_0 = [each.pid for each in marked(str(tmp_path)) if "program.py" in each.cmdline()]
        port = int(url.rpartition(":")[2].partition("/")[0])
        holders = {
            each.pid
            for each in marked(str(tmp_path))
            for one in each.net_connections()
            if one.status == "ESTABLISHED" and one.laddr.port == port
        }
        assert not holders & {*rank_0}


def test_a_port_that_is_taken_is_named_on_every_rank(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        (tmp_path / "program.py").write_text(CAUGHT)
        command = [BIN / "mpirun", "-np", "2", sys.executable, "program.py"]
        done = call(command, cwd=tmp_path, env=environment(PYTHONPATH=str(ROOT), HVDKIT_METRICS=port))
        assert done.returncode, done.stdout
        assert done.stdout.count(f"HVDKIT_METRICS: got 127.0.0.1:{port} (Address already in use)") == 2, done.stdout
        run = [
            sys.executable,
            "-m",
            "hvdkit",
            "run",
            "-np",
            "2",
            "--metrics-port",
            port,
            "--",
            sys.executable,
            "-c",
            "1",
        ]
        done = call(run, cwd=tmp_path)
        assert done.returncode == 2 and "starting" not in done.stderr, done.stderr
        assert f"--metrics-port: got 127.0.0.1:{port} (Address already in use), expected a free port" in done.stderr


def test_an_address_that_is_none_is_named_on_every_rank(tmp_path):
    command = [BIN / "mpirun", "-np", "2", sys.executable, "-c", "import hvdkit as hk; hk.init()"]
    done = call(command, cwd=tmp_path, env=environment(PYTHONPATH=str(ROOT), HVDKIT_METRICS="here"))
    assert done.returncode and "HVDKIT_METRICS: got here, expected a port from 0 to 65535" in done.stderr


PROMETHEUS = shutil.which("prometheus")
CONFIG = """
global:
  scrape_interval: 1s
scrape_configs:
  - job_name: hvdkit
    static_configs:
      - targets: ["{target}"]
"""
# Queries that have an answer only after a failure, or while a rank is stopped.
CONDITIONAL = ("last_failure", "stopped", "changes(")


def answers(server: str, expression: str) -> list[str]:
    """Return the values of a query of the dashboard, for any instance."""
    query = expression.replace("$instance", ".*").replace("$__rate_interval", "30s")
    encoded = urllib.parse.urlencode({"query": query})
    try:
        with urllib.request.urlopen(f"{server}/api/v1/query?{encoded}", timeout=WAIT) as answer:
            found = json.load(answer)
    except urllib.error.URLError:
        return []
    assert found["status"] == "success", found
    return [one["value"][1] for one in found["data"]["result"]]


@pytest.mark.nightly
@pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed")
def test_prometheus_answers_the_queries_of_the_dashboard(tmp_path):
    board = json.loads((ROOT / "launch" / "grafana-dashboard.json").read_text())
    queries = {target["expr"]: panel["title"] for panel in board["panels"] for target in panel["targets"]}
    command = [sys.executable, "-m", "hvdkit", "run", "-np", "2", "--metrics-port", "0"]
    with Started(tmp_path, *command, "--", sys.executable, "program.py", "logs") as job:
        target = job.url().removeprefix("http://").removesuffix("/metrics")
        (tmp_path / "prometheus.yml").write_text(CONFIG.format(target=target))
        with socket.create_server(("127.0.0.1", 0)) as free:
            server = f"127.0.0.1:{free.getsockname()[1]}"
        words = ["--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address={server}"]
        with (tmp_path / "prometheus.log").open("w") as log:
            prometheus = subprocess.Popen([str(PROMETHEUS), *words], cwd=tmp_path, stdout=log, stderr=log)
        try:
            expected = [each for each in queries if not any(words in each for words in CONDITIONAL)]

            def are_answered() -> bool:
                return all(answers(f"http://{server}", each) for each in expected)

            wait_until(are_answered, job.log.read_text)
            for query, title in queries.items():
                print(f"{title:52} {query:90} {' '.join(answers(f'http://{server}', query)) or '-'}")
        finally:
            prometheus.terminate()
            prometheus.wait(WAIT)
