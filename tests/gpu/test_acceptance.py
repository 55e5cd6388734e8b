"""The acceptance run's own arithmetic, and that it runs at all: on the CPU, as far as that goes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from perfscope.trace.hardware import peaks_of
from tests.gpu import raw
from tests.gpu.peaks import PUBLISHED
from tests.gpu.points import Point, between, guarded, near
from tests.gpu.setups import Setup


@pytest.mark.parametrize(("marks", "host_us"), [(True, 100), (True, 70), (False, 100)])
def test_busy_time_is_of_whole_periods(tmp_path: Path, marks: bool, host_us: int) -> None:
    """Steps of 100 µs, whose two kernels overlap by 10 µs and work for 50 in all; the first period does not count. The
    host may run ahead.
    """
    events = []
    for step in range(4):
        at, marked = 1000 + 100 * step, 1000 + host_us * step
        events.append({"ph": "X", "name": f"ProfilerStep#{step}", "cat": "user_annotation", "ts": marked, "dur": 60})
        # On the device the marker comes again, with its first kernel.
        again = {"ph": "X", "name": f"ProfilerStep#{step}", "cat": "gpu_user_annotation", "ts": at + 20, "dur": 50}
        events += [again] * marks
        events.append({"ph": "X", "name": "a", "cat": "kernel", "ts": at + 20, "dur": 30})
        events.append({"ph": "X", "name": "copy", "cat": "gpu_memcpy", "ts": at + 40, "dur": 30})
        events.append({"ph": "X", "name": "aten::mm", "cat": "cpu_op", "ts": at, "dur": 100})
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert raw.busy(path) == pytest.approx((50, 100))


def test_points_hold_at_their_limits() -> None:
    assert near("a", "b", 100.0, 102.0, 0.02).holds
    assert not near("a", "b", 100.0, 102.1, 0.02).holds
    assert not near("a", "b", 100.0, None, 0.02).holds
    assert between("a", "b", 1.0, 2.0, 2.0).holds
    assert not between("a", "b", 1.0, 2.1, 2.0).holds


def test_an_area_that_fails_is_a_point_and_not_the_end() -> None:
    def checks() -> list[Point]:
        raise RuntimeError("no such thing | here")

    (point,) = guarded("area", checks)
    assert point.holds is False
    assert "no such thing" in point.found
    assert point.row().count(" | ") == 4, "a cell cannot break the table"


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_products_peaks_are_the_published_ones(name: str) -> None:
    full = {"H100": "H100 80GB HBM3", "A100": "A100-SXM4-80GB", "RTX 4090": "GeForce RTX 4090"}.get(name, name)
    peaks = peaks_of(f"NVIDIA {full}")
    if peaks is None:
        pytest.skip(f"the product lists no {full}: its MFU is left out")
    known = {"bf16": peaks.tflops["bfloat16"], "tf32": peaks.tflops["tf32"], "fp32": peaks.tflops["float32"]}
    assert known == pytest.approx(PUBLISHED[name], rel=0.02)


@pytest.mark.parametrize("model", ["small", "conv"])
def test_flops_by_hand_are_torchs_own_count(model: str) -> None:
    torch = pytest.importorskip("torch")
    from tests.gpu.job import Training
    from tests.gpu.models import by_hand

    setup = Setup(
        model=model, batch=2, width=32, layers=2, context=16, workers=0, pinned=False, precision="fp32",
        optimizer="for-loop", count_flops=True,
    )  # fmt: skip
    assert Training(setup, torch.device("cpu")).flops == by_hand(setup)


@pytest.mark.frameworks
def test_the_account_area_runs_on_a_cpu(tmp_path: Path) -> None:
    """Every point is printed, and those that the machine's other work cannot move hold."""
    pytest.importorskip("torch")
    out = tmp_path / "evidence"
    line = [sys.executable, "-m", "tests.gpu", "--device", "cpu", "--only", "account", "--output", str(out)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    points = {point["what"]: point for point in json.loads((out / "points.json").read_text())}
    assert "the checks run to their end" not in points, done.stdout
    assert len(points) == 13, done.stdout + done.stderr
    for what in ("busy device: the categories add up", "model FLOPs, by hand", "losses"):
        assert points[what]["holds"] is not False, points[what]
    assert (out / "busy" / "report.html").is_file()
