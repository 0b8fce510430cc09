"""Metrics: what a rank notes, what its sentinel measures, the text, and the server under bad scrapers."""

from __future__ import annotations

import json
import math
import re
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.speed import WAIT, wait_until
from prometheus_client.parser import text_string_to_metric_families

from hvdkit.watchdog import job_metrics
from hvdkit.watchdog.events import Joined, Measured, Status
from hvdkit.watchdog.flight_recorder import FlightReader, FlightRecorder
from hvdkit.watchdog.job_metrics import METRICS, JobMetrics
from hvdkit.watchdog.metrics_server import MetricsAddress, MetricsServer, url_of
from hvdkit.watchdog.rank_process import RankGauge
from hvdkit.watchdog.verdict import Verdict

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "launch" / "grafana-dashboard.json"


def samples(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Return the samples of a text by name and labels, parsed as Prometheus does."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation and family.type in ("gauge", "counter")
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def values(metrics: JobMetrics) -> dict[str, float]:
    """Return the samples without labels."""
    return {name: series[()] for name, series in samples(metrics.text()).items() if () in series}


def job(size: int = 2) -> JobMetrics:
    metrics = JobMetrics()
    begin(metrics, size)
    return metrics


def begin(metrics: JobMetrics, size: int) -> None:
    metrics.begin(size)
    for rank in range(size):
        metrics.join(Joined(rank=rank, size=size, host=f"host-{rank}", place="p"))


# ---- the rank and its sentinel --------------------------------------------------------------------------------------


def test_a_sentinel_reads_what_the_training_notes():
    recorder = FlightRecorder()
    gauge = RankGauge(FlightReader(recorder.file))
    notes = gauge.take()
    assert (notes.step, notes.examples, notes.loss, notes.saved_step, notes.collectives) == (None, None, None, None, 0)
    recorder.notes.expect_examples(128.5)
    recorder.notes.at_loss(0.25)
    recorder.notes.saved(7, 1.5)
    recorder.at_step(9)
    number = recorder.begin("eager 1", "sum", nbytes=12, eager=True)
    time.sleep(0.01)
    recorder.end(number, eager=True)
    notes = gauge.take()
    assert (notes.step, notes.examples, notes.loss, notes.saved_step, notes.save_seconds) == (9, 128.5, 0.25, 7, 1.5)
    assert (notes.collectives, notes.nbytes) == (1, 12) and 0.01 <= notes.seconds < WAIT
    assert abs(notes.step_at - time.monotonic()) < WAIT and abs(notes.saved_at - time.time()) < WAIT
    recorder.notes.at_loss(math.nan)
    recorder.notes.expect_examples(None)
    assert math.isnan(gauge.take().loss) and gauge.take().examples is None


def test_a_step_is_measured_once_its_collectives_have_ended():
    """Two buckets of gradients overlap. The records of a step whose end was overwritten do not count."""
    recorder = FlightRecorder()
    gauge = RankGauge(FlightReader(recorder.file))
    assert gauge.take().step_seconds is None
    one = recorder.begin("one", "sum", nbytes=100, eager=False, at=10.0)
    two = recorder.begin("two", "sum", nbytes=50, eager=False, at=10.5)
    recorder.end(one, eager=False, at=11.0)
    assert gauge.take().step_seconds is None
    recorder.end(two, eager=False, at=20.0)  # when it began again: see Site.sample
    two = recorder.begin("two", "sum", nbytes=50, eager=False, at=20.0)
    one = recorder.begin("one", "sum", nbytes=100, eager=False, at=19.0)
    recorder.end(one, eager=False, at=20.5)
    recorder.end(two, eager=False, at=21.0)
    measured = gauge.take()
    assert (measured.step_seconds, measured.step_bytes) == (2.0, 150)
    assert gauge.take().step_seconds == 2.0  # nothing new


def test_one_slow_step_does_not_change_the_measured_one():
    recorder = FlightRecorder()
    gauge = RankGauge(FlightReader(recorder.file))
    for seconds in (30.0, 1.0, 1.0):
        recorder.end(recorder.begin("one", "sum", eager=False, at=5.0), eager=False, at=5.0 + seconds)
        gauge.take()
    assert gauge.take().step_seconds == 1.0


# ---- the text -------------------------------------------------------------------------------------------------------


def test_steps_are_counted_through_restarts(monkeypatch):
    now = 100.0
    monkeypatch.setattr(job_metrics, "time", SimpleNamespace(monotonic=lambda: now, time=lambda: 1e9))
    metrics = job()
    assert values(metrics)["hvdkit_steps_trained_total"] == 0
    metrics.add(0, Measured(step=40, step_at=10.0, examples=64.0, loss=0.5), now)
    metrics.add(0, Measured(step=60, step_at=14.0, examples=64.0, loss=0.25, saved_step=50, saved_at=9e8), now)
    metrics.add(1, Measured(step=61, step_at=3.0), now)
    found = values(metrics)
    assert found["hvdkit_step"] == 60 and found["hvdkit_steps_trained_total"] == 20
    assert found["hvdkit_examples_trained_total"] == 1280 and found["hvdkit_step_duration_seconds"] == 0.2
    assert found["hvdkit_examples_per_second"] == 320 and found["hvdkit_loss"] == 0.25
    metrics.fail(Verdict(137, "was killed", 1, "host-1"))
    begin(metrics, 1)
    found = values(metrics)
    assert "hvdkit_step" not in found and found["hvdkit_ranks"] == found["hvdkit_ranks_running"] == 1
    assert found["hvdkit_last_save_step"] == 50 and found["hvdkit_last_save_timestamp_seconds"] == 9e8
    metrics.add(0, Measured(step=50, step_at=90.0), now)
    metrics.add(0, Measured(step=55, step_at=95.0), now)
    found = values(metrics)
    assert (
        found["hvdkit_step"] == 55 and found["hvdkit_steps_trained_total"] == 25 and found["hvdkit_restarts_total"] == 1
    )
    assert found["hvdkit_step_duration_seconds"] == 1.0
    now = 160.0  # a step that hangs
    assert values(metrics)["hvdkit_step_duration_seconds"] == 60.0


def test_the_rank_that_others_wait_for_is_the_straggler():
    metrics = job(3)
    for rank, seconds in enumerate((0.05, 0.01, 0.04)):
        metrics.add(rank, Measured(step=1, step_at=1.0), 1.0)
        metrics.add(rank, Measured(step=11, step_at=2.0, step_seconds=seconds, step_bytes=9), 2.0)
    found = samples(metrics.text())
    waits = {rank: round(wait, 9) for (rank, _), wait in found["hvdkit_rank_wait_seconds"].items()}
    assert waits == {"0": 0.04, "1": 0.0, "2": 0.03} and found["hvdkit_straggler_rank"][()] == 1
    assert found["hvdkit_rank_exchange_bytes"]["0", "host-0"] == 9
    for rank in range(3):
        metrics.add(rank, Measured(step=21, step_at=3.0, step_seconds=0.01), 3.0)
    assert values(metrics)["hvdkit_straggler_rank"] == -1
    metrics.end(2)
    assert "hvdkit_straggler_rank" not in values(metrics) and values(metrics)["hvdkit_ranks_running"] == 2


def test_collectives_of_graphs_are_counted_by_steps():
    """A collective inside a graph costs nothing per step: the last step that was seen stands for those before it."""
    metrics = job(1)
    metrics.add(0, Measured(step=5, step_seconds=0.5, step_bytes=100), 1.0)
    metrics.add(0, Measured(step=25, step_seconds=0.25, step_bytes=100), 2.0)
    metrics.add(0, Measured(step=25, step_seconds=0.25, step_bytes=100), 3.0)
    metrics.add(0, Measured(step=35, step_seconds=0.5, step_bytes=60), 4.0)
    found = samples(metrics.text())
    assert found["hvdkit_rank_exchange_bytes_total"]["0", "host-0"] == 20 * 100 + 10 * 60
    assert found["hvdkit_rank_exchange_seconds_total"]["0", "host-0"] == 20 * 0.25 + 10 * 0.5


def test_a_failure_has_its_rank_and_cause():
    metrics = job()
    assert values(metrics)["hvdkit_failures_total"] == 0
    metrics.fail(Verdict(1, 'failed: ValueError: "a\\b"\nc', 1, "host-1", 3))
    metrics.fail(Verdict(1, 'failed at step 3: ValueError: "a\\b"\nc', 1, "host-1", 3))
    found = samples(metrics.text())
    assert found["hvdkit_failures_total"][()] == 1
    assert [*found["hvdkit_last_failure_info"]] == [("1", "host-1", "1", 'failed at step 3: ValueError: "a\\b"\nc')]


def test_values_that_are_not_finite_are_served():
    metrics = job()
    metrics.add(0, Measured(step=1, loss=math.nan), 1.0)
    metrics.add_status(1, Status(idle=math.inf, stopped=3.0))
    found = samples(metrics.text())
    assert math.isnan(found["hvdkit_loss"][()]) and found["hvdkit_rank_idle_seconds"]["1", "host-1"] == math.inf
    assert found["hvdkit_rank_stopped_seconds"]["1", "host-1"] == 3


def test_every_name_follows_the_conventions_of_prometheus():
    units = ("_seconds", "_bytes", "_total", "_info", "_per_second", "_step", "_loss", "_ranks", "_running", "_rank")
    for name, (kind, meaning) in METRICS.items():
        assert re.fullmatch(r"hvdkit(_[a-z]+)+", name) and meaning and not meaning.endswith(".")
        assert name.endswith("_total") == (kind == "counter") and name.endswith(units), name


def test_the_page_describes_every_metric():
    page = (ROOT / "docs" / "howto" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*) \|$", page, re.MULTILINE)
    assert {name: (kind, text[:1].upper() + text[1:]) for name, kind, text in rows} == METRICS


def test_the_dashboard_uses_metrics_that_exist():
    board = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [each["expr"] for each in board["annotations"]["list"]]
    names = {name for query in queries for name in re.findall(r"hvdkit_\w+", query)}
    assert names <= METRICS.keys() and len(names) > 15
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


# ---- the address and the server -------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "abc", "70000", "-1", ":9090", "host:", "9090/metrics", "1.5", "²"])
def test_an_address_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match=r"--metrics-port: got .*expected a port from 0 to 65535, or HOST:PORT; write"):
        MetricsAddress.parse("--metrics-port", text)


