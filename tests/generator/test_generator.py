"""The generator of traces is checked by hand: every expected time here was worked out on paper."""

from __future__ import annotations

import ast
import dataclasses
import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.generator import (
    MS,
    Collective,
    Fabric,
    Host,
    HostSync,
    JobSpec,
    Loader,
    LoaderSpec,
    Pause,
    SlowCompute,
    SlowHost,
    SlowLink,
    SlowLoader,
    SmallBuckets,
    Work,
    cpu_job,
    simulate,
)
from tests.generator.engine import Program, run
from tests.generator.paper import PAPER
from tests.generator.paper import present as _present


def _collective(sequence: int, cost: int, size: int = 8) -> Collective:
    return Collective("allreduce", (0, 1), sequence, 0, 4, 4, size, cost)


def test_collective_ends_everywhere_after_the_last_arrival() -> None:
    fabric, hosts = Fabric(2), [Host(0, 0), Host(1, 0)]
    for host, compute_ns in zip(hosts, (10, 14), strict=True):
        host.stream(7).put(Work(host.rank, "compute", "gemm", 0, 0, compute_ns))
        reduce = Work(host.rank, "comm", "nccl", 0, 3, after=(host.stream(7).works[0],))
        fabric.join(host.rank, reduce, lambda sequence: _collective(sequence, 5))
        host.stream(20).put(reduce)
        host.stream(7).put(Work(host.rank, "compute", "adam", 0, 3, 2, after=(reduce,)))

    run(hosts, [_nothing(), _nothing()], fabric)

    found = [[(w.start_ns, w.end_ns) for number in (7, 20) for w in host.stream(number).works] for host in hosts]
    assert found == [[(0, 10), (19, 21), (10, 19)], [(0, 14), (19, 21), (14, 19)]]


def test_two_lanes_take_work_in_order_as_they_become_free() -> None:
    host = Host(0, 0)
    for queued, duration in ((0, 10), (1, 3), (2, 5), (3, 1)):
        host.stream(20, lanes=2).put(Work(0, "comm", "gloo", 0, queued, duration))

    run([host], [_nothing()], Fabric(1))

    assert [(w.start_ns, w.end_ns, w.lane) for w in host.stream(20).works] == [
        (0, 10, 0),
        (1, 4, 1),
        (4, 9, 1),
        (9, 10, 1),
    ]


def test_ranks_that_wait_for_each_other_are_reported() -> None:
    fabric, hosts = Fabric(2), [Host(0, 0), Host(1, 0)]
    reduce = Work(0, "comm", "nccl", 0, 0)
    fabric.join(0, reduce, lambda sequence: _collective(sequence, 5))
    hosts[0].stream(20).put(reduce)

    with pytest.raises(RuntimeError, match="deadlock"):
        run(hosts, [_wait_for(reduce), _nothing()], fabric)


def test_ranks_must_agree_on_a_collective() -> None:
    fabric = Fabric(2)
    fabric.join(0, Work(0, "comm", "nccl", 0, 0), lambda sequence: _collective(sequence, 5))

    with pytest.raises(ValueError, match="collective 0"):
        fabric.join(1, Work(1, "comm", "nccl", 0, 0), lambda sequence: _collective(sequence, 5, size=9))


def test_loader_with_a_worker_hides_what_the_loop_leaves_time_for() -> None:
    # One worker, 100 ns per batch, two ahead: ready at 100, 200; the next is asked for as one is taken.
    host = Host(0, 0)
    loader = Loader(LoaderSpec(workers=1, prefetch=2, next_ns=1), 0, lambda batch: 100)
    for _ in range(4):
        loader.next(host)
        host.spend(30)

    assert [(d.start_ns, d.end_ns) for d in loader.deliveries] == [(0, 100), (130, 200), (230, 300), (330, 400)]


