"""Every nanosecond of a step belongs to exactly one category, in random jobs and with random events."""

from __future__ import annotations

import itertools
import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perfscope.results.time_breakdown import TimeBreakdown
from tests.analyzers.measured import measured
from tests.generator import (
    MIB,
    MS,
    US,
    Cause,
    Host,
    HostSpec,
    HostSync,
    JobSpec,
    LoaderSpec,
    ModelSpec,
    NetworkSpec,
    Pause,
    SlowCompute,
    SlowCopy,
    SlowHost,
    SlowLink,
    SlowLoader,
    Work,
    simulate,
)
from tests.generator.chrome import document
from tests.generator.engine import HostEvent

FEW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
"""Each example writes, reads and analyzes a job."""

NS_IN_US = 1e-3
"""Means over steps are exact to a fraction of a nanosecond; this much is a whole one."""


def _causes(ranks: int, steps: Sequence[int]) -> st.SearchStrategy[tuple[Cause, ...]]:
    who = st.one_of(st.none(), st.integers(0, ranks - 1).map(lambda rank: (rank,)))
    when = st.one_of(st.none(), st.sets(st.sampled_from(steps), min_size=1).map(lambda chosen: tuple(sorted(chosen))))
    place = {"ranks": who, "steps": when}
    one = st.one_of(
        st.builds(SlowCompute, factor=st.floats(0.5, 3.0), **place),
        st.builds(SlowLoader, load_ns=st.integers(0, 20 * MS), **place),
        st.builds(SlowHost, factor=st.floats(1.0, 30.0), **place),
        st.builds(Pause, pause_ns=st.integers(1, 5 * MS), name=st.sampled_from([None, "gc"]), **place),
        st.builds(SlowCopy, factor=st.floats(1.0, 50.0), **place),
        st.builds(SlowLink, factor=st.floats(1.0, 20.0)),
        st.builds(HostSync, **place),
    )
    return st.lists(one, max_size=3).map(tuple)


@st.composite
def jobs(draw: st.DrawFn) -> JobSpec:
    """Small jobs of every kind."""
    ranks, steps = draw(st.integers(1, 3)), draw(st.integers(2, 4))
    backend = draw(st.sampled_from(["nccl", "gloo"]))
    return JobSpec(
        ranks=ranks,
        steps=steps,
        warmup=draw(st.integers(0, 2)),
        backend=backend,
        strategy=draw(st.sampled_from(["ddp", "fsdp"])) if backend == "nccl" else "ddp",
        model=ModelSpec(
            layers=draw(st.integers(1, 3)),
            tokens=draw(st.integers(1, 4096)),
            width=256,
            hidden=512,
            small_kernel_ns=draw(st.integers(1, 50 * US)),
        ),
        host=HostSpec(
            operator_ns=draw(st.integers(8, 50 * US)),
            launch_ns=draw(st.integers(1, 10 * US)),
            python_ns=draw(st.integers(0, 20 * US)),
            latency_ns=draw(st.sampled_from([0, 1, 3_217])),
            sync_return_ns=draw(st.integers(0, 100 * US)),
        ),
        loader=LoaderSpec(workers=draw(st.integers(0, 2)), load_ns=draw(st.integers(0, 5 * MS))),
        network=NetworkSpec(busbw_gbps=draw(st.floats(0.5, 300.0)), end_jitter_ns=draw(st.sampled_from([0, 900]))),
        bucket_bytes=draw(st.integers(1, 4 * MIB)),
        end_sync=draw(st.booleans()),
        noise=draw(st.sampled_from([0.0, 0.05])),
        seed=draw(st.integers(0, 99)),
        causes=draw(_causes(ranks, range(10, 10 + steps))),
        clock_offsets_ns={rank: draw(st.integers(-5 * MS, 5 * MS)) for rank in range(ranks)},
    )


