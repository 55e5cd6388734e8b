"""Hosts beside their devices: replayed by hand, and recordings that come back as they were."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.analyzers.replay.engine import Lanes, OpKind, Schedules, replay
from perfscope.analyzers.replay.lanes import ProgramOps, issued_beside, rank_lane
from perfscope.analyzers.whatif.predict import predict
from perfscope.analyzers.whatif.schedules.recorded import editable_schedules
from perfscope.analyzers.whatif.schedules.steps import every_step
from perfscope.analyzers.whatif.whatif import context_of
from perfscope.trace.trace import NEVER, NONE
from tests.analyzers.job.collectives.matching_jobs import Rank
from tests.generator import (
    MS,
    US,
    HostSpec,
    HostSync,
    JobSpec,
    LoaderSpec,
    ModelSpec,
    SlowLoader,
    simulate,
    step_time_ns,
)

FOLDER = Path(__file__).parents[4] / "shared" / "traces"

Op = tuple[OpKind, int, int, int, int, int, int]
"""Kind, operand, host time, device work, reach, lag of the host, lag of the device."""


def alone(*ops: Op, lead: int = 0, transfer: int = 5) -> Schedules:
    """One rank whose collectives are its own, and which starts at 100."""
    columns = np.array(ops, dtype=np.int64).T
    count = int((columns[0] == OpKind.ISSUE).sum())
    nothing = np.empty(0, dtype=np.int64)
    return Schedules(
        ranks=(0,), start_ns=np.array([100]), first=np.array([0, len(ops)]), kind=columns[0], operand=columns[1],
        own_ns=columns[3], lag_ns=columns[6], instance=np.arange(count), previous=np.full(count, NONE),
        gap_ns=np.zeros(count, dtype=np.int64), transfer_ns=np.full(count, transfer), floor_ns=np.full(count, NEVER),
        hold_ns=nothing, marks=int((columns[0] == OpKind.MARK).sum()),
        lanes=Lanes(columns[2], columns[3], columns[4], columns[5], columns[6], nothing, np.array([lead])),
    )  # fmt: skip


def mark(number: int, host: int, work: int, reach: int) -> Op:
    """A mark of where the device is."""
    return (OpKind.MARK, number, host, work, reach, NEVER, 0)


def test_a_device_waits_for_the_launch_that_is_late() -> None:
    """Pieces of 3 and 4 are launched 1 and 6 later: 106 + 4. Launched 5 before the device is there, they wait: 107."""
    assert replay(alone(mark(0, 6, 7, max(1 + 7, 6 + 4)))).mark_ns.tolist() == [110]
    assert replay(alone(mark(0, 6, 7, max(1 + 7, 6 + 4)), lead=5)).mark_ns.tolist() == [107]


def test_a_host_that_waits_for_its_device_launches_the_next_work_later() -> None:
    """Work of 20 launched at once, then a wait that returns 2 after it, then work of 3 launched 4 after that."""
    after = mark(0, 4, 3, 4 + 3)
    waiting = (OpKind.SYNC, NONE, 1, 20, 1 + 20, 2, 0)
    assert replay(alone(waiting, after)).mark_ns.tolist() == [101 + 20 + 2 + 4 + 3]
    assert replay(alone((OpKind.SYNC, NONE, 1, 20, 1 + 20, NEVER, 0), after)).mark_ns.tolist() == [101 + 20 + 3]


def test_a_host_waits_for_what_it_has_noted_only() -> None:
    """The wait is for the first piece (10), while the second (30) still runs."""
    noted = (OpKind.NOTE, 0, 0, 10, 10, 0, 0)
    waiting = (OpKind.SYNC, 0, 1, 30, 1 + 30, 0, 0)
    called = (OpKind.ISSUE, 0, 2, 0, NEVER, 0, NEVER)
    assert replay(alone(noted, waiting, called)).start_ns.tolist() == [100 + 10 + 2]


def test_a_collective_begins_when_it_is_called_and_what_it_needs_is_done() -> None:
    """Called at 103, behind work until 120: there or at once, as it needs that or not. Both go on from its end."""
    for lag, start in ((0, 120), (NEVER, 103)):
        issue = (OpKind.ISSUE, 0, 3, 20, 20, 0, lag)
        device = (OpKind.WAIT, 0, 0, 0, NEVER, 0, 1)
        found = replay(alone(issue, device, mark(0, 0, 0, NEVER), transfer=30))
        assert found.start_ns.tolist() == [start]
        assert found.mark_ns.tolist() == [start + 30 + 1]
        host = (OpKind.JOIN, 0, 0, 0, NEVER, 2, 0)
        found = replay(alone(issue, host, mark(0, 4, 3, 4 + 3), transfer=30))
        assert found.mark_ns.tolist() == [start + 30 + 2 + 4 + 3]


def test_what_is_launched_through_all_segments_reaches_as_far_as_the_pieces_one_by_one() -> None:
    """Any pieces, however they are divided: end = max(end before, launch) + time of each."""
    random = np.random.default_rng(1)
    for _ in range(50):
        gaps, takes = random.integers(0, 20, 30), random.integers(1, 20, 30)
        cuts = [0, *sorted(random.choice(np.arange(1, 30), 4, replace=False).tolist()), 30]
        launched = np.cumsum(gaps)
        end = 0
        for at, took in zip(launched, takes, strict=True):
            end = max(end, int(at)) + int(took)
        ops, host = [], 0
        for number, (low, high) in enumerate(itertools.pairwise(cuts)):
            left = takes[low:high][::-1].cumsum()[::-1]
            reach = int((launched[low:high] - host + left).max())
            ops.append(mark(number, int(launched[high - 1]) - host, int(takes[low:high].sum()), reach))
            host = int(launched[high - 1])
        assert replay(alone(*ops)).mark_ns[-1] == 100 + end


SMALL = ModelSpec(layers=4, tokens=512, width=512, hidden=1024)
JOBS = {
    "a busy device": JobSpec(ranks=2, steps=4),
    "launch-bound": JobSpec(ranks=2, steps=4, model=SMALL, host=HostSpec(operator_ns=20 * US, latency_ns=5 * US)),
    "syncs": JobSpec(ranks=2, steps=4, end_sync=True, causes=(HostSync(),)),
    "launch-bound syncs": JobSpec(ranks=2, steps=4, model=SMALL, end_sync=True, causes=(HostSync(ranks=(1,)),)),
    "FSDP": JobSpec(ranks=2, steps=4, strategy="fsdp", model=SMALL, noise=0.03),
    "ZeRO 3": JobSpec(ranks=4, steps=4, strategy="zero3", end_sync=True, noise=0.03),
    "a pipeline": JobSpec(ranks=4, steps=3, strategy="pipeline", pipeline=4, microbatches=4),
    "a slow loader": JobSpec(ranks=2, steps=8, causes=(SlowLoader(load_ns=40 * MS),)),
    "loading in the process": JobSpec(ranks=2, steps=4, loader=LoaderSpec(workers=0, load_ns=8 * MS)),
}


@pytest.mark.parametrize("name", JOBS)
def test_the_recorded_steps_come_back_and_so_when_all_ops_are_written_anew(tmp_path: Path, name: str) -> None:
    simulate(JOBS[name]).write(tmp_path)
    context = context_of(tmp_path)
    recorded = context.recorded
    assert recorded.with_hosts is not None
    found = replay(recorded.with_hosts)
    assert found.complete
    measured = recorded.steps_ns(replay(recorded.schedules))
    assert np.array_equal(recorded.steps_ns(found), measured)
    written = editable_schedules(context.result, recorded, with_hosts=True)
    for step in list(every_step(written)):
        step.replace(frozenset(), [])
    assert np.abs(recorded.steps_ns(replay(written.compiled())) - measured).max() <= 2


def test_the_launches_decide_where_the_device_is_quick(tmp_path: Path) -> None:
    """Ten times as quick a device gains little where its host cannot launch faster."""
    spec = JOBS["launch-bound"]
    simulate(spec).write(tmp_path)
    quick = replace(SMALL, flops_per_ns=10 * SMALL.flops_per_ns, small_kernel_ns=2 * US, optimizer_kernel_ns=10 * US)
    truth = simulate(replace(spec, model=quick)).truth
    assert truth.step_time_ns > 0.9 * step_time_ns(spec)
    assert predict(context_of(tmp_path), {"compute": "10x"}).mid_ns == pytest.approx(truth.step_time_ns, rel=0.01)


@pytest.mark.skipif(not FOLDER.is_dir(), reason="the folder of real traces is not here")
@pytest.mark.parametrize("name", ["a100_rank3of8", "v100_ddp_rank1of2", "mi300x_eager_single", "h100_eager_single"])
def test_real_recordings_come_back(name: str) -> None:
    context = context_of(FOLDER / name)
    assert context.recorded.with_hosts is not None
    windows = context.recorded.steps_ns(replay(context.recorded.with_hosts))
    assert np.allclose(windows, context.recorded.steps_ns(replay(context.recorded.schedules)), rtol=1e-4)


def test_a_gather_behind_an_earlier_copy_keeps_no_wait_of_its_host() -> None:
    """Its launch at 9 ms, of 1 µs, follows one that waits from 20 µs for a place in the device's queue; it needs the
    copy that was launched at 13 µs. In a replay only what the host does itself between the two comes before it, 7 µs
    and two launches: what the wait was for may come sooner.
    """
    rank = Rank(0, 2, {"0": (0, 1)})
    for number in range(4):
        rank.builder.launched("gemm", (1 + 2 * number) * US, (10 + 10 * number) * US, (20 + 10 * number) * US)
    rank.builder.launched("gemm", 10 * US, 50 * US, 10_000 * US)
    rank.builder.launched("split", 13 * US, 10_000 * US, 10_010 * US)
    rank.builder.launched("gemm", 16 * US, 10_010 * US, 12_000 * US)
    rank.builder.launched("gemm", 20 * US, 12_000 * US, 13_000 * US, call_takes=8_980 * US)
    rank.kernel("_allgather_base", "0", 10_011 * US, 10_100 * US, launch=9_000 * US)
    rank.builder.launched("gemm", 9_010 * US, 13_000 * US, 14_000 * US)
    progress = analyze_rank(rank.builder.build()).progress
    lane = progress.host
    assert lane is not None
    behind = 13 * US + 1
    assert lane.behind_ns.tolist() == [behind]
    time_ns = np.array([10_011 * US])
    issue = ProgramOps.of(
        OpKind.ISSUE, time_ns, lane.behind_ns, np.zeros(1, dtype=np.int64), end_ns=lane.called_ns, begun_ns=time_ns
    )
    found = rank_lane(progress, lane, issue, 10 * US).lanes
    assert 7 * US <= found.host_lag_ns[0] <= 9 * US
    assert found.device_lag_ns.tolist() == [1 * US]


@pytest.mark.parametrize(
    ("ahead", "behind", "free"),
    [
        # Seen ahead in the forward, and behind own work in the backward, as FSDP2's gathers: free in the forward alone.
        ([1, 0, 0, 0], [0, 0, 1, 0], [0, 1, 0, 0]),
        # Ahead in one pass, and behind in none: free in both.
        ([1, 0, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1]),
        # Both were seen in the same pass.
        ([1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]),
        ([0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]),
    ],
)
def test_gathers_that_nobody_saw_wait_do_not_in_their_pass(
    ahead: list[int], behind: list[int], free: list[int]
) -> None:
    """Two of the forward (sort 6) and two of the backward (sort 7)."""
    ops: Any = SimpleNamespace(kind=np.full(4, OpKind.ISSUE), sort=np.array([6, 6, 7, 7]))
    lane: Any = SimpleNamespace(ahead=np.array(ahead, dtype=np.bool_), behind=np.array(behind, dtype=np.bool_))
    assert issued_beside([(ops, lane)])[0].tolist() == [bool(each) for each in free]
