"""Metrics of a running job for Prometheus, by its own client (the package ``prometheus-client``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from perfscope.analyzers.live.state import LiveState
from perfscope.errors import PerfscopeError, UnusableInput
from perfscope.reports.live.metrics import METRICS

try:
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector
except ImportError as error:
    raise PerfscopeError("--prometheus needs pip install 'perfscope-profiler[prometheus]'") from error


class JobCollector(Collector):
    """What Prometheus asks: the numbers of the last state."""

    def __init__(self) -> None:
        self.state: LiveState | None = None

    def collect(self) -> Iterator[Any]:
        """Every metric that has a value."""
        state = self.state
        for metric in METRICS if state is not None else ():
            assert state is not None
            kind = CounterMetricFamily if metric.grows else GaugeMetricFamily
            family = kind(metric.prometheus_name, metric.meaning, labels=metric.attributes)
            for attributes, value in metric.points(state):
                family.add_metric([attributes[name] for name in metric.attributes], value)
            if family.samples:
                yield family


@contextmanager
def served(port: int, address: str) -> Iterator[Callable[[LiveState], None]]:
    """Serve metrics over HTTP; what to call with each state. Raises UnusableInput where the port cannot be used."""
    collector = JobCollector()
    registry = CollectorRegistry()
    registry.register(collector)
    try:
        server, thread = start_http_server(port, address, registry=registry)
    except OSError as error:
        raise UnusableInput(
            f"--prometheus {port}: {address} cannot be listened on ({error.strerror or error}); choose another port, "
            "or another --prometheus-address"
        ) from error

    def take(state: LiveState) -> None:
        collector.state = state

    try:
        yield take
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
