"""Metrics of a running job, read back by Prometheus's own parser and OpenTelemetry's own reader."""

from __future__ import annotations

import re
import socket
import urllib.request
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from perfscope.errors import UnusableInput
from perfscope.reports.live.metrics import METRICS, MOST_RANKS
from tests.reports.live.test_screen import HOSTILE, state
from tests.waiting import PATIENCE_S, free_port

OTEL_NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)+")
PROMETHEUS_NAME = re.compile(r"perfscope_[a-z0-9_]+")


def scraped(port: int) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """What Prometheus would read: (name, labels) -> value."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as reply:
        text = reply.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_names_follow_the_conventions_of_both() -> None:
    names = [metric.otel_name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert OTEL_NAME.fullmatch(metric.otel_name)
        assert PROMETHEUS_NAME.fullmatch(metric.prometheus_name)
        assert metric.meaning.endswith(".")
        # No name is the beginning of another's.
        assert not any(other.startswith(f"{metric.otel_name}.") for other in names)


def test_prometheus_reads_what_the_state_says() -> None:
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed (the prometheus extra)")
    from perfscope.reports.live.prometheus import served

    port = free_port()
    with served(port, "127.0.0.1") as take:
        assert scraped(port) == {}
        take(state())
        values = scraped(port)
        assert values["perfscope_job_step_duration_seconds", ()] == pytest.approx(0.04)
        assert values["perfscope_job_steps_total", ()] == 1235
        assert values["perfscope_job_samples_total", ()] == 32 * 1235
        assert values["perfscope_job_sample_rate", ()] == 800
        assert values["perfscope_job_state", (("state", "running"),)] == 1
        assert values["perfscope_job_state", (("state", "stalled"),)] == 0
        assert values["perfscope_job_ranks", (("state", "gone"),)] == 1
        assert values["perfscope_job_stage_duration_seconds", (("stage", "backward"),)] == pytest.approx(0.02)
        assert values["perfscope_straggler_delay_seconds", (("rank", "2"), ("stage", "dataloader"))] == 0.008
        assert values["perfscope_rank_excess_seconds", (("rank", "2"),)] == 0.008
        assert values["perfscope_host_cpu_utilization_ratio", (("host", "node0"),)] == 0.5
        assert values["perfscope_gpu_memory_usage_bytes", (("gpu", "1"), ("host", "node0"))] == 40 << 30
        assert values["perfscope_job_last_step_timestamp_seconds", ()] == pytest.approx(1_799_999_999)
        # A name from a recording is a label like any other.
        take(replace(state(), hosts=(replace(state().hosts[0], host=f'{HOSTILE}"}} 1'),)))
        assert len(scraped(port)) == len(values)


def test_ranks_of_large_jobs_have_no_series_of_their_own() -> None:
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed (the prometheus extra)")
    from perfscope.reports.live.prometheus import JobCollector

    collector = JobCollector()
    collector.state = state(ranks=MOST_RANKS + 1)
    names = {family.name for family in collector.collect()}
    assert "perfscope_straggler_delay_seconds" in names
    assert not any(name.startswith("perfscope_rank_") for name in names)


def test_a_port_that_is_taken_is_refused_in_words() -> None:
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed (the prometheus extra)")
    from perfscope.reports.live.prometheus import served

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UnusableInput, match=f"--prometheus {port}"), served(port, "127.0.0.1"):
            pass


def test_opentelemetry_reads_what_the_state_says() -> None:
    pytest.importorskip("opentelemetry.sdk.metrics", reason="opentelemetry-sdk is not installed (the otel extra)")
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    from perfscope.reports.live.otel import JobMeter

    reader = InMemoryMetricReader()
    meter = JobMeter(reader)
    meter.take(state())
    read: Any = reader.get_metrics_data()
    (resource,) = read.resource_metrics
    assert resource.resource.attributes["service.name"] == "perfscope"
    found = {metric.name: metric for metric in resource.scope_metrics[0].metrics}
    values = {
        (name, tuple(sorted(point.attributes.items()))): point.value
        for name, metric in found.items()
        for point in metric.data.data_points
    }
    assert values["perfscope.job.step.duration", ()] == pytest.approx(0.04)
    assert values["perfscope.job.steps", ()] == 1235
    assert values["perfscope.straggler.delay", (("rank", "2"), ("stage", "dataloader"))] == 0.008
    assert values["perfscope.gpu.utilization", (("gpu", "2"), ("host", "node0"))] == 0.9
    assert (found["perfscope.job.step.duration"].unit, found["perfscope.gpu.memory.usage"].unit) == ("s", "By")
    assert found["perfscope.job.steps"].data.is_monotonic
    meter.close()


def test_opentelemetry_gets_them_over_http() -> None:
    pytest.importorskip("opentelemetry.sdk.metrics", reason="opentelemetry-sdk is not installed (the otel extra)")
    from perfscope.reports.live.otel import sent

    got: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        with sent(f"http://127.0.0.1:{server.server_port}/v1/metrics", 60.0) as take:
            take(state())
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert any(b"perfscope.job.step.duration" in each for each in got)


def test_every_metric_is_documented(root: Path) -> None:
    text = (root / "docs" / "watch.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(perfscope\.[\w.]+)` \| `(\w+)` \|", text, flags=re.MULTILINE)
    assert rows == [
        (metric.otel_name, metric.prometheus_name + ("_total" if metric.grows else "")) for metric in METRICS
    ]
