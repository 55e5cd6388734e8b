"""One real job recorded twice, with no loader workers and with four: what is compared is what the raw events say."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from statistics import median

import pytest

import perfscope
from perfscope.reports.compare import words

TRACES = Path(__file__).parents[4] / "shared" / "traces"
WITHOUT, WITH = TRACES / "resnet50_workers_0", TRACES / "resnet50_workers_4"


def _raw_ms(folder: Path, name: str) -> float:
    """Median duration of the host's ranges whose name contains this."""
    with gzip.open(next(folder.glob("*.gz")), "rt") as file:
        events = json.load(file)["traceEvents"]
    return median(event["dur"] / 1e3 for event in events if name in event.get("name", "") and event.get("ph") == "X")


@pytest.mark.skipif(not WITHOUT.is_dir(), reason="the recordings are not here")
def test_loader_workers_are_why_a_resnet_is_faster() -> None:
    step_ms = _raw_ms(WITH, "ProfilerStep#") - _raw_ms(WITHOUT, "ProfilerStep#")
    loader_ms = _raw_ms(WITH, "DataLoaderIter.__next__") - _raw_ms(WITHOUT, "DataLoaderIter.__next__")
    assert step_ms < -40
    assert loader_ms < -60
    difference = perfscope.compare(WITHOUT, WITH).differences[0]
    step = difference.step
    assert step.verdict == "faster"
    assert step.low_us is not None
    assert step.high_us is not None
    assert step.low_us <= 1e3 * step_ms <= step.high_us < 0
    assert (difference.causes[0], difference.causes_significant) == ("idle_dataloader", True)
    (loading,) = [row for row in difference.categories if row.name == "idle_dataloader"]
    # Launches of the step before run on while the host waits, so that the device idles for less than the host.
    assert 1e3 * loader_ms <= loading.delta_us <= 0.7 * 1e3 * loader_ms
    assert "less data loading" in words.because(difference).split(",")[0]
