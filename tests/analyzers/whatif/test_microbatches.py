"""Another number of micro-batches, predicted from one recording against the pipeline simulated with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from perfscope.analyzers.replay.engine import OpKind
from perfscope.analyzers.whatif.change import BadSetting, CannotReplay, Context
from perfscope.analyzers.whatif.microbatches import _as_long
from perfscope.analyzers.whatif.pipeline_turns import Hop, Work, turns
from perfscope.analyzers.whatif.predict import predict
from perfscope.analyzers.whatif.schedules.editable import EditableSchedules
from perfscope.analyzers.whatif.schedules.ops import Collective, RankOp, ScheduleOp
from perfscope.analyzers.whatif.stage_schedules import Layout, _lanes, _pieces
from perfscope.analyzers.whatif.whatif import context_of
from perfscope.results.categories import TimeCategory
from tests.analyzers.job.pipelines.pipeline_jobs import COALESCED, GPIPE, INTERLEAVED, pipeline
from tests.analyzers.replay.cpu_pipelines import CpuPipeline
from tests.emulator.emulate import emulate, step_ns
from tests.emulator.spec import Job, Model, Network, Recording
from tests.generator import ExtraLayers, HostSpec, HostSync, JobSpec, ModelSpec, NetworkSpec, simulate, step_time_ns

pytestmark = pytest.mark.scale

MODEL = ModelSpec(layers=8, tokens=16384)
ONE_F_ONE_B = pipeline(model=MODEL, end_sync=True)
JOBS = {
    "1F1B": ONE_F_ONE_B,
    "1F1B, both ways in one kernel": replace(ONE_F_ONE_B, schedule=COALESCED),
    "GPipe": replace(ONE_F_ONE_B, schedule=GPIPE),
    "noise": replace(ONE_F_ONE_B, noise=0.02),
    "tensor parallel": replace(ONE_F_ONE_B, ranks=8, tensor=2),
    "two copies": replace(ONE_F_ONE_B, ranks=8),
    "slow network": replace(ONE_F_ONE_B, network=NetworkSpec(busbw_gbps=20.0, alpha_ns=30_000)),
    "uneven stages": replace(ONE_F_ONE_B, causes=(ExtraLayers(stages=(2,), layers=1),)),
    # Its transfers take as long as its passes, so that what is handed over at one moment is waited for at another.
    "two stages, tensor parallel": replace(
        ONE_F_ONE_B, ranks=4, pipeline=2, tensor=2, microbatches=4, clip_norm=True,
        network=NetworkSpec(busbw_gbps=23.0, alpha_ns=62_000),
    ),
    "the same, both ways in one kernel": replace(
        ONE_F_ONE_B, ranks=4, pipeline=2, tensor=2, microbatches=4, clip_norm=True, schedule=COALESCED,
        network=NetworkSpec(busbw_gbps=23.0, alpha_ns=62_000),
    ),
    "two stages": replace(ONE_F_ONE_B, ranks=2, pipeline=2, microbatches=4),
}  # fmt: skip


class Recordings:
    """Every recorded job once, made when it is first asked for: a process that runs few of the tests makes few."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Context] = {}

    def __getitem__(self, name: str) -> Context:
        if name not in self._made:
            simulate(JOBS[name]).write(self._folder / str(len(self._made)))
            self._made[name] = context_of(self._folder / str(len(self._made)), workers=1)
        return self._made[name]


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Recordings:
    return Recordings(tmp_path_factory.mktemp("recordings"))


@pytest.mark.parametrize("count", [4, 16])
@pytest.mark.parametrize("name", JOBS)
def test_the_prediction_comes_true(recordings: Recordings, name: str, count: int) -> None:
    found = predict(recordings[name], {"pipeline.microbatches": str(count)})
    truth = step_time_ns(JOBS[name].in_microbatches(count))
    assert found.mid_ns == pytest.approx(truth, rel=0.05)
    assert found.low_ns <= found.mid_ns <= found.high_ns


