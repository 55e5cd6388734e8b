"""Merged traces, read back by an independent reader, against what the generator knows of its jobs."""

from __future__ import annotations

import importlib
import json
import zlib
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import perfscope
from perfscope.analyzers.analyze import JobAnalysis, job_analysis
from perfscope.analyzers.merge.choice import parse_numbers, parse_window
from perfscope.analyzers.merge.merge import Merged, Selection, merge, merge_analysis
from perfscope.analyzers.merge.pftrace import ROUNDING_NS, stacked
from perfscope.analyzers.merge.rank_view import DEFAULT_LANES
from perfscope.errors import UnusableInput
from perfscope.recording import metadata, paths
from perfscope.recording.metadata import DeviceMetadata, RunMetadata
from perfscope.recording.samples import DEVICE_COLUMNS, HOST_COLUMNS, LOADER, PROCESS_COLUMNS, SCHEMA
from perfscope.results.categories import CATEGORIES
from tests.analyzers.merge.perfetto_file import PerfettoFile, Slice, read
from tests.analyzers.readers.nsys_jobs import write_report
from tests.generator import Collective, Job, JobSpec, SlowCompute, chrome, cpu_job, simulate

OFFSETS = {0: 0, 1: 40_000, 2: -3_000_000, 3: 250_000_000}
STRAGGLER = SlowCompute(ranks=(2,), factor=1.4)


class Written:
    """A job, its file and the result of ``merge``."""

    def __init__(self, job: Job, folder: Path, **options: str) -> None:
        self.job = job
        job.write(folder / "traces")
        self.merged: Merged = merge(folder / "traces", folder / "merged.pftrace", **options)
        self.file: PerfettoFile = read(self.merged.path)

    def communication(self, rank: int) -> list[tuple[Slice, tuple[Collective, ...]]]:
        """Each slice of a rank's communication with what the generator carried out: the n-th is the n-th. Without what
        the device still had to do when the recording began."""
        works = {id(each.works[rank]): each.works[rank] for each in self.job.collectives if rank in each.works}
        first = f"ProfilerStep#{self.job.spec.first_step}"
        begun = next(event.start_ns for event in self.job.hosts[rank].events if event.name == first)
        ran = [work for work in sorted(works.values(), key=lambda work: work.started) if work.ended > begun]
        found = self.file.slices_of(f"rank {rank},", "communication")
        return [
            (one, work.collectives)
            for one, work in zip(found, ran, strict=True)
            if work.step in self.job.spec.recorded_steps
        ]


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> Written:
    spec = JobSpec(
        ranks=4, steps=7, causes=(STRAGGLER,), clock_offsets_ns=OFFSETS, ranks_per_host=1,
        host_drift_ppm={1: 30.0, 3: -60.0},
    )  # fmt: skip
    return Written(simulate(spec), tmp_path_factory.mktemp("ddp"), steps="all")


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobAnalysis]:
    """Ten ranks, of which 5 is slow."""
    folder = tmp_path_factory.mktemp("many")
    simulate(JobSpec(ranks=10, steps=4, causes=(SlowCompute(ranks=(5,), factor=1.5),))).write(folder)
    with job_analysis(folder) as analysis:
        yield analysis


def written(analysis: JobAnalysis, path: Path, workers: int | None = None, **options: Any) -> Merged:
    defaults = {"ranks": None, "steps": None, "window": None, "lanes": DEFAULT_LANES, "max_size_mb": 100.0}
    return merge_analysis(analysis, path, Selection.of(**{**defaults, **options}), workers=workers)


def test_arrows_lead_from_every_rank_op_to_the_last_arrival(ddp: Written) -> None:
    of_slice = {id(found): each[0] for rank in range(4) for found, each in ddp.communication(rank)}
    expected = set()
    for rank in range(4):
        for _, (collective,) in ddp.communication(rank):
            last = max(collective.works, key=lambda other: collective.works[other].started)
            expected |= {(id(collective), other, last) for other in collective.ranks if other != last}
    drawn = set()
    for source, target in ddp.file.arrows:
        if id(source) in of_slice:
            assert of_slice[id(source)] is of_slice[id(target)]
            drawn.add((id(of_slice[id(source)]), _rank(ddp, source), _rank(ddp, target)))
    assert drawn == expected
    assert len(drawn) > 50


