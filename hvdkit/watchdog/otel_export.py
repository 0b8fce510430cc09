"""Exports a job's metrics by OpenTelemetry's SDK (OTLP over HTTP), next to the text that Prometheus reads."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from hvdkit.errors import describe
from hvdkit.watchdog.job_metrics import METRICS, JobMetrics

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Observation

VARIABLE = "HVDKIT_OTEL"
"""Variable that is 1 if ``hvdkit run`` exports metrics."""
_LAST_MILLISECONDS = 5000  # for the last export, at the end of the job


def exports_metrics() -> bool:
    """Return whether ``HVDKIT_OTEL`` requests an export. Raises ValueError if it is neither 0 nor 1."""
    text = os.environ.get(VARIABLE, "0")
    if text not in ("", "0", "1"):
        raise ValueError(describe(VARIABLE, text, "0 or 1", "set it to 1 to export metrics"))
    return text == "1"


def start_export(metrics: JobMetrics) -> Callable[[], None]:
    """Export metrics from a thread until the returned function is called, which exports the last values.

    The SDK's variables apply, such as ``OTEL_EXPORTER_OTLP_ENDPOINT`` and ``OTEL_METRIC_EXPORT_INTERVAL``. Raises
    ValueError if the SDK is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource
    except ImportError as error:
        expected = f"OpenTelemetry's SDK and its OTLP exporter ({error})"
        raise ValueError(describe(VARIABLE, "1", expected, "pip install 'hvdkit[otel]'")) from None
    resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "hvdkit")})
    provider = MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())], resource, shutdown_on_exit=False)
    meter = provider.get_meter("hvdkit")
    for name, (kind, meaning) in METRICS.items():
        create = meter.create_observable_counter if kind == "counter" else meter.create_observable_gauge
        create(name, [functools.partial(_observe, metrics, name)], description=meaning)
    return functools.partial(provider.shutdown, timeout_millis=_LAST_MILLISECONDS)


def _observe(metrics: JobMetrics, name: str, options: CallbackOptions) -> list[Observation]:
    from opentelemetry.metrics import Observation

    return [Observation(value, labels) for found, labels, value in metrics.values() if found == name]