@pytest.mark.parametrize("name", ["1F1B", "GPipe", "tensor parallel", "two copies", "two stages, tensor parallel"])
def test_four_times_as_many(recordings: Recordings, name: str) -> None:
    count = 4 * JOBS[name].microbatches
    asked = {"pipeline.microbatches": str(count)}
    truth = step_time_ns(JOBS[name].in_microbatches(count))
    if name == "tensor parallel":
        # Its collectives have one size: what a quarter of it takes depends on a latency that is assumed.
        with pytest.raises(CannotReplay, match="latency and bandwidth cannot be separated"):
            predict(recordings[name], asked)
        return
    found = predict(recordings[name], asked)
    assert found.mid_ns == pytest.approx(truth, rel=0.02)
    assert found.low_ns <= truth <= found.high_ns


def test_a_host_that_waits_once_per_step_still_does_so_once(tmp_path: Path) -> None:
    """Behind the last of four forwards of a stage ``.item()`` returns late: behind one of eight as well."""
    late = HostSpec(sync_return_ns=500_000)
    spec = replace(ONE_F_ONE_B, microbatches=4, host=late, end_sync=False, causes=(HostSync(ranks=(1,)),))
    spec = replace(spec, model=replace(MODEL, layers=4, tokens=2048), network=NetworkSpec(busbw_gbps=600.0))
    simulate(spec).write(tmp_path)
    found = predict(context_of(tmp_path), {"pipeline.microbatches": "8"})
    assert found.mid_ns == pytest.approx(step_time_ns(spec.in_microbatches(8)), rel=0.03)


def test_as_many_as_there_are_change_nothing(recordings: Recordings) -> None:
    found = predict(recordings["1F1B"], {"pipeline.microbatches": "8"})
    assert found.mid_ns == pytest.approx(found.measured_ns)
    # So few steps do not show the job's mean exactly.
    assert found.low_ns < 0.99 * found.mid_ns < 1.01 * found.mid_ns < found.high_ns


def test_together_with_a_quicker_network(recordings: Recordings) -> None:
    asked = {"pipeline.microbatches": "16", "network.bandwidth": "4x"}
    quick = replace(JOBS["slow network"], network=NetworkSpec(busbw_gbps=80.0, alpha_ns=30_000))
    truth = step_time_ns(quick.in_microbatches(16))
    assert predict(recordings["slow network"], asked).mid_ns == pytest.approx(truth, rel=0.05)


def test_what_cannot_be_written_down_anew_is_refused(tmp_path: Path) -> None:
    asked = {"pipeline.microbatches": "16"}
    simulate(pipeline(schedule=INTERLEAVED)).write(tmp_path / "interleaved")
    with pytest.raises(CannotReplay, match=r"interleaved, 2 chunks"):
        predict(context_of(tmp_path / "interleaved"), asked)
    simulate(pipeline()).write(tmp_path / "part", ranks=[0, 1, 2])
    with pytest.raises(CannotReplay, match=r"missing|stages are known"):
        predict(context_of(tmp_path / "part"), asked)
    simulate(JobSpec(ranks=2, steps=3)).write(tmp_path / "ddp")
    with pytest.raises(CannotReplay, match="no pipeline"):
        predict(context_of(tmp_path / "ddp"), asked)


def test_a_number_is_asked_for(recordings: Recordings) -> None:
    for value in ("0", "many", "-4", "1.5"):
        with pytest.raises(BadSetting, match=r"pipeline\.microbatches"):
            predict(recordings["1F1B"], {"pipeline.microbatches": value})