def test_clocks_are_aligned_to_what_the_generator_set(ddp: Written) -> None:
    """Shown time less true time is one number on every rank, within the end jitter."""
    apart = [
        found.end_ns - collective.works[rank].ended
        for rank in range(4)
        for found, (collective,) in ddp.communication(rank)
    ]
    assert np.ptp(apart) <= 1_000
    drifted_ns = 90e-6 * 7 * ddp.job.truth.step_time_ns
    assert drifted_ns > 5_000  # setting the offsets alone would not have done


def test_zero_is_the_time_of_day_on_the_lowest_ranks_clock(ddp: Written) -> None:
    document = json.loads(chrome.document(ddp.job.spec, ddp.job.hosts[0]))
    recorded = min(event["ts"] for event in document["traceEvents"] if _is_collective(event))
    found = ddp.file.slices_of("rank 0,", "communication")[0]
    moment = document["baseTimeNanoseconds"] + round(recorded * 1000)
    assert ddp.file.realtime_ns + found.start_ns == pytest.approx(moment, abs=200)


def test_waits_and_transfers_lie_inside_their_collective(ddp: Written) -> None:
    for rank in range(4):
        for found, (collective,) in ddp.communication(rank):
            inner = [each for each in found.track.slices if each.inside is found]
            waited = collective.last_arrival_ns - collective.works[rank].started
            waiting_ns = sum(each.duration_ns for each in inner if each.name.startswith("waiting"))
            assert waiting_ns == pytest.approx(waited, abs=8_000)
            assert found.args["bytes"] == collective.bytes
            assert found.args["group ranks"] == "0-3"
            if waited > 20_000:
                last = max(collective.works, key=lambda other: collective.works[other].started)
                assert inner[0].name == f"waiting for rank {last}"
                assert found.args["last arriver"] == f"rank {last}"


def test_the_breakdown_is_the_one_of_the_analysis_and_leaves_no_gap(ddp: Written) -> None:
    for rank, windows in ddp.job.truth.windows.items():
        breakdown = ddp.file.slices_of(f"rank {rank},", "time breakdown")
        steps = ddp.file.slices_of(f"rank {rank},", "steps")
        assert [each.name for each in steps] == [f"step {number}" for number in ddp.job.spec.recorded_steps]
        assert all(before.end_ns == after.start_ns for before, after in pairwise(breakdown))
        assert {each.name for each in breakdown} <= set(CATEGORIES)
        total = sum(each.duration_ns for each in breakdown)
        assert total == pytest.approx(sum(window.duration_ns for window in windows), rel=1e-4)
        computed = sum(each.duration_ns for each in breakdown if each.name == "compute")
        assert computed == pytest.approx(sum(window.categories["compute"] for window in windows), rel=1e-3)


def test_the_critical_path_fills_the_jobs_steps_and_names_the_straggler(ddp: Written) -> None:
    path = ddp.file.slices_of("perfscope merge", "critical path")
    steps = ddp.file.slices_of("perfscope merge", "steps")
    assert all(before.end_ns == after.start_ns for before, after in pairwise(path))
    assert path[-1].end_ns - path[0].start_ns == steps[-1].end_ns - steps[0].start_ns
    by_rank: dict[object, int] = defaultdict(int)
    for each in path:
        by_rank[each.args["rank"]] += each.duration_ns
    assert max(by_rank, key=lambda rank: by_rank[rank]) == 2


def test_findings_carry_their_evidence(ddp: Written) -> None:
    summary = perfscope.analyze(ddp.merged.path.parent / "traces")
    (track,) = ddp.file.below("perfscope merge", "findings")
    assert [each.name for each in track.slices] == [
        summary.verdict.headline,
        *(finding.title for finding in summary.findings),
    ]
    assert [each.depth for each in track.slices] == list(range(len(track.slices)))
    for found, finding in zip(track.slices[1:], summary.findings, strict=True):
        assert found.args["rule"] == finding.rule
        assert found.args["how"] == finding.action.how
        assert sum(name.startswith("evidence") for name in found.args) == len({row.what for row in finding.evidence})


def test_kernels_are_on_their_streams_and_arrows_lead_to_them_from_their_launches(ddp: Written) -> None:
    rank = ddp.file.top("rank 1,")
    compute = ddp.file.slices_of("rank 1,", "compute: stream")
    host = ddp.job.hosts[1]
    works = [work for stream in host.streams.values() for work in stream.works]
    recorded = [work for work in works if work.kind == "compute" and work.step in ddp.job.spec.recorded_steps]
    assert len(compute) >= len(recorded)
    launched = [(source, target) for source, target in ddp.file.arrows if target in set(compute)]
    assert len(launched) > 0.9 * len(recorded)
    assert all(source.name.startswith("cudaLaunch") for source, _ in launched)
    assert all(source.track.parent == rank.uuid for source, _ in launched)
    assert all(source.start_ns <= target.start_ns for source, target in launched)


