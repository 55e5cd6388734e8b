"""A rank at its peers' pace: the finding and the what-if give one number, that of the job without the cause."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from perfscope.analyzers.replay.pace import _capped, _issued_sooner
from perfscope.analyzers.replay.peers import Peers, Segments
from perfscope.analyzers.whatif.predict import predict
from perfscope.analyzers.whatif.whatif import context_of
from perfscope.results.categories import TimeCategory
from tests.analyzers.measured import measured
from tests.emulator import MS, US, Cause, Cpu, Job, Loader, Model, Recording, emulate, step_ns
from tests.emulator.draw import draw

SMALL = Job(
    ranks=2, noise=0.005, model=Model(blocks=2), loader=Loader(workers=0, load_ns=MS), recording=Recording(steps=4)
)
BUSY_HOST = replace(SMALL, cpu=Cpu(python_ns=20 * US, operator_ns=20 * US))


def _step_of(folder: Path, rank: int) -> tuple[float, float]:
    """(measured step less what the finding says that a rank costs, the same as a what-if predicts it)."""
    context = context_of(folder, workers=1)
    (row,) = [row for row in measured(folder).stragglers if row.ranks in ((rank,), ())]
    return context.result.step_ns - 1e3 * row.lost_us, predict(context, {f"rank.{rank}": "peers"}).mid_ns


@pytest.mark.parametrize(
    ("job", "cause"),
    [
        (SMALL, Cause("slow compute", 1.4, ranks=(1,))),
        (SMALL, Cause("slow loader", 3.0, ranks=(1,))),
        (SMALL, Cause("slow host", 3.0, ranks=(1,))),
        (BUSY_HOST, Cause("slow host", 2.0, ranks=(1,))),
        (BUSY_HOST, Cause("pause", 2 * MS, ranks=(1,), how="log")),
        (BUSY_HOST, Cause("sync", ranks=(1,))),
    ],
    ids=lambda one: "" if isinstance(one, Job) else one.kind,
)
def test_finding_and_what_if_agree_with_the_job_without_the_cause(tmp_path: Path, job: Job, cause: Cause) -> None:
    emulate(replace(job, causes=(cause,))).write(tmp_path)
    found, predicted = _step_of(tmp_path, 1)
    assert found == pytest.approx(predicted, rel=0.001)
    assert predicted == pytest.approx(step_ns(job), rel=0.05)


@pytest.mark.scale
@pytest.mark.parametrize("seed", [1003, 1012, 1015, 1016, 1021, 1043, 5017, 5100])
def test_they_agree_on_random_jobs(tmp_path: Path, seed: int) -> None:
    drawn = draw(seed)
    (rank,) = next(plant.ranks for plant in drawn.plants if plant.ranks is not None)
    emulate(drawn.job).write(tmp_path)
    found, predicted = _step_of(tmp_path, rank)
    assert found == pytest.approx(predicted, rel=0.001)


def test_the_longest_is_shortened_first() -> None:
    parts = np.array([3, 100, 0, 5, 20])
    assert _capped(parts, 128).tolist() == parts.tolist()
    assert _capped(parts, 38).tolist() == [3, 15, 0, 5, 15]
    assert _capped(parts, 8).tolist() == [2, 2, 0, 2, 2]
    assert _capped(parts, 0).tolist() == [0] * 5


@pytest.mark.parametrize(
    ("lags", "sooner"),
    [
        # Three issues of rank 1, which is late to all of them, and of its peers.
        ([[-900, 0, -300], [0, 0, 0], [-700, 20, -500]], {0: -700, 2: -300}),
        ([[-900, 0, -300], [-1000, 0, -400], [-700, 20, -500]], {}),  # it is as soon as they are
        ([[-900, 0, 50], [0, 0, 0]], {0: -900}),
    ],
)
def test_what_a_late_host_issues_is_ready_as_soon_as_on_its_peers(
    lags: list[list[int]], sooner: dict[int, int]
) -> None:
    ranks = len(lags)
    anchors = np.tile([-1, 2, 4, 7, 9], (ranks, 1))
    device_lag = [np.full(10, 99, dtype=np.int64) for _ in lags]
    for mine, each in zip(device_lag, lags, strict=True):
        mine[[2, 4, 7]] = each
    nothing = np.empty((ranks, 0), dtype=np.int64)
    steps = np.zeros((ranks, 1, len(TimeCategory)), dtype=np.int64)
    of = Segments(anchors, np.zeros((ranks, 4, 1), dtype=np.int64), np.zeros(4, dtype=np.int64))
    peers = Peers(tuple(range(ranks)), nothing, nothing, steps, nothing[0], of, of)
    recorded: Any = SimpleNamespace(
        with_hosts=SimpleNamespace(line_of=lambda rank: rank),
        lanes=[SimpleNamespace(lanes=SimpleNamespace(device_lag_ns=mine)) for mine in device_lag],
    )
    ops, found = _issued_sooner(recorded, peers, 1, (1,))
    assert dict(zip(ops.tolist(), found.tolist(), strict=True)) == {[2, 4, 7][at]: ns for at, ns in sooner.items()}