class TestSchedules:
    def test_one_forward_one_backward_in_two_stages(self) -> None:
        activation, gradient = Hop(True, 1, True), Hop(False, 1, False)
        assert turns("1f1b", 2, 0, 2) == [
            Work("F"), (activation,), Work("F"), (activation, gradient), Work("B"), (gradient,), Work("B"),
        ]  # fmt: skip
        into, out = Hop(False, 0, True), Hop(True, 0, False)
        assert turns("1f1b", 2, 1, 2) == [(into,), Work("FB"), (into, out), Work("FB"), (out,)]

    @pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
    @pytest.mark.parametrize("microbatches", [1, 3, 4, 9])
    def test_every_stage_sees_every_microbatch_twice_and_sends_what_its_neighbours_receive(
        self, schedule: str, microbatches: int
    ) -> None:
        stages = 4
        listed = [turns(schedule, stages, stage, microbatches) for stage in range(stages)]
        for stage, own in enumerate(listed):
            works = "".join(turn.passes for turn in own if isinstance(turn, Work))
            assert (works.count("F"), works.count("B")) == (microbatches, microbatches)
            hops = [hop for turn in own if not isinstance(turn, Work) for hop in turn]
            for other in {hop.stage for hop in hops}:
                back = [
                    (hop.forward, hop.sends) for turn in listed[other] if not isinstance(turn, Work) for hop in turn
                    if hop.stage == stage
                ]  # fmt: skip
                # One after the other on one stream, both ends in the same order: nobody waits for ever.
                assert [(hop.forward, not hop.sends) for hop in hops if hop.stage == other] == back


@pytest.mark.parametrize(
    ("recorded", "at_once", "streams"),
    [
        (((3, 3), (3, 3)), False, [0, 0, 0, 0]),
        (((3, 3), (5, 5)), False, [0, 0, 1, 1]),
        (((3, 4), (5, 6)), False, [0, 1, 2, 3]),
        (((3, 3), (3, 3)), True, [0, 1, 2, 3]),
    ],
)
def test_messages_share_the_streams_that_they_were_recorded_on(
    recorded: tuple[tuple[int, int], tuple[int, int]], at_once: bool, streams: list[int]
) -> None:
    """A stage between two, whose messages with them ran on these streams; 7 are known already."""
    layout = Layout("gpipe", 3, 4, {0: 0, 1: 1, 2: 2}, {1: {0: 0, 2: 2}}, frozenset({0}), at_once)
    message = Collective("send_recv", 0, 100, 2, 0)
    issues = {
        (stage, sends): ScheduleOp.of(OpKind.ISSUE, RankOp(1, message, lane, sends=sends), None)
        for stage, ways in zip((0, 2), recorded, strict=True)
        for sends, lane in zip((True, False), ways, strict=True)
    }
    schedules = SimpleNamespace(lanes=7)
    lanes = _lanes(cast("EditableSchedules", schedules), layout, issues)
    assert [lane - 7 for lane in lanes.values()] == streams
    assert schedules.lanes == 7 + len(set(streams))


PIPELINE = Job(strategy="pipeline", ranks=2, stages=2, noise=0.0, recording=Recording(steps=3))


@pytest.mark.parametrize(
    ("job", "count"),
    [
        # The emulated hosts issue a step's first recv while the device is in the step before.
        (replace(PIPELINE, microbatches=4, model=Model(tokens=65536)), 8),
        # The first of two stages has no backward right before a forward.
        (replace(PIPELINE, microbatches=2, model=Model(tokens=65536)), 4),
        # Devices wait for their hosts, which take as long for each pass and each message.
        (replace(PIPELINE, microbatches=8, model=Model(tokens=4096, width=512)), 16),
        (replace(PIPELINE, microbatches=8, model=Model(tokens=4096, width=512)), 32),
        (replace(PIPELINE, microbatches=16, model=Model(tokens=4096, width=512)), 8),
        # As the hosts take longer than their devices for each pass, so for fewer passes it is the devices.
        (replace(PIPELINE, microbatches=8, model=Model(tokens=4096, width=512)), 4),
    ],
)
def test_emulated_hosts_set_the_pace_of_a_pipeline_or_its_devices_do(tmp_path: Path, job: Job, count: int) -> None:
    emulated = emulate(job)
    emulated.write(tmp_path)
    answer = predict(context_of(str(tmp_path)), {"pipeline.microbatches": str(count)})
    truth = step_ns(replace(job, microbatches=count))
    assert answer.mid_ns == pytest.approx(truth, rel=0.05)
    assert answer.low_ns <= truth <= answer.high_ns


