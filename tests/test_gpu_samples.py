"""The recordings from a GPU in sample_traces hold what the training measured itself, by CUDA events, as planted."""

from __future__ import annotations

import gzip
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest

import perfscope
from perfscope.recording import metadata, paths
from perfscope.results.findings import Finding
from perfscope.results.summary import Summary
from tests.gpu import raw
from tests.gpu.account import WORKING
from tests.gpu.setups import Setup

PLANTED = {
    "h200_starved": Setup(load_ms=60.0, workers=0, layers=4),
    "h200_pageable": Setup(model="conv", layers=1, batch=64, context=224, workers=4, pinned=False),
    "h200_float32": Setup(precision="fp32", layers=4),
}
LARGEST_BYTES = 1_000_000
PLACES = re.compile(r"/(?:home|root|Users|work|workspace|tmp|mnt|opt|srv|data)/[\w.-]+")
HOST, UUID = "node-0", "00000000-0000-0000-0000-000000000000"

every_sample = pytest.mark.parametrize("name", PLANTED)


@dataclass(frozen=True)
class Sample:
    """A recording, what the training measured of the same run, and the analysis."""

    folder: Path
    truth: dict[str, Any]
    summary: Summary

    @property
    def trace(self) -> Path:
        return paths.trace_file(self.folder, 0, 0)

    def finding(self, rule: str) -> Finding:
        (found,) = (finding for finding in self.summary.findings if finding.rule == rule)
        return found

    def measured_gain(self) -> float:
        """Of the change, as a speedup less 1: before and after took turns without the profiler, in rounds. The first
        round, in which the device is used for the first time, does not count.
        """
        before, changed, again = (turns[1:] for turns in self.truth["changed"]["turns_ms"])
        return median((a + c) / (2 * b) for a, b, c in zip(before, changed, again, strict=True)) - 1


@pytest.fixture(scope="module")
def analyzed(samples: Path) -> dict[str, Sample]:
    """Each sample."""
    return {
        name: Sample(
            samples / name,
            json.loads((samples / name / "truth.json").read_text(encoding="utf-8")),
            perfscope.analyze(samples / name),
        )
        for name in PLANTED
    }


def _text(path: Path) -> str:
    if path.suffix == ".bin":
        return path.read_bytes().decode("latin-1")
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()


@every_sample
def test_whole(analyzed: dict[str, Sample], name: str) -> None:
    sample = analyzed[name]
    assert metadata.load_launch(sample.folder / paths.LAUNCH_FILE).exit_code == 0
    run = metadata.load_run(paths.run_file(sample.folder, 0))
    assert (run.rank, run.world_size, run.outcome, run.problems) == (0, 1, "finished", ())
    (capture,) = run.captures
    assert (capture.file, capture.complete) == (sample.trace.name, True)
    assert (capture.first_step, capture.last_step) == (8, 15)
    assert sample.summary.job.devices == ("NVIDIA H200",)
    assert sample.summary.system is not None
    assert len(sample.summary.system.devices) == 1


@every_sample
def test_small(samples: Path, name: str) -> None:
    assert sum(path.stat().st_size for path in (samples / name).iterdir()) <= LARGEST_BYTES


@every_sample
def test_anonymous(samples: Path, name: str) -> None:
    for path in (samples / name).iterdir():
        text = _text(path)
        assert not PLACES.findall(text), path.name
        if path.name != "README.md":
            assert set(re.findall(r'"host": ?"([^"]*)"', text)) <= {HOST}, path.name
            assert set(re.findall(r'"uuid": ?"(?:GPU-)?([^"]*)"', text)) <= {UUID}, path.name


@every_sample
def test_planted_as_said(samples: Path, analyzed: dict[str, Sample], name: str) -> None:
    """In the recording's command, in the truth, and in the command that README.md shows. Fields that a command leaves
    out have their defaults.
    """
    recorded = metadata.load_launch(samples / name / paths.LAUNCH_FILE).command
    (block,) = re.findall(r"```\n(perfscope run .*?)```", _text(samples / name / "README.md"), flags=re.DOTALL)
    launch, shown = _split(shlex.split(block.replace("\\\n", " ")))
    assert launch == ["perfscope", "run", "--output", name]
    assert _setup(shown) == _setup(recorded) == Setup(**analyzed[name].truth["setup"]) == PLANTED[name]
    assert shown[:-1] == list(recorded[:-1])


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    end = words.index("--")
    return words[:end], words[end + 1 :]