@FEW
@given(jobs())
def test_rows_of_simulated_jobs_are_exact(spec: JobSpec) -> None:
    job = simulate(spec)
    with tempfile.TemporaryDirectory() as folder:
        job.write(Path(folder))
        summary = measured(Path(folder))

    assert summary.job.steps == spec.recorded_steps
    for row in summary.time_breakdown:
        _check_laws(row)
        windows = job.truth.windows[row.rank]
        doubtful = _mean_us([window.doubtful_compute_ns for window in windows])
        # Where the first step begins is an estimate if the profiler drained the device: what it is off by is idle time.
        off_us = row.step_time_us - _mean_us([window.duration_ns for window in windows])
        totals = [dict(window.categories) for window in windows]
        totals[0]["idle_host"] += round(off_us * 1e3 * len(windows))
        _check_totals(row, totals, [window.comm_ns for window in windows], doubtful)
    # Steps that follow one another take the job as long as the rank that begins the first one last, or longer. Clocks
    # are aligned by the ends of collectives, which may be 900 ns apart. The ranks' own windows are those of the truth,
    # apart from the estimate above: of a wait for the first batch alone, 11 us of 341, no other step tells.
    assert summary.job.step_time_us >= min(row.step_time_us for row in summary.time_breakdown) - 2


KINDS = st.sampled_from(["compute", "compute", "comm", "comm", "copy", "memset"])
NAMES = {
    "compute": "void at::native::vectorized_elementwise_kernel<4>(int)",
    "comm": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "copy": "Memcpy DtoD (Device -> Device)",
    "memset": "Memset (Device)",
}
LENGTH = 20_000
"""A host step of a soup, ns."""


@st.composite
def soups(draw: st.DrawFn) -> tuple[JobSpec, list[Host]]:
    """Ranks whose streams and threads run anything at any time. Nothing lies across the bounds of steps: a step's first
    launch is its first kernel to start, and a kernel follows everything else of the last step."""
    ranks, steps = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    spec = JobSpec(ranks=ranks, steps=steps, first_step=draw(st.integers(0, 5)))
    return spec, [_soup(draw, rank, spec.recorded_steps) for rank in range(ranks)]


