"""Pipelines that do all forwards first, with other micro-batches: hosts run ahead until their devices' queues are full.

A host that nothing stops waits in launches, for kernels that its device begins, and for messages: neither is its work.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from perfscope.analyzers.replay.engine import OpKind
from perfscope.analyzers.whatif import microbatches
from perfscope.analyzers.whatif.change import CannotReplay, Context
from perfscope.analyzers.whatif.predict import predict
from perfscope.analyzers.whatif.schedules.hosts import HostPart
from perfscope.analyzers.whatif.schedules.ops import Collective, RankOp, ScheduleOp
from perfscope.analyzers.whatif.stage_schedules import Exchanges, Piece, StageSchedule, StageStep, _step
from perfscope.analyzers.whatif.whatif import context_of
from perfscope.results.categories import TimeCategory
from tests.emulator.emulate import emulate, step_ns
from tests.emulator.spec import Cause, Cpu, Job, Model, Network, Recording

pytestmark = pytest.mark.scale

GPIPE = Job(
    strategy="pipeline", gpipe=True, ranks=4, stages=4, microbatches=8, noise=0.0, model=Model(tokens=65536),
    recording=Recording(steps=4),
)  # fmt: skip
QUICK = Cpu(python_ns=300, engine_ns=300, operator_ns=500, launch_ns=1000, latency_ns=3000, collective_ns=5000)
SHORT = replace(
    GPIPE, cpu=QUICK, model=Model(blocks=16, tokens=16384, width=512), network=Network(latency_ns=10_000, gbps=200.0)
)
LONG = replace(GPIPE, microbatches=4, model=replace(GPIPE.model, blocks=32))


@pytest.mark.parametrize(
    ("job", "counts"),
    [
        pytest.param(replace(GPIPE, ranks=2, stages=2), (4, 16, 32), id="no stage between others"),
        pytest.param(GPIPE, (2, 16, 32), id="two stages between others"),
        pytest.param(replace(GPIPE, sends_awaited=False), (4, 32), id="sends waited for at the end"),
        pytest.param(LONG, (2, 8, 16), id="every launch waits for long"),
        pytest.param(SHORT, (4, 16, 32), id="every launch waits shortly"),
        pytest.param(replace(GPIPE, gpipe=False), (4, 32), id="1F1B"),
        pytest.param(replace(GPIPE, causes=(Cause("slow compute", 1.3, (1,)),)), (4, 16), id="a slow stage"),
        pytest.param(replace(GPIPE, network=Network(gbps=20.0)), (4, 16), id="slow links"),
        pytest.param(replace(GPIPE, item_every=1), (16,), id="hosts that wait once per step"),
        pytest.param(replace(GPIPE, model=Model(tokens=4096, width=512)), (4, 16), id="devices wait for hosts"),
    ],
)
def test_the_emulated_step(tmp_path: Path, job: Job, counts: tuple[int, ...]) -> None:
    emulate(job).write(tmp_path)
    context = context_of(tmp_path, workers=1)
    for count in counts:
        found = predict(context, {"pipeline.microbatches": str(count)})
        truth = step_ns(replace(job, microbatches=count))
        assert found.mid_ns == pytest.approx(truth, rel=0.05)
        assert found.low_ns <= truth <= found.high_ns


@pytest.mark.parametrize(("joins_own", "waits"), [(True, {OpKind.JOIN: 7.0}), (False, {})])
def test_a_wait_for_an_earlier_message_is_none_of_the_exchange(joins_own: bool, waits: dict[OpKind, float]) -> None:
    """A forward's activations are sent, then the next ones received: the host waits for those, or for the sends of the
    exchange before.
    """
    messages = [RankOp(1, Collective("send_recv", 0, 4096, 2, 1), 0) for _ in range(6)]

    def op(kind: OpKind, message: RankOp, compute_ns: float = 0.0) -> ScheduleOp:
        made = ScheduleOp.of(kind, message, 1)
        made.own_ns[TimeCategory.COMPUTE] = compute_ns
        made.host = HostPart.only_lag(7.0)
        return made

    pieces, places = [], []
    for number in range(1, 6):
        places.append(len(pieces))
        pieces.append(Piece([], op(OpKind.ISSUE, messages[number], 1e6)))
        pieces.append(Piece([], op(OpKind.WAIT, messages[number])))
        pieces.append(Piece([], op(OpKind.JOIN, messages[number if joins_own else number - 1])))
    step = _step(pieces, places, op(OpKind.ISSUE, messages[0]), 1, ["F"] * 5)
    assert step.exchanges.host_waits == waits


def test_what_cannot_be_written_anew_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 ms; in an even order as many micro-batches would take 109, or 111."""
    emulate(GPIPE).write(tmp_path)
    context = context_of(tmp_path, workers=1)
    for again_ms, refused in ((109.0, False), (111.0, True)):
        steps = iter((100e6, again_ms * 1e6, 100e6, 100e6, 100e6))
        monkeypatch.setattr(microbatches, "_step_ns", lambda *_, steps=steps: next(steps))
        microbatches._LEFT_OUT.clear()
        if refused:
            with pytest.raises(CannotReplay, match=r"the 8 recorded micro-batches.* 1\.11 times as long"):
                predict(context, {"pipeline.microbatches": "16"})
        else:
            predict(context, {"pipeline.microbatches": "16"})


@pytest.mark.parametrize(("times", "ms"), [(2.0, 4.0), (4.0, 12.0), (0.5, 2.0)])
def test_what_starting_other_kernels_takes(monkeypatch: pytest.MonkeyPatch, times: float, ms: float) -> None:
    """Of 20 ms of computation per step, in 10 passes, starting takes a fifth: 4 ms for as many kernels."""
    monkeypatch.setattr(microbatches, "_of_starting", lambda *_: 0.2)
    own = ScheduleOp(OpKind.MARK, np.zeros(len(TimeCategory)))
    own.own_ns[TimeCategory.COMPUTE] = 2e6
    exchanges = Exchanges(own, own, {})
    steps = [StageStep(number, {"F": [Piece([], own)] * 5, "B": [Piece([], own)] * 5}, exchanges) for number in (1, 2)]
    result = SimpleNamespace(partials={0: None}, steps=None)
    context = cast("Context", SimpleNamespace(result=result))
    stage = StageSchedule(0, steps, [], {}, {}, frozenset())
    assert microbatches._starting_ns(context, stage, times) == pytest.approx(ms * 1e6)
