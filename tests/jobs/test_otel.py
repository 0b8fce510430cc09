"""``hvdkit run`` exports a job's metrics by OTLP, to a receiver that decodes them with OpenTelemetry's messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.jobs import call, environment

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".cache" / "otel" / "bin" / "python"  # made by `make test-nightly`
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PYTHON.exists(), reason="make test-nightly installs OpenTelemetry in .cache/otel"),
]
RECEIVER = """
import gzip, http.server, json, os, subprocess, sys, threading
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

found = {}

class Receiver(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
        for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            found["service"] = [a.value.string_value for a in resource.resource.attributes if a.key == "service.name"]
            for metric in resource.scope_metrics[0].metrics:
                points = (metric.sum if metric.HasField("sum") else metric.gauge).data_points
                found[metric.name] = {
                    ",".join(a.value.string_value for a in point.attributes): point.as_double or point.as_int
                    for point in points
                }
                if metric.HasField("sum"):
                    assert metric.sum.is_monotonic and metric.name.endswith("_total"), metric
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{server.server_address[1]}"
command = [sys.executable, "-m", "hvdkit", "run", "-np", "2", "--", sys.executable, "train.py"]
code = subprocess.run(command, env={**os.environ, "HVDKIT_OTEL": "1"}).returncode
print("FOUND", json.dumps([code, found]))
"""
TRAIN = """
import time
import hvdkit as hk

hk.init()
with hk.Supervisor("logs", state={"a": 1}, save_model_secs=None) as sv:
    for _ in range(60):
        hk.barrier()
        time.sleep(0.1)
        sv.step(loss=0.5)
time.sleep(5)  # the sentinels measure every two seconds
"""


def test_a_job_is_exported(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    job = call([PYTHON, "-c", RECEIVER], cwd=tmp_path, env=environment(PYTHONPATH=str(ROOT)))
    assert "FOUND" in job.stdout, job.stdout + job.stderr
    code, found = json.loads(job.stdout.split("FOUND ")[1])
    assert code == 0, job.stdout + job.stderr
    assert found["service"] == ["hvdkit"]
    assert found["hvdkit_ranks"] == {"": 2}
    assert found["hvdkit_step"] == {"": 60}
    assert len(found["hvdkit_rank_collectives_total"]) == 2


def test_the_package_is_named_if_it_is_missing(tmp_path):
    job = call(["hvdkit", "run", "-np", "2", "--", "true"], cwd=tmp_path, env=environment(HVDKIT_OTEL="1"))
    assert job.returncode
    assert "pip install 'hvdkit[otel]'" in job.stderr
