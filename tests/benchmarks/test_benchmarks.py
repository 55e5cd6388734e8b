"""The benchmarks run, on inputs far too small for a result; results are in docs/benchmarks.md."""

from __future__ import annotations

import gzip
import os
import sys
from pathlib import Path

import pytest

from perfscope.analyzers.analyze import analyze
from perfscope.analyzers.readers import chrome
from perfscope.trace.trace import Category
from tests.benchmarks import (
    agreement,
    agreement_tracelens,
    floor,
    generate,
    growth,
    measure,
    overhead,
    overhead_counts,
    overhead_turns,
)
from tests.collectors.harness import needs_torch


def test_a_generated_set_reads_whole_and_is_what_it_claims(tmp_path: Path) -> None:
    written = generate.write_set(tmp_path, 2, 500_000, packed=True, python=True)

    unpacked = [gzip.decompress(path.read_bytes()) for path in sorted(tmp_path.iterdir())]
    assert written == sum(map(len, unpacked)) > 1_000_000
    trace = chrome.read(tmp_path / "rank1.json.gz")
    assert (trace.rank, trace.world_size, trace.parse_report.dropped_events, trace.parse_report.notes) == (1, 2, 0, ())
    for category in (Category.CPU_OP, Category.KERNEL, Category.RUNTIME, Category.PYTHON):
        assert len(trace.rows(category)) > 100
    assert len(trace.collectives.row) > 4
    assert trace.has_shapes
    assert analyze(tmp_path).job.ranks == (0, 1)


