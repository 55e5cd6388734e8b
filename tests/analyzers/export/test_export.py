"""Chakra files hold the recorded job: read with Google's protobuf and replayed, they take the recorded time."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import perfscope
from perfscope.analyzers.export.export import ExportedChakra
from perfscope.errors import PerfscopeError, UnusableInput
from perfscope.results.summary import Summary
from tests.analyzers.export.chakra_file import COLLECTIVE, COMP, RECV, SEND, ChakraFile, Replay, read, read_job
from tests.analyzers.measured import measured
from tests.generator import JobSpec, SlowCompute, cpu_job, simulate

SAMPLES = Path(__file__).parents[3] / "sample_traces"
KINDS = {0: "all_reduce", 2: "all_gather", 5: "broadcast", 6: "all_to_all", 7: "reduce_scatter"}
JOBS = {
    "ddp": JobSpec(ranks=2, steps=3, causes=(SlowCompute(ranks=(1,), factor=1.5),)),
    "fsdp": JobSpec(ranks=4, steps=2, strategy="fsdp", replicas=2),
    "tensor": JobSpec(ranks=4, steps=2, strategy="fsdp", tensor=2),
    "pipeline": JobSpec(ranks=2, steps=2, strategy="pipeline", pipeline=2, microbatches=3),
    "cpu": cpu_job(),
}


def exported(traces: Path, folder: Path) -> tuple[Summary, ExportedChakra, dict[int, ChakraFile], dict[str, list[int]]]:
    written = perfscope.export_chakra(traces, folder, workers=1)
    return (measured(traces), written, *read_job(folder))


def assert_like_the_recording(
    summary: Summary, written: ExportedChakra, files: dict[int, ChakraFile], groups: dict[str, list[int]]
) -> None:
    """Step time, compute of every rank, and the collectives of every group are those of the analysis."""
    steps = len(written.steps)
    assert Replay(files, groups).run().span_us() / steps == pytest.approx(summary.job.step_time_us, rel=0.005)
    for row in summary.time_breakdown:
        computed = [node for node in files[row.rank].of_type(COMP) if node.attributes.get("category") == "compute"]
        assert not any(node.on_host for node in computed)
        assert sum(node.us for node in computed) / steps == pytest.approx(row.compute_us, rel=0.001, abs=2)
    recorded: Counter[tuple[tuple[int, ...], str, int]] = Counter()
    for each in summary.collectives:
        if each.kind != "send_recv":
            recorded[each.ranks, each.kind, each.bytes] += each.count
    found: Counter[tuple[tuple[int, ...], str, int]] = Counter()
    for rank, file in files.items():
        for node in file.of_type(COLLECTIVE):
            about = node.attributes
            ranks = tuple(groups[about["pg_name"]] if "pg_name" in about else sorted(files))
            kind = KINDS[about["comm_type"]]
            size = about["comm_size"] * (len(ranks) if kind == "all_gather" else 1)
            found[ranks, kind, size] += rank == min(ranks)
    assert found == recorded


def assert_messages_have_both_ends(files: dict[int, ChakraFile]) -> None:
    """Each message is sent once and received once, with one tag and size."""
    keys = ("comm_src", "comm_dst", "comm_tag", "comm_size")
    sent, received = (
        [tuple(node.attributes[key] for key in keys) for file in files.values() for node in file.of_type(kind)]
        for kind in (SEND, RECV)
    )
    assert sorted(sent) == sorted(received)
    assert len({end[:3] for end in sent}) == len(sent)


def assert_in_order(written: ExportedChakra, files: dict[int, ChakraFile]) -> None:
    """A node follows only earlier ones, and one alone follows none."""
    communication = 0
    for rank, file in files.items():
        assert file.version == "0.0.4"
        assert file.about["rank"] == rank
        assert (file.about["first_step"], file.about["last_step"]) == (written.steps[0], written.steps[-1])
        assert [node.id for node in file.nodes] == list(range(1, len(file.nodes) + 1))
        assert all(max(node.deps, default=0) < node.id for node in file.nodes)
        assert sum(not node.deps for node in file.nodes) == 1
        assert min(node.start_us for node in file.nodes if node.attributes.get("step") == written.steps[-1]) > 0
        communication += len(file.of_type(SEND, RECV, COLLECTIVE))
    assert written.communication == communication


@pytest.mark.parametrize("name", JOBS)
def test_a_replay_of_the_files_takes_the_recorded_time(name: str, tmp_path: Path) -> None:
    simulate(JOBS[name]).write(tmp_path / "traces")
    summary, written, files, groups = exported(tmp_path / "traces", tmp_path / "chakra")
    assert written.notes == ()
    assert written.ranks == tuple(files)
    assert written.nodes == sum(len(file.nodes) for file in files.values())
    assert_like_the_recording(summary, written, files, groups)
    assert_messages_have_both_ends(files)
    assert_in_order(written, files)
    if name == "fsdp":
        assert sorted(groups.values()) == [[0, 1], [0, 2], [1, 3], [2, 3]]
        assert all(int(group) > 0 for group in groups)
    assert bool(files[0].of_type(SEND)) == (name == "pipeline")


@pytest.mark.scale
def test_so_does_one_of_a_real_recording(tmp_path: Path) -> None:
    summary, written, files, groups = exported(SAMPLES / "slow_rank", tmp_path)
    assert_like_the_recording(summary, written, files, groups)
    assert sum(node.attributes.get("num_ops", 0) for node in files[0].nodes) > 1e9


def test_steps_can_be_chosen(tmp_path: Path) -> None:
    simulate(JOBS["ddp"]).write(tmp_path / "traces")
    whole = perfscope.export_chakra(tmp_path / "traces", tmp_path / "whole")
    first, last = whole.steps[0], whole.steps[-1]
    one = perfscope.export_chakra(tmp_path / "traces", tmp_path / "one", steps=str(last))
    assert one.steps == (last,)
    assert one.nodes < whole.nodes / 2
    with pytest.raises(UnusableInput, match="follow one another"):
        perfscope.export_chakra(tmp_path / "traces", tmp_path, steps=f"{first},{last}")
    with pytest.raises(UnusableInput, match="no step 99"):
        perfscope.export_chakra(tmp_path / "traces", tmp_path, steps="99")


def test_ranks_that_are_not_recorded_are_named(tmp_path: Path) -> None:
    simulate(JOBS["ddp"]).write(tmp_path / "traces")
    for path in (tmp_path / "traces").glob("*1*"):
        path.unlink()
    written = perfscope.export_chakra(tmp_path / "traces", tmp_path / "chakra")
    assert written.ranks == (0,)
    assert any("Ranks 1 of 2 are not in the recording" in note for note in written.notes)
    assert read(tmp_path / "chakra" / "perfscope.0.et").of_type(COLLECTIVE)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    simulate(JOBS["ddp"]).write(tmp_path / "traces")
    (tmp_path / "file").write_text("")
    with pytest.raises(PerfscopeError, match="choose another folder"):
        perfscope.export_chakra(tmp_path / "traces", tmp_path / "file")