def test_loader_with_two_workers_halves_the_time_between_batches() -> None:
    # Batches 0 and 1 at 100, 2 and 3 at 200: the loop of 60 ns never waits after the first.
    host = Host(0, 0)
    loader = Loader(LoaderSpec(workers=2, prefetch=2, next_ns=1), 0, lambda batch: 100)
    for _ in range(4):
        loader.next(host)
        host.spend(60)

    assert [(d.start_ns, d.end_ns) for d in loader.deliveries] == [(0, 100), (160, 161), (221, 222), (282, 283)]


def test_loader_without_workers_loads_while_the_loop_waits() -> None:
    host = Host(0, 0)
    loader = Loader(LoaderSpec(workers=0, next_ns=1), 0, lambda batch: 100 + batch)
    for _ in range(2):
        loader.next(host)
        host.spend(60)

    assert [(d.start_ns, d.end_ns) for d in loader.deliveries] == [(0, 101), (161, 263)]
    assert [state.state for state in host.states] == ["dataloader", "dataloader", "host"] * 2


def test_paper_job_adds_up() -> None:
    # zero 10, copy 5, forward 100 + 10 + 100, loss 10 + 10, backward 200 + 10 + 200, the last bucket's 100,
    # optimizer 60. The first bucket's reduction lies under the second half of backward.
    job = simulate(PAPER)

    for rank in (0, 1):
        for window in job.truth.windows[rank]:
            assert window.duration_ns == 815
            assert _present(window.categories) == {"compute": 710, "exposed_comm_transfer": 100, "exposed_copy": 5}
            assert window.comm_ns == 200
    assert job.truth.step_time_ns == 815
    assert job.truth.flops_per_step == 2 * 6 * 2_000


def test_paper_job_with_a_slow_rank() -> None:
    # Rank 1: zero 20, copy 5, forward 420, loss 40, backward's first half 400: first bucket at 885, reduced by 985;
    # second half 420: last bucket at 1305, reduced by 1405; optimizer 120: 1525. Rank 0 begins 60 earlier (its
    # optimizer is faster): first bucket at 385, backward done at 595; waits until 885, sees the transfer until 985,
    # arrives at the last one at 985, waits until 1305, transfer until 1405.
    slow = SlowCompute(ranks=(1,), factor=2.0)
    job = simulate(dataclasses.replace(PAPER, causes=(slow,)))

    assert job.truth.step_time_ns == 1525
    assert job.lost_ns(slow) == 710
    for window in job.truth.windows[0]:
        assert _present(window.categories) == {
            "compute": 710, "exposed_comm_wait": 610, "exposed_comm_transfer": 200, "exposed_copy": 5,
        }  # fmt: skip
    for window in job.truth.windows[1]:
        assert _present(window.categories) == {"compute": 1420, "exposed_comm_transfer": 100, "exposed_copy": 5}
    (reduction,) = job.truth.collectives
    assert (reduction.count, reduction.bytes, reduction.transfer_ns) == (6, 200, 100)
    assert reduction.wait_ns == (500 + 0 + 320 + 0) / 4
    assert reduction.last_arriver == {1: 1.0}


def test_paper_job_cause_in_some_steps_only() -> None:
    slow = SlowCompute(ranks=(1,), steps=(11,), factor=2.0)
    job = simulate(dataclasses.replace(PAPER, causes=(slow,)))

    assert [window.duration_ns for window in job.truth.windows[1]] == [815, 1525, 815]
    assert job.lost_ns(slow) == pytest.approx(710 / 3)


def test_paper_job_waits_for_its_loader() -> None:
    # One worker, 2000 ns per batch: one step every 2000, the last one too: its batch is the one that it waits for.
    slow = SlowLoader(load_ns=2_000)
    job = simulate(dataclasses.replace(PAPER, causes=(slow,)))

    assert [window.duration_ns for window in job.truth.windows[0]] == [2_000] * 3
    assert [window.categories["idle_dataloader"] for window in job.truth.windows[0]] == [1_185] * 3
    assert [delivery.load_ns for delivery in job.truth.deliveries[1]] == [2_000] * 3