def _soup(draw: st.DrawFn, rank: int, steps: Sequence[int]) -> Host:
    host = Host(rank, 0)
    lag = draw(st.integers(2, 2 * LENGTH))
    end = 0
    for index, step in enumerate(steps):
        begin = index * LENGTH
        first = begin + lag + draw(st.integers(0, LENGTH // 2))
        _host_event(host, "user_annotation", f"ProfilerStep#{step}", "main", begin, begin + LENGTH, step)
        _work(host, "compute", 7, "main", begin + 1, first, draw(st.integers(1, 500)), step)
        for kind, stream, thread, launch, delay, length in draw(
            st.lists(
                st.tuples(
                    KINDS,
                    st.sampled_from([7, 20, 24]),
                    st.sampled_from(["main", "autograd"]),
                    st.integers(2, LENGTH - 2),
                    st.integers(0, LENGTH),
                    st.integers(0, 6_000),
                ),
                max_size=12,
            )
        ):
            started = max(begin + launch, first) + delay
            _work(host, kind, stream, thread, begin + launch, started, length, step)
            end = max(end, started + length)
        for name, thread, start, length in draw(
            st.lists(
                st.tuples(
                    st.sampled_from(["aten::mm", "cudaStreamSynchronize", "aten::item", "loader", "user"]),
                    st.sampled_from(["main", "autograd"]),
                    st.integers(0, LENGTH - 1),
                    st.integers(0, LENGTH),
                ),
                max_size=8,
            )
        ):
            _anything(host, name, thread, begin + start, min(begin + start + length, begin + LENGTH), step)
        end = max(end, first + 500)
    _work(host, "compute", 7, "main", len(steps) * LENGTH - 1, max(end, len(steps) * LENGTH), 10, steps[-1])
    return host


def _anything(host: Host, name: str, thread: str, start: int, end: int, step: int) -> None:
    if name == "loader":
        name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
        _host_event(host, "user_annotation", name, "main", start, end, step)
    elif name == "cudaStreamSynchronize":
        _host_event(host, "cuda_runtime", name, thread, start, end, step)
    else:
        _host_event(host, "user_annotation" if name == "user" else "cpu_op", name, thread, start, end, step)


def _host_event(host: Host, kind: str, name: str, thread: str, start: int, end: int, step: int) -> None:
    ids = len(host.events) + 1
    host.events.append(HostEvent(kind, name, thread, start, end, step, ids, correlation=100_000 + ids))


def _work(host: Host, kind: str, stream: int, thread: str, launch: int, start: int, length: int, step: int) -> None:
    number = host.correlate()
    host.events.append(HostEvent("cuda_runtime", "cudaLaunchKernel", thread, launch, launch + 1, step, 0, number))
    args: dict[str, Any] = {"bytes": 64}
    if kind == "comm":
        args = {
            "Collective name": "allreduce",
            "In msg nelems": 1024,
            "Out msg nelems": 1024,
            "Group size": 2,
            "dtype": "BFloat16",
            "Process Group Name": "0",
            "Process Group Ranks": "[0, 1]",
        }
    elif kind == "compute":
        args = {}
    work = Work(host.rank, kind, NAMES[kind], step, launch, args=args, correlation=number)
    work.start_ns, work.end_ns = start, start + length
    host.stream(stream).put(work)


@FEW
@given(soups())
def test_rows_of_anything_are_exact(soup: tuple[JobSpec, list[Host]]) -> None:
    spec, hosts = soup
    with tempfile.TemporaryDirectory() as folder:
        for host in hosts:
            Path(folder, f"rank{host.rank}.json").write_text(document(spec, host), encoding="utf-8")
        summary = measured(Path(folder))

    assert summary.job.steps == spec.recorded_steps
    assert [row.rank for row in summary.time_breakdown] == [host.rank for host in hosts]
    for row, host in zip(summary.time_breakdown, hosts, strict=True):
        _check_laws(row)
        works = [work for stream in host.streams.values() for work in stream.works]
        totals = [_brute_force(works, start, end) for start, end in _bounds(works, spec.recorded_steps)]
        _check_totals(row, totals, [total["comm"] for total in totals])


GLOO = st.tuples(
    st.sampled_from(["gloo:all_reduce", "gloo:all_gather", "gloo:broadcast", "gloo:send", "gloo:recv"]),
    st.sampled_from(["0", "1", "main"]),
    st.integers(0, LENGTH - 1),
    st.integers(0, LENGTH),
)
"""(name, thread, start in its step, length)"""


@st.composite
def cpu_soups(draw: st.DrawFn) -> tuple[JobSpec, Host, list[Work]]:
    """A rank without a device: operators in turn on its main thread, gloo's ranges anywhere on any thread, loaders in
    between. Also returns all that ran, as works."""
    spec = JobSpec(ranks=1, steps=draw(st.integers(1, 3)), backend="gloo")
    host, works = Host(0, 0), []
    for index, step in enumerate(spec.recorded_steps):
        begin = index * LENGTH
        _host_event(host, "user_annotation", f"ProfilerStep#{step}", "main", begin, begin + LENGTH, step)
        cuts = sorted(draw(st.sets(st.integers(1, LENGTH - 1), min_size=1, max_size=16)))
        for start, end in zip(cuts[0::2], cuts[1::2], strict=False):
            name = draw(st.sampled_from(["aten::mm", "aten::add_", "aten::native_layer_norm", "loader"]))
            _anything(host, name, "main", begin + start, begin + end, step)
            if name != "loader":
                works.append(_ran("compute", name, begin + start, begin + end, step))
        for name, lane, start, length in draw(st.lists(GLOO, max_size=8)):
            work = _ran("comm", name, begin + start, begin + start + length, step)
            works.append(work)
            if lane == "main":
                _host_event(host, "user_annotation", name, "main", work.started, work.ended, step)
            else:
                work.lane = int(lane)
                work.args = {"Input Dims": [[1024]], "Input type": ["float"]}
                host.stream(20, lanes=2).put(work)
    return spec, host, works


def _ran(kind: str, name: str, start: int, end: int, step: int) -> Work:
    return Work(0, kind, name, step, start, start_ns=start, end_ns=end)


@FEW
@given(cpu_soups())
def test_rows_of_anything_on_cpus_are_exact(soup: tuple[JobSpec, Host, list[Work]]) -> None:
    spec, host, works = soup
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "rank0.json").write_text(document(spec, host), encoding="utf-8")
        summary = measured(Path(folder))

    assert summary.job.steps == spec.recorded_steps
    (row,) = summary.time_breakdown
    _check_laws(row)
    starts = [index * LENGTH for index in range(spec.steps)]
    totals = [_brute_force(works, start, start + LENGTH) for start in starts]
    _check_totals(row, totals, [total["comm"] for total in totals])


def _bounds(works: Sequence[Work], steps: Sequence[int]) -> list[tuple[int, int]]:
    """A step begins once the host has begun it and all earlier work has ended, with its first kernel at the latest. The
    first one, before which nothing is recorded, is as late after the host as it ends, or as the last one does; or,
    where others have their first launch at least half as late, begins as long before its first kernel as those usually
    do."""
    kernels = [work for work in works if work.kind in ("compute", "comm")]
    opening = [min((w for w in kernels if w.step == step), key=lambda work: work.queued_ns) for step in steps]
    first, lead = [w.started for w in opening], [w.queued_ns - n * LENGTH for n, w in enumerate(opening)]
    done = [max((w.ended for w in works if w.step < step), default=0) for step in [*steps, steps[-1] + 1]]
    edges = [max(index * LENGTH, ended) for index, ended in enumerate(done)]
    starts = [min(start, edge) for start, edge in zip(first, edges, strict=False)]
    ends = [*starts[1:], edges[-1]]
    idle = [first[n] - start for n, start in enumerate(starts) if n and 2 * lead[n] >= lead[0]]
    lag = max(ends[0] - LENGTH, 0)
    if lag:
        last = ends[-1] - LENGTH * len(steps)
        lag = max(int(first[0] - statistics.median(idle)), 0) if idle else max(lag, last)
    return list(zip([min(first[0], lag), *starts[1:]], ends, strict=True))


def _brute_force(works: Sequence[Work], start: int, end: int) -> dict[str, int]:
    """What runs between any two changes, by looking."""
    totals = dict.fromkeys(("compute", "exposed_comm_wait", "exposed_copy", "idle_host", "comm"), 0)
    bounds = sorted({start, end, *(t for w in works for t in (w.started, w.ended) if start < t < end)})
    for begin, stop in itertools.pairwise(bounds):
        kinds = {work.kind for work in works if work.started <= begin < work.ended}
        if "compute" in kinds:
            row = "compute"
        elif "comm" in kinds:
            row = "exposed_comm_wait"
        else:
            row = "exposed_copy" if kinds else "idle_host"
        totals[row] += stop - begin
        totals["comm"] += stop - begin if "comm" in kinds else 0
    return totals


def _check_laws(row: TimeBreakdown) -> None:
    row.self_check()
    assert min(row.categories().values()) >= 0
    assert row.hidden_comm_us >= 0
    assert math.fsum(row.categories().values()) == pytest.approx(row.step_time_us, abs=NS_IN_US / 1e3)
    exposed = row.exposed_comm_wait_us + row.exposed_comm_transfer_us
    assert exposed + row.hidden_comm_us == pytest.approx(row.comm_us, abs=NS_IN_US / 1e3)


def _check_totals(
    row: TimeBreakdown, totals: Sequence[dict[str, int]], comm_ns: Sequence[int], doubtful_us: float = 0.0
) -> None:
    """Compute, exposed communication, exposed copies, all idle time and communication, to the nanosecond.

    ``doubtful_us`` of the compute may be counted as what was left had it not been compute.
    """
    found = row.categories()
    for prefix in ("compute", "exposed_comm", "exposed_copy", "idle"):
        reported = math.fsum(us for name, us in found.items() if name.startswith(prefix))
        true = _mean_us([sum(ns for name, ns in total.items() if name.startswith(prefix)) for total in totals])
        if prefix == "compute":
            assert true - doubtful_us - NS_IN_US <= reported <= true + NS_IN_US
        else:
            assert true - NS_IN_US <= reported <= true + doubtful_us + NS_IN_US, prefix
    assert row.comm_us == pytest.approx(_mean_us(comm_ns), abs=NS_IN_US / 2)


def _mean_us(ns: Sequence[int]) -> float:
    return sum(ns) / len(ns) / 1e3