def test_counters_of_the_queue(ddp: Written) -> None:
    (track,) = ddp.file.below("rank 0,", "launch queue depth")
    assert max(value for _, value in track.values) > 1
    assert [time for time, _ in track.values] == sorted(time for time, _ in track.values)


def test_messages_lead_from_send_to_recv(tmp_path: Path) -> None:
    spec = JobSpec(ranks=2, steps=3, strategy="pipeline", pipeline=2, microbatches=4)
    written = Written(simulate(spec), tmp_path, steps="all")
    carried = {id(found): (rank, each) for rank in range(2) for found, each in written.communication(rank)}
    expected = {(id(one), *one.ranks) for _, each in carried.values() for one in each if one.kind == "send_recv"}
    drawn = set()
    for source, target in written.file.arrows:
        if id(source) in carried and id(target) in carried:
            (sender, sent), (receiver, received) = carried[id(source)], carried[id(target)]
            shared = {id(one) for one in sent} & {id(one) for one in received}
            assert shared
            assert source.start_ns <= target.end_ns
            drawn |= {(one, sender, receiver) for one in shared if (one, sender, receiver) in expected}
            assert any((one, sender, receiver) in expected for one in shared)
    assert drawn == expected


def test_a_job_without_devices(tmp_path: Path) -> None:
    written = Written(simulate(cpu_job(ranks=2, steps=3)), tmp_path, steps="all")
    assert len(written.communication(0)) == len(written.communication(1)) > 0
    assert written.file.below("rank 0,", "host: ")
    assert not written.file.below("rank 0,", "compute")
    assert written.file.below("rank 0,", "data loader")


def test_of_many_ranks_the_most_informative_are_shown(many: JobAnalysis, tmp_path: Path) -> None:
    merged = written(many, tmp_path / "out.pftrace")
    assert len(merged.ranks) == 8
    assert 5 in merged.ranks
    assert len(merged.steps) < 4
    assert any("2 of 10 ranks are left out" in sentence for sentence in merged.left_out)
    assert any("of 4 steps are left out" in sentence for sentence in merged.left_out)
    file = read(merged.path)
    (findings,) = file.below("perfscope merge", "findings")
    assert findings.slices[0].args["left out 1"] == merged.left_out[0]
    assert {each.name.split(",")[0] for each in file.tracks.values() if each.name.startswith("rank ")} == {
        f"rank {rank}" for rank in merged.ranks
    }


def test_what_is_asked_for_is_shown(many: JobAnalysis, tmp_path: Path) -> None:
    merged = written(many, tmp_path / "out.pftrace", ranks="1,8-9", steps="11", lanes=("comm",))
    file = read(merged.path)
    assert merged.ranks == (1, 8, 9)
    assert 11 in merged.steps
    assert [track.name for track in file.below("rank 8", "")] == ["steps", "time breakdown", "communication"]
    start, end = merged.windows_ms[0]
    shown = written(many, tmp_path / "window.pftrace", ranks="1", window=f"{start}ms-{end}ms").windows_ms
    assert shown == pytest.approx(np.array(merged.windows_ms))
    everything = [each for each in file.slices if each.track.name != "findings"]
    assert min(each.start_ns for each in everything) >= round(start * 1e6)
    assert max(each.end_ns for each in everything) <= round(end * 1e6)


def test_a_file_that_would_grow_too_large_loses_its_least_informative_ranks(many: JobAnalysis, tmp_path: Path) -> None:
    complete = written(many, tmp_path / "whole.pftrace", ranks="all")
    assert len(complete.ranks) == 10
    half = written(many, tmp_path / "half.pftrace", ranks="all", max_size_mb=complete.bytes / 2e6)
    assert 2 < len(half.ranks) < 10
    assert 5 in half.ranks
    assert half.bytes < 0.6 * complete.bytes
    assert any("ranks are left out" in sentence for sentence in half.left_out)
    with pytest.raises(UnusableInput, match="--max-size"):
        written(many, tmp_path / "none.pftrace", max_size_mb=0.001)
    assert not list(tmp_path.glob("none*"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": "0,40"}, "no rank 40"),
        ({"ranks": "3-1"}, "0,3-7"),
        ({"steps": "99"}, "no step 99"),
        ({"window": "5"}, "120ms-250ms"),
        ({"window": "900s-901s"}, "the steps end"),
        ({"window": "1ms-2ms", "steps": "11"}, "one of them"),
        ({"lanes": ("gpu",)}, "compute, comm"),
    ],
)
def test_what_cannot_be_shown_is_reported(
    many: JobAnalysis, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnusableInput, match=message):
        written(many, tmp_path / "out.pftrace", **options)


