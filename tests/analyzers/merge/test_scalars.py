"""Scalars for TensorBoard, read back by an independent reader and, where it is installed, by TensorBoard's own."""

from __future__ import annotations

import importlib
import json
import struct
from pathlib import Path

import numpy as np
import pytest

from perfscope.analyzers.merge.scalars import job_curves
from perfscope.errors import UnusableInput
from perfscope.recording import paths
from perfscope.recording.history import Block, pack
from perfscope.reports import tensorboard
from perfscope.results.categories import CATEGORIES
from perfscope.results.scalars import Curves, Point
from tests.analyzers.measured import measured
from tests.analyzers.merge.perfetto_file import fields
from tests.generator import JobSpec, SlowCompute, simulate

SPEC = JobSpec(ranks=3, steps=6, first_step=100, causes=(SlowCompute(ranks=(1,), factor=1.5),))


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Laid out as ``perfscope run`` does, with a history of 12 000 steps of rank 0."""
    folder = tmp_path_factory.mktemp("recording")
    simulate(SPEC).write(folder, file_template="rank-{rank:05d}.capture-0.trace.json")
    stages = {"dataloader": [1_000] * 12_000, "forward": [2_000] * 12_000}
    block = Block(0, 0, 1_700_000_000 * 10**9, [11_000 + number % 2 for number in range(12_000)], stages, bytes(12_000))
    paths.steps_file(folder, 0).write_bytes(pack(block))
    return folder


def scalars(path: Path) -> dict[str, list[tuple[int, float, float]]]:
    """Tag -> (step, value, time) of an event file, the checksums of its first records compared."""
    data, at = path.read_bytes(), 0
    found: dict[str, list[tuple[int, float, float]]] = {}
    first = True
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        body = data[at + 12 : at + 12 + length]
        for covered, place in () if at > 20_000 else ((data[at : at + 8], at + 8), (body, at + 12 + length)):
            assert struct.unpack_from("<I", data, place)[0] == _masked(_crc(covered))
        event = fields(body)
        assert (3 in event) == first
        if first:
            assert event[3] == [b"brain.Event:2"]
        first = False
        for summary in event.get(5, []):
            assert isinstance(summary, bytes)
            for value in fields(summary)[1]:
                assert isinstance(value, bytes)
                tag, number = fields(value)[1][0], fields(value)[2][0]
                assert isinstance(tag, bytes)
                assert isinstance(number, int)
                (time,) = struct.unpack("<d", struct.pack("<Q", event[1][0]))
                (scalar,) = struct.unpack("<f", struct.pack("<I", number))
                step = event[2][0]
                assert isinstance(step, int)
                found.setdefault(tag.decode(), []).append((step, scalar, time))
        at += 16 + length
    return found


def test_the_checksum_is_the_standards() -> None:
    assert tensorboard.crc32c(b"123456789") == 0xE3069283
    assert tensorboard.crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4


def test_every_step_has_its_own_number_and_the_breakdowns_shares(recording: Path, tmp_path: Path) -> None:
    files = tensorboard.write(job_curves(recording), tmp_path)
    assert {file.parent.name for file in files} == {"job", "rank-0", "rank-1", "rank-2"}
    summary = measured(recording)
    for row in summary.time_breakdown:
        (path,) = (tmp_path / f"rank-{row.rank}").glob("*capture-0")
        found = scalars(path)
        steps = [step for step, _, _ in found["perfscope/step_ms"]]
        assert steps == list(SPEC.recorded_steps)
        length = np.array([value for _, value, _ in found["perfscope/step_ms"]])
        assert length.mean() * 1e3 == pytest.approx(row.step_time_us, rel=1e-5)
        for name in CATEGORIES:
            share = np.array([value for _, value, _ in found[f"perfscope/share/{name}"]])
            assert (share * length).mean() * 1e3 == pytest.approx(row.categories()[name], rel=1e-4, abs=0.01)
        share = np.array([value for _, value, _ in found["perfscope/share/overlapped_comm"]])
        assert (share * length).mean() * 1e3 == pytest.approx(row.hidden_comm_us, rel=1e-4, abs=0.01)
        times = [time for _, _, time in found["perfscope/step_ms"]]
        assert np.diff(times) * 1e3 == pytest.approx(length[:-1], rel=0.01)


def test_the_jobs_curves(recording: Path, tmp_path: Path) -> None:
    tensorboard.write(job_curves(recording), tmp_path)
    (path,) = (tmp_path / "job").glob("*capture-0")
    found = scalars(path)
    summary = measured(recording)
    assert [value * 1e3 for _, value, _ in found["perfscope/step_ms"]] == pytest.approx(
        summary.job.step_time_us_per_step, rel=1e-6
    )
    assert found["perfscope/straggler_cost_ms"][-1][1] == pytest.approx(summary.stragglers[0].lost_us / 1e3, rel=1e-5)
    lost = {
        rank: scalars(next((tmp_path / f"rank-{rank}").glob("*capture-0")))["perfscope/straggler_cost_ms"]
        for rank in (0, 1)
    }
    assert lost[0][-1][1] == 0 < lost[1][-1][1]
    assert len(lost[1]) == 1  # of the capture as a whole
    assert summary.utilisation.mfu is not None
    mfu = np.array([value for _, value, _ in found["perfscope/mfu"]])
    length = np.array([value for _, value, _ in found["perfscope/step_ms"]])
    assert mfu * length == pytest.approx(np.full(len(mfu), summary.utilisation.mfu * length.mean()), rel=1e-5)


def test_the_whole_runs_history_is_thinned_to_means(recording: Path, tmp_path: Path) -> None:
    tensorboard.write(job_curves(recording, ranks="0"), tmp_path)
    (path,) = (tmp_path / "rank-0").glob("*history")
    found = scalars(path)
    assert len(found["perfscope/run/step_ms"]) <= 10_000
    assert found["perfscope/run/step_ms"][1][0] == 2
    values = [value for _, value, _ in found["perfscope/run/step_ms"]]
    assert np.mean(values) == pytest.approx(11.0005, rel=1e-4)
    assert found["perfscope/run/other_ms"][0][1] == pytest.approx(8.0, rel=1e-3)
    step, _, time = found["perfscope/run/step_ms"][-1]
    assert time == pytest.approx(1_700_000_000 + step * 0.0110005, abs=0.01)


def test_writing_again_replaces_what_was_there(recording: Path, tmp_path: Path) -> None:
    before = tensorboard.write(job_curves(recording), tmp_path)
    assert tensorboard.write(job_curves(recording), tmp_path) == before
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(before)


def test_every_capture_is_a_part_of_the_curve(tmp_path: Path) -> None:
    for first in (10, 50):
        simulate(JobSpec(ranks=2, steps=3, first_step=first)).write(
            tmp_path / "traces", file_template=f"rank{{rank}}_step{first}.json"
        )
    files = tensorboard.write(job_curves(tmp_path / "traces", ranks="0"), tmp_path / "logs")
    steps = [[step for step, _, _ in scalars(file)["perfscope/step_ms"]] for file in files if file.parent.name == "job"]
    assert steps == [[10, 11, 12], [50, 51, 52]]
    one = tensorboard.write(job_curves(tmp_path / "traces", capture=0), tmp_path / "one")
    assert {path.name.rsplit(".", 1)[-1] for path in one} == {"capture-0"}


def test_a_recording_without_steps_has_no_curve(tmp_path: Path) -> None:
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 1, "tid": 1, "ts": 1, "dur": 5}
    (tmp_path / "rank0.json").write_text(json.dumps({"traceEvents": [event]}))
    with pytest.raises(UnusableInput, match="nothing in the recording marks steps"):
        list(job_curves(tmp_path))


def test_tensorboard_reads_it(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    points = tuple(Point(step, 1_700_000_000.5 + step, {"perfscope/step_ms": step / 3}) for step in (7, 8, 2**40))
    (path,) = tensorboard.write([Curves("job", "capture-0", points)], tmp_path)
    found = reader.EventAccumulator(str(path.parent))
    found.Reload()
    assert found.Tags()["scalars"] == ["perfscope/step_ms"]
    assert [(each.step, each.wall_time) for each in found.Scalars("perfscope/step_ms")] == [
        (point.step, point.time_s) for point in points
    ]
    loader = importlib.import_module("tensorboard.backend.event_processing.event_file_loader")
    assert len(list(loader.LegacyEventFileLoader(str(path)).Load())) == 4  # one that fails a checksum is dropped


def _crc(data: bytes) -> int:
    """CRC-32C bit by bit."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ 0x82F63B78 * (value & 1)
    return value ^ 0xFFFFFFFF


def _masked(value: int) -> int:
    return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_a_recording_of_step_times_alone_has_the_curves_of_its_run(recording: Path, tmp_path: Path) -> None:
    paths.steps_file(tmp_path, 0).write_bytes(paths.steps_file(recording, 0).read_bytes())
    (run,) = job_curves(tmp_path)
    assert (run.run, run.source) == ("rank-0", "history")
    assert run.points[0].values["perfscope/run/forward_ms"] == 2.0
    with pytest.raises(UnusableInput, match="--ranks 3: no rank 3"):
        list(job_curves(tmp_path, ranks="3"))
