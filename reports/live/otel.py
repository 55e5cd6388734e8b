"""Metrics of a running job for OpenTelemetry, by its own SDK and its OTLP exporter over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from perfscope._version import __version__
from perfscope.analyzers.live.state import LiveState
from perfscope.errors import PerfscopeError
from perfscope.reports.live.metrics import METRICS, Metric

try:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.metrics import CallbackOptions, Observation
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource
except ImportError as error:
    raise PerfscopeError("--otlp needs pip install 'perfscope-profiler[otel]'") from error

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricReader

_SERVICE = "perfscope"


class JobMeter:
    """Hands the numbers of the last state to a reader of metrics."""

    def __init__(self, reader: MetricReader) -> None:
        self._state: LiveState | None = None
        # OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME of the environment go before these.
        resource = Resource.create({"service.name": _SERVICE, "service.version": __version__})
        self._provider = MeterProvider([reader], resource, shutdown_on_exit=False)
        meter = self._provider.get_meter("perfscope", __version__)
        for metric in METRICS:
            make = meter.create_observable_counter if metric.grows else meter.create_observable_gauge
            make(metric.otel_name, [self._callback(metric)], metric.unit, metric.meaning)

    def take(self, state: LiveState) -> None:
        """The state that is sent next."""
        self._state = state

    def close(self) -> None:
        """Send what there is, and end. Where no collector answers, that is logged and forgotten."""
        self._provider.shutdown(timeout_millis=_PATIENCE_MS)

    def _callback(self, metric: Metric) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_options: CallbackOptions) -> Iterable[Observation]:
            state = self._state
            return [Observation(value, dict(attributes)) for attributes, value in metric.points(state)] if state else []

        return observe


_PATIENCE_MS = 5_000
"""To wait for a collector at the end."""


@contextmanager
def sent(url: str, interval_s: float) -> Iterator[Callable[[LiveState], None]]:
    """Send metrics to an OpenTelemetry collector every interval; what to call with each state."""
    exporter = OTLPMetricExporter(endpoint=url, timeout=_PATIENCE_MS / 1000)
    meter = JobMeter(PeriodicExportingMetricReader(exporter, export_interval_millis=interval_s * 1000))
    try:
        yield meter.take
    finally:
        meter.close()