def test_workers_write_the_same_file(many: JobAnalysis, tmp_path: Path) -> None:
    alone = written(many, tmp_path / "alone.pftrace", workers=1)
    together = written(many, tmp_path / "together.pftrace", workers=2)
    assert alone.path.read_bytes() == together.path.read_bytes()


def test_numbers_and_windows() -> None:
    assert parse_numbers("0,3-5, 4", "--ranks") == (0, 3, 4, 5)
    assert parse_window("1.5s-2s") == (1_500_000_000, 2_000_000_000)
    assert parse_window("1-2") == (1_000_000, 2_000_000)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40)), max_size=30))
def test_ranges_on_one_lane_nest(ranges: list[tuple[int, int]]) -> None:
    unit = 10 * ROUNDING_NS  # nothing here overlaps by rounding
    start = np.array([begin * unit for begin, _ in ranges], dtype=np.int64)
    end = start + np.array([length * unit for _, length in ranges], dtype=np.int64)
    placed = stacked(start, end)
    assert (placed.end_ns == end).all()
    for one in range(len(start)):
        for other in range(one):
            if placed.lane[one] == placed.lane[other]:
                apart = end[one] <= start[other] or end[other] <= start[one]
                nested = (start[one] <= start[other] and end[other] <= end[one]) or (
                    start[other] <= start[one] and end[one] <= end[other]
                )
                assert apart or nested
    assert placed.lanes <= 1 + max((int(placed.lane[index]) for index in range(len(start))), default=0)


def test_overlaps_by_rounding_are_cut() -> None:
    start = np.array([0, 0, 9_500], dtype=np.int64)
    end = np.array([10_000, 10_600, 20_000], dtype=np.int64)
    placed = stacked(start, end)
    assert placed.lanes == 2  # 1.1 us are no rounding
    start[2] = 10_000
    placed = stacked(start, end)
    assert placed.lanes == 1
    assert placed.end_ns.tolist() == [10_000, 10_000, 20_000]


def test_the_published_schema_knows_every_field(ddp: Written) -> None:
    schema = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    unknown = importlib.import_module("google.protobuf.unknown_fields")
    events = 0
    pending = [schema.Trace.FromString(ddp.merged.path.read_bytes())]
    while pending:
        message = pending.pop()
        assert len(unknown.UnknownFieldSet(message)) == 0
        for field, value in message.ListFields():
            if field.name == "compressed_packets":
                pending.append(schema.Trace.FromString(zlib.decompress(value)))
            elif field.type == field.TYPE_MESSAGE:
                pending += list(value) if field.is_repeated else [value]
            events += field.name == "track_event"
    counted = sum(len(track.slices) + len(track.values) for track in ddp.file.tracks.values())
    instants = sum(each.duration_ns == 0 for each in ddp.file.slices)
    assert events == counted + len(ddp.file.slices) - instants  # a beginning and an end each


def test_names_that_are_no_text_and_very_long_ones(tmp_path: Path) -> None:
    job = simulate(JobSpec(ranks=1, steps=2))
    (path,) = job.write(tmp_path / "traces", compress=False)
    hostile = "</script>\u202e" + "x" * 10_000 + "\ud800"
    path.write_text(path.read_text().replace('"name": "aten::mm"', json.dumps({"name": hostile})[1:-1]))
    merged = merge(tmp_path / "traces", tmp_path / "out.pftrace")
    names = {each.name for each in read(merged.path).slices}
    assert any(name.startswith("</script>\u202e" + "x" * 10_000) for name in names)


def test_a_report_of_nsight_systems(tmp_path: Path) -> None:
    job = simulate(JobSpec(ranks=2, steps=3))
    write_report(job, tmp_path / "report.sqlite")
    merged = merge(tmp_path / "report.sqlite", steps="all")
    assert merged.path == tmp_path / "merged.pftrace"
    file = read(merged.path)
    assert len(file.slices_of("rank 0", "communication")) == len(file.slices_of("rank 1", "communication")) > 0
    assert len(file.arrows) > 100