def test_a_port_that_is_taken_and_a_host_that_is_not_ours_are_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"HVDKIT_METRICS: got 127.0.0.1:{port} .*in use.*choose another port"):
            MetricsAddress.parse("HVDKIT_METRICS", str(port)).listen()
    for host in ("192.0.2.1", "no-such-host.invalid"):
        with pytest.raises(ValueError, match=f"--metrics-port: got {re.escape(host)}:0 "):
            MetricsAddress.parse("--metrics-port", f"{host}:0").listen()


def test_it_listens_on_this_host_only_unless_another_is_given():
    with MetricsAddress.parse("x", "0").listen() as listener:
        assert listener.getsockname()[0] == "127.0.0.1" and re.fullmatch(
            r"http://127.0.0.1:\d+/metrics", url_of(listener)
        )
    if socket.has_ipv6:
        with MetricsAddress.parse("x", "[::1]:0").listen() as listener:
            assert re.fullmatch(r"http://\[::1\]:\d+/metrics", url_of(listener))


@pytest.fixture
def served():
    listener = MetricsAddress.parse("x", "0").listen()
    server = MetricsServer(listener, lambda: "# HELP a b\n# TYPE a gauge\na 1\n" + "# filler\n" * 300_000)
    server.start()
    yield listener.getsockname(), url_of(listener)
    server.close()