def test_paper_job_bound_by_launches() -> None:
    # 17 launches of 300 ns per step, each longer than its kernel: every step takes the host's 5100, and the device ends
    # each 20 ns after its last launch returns.
    job = simulate(dataclasses.replace(PAPER, host=dataclasses.replace(PAPER.host, launch_ns=300)))

    assert [window.duration_ns for window in job.truth.windows[0]] == [5_100] * 3
    assert _present(job.truth.windows[0][0].categories) == {
        "compute": 710, "exposed_comm_transfer": 200, "exposed_copy": 5, "idle_launch": 4_185,
    }  # fmt: skip


def test_paper_job_with_latency_waits_for_what_is_queued() -> None:
    host = dataclasses.replace(PAPER.host, launch_ns=300, latency_ns=50)
    rows = simulate(dataclasses.replace(PAPER, host=host)).truth.windows[0][0].categories

    # Every kernel starts 50 ns later than its launch returns; each is over before the next launch returns, but the
    # reductions (100) and the matrix products (100) as well: the device was idle in all 17 latencies.
    assert rows["idle_dependency"] == 17 * 50
    assert rows["idle_launch"] == 4_185 - 17 * 50


def test_paper_job_with_a_sync_in_each_step() -> None:
    # item() copies for 1000 ns; the call returns 7 ns later, and the rest of the step is issued at once.
    spec = dataclasses.replace(PAPER, host=dataclasses.replace(PAPER.host, sync_return_ns=7), causes=(HostSync(),))
    window = simulate(spec).truth.windows[0][1]

    assert _present(window.categories) == {
        "compute": 710, "exposed_comm_transfer": 100, "exposed_copy": 1_005, "idle_sync": 7,
    }  # fmt: skip
    assert window.idle_after_sync_ns == 7


def test_paper_job_with_a_pause() -> None:
    # end_sync: the host is with the device when the step ends, so the whole pause shows, less what runs under it,
    # zero 10 and copy 5. Rank 1 is done with its backward at 655, sees rank 0 come to the first bucket at
    # 445 + 385 = 830 and leave it at 930, and come to the last one at 655 + 385 = 1040: 175 + 110 of waiting.
    pause = Pause(ranks=(0,), pause_ns=400, name="gc")
    job = simulate(dataclasses.replace(PAPER, end_sync=True, causes=(pause,)))

    assert [window.categories["idle_host"] for window in job.truth.windows[0]] == [385] * 3
    assert [window.categories["exposed_comm_wait"] for window in job.truth.windows[1]] == [285] * 3
    assert job.lost_ns(pause) == 385


def test_paper_job_on_a_slow_link_and_in_one_bucket() -> None:
    # Two buckets of 50 + 5 x 50 = 300: the first ends 90 after backward, the second 300 later: 390 exposed.
    job = simulate(dataclasses.replace(PAPER, causes=(SlowLink(factor=5.0),)))
    assert job.truth.windows[0][0].categories["exposed_comm_transfer"] == 390
    # One of 50 + 100, all of it after backward; and small buckets put them back.
    whole = dataclasses.replace(PAPER, bucket_bytes=1_000)
    assert simulate(whole).truth.windows[0][0].categories["exposed_comm_transfer"] == 150
    small = dataclasses.replace(whole, causes=(SmallBuckets(bucket_bytes=1),))
    assert simulate(small).truth.windows[0][0].categories["exposed_comm_transfer"] == 100


def test_paper_job_fully_sharded() -> None:
    # Both weights as one message of 400 bytes, factor 1/2: 50 + 50 = 100. The gathers wait for what was launched
    # before them: zero 10, copy 5, gather 100, forward 210, loss 20, gather 100, backward 410, reduce-scatter 100,
    # optimizer 60.
    job = simulate(dataclasses.replace(PAPER, strategy="fsdp"))

    window = job.truth.windows[0][1]
    assert window.duration_ns == 10 + 5 + 100 + 210 + 20 + 100 + 410 + 100 + 60
    assert _present(window.categories) == {"compute": 710, "exposed_comm_transfer": 300, "exposed_copy": 5}
    gather, scatter = job.truth.collectives
    assert (gather.kind, gather.elements_in, gather.elements_out, gather.bytes) == ("_allgather_base", 100, 200, 400)
    assert (scatter.kind, scatter.elements_in, scatter.elements_out) == ("_reduce_scatter_base", 200, 100)
    assert (gather.count, scatter.count) == (6, 3)