def _setup(command: list[str] | tuple[str, ...]) -> Setup:
    return Setup(**json.loads(command[-1].removeprefix("--setup=")))


@every_sample
def test_step_time_by_cuda_events(analyzed: dict[str, Sample], name: str) -> None:
    """Without the last recorded step: the script's mark comes after the optimizer's step, in which the capture ends."""
    job, steps_ms = analyzed[name].summary.job, analyzed[name].truth["steps_ms"]
    expected = mean(steps_ms[step - 1] for step in job.steps[:-1])
    assert mean(job.step_time_us_per_step[:-1]) / 1e3 == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("name", ["h200_starved", "h200_pageable"])
def test_unprofiled_step_time_by_cuda_events(analyzed: dict[str, Sample], name: str) -> None:
    """The last steps, of which the collector counts as many as it timed."""
    sample = analyzed[name]
    timed = len(metadata.load_run(paths.run_file(sample.folder, 0)).steps.unprofiled_ns)
    found = sample.summary.job.unprofiled_step_us
    assert found is not None
    assert found / 1e3 == pytest.approx(mean(sample.truth["steps_ms"][-timed:]), rel=0.02)


@every_sample
def test_busy_time_by_the_raw_events(analyzed: dict[str, Sample], name: str) -> None:
    by_events = raw.busy(analyzed[name].trace)
    assert by_events is not None
    row = analyzed[name].summary.time_breakdown[0]
    assert sum(getattr(row, part) for part in WORKING) == pytest.approx(by_events[0], rel=0.02)


@every_sample
def test_time_breakdown_adds_up(analyzed: dict[str, Sample], name: str) -> None:
    analyzed[name].summary.self_check()


@every_sample
def test_peak_of_reserved_memory_by_torch(analyzed: dict[str, Sample], name: str) -> None:
    (row,) = analyzed[name].summary.memory
    assert row.peak_bytes == analyzed[name].truth["memory"]["reserved"]


def test_verdict_on_slow_loading(analyzed: dict[str, Sample]) -> None:
    """The device waits for the batch; what it is idle besides is the host's, which then has to launch the step."""
    summary = analyzed["h200_starved"].summary
    assert 54 <= summary.time_breakdown[0].idle_dataloader_us / 1e3 <= 63
    first = summary.findings[0]
    assert (first.rule, first.severity) == ("dataloader-workers", "high")
    assert first.action.old == "0"


def test_verdict_on_pageable_batches(analyzed: dict[str, Sample]) -> None:
    sample = analyzed["h200_pageable"]
    finding = sample.finding("pinned-memory")
    assert (finding.action.old, finding.action.new) == ("False", "True")
    assert sample.summary.time_breakdown[0].exposed_copy_us / 1e3 == pytest.approx(_copies_ms(sample), rel=0.05)


def _copies_ms(sample: Sample) -> float:
    """Time of the batches' copies per step, of the recorded ones, by the raw events."""
    job = sample.summary.job
    every = [event for event in raw.events(sample.trace) if "Pageable -> Device" in event["name"]]
    times = [event["dur"] for event in sorted(every, key=lambda event: event["ts"]) if event["args"]["bytes"] > 1e6]
    # The last warm-up step is in the trace before the recorded ones.
    assert len(times) == len(job.steps) + 1
    return mean(times[1:]) / 1e3


def test_bound_of_pinned_memory(analyzed: dict[str, Sample]) -> None:
    sample = analyzed["h200_pageable"]
    gain, bound = sample.measured_gain(), sample.finding("pinned-memory").ceiling
    assert gain == pytest.approx(0.271, abs=0.002)
    assert bound is not None
    assert bound >= gain


def test_verdict_on_float32(analyzed: dict[str, Sample]) -> None:
    sample = analyzed["h200_float32"]
    first = sample.summary.findings[0]
    assert (first.rule, first.severity) == ("mixed-precision", "high")
    assert "float32" in first.action.old


def test_bound_of_tf32(analyzed: dict[str, Sample]) -> None:
    """The finding's own bound is of bfloat16; the one of TF32, which was measured, stands in its advice."""
    sample = analyzed["h200_float32"]
    gain, finding = sample.measured_gain(), sample.finding("mixed-precision")
    assert gain == pytest.approx(2.44, abs=0.01)
    (bound,) = re.findall(r"TF32.*Speedup: at most ([\d.]+)x", finding.action.how)
    assert gain <= float(bound) - 1 <= finding.ceiling