def test_gradients_reduced_in_one_of_two_passes_are_reduced_once(tmp_path: Path) -> None:
    """The last of two stages has two passes between its messages; over a slow network its gradients take long."""
    slow = Network(latency_ns=50_000, gbps=4.0)
    job = Job(strategy="pipeline", ranks=8, ranks_per_host=8, stages=2, microbatches=2, noise=0.0,
              model=Model(blocks=4, tokens=4096, width=2048), network=slow, recording=Recording(steps=4))  # fmt: skip
    emulate(job).write(tmp_path)
    found = predict(context_of(tmp_path), {"pipeline.microbatches": "4"})
    assert found.mid_ns == pytest.approx(step_ns(replace(job, microbatches=4)), rel=0.03)


@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize(("product", "python"), [(1000.0, 400.0), (600.0, 1500.0), (600.0, 2500.0)])
def test_on_cpus_python_takes_as_long_for_each_pass(tmp_path: Path, product: float, python: float, count: int) -> None:
    """Of 4 micro-batches; more of them are slower where Python takes longer than what it computes."""
    CpuPipeline(product=product, python=python).write(tmp_path / "recorded")
    context = context_of(tmp_path / "recorded")
    other = CpuPipeline(product=product * 4 / count, python=python, batches=count)
    other.write(tmp_path / "other")
    found = predict(context, {"pipeline.microbatches": str(count)})
    true_ns = 1e3 * other.took / other.steps
    assert found.mid_ns == pytest.approx(true_ns, rel=0.055)
    assert (found.mid_ns > found.measured_ns) == (true_ns > found.measured_ns) or product > python


@pytest.mark.parametrize("all_forwards_first", [False, True])
def test_passes_that_mostly_run_python(tmp_path: Path, all_forwards_first: bool) -> None:
    """Their forwards compute a thirtieth of what the backwards do, so that computation alone does not tell them."""
    recorded = CpuPipeline(
        product=4000.0, forward=0.016, python=4000.0, ranges=False, all_forwards_first=all_forwards_first
    )
    recorded.write(tmp_path / "recorded")
    other = replace(recorded, product=recorded.product / 2, batches=8)
    other.write(tmp_path / "other")
    context = context_of(tmp_path / "recorded")
    found = predict(context, {"pipeline.microbatches": "8"})
    assert found.mid_ns == pytest.approx(1e3 * other.took / other.steps, rel=0.055)


def test_what_a_schedule_written_anew_leaves_out_is_part_of_the_prediction() -> None:
    assert _as_long(40.0, 32.0) == 1.25
    assert _as_long(40.0, 41.0) == 1.0  # nothing is left out
    assert _as_long(0.0, 32.0) == _as_long(40.0, 0.0) == 1.0  # one of them cannot be replayed


def test_a_host_that_waits_for_a_message_divides_no_pass_of_its_device() -> None:
    """4 ms of a backward, and 2 of the forward after it, with the host's wait for the message between them."""
    message = Collective("send_recv", 0, 4096, 2, 1)
    layout = Layout("1f1b", 2, 4, {0: 0, 1: 1}, {0: {1: 1}, 1: {0: 0}}, frozenset({0}), at_once=False)
    own = RankOp(0, message, 0)

    def op(kind: OpKind, compute_ms: float) -> ScheduleOp:
        issued = ScheduleOp.of(kind, own, 1)
        issued.own_ns[TimeCategory.COMPUTE] = compute_ms * 1e6
        return issued

    ops = [op(OpKind.ISSUE, 0), op(OpKind.WAIT, 0), op(OpKind.JOIN, 4), op(OpKind.ISSUE, 2), op(OpKind.WAIT, 0)]
    pieces = _pieces(layout, ops)
    assert [(piece.tail.kind, piece.work_ns / 1e6) for piece in pieces] == [
        (OpKind.WAIT, 0.0), (OpKind.JOIN, 0.0), (OpKind.ISSUE, 6.0), (OpKind.WAIT, 0.0),
    ]  # fmt: skip