def test_paper_job_on_cpus() -> None:
    # zero 10, forward 210, loss 20, backward 410, the last bucket 100 in a gap, optimizer 60. No copy.
    job = simulate(dataclasses.replace(PAPER, backend="gloo"))

    for window in job.truth.windows[1]:
        assert window.duration_ns == 810
        assert _present(window.categories) == {"compute": 710, "exposed_comm_transfer": 100}
        assert window.comm_ns == 200


def test_noise_is_small_seeded_and_changes_every_kernel() -> None:
    first, again = (simulate(JobSpec(noise=0.01, seed=7)).truth for _ in range(2))
    other = simulate(JobSpec(noise=0.01, seed=8)).truth

    assert first == again
    assert first.step_time_ns != other.step_time_ns
    assert first.step_time_ns == pytest.approx(simulate(JobSpec()).truth.step_time_ns, rel=0.02)


@pytest.mark.parametrize(
    "spec",
    [
        JobSpec(noise=0.05),
        JobSpec(strategy="fsdp", noise=0.05),
        JobSpec(strategy="zero2", noise=0.05, recompute="non_reentrant"),
        JobSpec(strategy="zero3", noise=0.05, microbatches=2),
        JobSpec(strategy="pipeline", pipeline=2, tensor=2, microbatches=3, clip_norm=True, noise=0.05),
        cpu_job(noise=0.05),
    ],
    ids=lambda spec: spec.strategy if spec.backend == "nccl" else "cpu",
)
def test_truth_obeys_the_conservation_laws(spec: JobSpec) -> None:
    causes = (
        SlowCompute(ranks=(1,), factor=1.2),
        SlowHost(ranks=(2,), factor=8),
        SlowLoader(ranks=(3,), load_ns=30 * MS),
    )
    truth = simulate(dataclasses.replace(spec, causes=causes)).truth

    for windows in truth.windows.values():
        for window in windows:
            exposed = window.categories["exposed_comm_wait"] + window.categories["exposed_comm_transfer"]
            assert sum(window.categories.values()) == window.duration_ns
            assert min(window.categories.values()) >= 0
            assert exposed <= window.comm_ns
            assert sum(end - start for start, end in window.bubbles) <= window.categories["exposed_comm_wait"]
        for before, after in itertools.pairwise(windows):
            assert before.end_ns == after.start_ns


def test_written_trace_is_what_kineto_writes(tmp_path: Path) -> None:
    job = simulate(JobSpec(steps=2))
    files = job.write(tmp_path, file_template="worker-{rank}.json")

    assert [file.name for file in files] == [f"worker-{rank}.json.gz" for rank in range(4)]
    trace = json.loads(gzip.decompress(files[2].read_bytes()))
    assert trace["distributedInfo"]["rank"] == 2
    assert trace["deviceProperties"][2]["name"] == "NVIDIA A100-SXM4-80GB"
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    by_category = {cat: [e for e in events if e["cat"] == cat] for cat in {e["cat"] for e in events}}
    assert set(by_category) == {
        "cpu_op", "cuda_runtime", "gpu_memcpy", "gpu_user_annotation", "kernel", "user_annotation",
    }  # fmt: skip

    launches = {e["args"]["correlation"]: e for e in by_category["cuda_runtime"]}
    operators = {e["args"]["External id"]: e for e in by_category["cpu_op"] + by_category["user_annotation"]}
    work = by_category["kernel"] + by_category["gpu_memcpy"]
    launched = [event for event in work if event["args"]["correlation"] in launches]
    for kernel in launched:
        assert kernel["ts"] >= launches[kernel["args"]["correlation"]]["ts"]
        assert kernel["args"]["External id"] in operators
    flows = [(e["ph"], e["id"]) for e in trace["traceEvents"] if e["ph"] in "sf"]
    assert len(flows) == 2 * len(launched)
    # The device still had these to do when the recording began.
    begun = min(event["ts"] for event in by_category["user_annotation"])
    assert all(event["ts"] + event["dur"] > begun for event in work if event not in launched)
    assert len(work) > len(launched)
    products = [e for e in by_category["cpu_op"] if e["name"] in ("aten::addmm", "aten::mm")]
    assert sum(_flops(e) for e in products) == 2 * job.spec.model.flops_per_step
    reduction = next(e for e in by_category["kernel"] if e["name"].startswith("ncclDevKernel_AllReduce_Sum_bf16"))
    assert reduction["args"]["In msg nelems"] == 4_194_304
    assert reduction["args"]["Process Group Ranks"] == "[0, 1, 2, 3]"


