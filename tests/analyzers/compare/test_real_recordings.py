"""One real job recorded twice, with no loader workers and with four: what is compared is what the raw events say."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from statistics import fmean, median

import pytest

import perfscope
from perfscope.reports.compare import words

pytestmark = pytest.mark.scale

TRACES = Path(__file__).parents[4] / "shared" / "traces"
WITHOUT, WITH = TRACES / "resnet50_workers_0", TRACES / "resnet50_workers_4"


def _raw_ms(folder: Path, name: str) -> list[float]:
    """Durations of the host's ranges whose name contains this."""
    with gzip.open(next(folder.glob("*.gz")), "rt") as file:
        events = json.load(file)["traceEvents"]
    return [event["dur"] / 1e3 for event in events if name in event.get("name", "") and event.get("ph") == "X"]


@pytest.mark.skipif(not WITHOUT.is_dir(), reason="the recordings are not here")
def test_loader_workers_shorten_the_loading_of_a_resnet() -> None:
    """Two of the six steps with workers launch slowly. In one of them the host first waits for a copy of before the
    recording, which is not that step's; the other is far from the rest and left out.
    """
    without, with_workers = (_raw_ms(folder, "ProfilerStep#") for folder in (WITHOUT, WITH))
    assert (len(without), len(with_workers)) == (6, 6)
    loader_ms = fmean(_raw_ms(WITH, "DataLoaderIter.__next__")) - fmean(_raw_ms(WITHOUT, "DataLoaderIter.__next__"))
    comparison = perfscope.compare(WITHOUT, WITH)
    difference = comparison.differences[0]
    step = difference.step
    assert step.verdict == "faster"
    assert words.headline(comparison, difference).startswith("resnet50_workers_4 is 1.3")
    assert step.low_us is not None
    assert step.high_us is not None
    assert step.low_us <= 1e3 * (median(with_workers) - median(without)) <= step.high_us < 0
    (loading,) = [row for row in difference.categories if row.name == "idle_dataloader"]
    assert loading.significant
    # Launches of the step before run on while the host waits, so that the device idles for less than the host.
    assert 1e3 * loader_ms <= loading.delta_us <= 0.7 * 1e3 * loader_ms
    assert re.match(r"Each step has 5\d\.\d ms less data loading", words.because(difference))