def scraped(url: str) -> str:
    with urllib.request.urlopen(url, timeout=WAIT) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return answer.read().decode()


def test_a_scrape_gets_the_text_and_others_an_error(served):
    _, url = served
    assert samples(scraped(url)) == {"a": {(): 1.0}} and samples(scraped(f"{url}?x=1")) == {"a": {(): 1.0}}
    for path, method, code in (("/", "GET", 404), ("/metrics", "POST", 405), ("/metrics", "HEAD", 200)):
        request = urllib.request.Request(url.replace("/metrics", path), method=method)
        try:
            with urllib.request.urlopen(request, timeout=WAIT) as answer:
                assert answer.status == code and answer.read() == b""
        except urllib.error.HTTPError as error:
            assert error.code == code


@pytest.mark.nightly
def test_scrapers_that_misbehave_disturb_nobody(served):
    """Some never send, never read, send a megabyte, or reset; a thousand connect; a scrape is answered in between."""
    address, url = served
    silent = [socket.create_connection(address, WAIT) for _ in range(100)]
    greedy = [socket.create_connection(address, WAIT) for _ in range(20)]
    for one in greedy:
        one.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")  # 2.7 MB are never read
    assert "a 1\n" in scraped(url)
    with socket.create_connection(address, WAIT) as large, pytest.raises(OSError):
        for _ in range(1024):
            large.sendall(b"x" * 1024)
            time.sleep(0.001)
    many = []
    for _ in range(1000):
        many.append(socket.create_connection(address, WAIT))
        if len(many) % 250 == 0:
            assert "a 1\n" in scraped(url)
    for one in (*silent, *greedy, *many):
        one.close()
    assert "a 1\n" in scraped(url)


@pytest.mark.full
def test_a_connection_that_does_nothing_is_closed(served, monkeypatch):
    address, _ = served
    with socket.create_connection(address, WAIT) as idle:
        assert idle.recv(1) == b""


def test_closing_ends_the_thread():
    listener = MetricsAddress.parse("x", "0").listen()
    address = listener.getsockname()
    server = MetricsServer(listener, lambda: "")
    server.start()
    with socket.create_connection(address, WAIT):
        server.close()

    def is_refused() -> bool:
        try:
            socket.create_connection(address, 1).close()
        except ConnectionRefusedError:
            return True
        return False

    wait_until(is_refused)