def test_written_sync_has_a_shadow_on_the_device(tmp_path: Path) -> None:
    (file, *_) = simulate(JobSpec(steps=2, causes=(HostSync(),))).write(tmp_path, compress=False)
    events = [event for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == "X"]

    calls = [event for event in events if event["name"] == "cudaStreamSynchronize"]
    shadows = [event for event in events if event["cat"] == "cuda_sync"]
    assert [(e["ts"], e["dur"]) for e in shadows] == [(e["ts"], e["dur"]) for e in calls]
    assert len(calls) == 2


def test_written_times_are_exact_to_the_ns_and_shifted_by_the_clock(tmp_path: Path) -> None:
    job = simulate(JobSpec(ranks=2, steps=1, clock_offsets_ns={1: -5 * MS - 7}))
    for rank, file in enumerate(job.write(tmp_path, compress=False)):
        # Text, not floats: three decimals of a number this large are at the edge of what a float can hold.
        trace = json.loads(file.read_text(), parse_float=lambda text: int(text.replace(".", "")))
        kernels = [e for e in trace["traceEvents"] if e.get("cat") == "kernel"]
        written = sorted((e["ts"] - 4_458_676_000_000_000, e["dur"]) for e in kernels)
        shift = (0, -5 * MS - 7)[rank]
        works = [work for stream in job.hosts[rank].streams.values() for work in stream.works]
        recorded_from = next(event.start_ns for event in job.hosts[rank].events if event.name == "ProfilerStep#10")
        simulated = sorted(
            (work.started + shift, work.ended - work.started)
            for work in works
            if work.kind != "copy" and work.ended > recorded_from
        )
        assert written == simulated
    assert job.truth.clock_correction_ns == {0: 0, 1: 5 * MS + 7}


def test_written_cpu_trace_has_gloo_on_two_threads_and_no_device(tmp_path: Path) -> None:
    (file, *_) = simulate(cpu_job(steps=2)).write(tmp_path, compress=False)
    trace = json.loads(file.read_text())

    gloo = [e for e in trace["traceEvents"] if e["name"] == "gloo:all_reduce"]
    threads = {e["tid"] for e in trace["traceEvents"] if e["ph"] == "M" and "gloo" in e["args"].get("name", "")}
    assert trace["deviceProperties"] == []
    assert {e["cat"] for e in gloo} == {"user_annotation"}
    assert {e["tid"] for e in gloo} <= threads
    assert len(threads) == 2
    assert gloo[0]["args"]["Input type"] == ["float"]
    assert not [e for e in trace["traceEvents"] if e.get("cat") in ("kernel", "cuda_runtime", "gpu_memcpy")]


def test_generator_knows_nothing_of_the_product(root: Path) -> None:
    for file in (root / "tests" / "generator").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.startswith("perfscope")], f"{file} imports the product"


def _flops(event: dict[str, Any]) -> int:
    (rows, inner), (_, columns) = event["args"]["Input Dims"][-2:]
    return int(2 * rows * inner * columns)


def _nothing() -> Program:
    yield from ()


def _wait_for(work: Work) -> Program:
    yield work
