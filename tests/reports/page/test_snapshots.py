"""Memory snapshots on the page, alone and beside traces."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from pathlib import Path

import pytest

from perfscope.analyzers.analyze import analyze, job_analysis
from perfscope.analyzers.verdict import verdict
from perfscope.errors import UnusableInput
from perfscope.reports import markdown, terminal
from perfscope.reports.figures.figures import Figures
from perfscope.reports.page import page
from perfscope.results.file import summary_from_dict
from perfscope.results.summary import Summary
from tests.analyzers.snapshots.allocator import GIB, MIB, Allocator, OutOfMemory, train
from tests.reports.examples import healthy


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    """Rank 0 keeps 30 MiB of each step, until memory runs out."""
    folder = tmp_path_factory.mktemp("snapshots")
    allocator = Allocator(2 * GIB)
    with suppress(OutOfMemory):
        train(allocator, 100, leak=30 * MIB)
    allocator.dump(folder / "rank0.pickle")
    return analyze(folder)


def test_alone(failed: Summary) -> None:
    html = page.render(failed)
    assert 'href="#snapshots">Who holds the memory' in html
    for name in ("memory-failures", "memory-growth", "memory-holders", "memory-devices"):
        assert f'<table id="{name}"' in html
    assert 'id="time-breakdown-section"' not in html
    assert "Rank 0 ran out of memory" in html


def test_the_terminal_says_why_and_what_grows(failed: Summary) -> None:
    text = " ".join(terminal.verdict(failed).split())
    assert text.count("Rank 0 ran out of memory: ") == 2
    assert "Rank 0's memory grows by 30.0 MiB per step, in other code, remember (/home/jdoe/acme/train.py:55)" in text
    assert "ran out of memory" in markdown.of_summary(failed)


def test_areas_add_up_to_what_is_allocated(failed: Summary) -> None:
    figure = Figures(failed)["allocations"]
    areas = [trace for trace in figure.data if trace.stackgroup]
    highest = max(map(sum, zip(*(trace.y for trace in areas), strict=True)))
    assert failed.snapshots is not None
    assert highest == pytest.approx(failed.snapshots.devices[0].peak_bytes / GIB, rel=1e-4)


def test_beside_traces(failed: Summary) -> None:
    html = page.render(dataclasses.replace(healthy(), snapshots=failed.snapshots))
    assert 'id="time-breakdown-section"' in html
    assert html.index('id="evidence"') < html.index('id="snapshots"')


def test_what_needs_traces_says_what_is_there(tmp_path: Path) -> None:
    allocator = Allocator()
    train(allocator, 1)
    allocator.dump(tmp_path / "rank0.pickle")
    with pytest.raises(UnusableInput, match="holds memory snapshots, but no trace"), job_analysis(tmp_path):
        pass


def test_read_back(failed: Summary) -> None:
    assert summary_from_dict(failed.to_dict()).to_dict() == failed.to_dict()
    assert len(failed.frames.memory_holders) == len(failed.snapshots.holders if failed.snapshots else ())


def test_the_verdict_of_a_training_that_ran_out_of_memory_is_that(failed: Summary) -> None:
    summary = dataclasses.replace(healthy(), snapshots=failed.snapshots, findings=tuple(failed.findings))
    assert "ran out of memory" in verdict(summary).headline