def test_cost_of_a_command_and_its_children() -> None:
    burn = "import time; data = bytearray(80 << 20); data[::4096] = b'x' * 20480; end = time.process_time() + 0.3\n"
    burn += "while time.process_time() < end: pass"
    cost = measure.run(
        [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"]
    )

    assert cost.cpu_s >= 0.3
    assert cost.wall_s >= 0.3
    assert cost.peak_bytes > 80 << 20
    with pytest.raises(RuntimeError, match="ended with 3"):
        measure.run([sys.executable, "-c", "raise SystemExit(3)"])


def test_contenders_take_turns() -> None:
    turns: list[str] = []

    def contender(name: str, seconds: float) -> measure.Cost:
        turns.append(name)
        return measure.Cost(seconds * len(turns), 1.0, 7)

    costs = measure.interleaved({"a": lambda: contender("a", 1), "b": lambda: contender("b", 2)}, 3)
    assert turns == ["a", "b"] * 3
    assert measure.median(costs["a"]) == measure.Cost(3, 1.0, 7)


def test_growth_has_a_row_for_each_size_and_number_of_ranks(tmp_path: Path) -> None:
    rows = [*growth.by_size(tmp_path, [0.3], 1), *growth.by_ranks(tmp_path, [2], 0.3, 1)]

    assert [len(row.split("|")) for row in rows] == [6, 7]


def test_floor_compares_the_same_bytes(tmp_path: Path) -> None:
    pytest.importorskip("simdjson")
    path = tmp_path / "trace.json.gz"
    written = generate.write_rank(path, 0, 1, 300_000)

    assert floor.unpacked_size(path) == written
    assert floor.compare(path, 1).startswith("| trace.json.gz | 1 | ")


def test_tracelens_s_definition_by_hand() -> None:
    """Compute 0-10 and 8-14, a memset 30-31, nccl 12-20, a copy 18-25: exposed nccl 14-20, exposed copy 20-25."""
    spans = [
        ("kernel", "gemm", 0, 10), ("kernel", "add", 8, 6), ("gpu_memset", "Memset (Device)", 30, 1),
        ("kernel", "ncclDevKernel_AllReduce", 12, 8), ("gpu_memcpy", "Memcpy DtoH", 18, 7),
        ("cuda_sync", "Sync", 0, 99),
    ]  # fmt: skip
    events = [{"cat": cat, "name": name, "ts": ts, "dur": dur} for cat, name, ts, dur in spans]

    assert agreement_tracelens.by_definition(events) == {
        "total": 31, "busy": 26, "idle": 5, "compute and memsets": 15, "communication": 8, "exposed communication": 6,
        "copies": 7, "exposed copies": 5,
    }  # fmt: skip
    with pytest.raises(ValueError, match="no device events"):
        agreement_tracelens.by_definition(events[-1:])


def test_the_breakdown_agrees_with_tracelens_s_definition(tmp_path: Path) -> None:
    generate.write_set(tmp_path, 1, 400_000, packed=True)

    lines = list(agreement.lines_of(agreement.traces_in([tmp_path]), None, None))
    assert {line.quantity for line in lines} == set(agreement_tracelens.NAMES.values())
    assert all(line.difference == pytest.approx(0, abs=1e-5) for line in lines)
    assert next(line.theirs for line in lines if line.quantity == "exposed communication")


def test_a_difference_is_traced_to_what_it_comes_from() -> None:
    variants = {
        "as it comes": {"idle": 150.0, "copies": 0.0}, "rounding": {"idle": 120.0, "copies": 0.0},
        "steps": {"idle": 120.01, "copies": 0.0}, "rows": {"idle": 100.0, "copies": 4.0},
    }  # fmt: skip
    idle, copies = agreement.compare("t", "HTA", {"idle": 100.0, "copies": 0.0}, variants)

    assert (idle.agrees, idle.explained) == (False, True)
    assert list(idle.reasons()) == ["rounding: +50.00 % → +20.00 %", "rows: +20.01 % → +0.00 %"]
    assert (copies.agrees, copies.explained) == (True, False)
    failing = agreement.compare("t", "HTA", {"idle": 100.0}, {**variants, "as it comes": {"error": "Broken"}})[0]
    assert (failing.theirs, failing.agrees, failing.explained) == (None, False, True)
    assert next(failing.reasons()) == "rounding: Broken → +20.00 %"
    assert "| t | idle | 150 | 100 | +50.00 % |" in "\n".join(agreement.table([idle]))
    assert "| t | HTA | 2 | 1 | 1 | rounding, rows |" in "\n".join(agreement.digest([idle, copies]))


@pytest.mark.skipif(
    "PERFSCOPE_HTA_PYTHON" not in os.environ, reason="PERFSCOPE_HTA_PYTHON names no interpreter with HTA"
)
def test_hta_s_differences_are_all_explained(tmp_path: Path) -> None:
    generate.write_set(tmp_path, 1, 400_000, packed=True)

    hta = Path(os.environ["PERFSCOPE_HTA_PYTHON"])
    lines = [line for line in agreement.lines_of(agreement.traces_in([tmp_path]), hta, None) if line.tool == "HTA"]
    assert len(lines) >= 14
    assert not [line for line in lines if not line.explained]


@pytest.mark.frameworks
@needs_torch
def test_what_recording_costs_can_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    overhead.main(["--layers", "1", "--steps", "2", "--rounds", "1", "--starts", "1"])

    printed = capsys.readouterr().out
    rows = {line.split("|")[1].strip(): line for line in printed.splitlines() if line.startswith("|")}
    assert set(rows) >= {"bare", "bare again", "waiting", "always-on", "by hand", "recording", "--steps-only"}
    assert rows["recording"].count("by hand") == 1
    assert "µs per step" in printed


@pytest.mark.frameworks
@needs_torch
def test_processes_that_are_recorded_and_not_take_turns(capsys: pytest.CaptureFixture[str]) -> None:
    overhead_turns.main(["--layers", "1", "--steps", "2", "--turns", "2", "--starts", "1"])

    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    kinds = ["bare again", "bare, more modules", "not recorded", "waiting", "always-on"]
    assert [row[0].strip() for row in rows[2:]] == kinds


def test_counts_of_callgrind_are_added_up_per_step(tmp_path: Path) -> None:
    file = tmp_path / "out.2-01"
    file.write_text("version: 1\nevents: Ir I1mr D1mr D1mw DLmr Bcm Bim\nfn=(1) f\n1 5\ntotals: 1000 10 20 4 3 7 1\n")
    assert list(overhead_counts.per_step(file, 2).values()) == [500, 5, 12, 1.5, 4]


@pytest.mark.frameworks
@needs_torch
def test_what_recording_costs_a_whole_training_can_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    overhead.main(["--whole", "8", "--starts", "1"])

    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [row[0].strip() for row in rows[2:]] == [
        "bare", "default: one capture of 8 steps", "--steps-only", "--steps-only, no samples",
    ]  # fmt: skip
    assert all(row[2].strip().endswith("%") for row in rows[3:])


def test_the_interval_of_a_median_widens_with_what_is_not_known() -> None:
    assert overhead.interval([3.0]) == (3.0, 3.0, 3.0)
    middle, low, high = overhead.interval([float(value) for value in range(101)])
    assert middle == 50.0
    assert (low, high) == (40.0, 61.0)
