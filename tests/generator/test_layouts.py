"""Groups, hosts and clocks of jobs with several dimensions, checked by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.generator import MS, TENSORBOARD, JobSpec, Layout, ModelSpec, NetworkSpec, SlowLink, simulate
from tests.generator.paper import PAPER, present

TINY = ModelSpec(layers=2, tokens=256, width=128, hidden=256)


def test_ranks_are_laid_out_tensor_first_then_data_then_pipeline() -> None:
    layout = Layout(ranks=8, tensor=2, pipeline=2)

    assert layout.data == 2
    assert [layout.coordinates(rank) for rank in range(8)] == [
        (0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1), (1, 1, 1),
    ]  # fmt: skip
    assert all(layout.rank(*layout.coordinates(rank)) == rank for rank in range(8))
    groups = {role: [group.ranks for group in made] for role, made in layout.groups().items()}
    assert groups == {
        "world": [(0, 1, 2, 3, 4, 5, 6, 7)],
        "data": [(0, 2), (1, 3), (4, 6), (5, 7)],
        "tensor": [(0, 1), (2, 3), (4, 5), (6, 7)],
        "pipeline": [(0, 4), (1, 5), (2, 6), (3, 7)],
        "model": [(0, 1, 4, 5), (2, 3, 6, 7)],
    }
    names = [int(group.name) for made in layout.groups().values() for group in made]
    assert names == list(range(len(names)))


def test_copies_of_the_whole_model_use_the_default_group() -> None:
    spec = JobSpec(ranks=4)

    assert list(spec.groups_of(3)) == ["world"]
    assert spec.group(3, "data") == spec.groups_of(3)["world"]
    assert JobSpec(ranks=1).group(0, "data") is None
    assert JobSpec(ranks=4, tensor=4).group(0, "data") is None


def test_tensor_parallel_ranks_sum_activations_once_forward_and_once_backward() -> None:
    # Half of the hidden dimension: products of 50. 100 activations of 2 bytes: 50 + 200 / 4 = 100. Zero 10, copy 5,
    # forward 50 + 10 + 50, sum 100, loss 20, backward 100 + 10 + 100, sum 100, optimizer 60.
    truth = simulate(dataclasses.replace(PAPER, tensor=2)).truth

    window = truth.windows[0][1]
    assert window.duration_ns == 10 + 5 + 110 + 100 + 20 + 210 + 100 + 60
    assert present(window.categories) == {"compute": 410, "exposed_comm_transfer": 200, "exposed_copy": 5}
    (reduction,) = truth.collectives
    assert (reduction.group.description, reduction.bytes, reduction.count) == ("TENSOR_MODEL_PARALLEL_GROUP", 200, 6)
    assert truth.flops_per_step == 6 * 2_000


def test_groups_have_streams_and_sequences_of_their_own(tmp_path: Path) -> None:
    spec = JobSpec(ranks=8, tensor=2, microbatches=2, model=TINY, steps=2)
    (file,) = simulate(spec).write(tmp_path, ranks=[5], compress=False)
    trace = json.loads(file.read_text())

    listed = trace["distributedInfo"]["pg_config"]
    assert [(group["pg_name"], group["pg_desc"], group["ranks"]) for group in listed] == [
        ("0", "default_pg", list(range(8))),
        ("2", "DATA_PARALLEL_GROUP", [1, 3, 5, 7]),
        ("5", "TENSOR_MODEL_PARALLEL_GROUP", [4, 5]),
        ("9", "MODEL_PARALLEL_GROUP", [4, 5]),
    ]
    kernels = [event for event in trace["traceEvents"] if event["name"].startswith("nccl") and event["ph"] == "X"]
    assert {(k["args"]["Process Group Name"], k["args"]["stream"]) for k in kernels if k["cat"] == "kernel"} == {
        ("2", 24), ("5", 28),
    }  # fmt: skip
    for name, rank, stride, a_step in (("2", 2, 2, 1), ("5", 1, 1, 2 * 2 * 2)):
        recorded = [event["args"] for event in trace["traceEvents"] if event["name"] == "record_param_comms"]
        mine = [args for args in recorded if args["Process Group Name"] == name]
        # Three steps of warm-up come first.
        assert [args["Seq"] for args in mine] == list(range(3 * a_step, 5 * a_step))
        assert {(args["Rank"], args["Global rank stride"]) for args in mine} == {(rank, stride)}


def test_long_lists_of_ranks_are_cut_short_as_torch_does(tmp_path: Path) -> None:
    (file,) = simulate(JobSpec(ranks=32, steps=1, model=TINY)).write(tmp_path, ranks=[31], compress=False)
    trace = json.loads(file.read_text())

    kernel = next(event for event in trace["traceEvents"] if event["name"].startswith("ncclDev"))
    assert kernel["args"]["Process Group Ranks"] == f"[{', '.join(map(str, range(30)))}, ...]"
    assert trace["distributedInfo"]["pg_config"][0]["ranks"] == list(range(32))


def test_hosts_hold_consecutive_ranks(tmp_path: Path) -> None:
    spec = JobSpec(ranks=8, ranks_per_host=4, steps=1, model=TINY)
    (file,) = simulate(spec).write(tmp_path, ranks=[6], file_template=TENSORBOARD, compress=False)
    trace = json.loads(file.read_text())

    assert (spec.hosts, spec.ranks_of_host(1)) == (2, (4, 5, 6, 7))
    host, pid, *_ = file.name.replace(".", "_").split("_")
    assert (host, file.name.endswith(".pt.trace.json")) == ("node1", True)
    assert int(file.name.split(".")[1]) > 1_700_000_000_000
    kernels = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    assert {(event["pid"], event["args"]["device"]) for event in kernels} == {(2, 2)}
    assert {event["pid"] for event in trace["traceEvents"] if event.get("cat") == "cpu_op"} == {int(pid)}
    assert [device["id"] for device in trace["deviceProperties"]] == [0, 1, 2, 3]


def test_only_what_leaves_a_host_uses_its_slow_link() -> None:
    # Tensor parallel inside a host, data parallel across: two ranks take 50 + 200 x 1 / 4 = 100, or 50 + 5 x 50.
    link = SlowLink(factor=5.0, hosts=(1,))
    spec = dataclasses.replace(PAPER, ranks=8, ranks_per_host=2, tensor=2, first_bucket_bytes=200, causes=(link,))
    model = dataclasses.replace(PAPER.model, hidden=20)
    truth = simulate(dataclasses.replace(spec, model=model)).truth
    tensor = {c.ranks: c.transfer_ns for c in truth.collectives if c.group.role == "tensor"}
    data = {c.ranks: c.transfer_ns for c in truth.collectives if c.group.role == "data"}

    assert tensor == {(0, 1): 100, (2, 3): 100, (4, 5): 100, (6, 7): 100}
    # Four ranks: 50 + 200 x 1.5 / 4 = 125; with the link 50 + 5 x 75.
    assert data == {(0, 2, 4, 6): 425, (1, 3, 5, 7): 425}
    pipeline = dataclasses.replace(
        spec, strategy="pipeline", pipeline=2, microbatches=2, model=dataclasses.replace(model, layers=2)
    )
    by_ranks = {c.ranks: c.transfer_ns for c in simulate(pipeline).truth.collectives}
    # Hosts 0 and 1 hold stage 0, hosts 2 and 3 stage 1.
    assert (by_ranks[0, 2], by_ranks[4, 6]) == (50 + 5 * 50, 100)
    assert (by_ranks[0, 4], by_ranks[2, 6], by_ranks[6, 2]) == (100, 50 + 5 * 50, 50 + 5 * 50)


def test_bandwidth_between_hosts_is_another() -> None:
    network = NetworkSpec(alpha_ns=50, busbw_gbps=4.0, between_hosts_gbps=1.0)
    truth = simulate(dataclasses.replace(PAPER, ranks=4, ranks_per_host=2, tensor=2, network=network)).truth

    assert {c.ranks: c.transfer_ns for c in truth.collectives if c.bytes == 200 and c.group.role == "tensor"} == {
        (0, 1): 100, (2, 3): 100,
    }  # fmt: skip
    assert {c.ranks: c.transfer_ns for c in truth.collectives if c.group.role == "data"} == {
        (0, 2): 50 + 200, (1, 3): 50 + 200,
    }  # fmt: skip


def test_clocks_of_hosts_differ_and_drift(tmp_path: Path) -> None:
    # Host 1 shows 5 ms too much and gains 20 us per second, rank 3 has 7 ns of its own.
    spec = JobSpec(
        ranks=4, ranks_per_host=2, steps=2, model=TINY, clock_offsets_ns={3: 7}, host_clock_offsets_ns={1: 5 * MS},
        host_drift_ppm={1: 20.0},
    )  # fmt: skip
    job = simulate(spec)
    for rank, file in enumerate(job.write(tmp_path, compress=False)):
        trace = json.loads(file.read_text(), parse_float=lambda text: int(text.replace(".", "")))
        kernels = [e for e in trace["traceEvents"] if e.get("cat") == "kernel"]
        written = sorted((e["ts"] - 4_458_676_000_000_000, e["dur"]) for e in kernels)
        works = [work for stream in job.hosts[rank].streams.values() for work in stream.works]
        begun = next(event.start_ns for event in job.hosts[rank].events if event.name == "ProfilerStep#10")
        recorded = [work for work in works if work.ended > begun and work.kind != "copy"]
        spans = ((_shown(rank, work.started), _shown(rank, work.ended)) for work in recorded)
        assert written == sorted((start, end - start) for start, end in spans)
    windows = job.truth.windows[0]
    middle = (windows[0].start_ns + windows[-1].end_ns) // 2
    assert job.truth.clock_correction_ns == {rank: middle - _shown(rank, middle) for rank in range(4)}
    assert job.truth.drift_ppm == {0: 0, 1: 0, 2: 20.0, 3: 20.0}


def _shown(rank: int, ns: int) -> int:
    return ns if rank < 2 else ns + 5 * MS + (7 if rank == 3 else 0) + round(ns * 20 / 1_000_000)


@pytest.mark.parametrize("wrong", [{"ranks": 6, "tensor": 4}, {"tensor": 3, "ranks": 6}, {"groups": "other"}])
def test_layouts_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"laid out|divided|style"):
        JobSpec(**wrong)