def test_what_was_sampled_and_allocated_are_counters(tmp_path: Path) -> None:
    job = simulate(JobSpec(ranks=2, steps=4))
    job.write(tmp_path, file_template="rank-{rank:05d}.capture-0.trace.json", compress=False)
    for rank in range(2):
        trace = tmp_path / f"rank-{rank:05d}.capture-0.trace.json"
        document = json.loads(trace.read_text())
        steps = [event for event in document["traceEvents"] if _is_step(event)]
        document["traceEvents"] += [_allocation(event["ts"] + 5, 10**9 + index) for index, event in enumerate(steps)]
        trace.write_text(json.dumps(document))
        device = DeviceMetadata(type="cuda", index=rank)
        metadata.save(RunMetadata(rank=rank, world_size=2, host="node7", device=device), paths.run_file(tmp_path, rank))
    base = document["baseTimeNanoseconds"] + round(steps[0]["ts"] * 1000)
    _sample(tmp_path, base)
    merged = merge(tmp_path)
    file = read(merged.path)
    (allocated,) = file.below("rank 0", "memory allocated")
    assert [value for _, value in allocated.values] == [10**9 + index for index in range(4)]
    (cores,) = file.below("rank 1", "loader worker 12: cores used")
    assert {round(value, 6) for _, value in cores.values} == {0.75}
    assert not file.below("rank 0", "loader worker")
    for rank, per_cent in ((0, 80.0), (1, 30.0)):
        (used,) = file.below(f"rank {rank}", "GPU utilisation")
        (power,) = file.below(f"rank {rank}", "GPU power")
        assert {value for _, value in used.values} == {per_cent}
        assert {value for _, value in power.values} == {350.0}


def test_a_recording_without_steps_is_shown_whole(tmp_path: Path) -> None:
    names = ("aten::mm", "aten::add", "aten::mul")
    events = [
        {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": 10 * place, "dur": 5}
        for place, name in enumerate(names)
    ]
    (tmp_path / "rank0.json").write_text(json.dumps({"traceEvents": events}))
    merged = merge(tmp_path)
    file = read(merged.path)
    assert merged.steps == merged.left_out == ()
    assert [each.name for each in file.slices_of("rank 0", "steps")] == ["the whole recording"]
    assert [each.name for each in file.slices_of("rank 0", "host")] == list(names)


def _rank(written: Written, found: Slice) -> int:
    (rank,) = [rank for rank in range(4) if written.file.top(f"rank {rank},").uuid == found.track.parent]
    return rank


def _is_collective(event: dict[str, Any]) -> bool:
    return event.get("cat") == "kernel" and "Collective name" in event["args"]


def _is_step(event: dict[str, Any]) -> bool:
    return event["name"].startswith("ProfilerStep") and event["cat"] == "user_annotation"


def _allocation(ts: float, allocated: int) -> dict[str, Any]:
    args = {"Total Allocated": allocated, "Device Type": 1, "Device Id": 0, "Bytes": 1, "Addr": 1}
    return {
        "ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 1, "tid": 1, "ts": ts, "args": args,
    }  # fmt: skip


def _sample(folder: Path, base_ns: int) -> None:
    """A sample each 10 ms of two devices, a rank and its loader worker, which keeps three quarters of a core busy."""

    def row(columns: dict[str, bool], **values: float) -> list[float | None]:
        return [values.get(name) for name in columns]

    header = {
        "schema": SCHEMA, "host": "node7", "period_s": 0.01, "cores": 8, "devices": [{"index": 0}, {"index": 1}],
        "host_columns": list(HOST_COLUMNS), "device_columns": list(DEVICE_COLUMNS),
        "process_columns": list(PROCESS_COLUMNS),
    }  # fmt: skip
    lines: list[Any] = [header, {"process": 12, "rank": 1, "kind": LOADER, "cores": ""}]
    for at in range(-10, 20):
        host = row(HOST_COLUMNS, user_ms=10 * at + 1000, idle_ms=70 * at + 7000, system_ms=0, iowait_ms=0, steal_ms=0)
        devices = [row(DEVICE_COLUMNS, utilisation=used, power_mw=350_000) for used in (80, 30)]
        worker = [12, *row(PROCESS_COLUMNS, cpu_ms=7.5 * at + 1000)]
        lines.append([base_ns + at * 10_000_000, host, devices, [worker]])
    paths.samples_file(folder, "node7").write_text("".join(json.dumps(line) + "\n" for line in lines))
