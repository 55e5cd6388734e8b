"""Work and bubbles of a pipeline's stages, its schedule, and what is advised about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import perfscope
from perfscope.analyzers.job.aligned import align_job
from perfscope.analyzers.job.pipelines.bubbles import find_bubbles
from perfscope.analyzers.job.pipelines.messages import pipeline_messages
from perfscope.analyzers.job.pipelines.stages import place
from perfscope.analyzers.job.pipelines.table import find_pipeline, ideal_bubble_share
from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.analyzers.rank.partial import BACKWARD, FORWARD, WEIGHTS
from perfscope.analyzers.whatif.stage_balance import balanced_step_us, uneven_stage, work_shares
from perfscope.recording.metadata import RunMetadata
from perfscope.trace.trace import Category
from tests.analyzers.job.collectives.matching_jobs import STEP, Rank
from tests.analyzers.job.pipelines.pipeline_jobs import (
    COALESCED,
    GPIPE,
    INTERLEAVED,
    MODEL,
    compared,
    made,
    pipeline,
    silent,
    stage,
)
from tests.analyzers.measured import measured
from tests.collectors.harness import SCRIPTS, needs_torch, record_ranks
from tests.generator import ExtraLayers, JobSpec, PipelineSpec, SlowCompute, SlowLoader, simulate, step_time_ns
from tests.traces import TraceBuilder

pytestmark = pytest.mark.scale

TWO = {"ranks": 2, "pipeline": 2}
TWELVE = replace(MODEL, layers=12)


@pytest.mark.parametrize(
    ("spec", "schedule", "chunks"),
    [
        (pipeline(), "1f1b", 1),
        (pipeline(schedule=GPIPE), "gpipe", 1),
        (pipeline(schedule=COALESCED), "1f1b", 1),
        (pipeline(schedule=INTERLEAVED), "interleaved", 2),
        (pipeline(schedule=silent(PipelineSpec())), "1f1b", 1),
        (pipeline(schedule=silent(COALESCED)), "1f1b", 1),
        (pipeline(microbatches=2), "1f1b", 1),
        (pipeline(**TWO), "1f1b", 1),
        (pipeline(**TWO, schedule=GPIPE), "gpipe", 1),
        (pipeline(**TWO, schedule=INTERLEAVED), "interleaved", 2),
        (
            pipeline(**TWO, microbatches=4, model=TWELVE, schedule=replace(INTERLEAVED, chunks=3)),
            "interleaved",
            3,
        ),
        (pipeline(schedule=PipelineSpec(ranges=True)), "1f1b", 1),
        (pipeline(schedule=replace(INTERLEAVED, ranges=True)), "interleaved", 2),
        (pipeline(causes=(ExtraLayers(stages=(2,), layers=2),)), "1f1b", 1),
        (pipeline(causes=(ExtraLayers(stages=(1,)),), schedule=INTERLEAVED), "interleaved", 2),
        (pipeline(causes=(SlowCompute(ranks=(1,), factor=1.5),)), "1f1b", 1),
        (pipeline(causes=(SlowLoader(ranks=(0,), load_ns=40_000_000),)), "1f1b", 1),
        (pipeline(ranks=8, tensor=2), "1f1b", 1),
        (pipeline(ranks=8, clip_norm=True, schedule=INTERLEAVED), "interleaved", 2),
        (pipeline(ranks=16, tensor=2, microbatches=4), "1f1b", 1),
        (pipeline(recompute="reentrant", ranks_per_host=2, host_clock_offsets_ns={1: 5_000_000}), "1f1b", 1),
    ],
    ids=lambda value: f"{value.ranks}r {value.schedule} {value.causes}"[:90] if isinstance(value, JobSpec) else "",
)
def test_stages_are_what_the_simulation_knows(spec: JobSpec, schedule: str, chunks: int, tmp_path: Path) -> None:
    job, found = compared(spec, tmp_path)
    known = find_pipeline(found.result, {})
    assert known is not None
    assert (known.schedule, known.microbatches, known.virtual_stages) == (schedule, spec.microbatches, chunks)
    assert known.degree == spec.pipeline
    assert known.ideal_bubble_share == ideal_bubble_share(spec.pipeline, spec.microbatches, chunks)
    assert known.bubble_share == pytest.approx(job.truth.bubble_share, abs=0.005)
    assert not known.bubbles_are_bounds
    busiest = max(stage.busy_ns for stage in job.truth.stages)
    mean = sum(stage.busy_ns for stage in job.truth.stages) / spec.pipeline
    assert known.imbalance == pytest.approx(busiest / mean, rel=0.02)
    for row, truth in zip(known.stages, job.truth.stages, strict=True):
        step = truth.step_ns / 1e3
        assert (row.stage, row.ranks) == (truth.stage, truth.ranks)
        assert row.busy_us == pytest.approx(truth.busy_ns / 1e3, rel=0.02)
        assert row.bubble_start_us == pytest.approx(truth.bubble_start_ns / 1e3, abs=0.005 * step)
        assert row.bubble_steady_us == pytest.approx(truth.bubble_steady_ns / 1e3, abs=0.005 * step)
        assert row.bubble_drain_us == pytest.approx(truth.bubble_drain_ns / 1e3, abs=0.005 * step)
        assert row.flops_per_step == truth.flops_per_step
        if spec.schedule.ranges:
            assert row.forward_us == pytest.approx(truth.forward_ns / 1e3, rel=0.02)
            assert row.backward_us == pytest.approx(truth.backward_ns / 1e3, rel=0.02)
        else:
            assert (row.forward_us, row.backward_us) == (None, None)


def test_messages_without_peers_are_still_counted(tmp_path: Path) -> None:
    job, found = compared(pipeline(schedule=silent(INTERLEAVED)), tmp_path)
    known = find_pipeline(found.result, {})
    assert known is not None
    assert (known.schedule, known.microbatches, known.virtual_stages) == ("interleaved", 8, 2)
    # Which of a kernel's messages came first is not known there.
    assert known.bubble_share == pytest.approx(job.truth.bubble_share, abs=0.02)


@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [(PipelineSpec(), (0,)), (PipelineSpec(), (1, 2)), (GPIPE, (3,)), (COALESCED, (0, 2)), (INTERLEAVED, (0, 1))],
)
def test_bubbles_of_some_ranks_alone_are_bounds(schedule: PipelineSpec, ranks: Sequence[int], tmp_path: Path) -> None:
    job, found = compared(pipeline(schedule=schedule), tmp_path, ranks)
    known = find_pipeline(found.result, {})
    assert known is not None
    assert known.bubbles_are_bounds
    assert (known.degree, known.microbatches) == (4, 8)
    assert [row.stage for row in known.stages] == list(ranks)
    for row in known.stages:
        truth = job.truth.stages[row.stage]
        bubble = row.bubble_us
        assert bubble >= truth.bubble_ns / 1e3 * 0.999
        # Several messages of one kernel may take longer than the quickest.
        assert bubble <= truth.bubble_ns / 1e3 * 1.15


def test_bubbles_by_hand() -> None:
    # Two micro-batches through two stages, forwards of 9.9 us (the first with what begins the window), backwards of 20
    # us, 0.1 us for a message, 0.2 us and 0.3 us for gradients; then a norm over both. Stage 1 waits for its first
    # micro-batch from 50 ns on until 10 us, and from its end at 70.3 us on until stage 0 comes to the norm at 90 us.
    # Stage 0 waits from 20 us until stage 1 has the first gradients at 40 us, and from 60 us until 70 us.
    first, last = (Rank(rank, 2, {"1": (0, 1)}, host="node") for rank in (0, 1))

    def compute(rank: Rank, begin: int, end: int) -> None:
        rank.builder.launched("gemm", max(begin - 60, 60), begin, end)

    compute(first, 100, 10_000)
    first.kernel("send", "1", 10_000, 10_100, peer=1)
    compute(first, 10_100, 20_000)
    first.kernel("send", "1", 20_000, 40_100, peer=1)
    first.kernel("recv", "1", 20_000, 40_200, peer=1, stream=30)
    compute(first, 40_200, 60_000)
    first.kernel("recv", "1", 60_000, 70_300, peer=1, stream=30)
    compute(first, 70_300, 90_000)
    first.kernel("allreduce", "1", 90_000, 90_500)
    last.kernel("recv", "1", 60, 10_100, peer=0)
    compute(last, 10_100, 20_000)
    compute(last, 20_000, 40_000)
    last.kernel("recv", "1", 40_000, 40_100, peer=0)
    last.kernel("send", "1", 40_000, 40_200, peer=0, stream=30)
    compute(last, 40_200, 50_000)
    compute(last, 50_000, 70_000)
    last.kernel("send", "1", 70_000, 70_300, peer=0, stream=30)
    last.kernel("allreduce", "1", 70_300, 90_500)

    result = align_job({rank.number: analyze_rank(rank.builder.build()) for rank in (first, last)})
    messages = pipeline_messages(result)
    bubbles = find_bubbles(result, messages, place(result, messages).stage_of)
    parts = {
        rank: (own.start_ns.tolist(), own.steady_ns.tolist(), own.drain_ns.tolist()) for rank, own in bubbles.items()
    }
    assert parts == {0: ([0], [30_000], [0]), 1: ([9_940], [0], [19_700])}
    known = find_pipeline(result, {})
    assert known is not None
    assert (known.schedule, known.microbatches, known.virtual_stages, known.degree) == ("1f1b", 2, 1, 2)
    assert known.ideal_bubble_share == pytest.approx(1 / 3)
    # The step lasts as long as its host takes for it.
    assert known.bubble_share == pytest.approx((30_000 + 29_640) / 2 / STEP)


def test_several_tensors_of_a_micro_batch_count_once() -> None:
    first, last = (Rank(rank, 2, {"1": (0, 1)}, host="node") for rank in (0, 1))
    for number in range(4):
        begin = 10_000 * number
        first.builder.launched("gemm", begin + 60, begin + 120, begin + 1_000)
        for part in range(2):
            at = begin + 1_000 + 10 * part
            first.kernel("send", "1", at, at + 10, 100 + part, peer=1)
            last.kernel("recv", "1", at, at + 10, 100 + part, peer=0)
        last.builder.launched("gemm", begin + 1_000, begin + 1_020, begin + 4_000)
        last.kernel("send", "1", begin + 4_000, begin + 4_010, peer=0, stream=30)
        first.kernel("recv", "1", begin + 4_000, begin + 4_010, peer=1, stream=30)
    known = find_pipeline(align_job({rank.number: analyze_rank(rank.builder.build()) for rank in (first, last)}), {})
    assert known is not None
    assert known.microbatches == 4


def test_settings_show_what_messages_do_not(tmp_path: Path) -> None:
    # Three micro-batches of the middle stages: whether they are three of one chunk or fewer of several is not to be
    # seen without the first and last stage.
    _, found = compared(pipeline(microbatches=3, schedule=GPIPE), tmp_path, (1, 2))
    bare = find_pipeline(found.result, {})
    assert bare is not None
    assert (bare.schedule, bare.microbatches, bare.ideal_bubble_share) == ("unknown", None, None)
    settings = {"pipeline": {"schedule": "ScheduleGPipe", "microbatches": 3, "virtual_stages": 1}}
    known = find_pipeline(found.result, {1: RunMetadata(rank=1, settings=settings)})
    assert known is not None
    assert (known.schedule, known.microbatches) == ("gpipe", 3)
    assert known.ideal_bubble_share == 0.5


def test_a_job_without_a_pipeline_has_none(tmp_path: Path) -> None:
    job = JobSpec(ranks=2, steps=2)
    simulate(job).write(tmp_path)
    summary = perfscope.analyze(tmp_path)
    assert summary.pipeline is None
    assert not {finding.rule for finding in summary.findings} & {"pipeline-bubble", "pipeline-imbalance"}


class TestPasses:
    def test_the_best_description_is_read(self) -> None:
        builder = TraceBuilder().step(3, 0, 1000)
        for name, begin, end in (
            ("Forward 0", 100, 200),
            ("perfscope::pipeline#forward|1|0", 110, 190),
            ("perfscope::pipeline#backward_input|1|0", 300, 400),
            ("perfscope::pipeline#backward_weight|5|2", 1000, 1100),
        ):
            builder.event(name, Category.ANNOTATION, begin, end)
        trace = builder.op("aten::mm", 120, 180).build()
        partial = analyze_rank(trace)
        own = partial.passes
        assert own.phase.tolist() == [FORWARD, BACKWARD, WEIGHTS]
        assert own.stage.tolist() == [1, 1, 5]
        assert own.microbatch.tolist() == [0, 0, 2]
        assert own.step.tolist() == [0, 0, -1]
        assert (own.start_ns.tolist()[0], own.end_ns.tolist()[0]) == (110, 190)

    def test_on_a_device_it_is_the_kernels_time_whoever_launched_them(self) -> None:
        builder = TraceBuilder().step(0, 0, 1000)
        builder.event("PP:2B7", Category.ANNOTATION, 100, 200)
        builder.launched("gemm", 110, 500, 600).launched("gemm", 190, 600, 750)
        builder.launched("ncclDevKernel_SendRecv(x)", 195, 750, 900, stream=20)
        builder.launched("gemm", 210, 900, 950)
        builder.event("PP:2SEND_B7", Category.ANNOTATION, 250, 300)
        own = analyze_rank(builder.build()).passes
        assert (own.phase.tolist(), own.stage.tolist(), own.microbatch.tolist()) == ([BACKWARD], [2], [7])
        assert (own.start_ns.tolist(), own.end_ns.tolist()) == ([500], [750])

    def test_other_ranges_are_none(self) -> None:
        builder = TraceBuilder().step(0, 0, 1000).op("aten::mm", 10, 20)
        for name in ("Forward pass", "Backward", "PP:0UNSHARD", "perfscope::forward"):
            builder.event(name, Category.ANNOTATION, 100, 200)
        assert len(analyze_rank(builder.build()).passes) == 0


class TestBalance:
    @pytest.mark.parametrize(
        ("extra", "schedule"),
        [((2,), PipelineSpec()), ((0,), PipelineSpec()), ((3,), GPIPE), ((1, 3), COALESCED)],
    )
    def test_even_stages_take_what_a_job_with_even_stages_takes(
        self, extra: tuple[int, ...], schedule: PipelineSpec, tmp_path: Path
    ) -> None:
        # Four layers too many on one stage, or two on two of them: evenly spread it is one more on each.
        cause = ExtraLayers(stages=extra, layers=4 // len(extra))
        _, found = compared(pipeline(causes=(cause,), schedule=schedule), tmp_path)
        even = step_time_ns(pipeline(model=TWELVE, schedule=schedule))
        known = find_pipeline(found.result, {})
        predicted = balanced_step_us(found, known)
        assert known is not None
        assert uneven_stage(known) in extra
        assert predicted is not None
        # A first stage that is slow never waits for what comes back to it: that it would is not seen in the recording.
        assert predicted.mid == pytest.approx(even / 1e3, rel=0.03 if extra != (0,) else 0.08)
        assert predicted.low <= even / 1e3 * 1.01
        assert even / 1e3 <= predicted.high
        assert predicted.high < found.result.step_ns / 1e3

    def test_a_stage_that_takes_longer_for_its_work_gets_less_of_it(self, tmp_path: Path) -> None:
        # Stage 1 has four layers too many, and stage 3 takes 1.3 times as long for each.
        slow = SlowCompute(ranks=(3,), factor=1.3)
        _, found = compared(pipeline(causes=(ExtraLayers(stages=(1,), layers=4), slow)), tmp_path)
        as_many_each = step_time_ns(pipeline(model=TWELVE, causes=(slow,)))
        predicted = balanced_step_us(found, find_pipeline(found.result, {}))
        assert predicted is not None
        assert predicted.mid < 0.95 * as_many_each / 1e3

    def test_chunks_that_are_uneven_widen_the_prediction(self, tmp_path: Path) -> None:
        # All eight layers too many lie in one of the two chunks of stage 1.
        _, found = compared(pipeline(causes=(ExtraLayers(stages=(1,), layers=8),), schedule=INTERLEAVED), tmp_path)
        sixteen = replace(MODEL, layers=16)
        even = step_time_ns(pipeline(model=sixteen, schedule=INTERLEAVED))
        predicted = balanced_step_us(found, find_pipeline(found.result, {}))
        assert predicted is not None
        assert predicted.low * 0.97 <= even / 1e3 <= predicted.high

    def test_even_stages_are_left_alone(self, tmp_path: Path) -> None:
        _, found = compared(pipeline(causes=(SlowCompute(ranks=(2,), factor=1.5),)), tmp_path)
        known = find_pipeline(found.result, {})
        assert known is not None
        assert known.imbalance > 1.2
        assert uneven_stage(known) is None
        assert balanced_step_us(found, known) is None

    def test_without_flops_kernels_are_counted(self) -> None:
        rows = [stage(0, flops=None, kernels=100.0), stage(1, flops=5.0, kernels=300.0)]
        assert work_shares(made(rows)) == {0: 0.5, 1: 1.5}
        assert work_shares(made([*rows, stage(2, flops=None, kernels=None)])) is None
        assert work_shares(made(rows, degree=4)) is None


@needs_torch
@pytest.mark.training
@pytest.mark.parametrize(
    ("mode", "schedule", "chunks"),
    [("one_forward_one_backward", "1f1b", 1), ("gpipe", "gpipe", 1), ("interleaved", "interleaved", 2)],
)
def test_a_real_pipeline(mode: str, schedule: str, chunks: int, tmp_path: Path) -> None:
    options = ("--wait", "2", "--warmup", "1", "--active", "4")
    script = (str(SCRIPTS / "parallel.py"), mode, "--steps", "9")
    recording = record_ranks(tmp_path / "recording", 2, *script, options=options)
    assert recording.exit_code == 0, recording.err
    known = measured(recording.folder).pipeline
    assert known is not None
    assert (known.schedule, known.microbatches, known.virtual_stages, known.degree) == (schedule, 4, chunks, 2)
    assert [row.ranks for row in known.stages] == [(0,), (1,)]
    assert known.ideal_bubble_share == pytest.approx(1 / (4 * chunks + 1))
    for row in known.stages:
        assert row.forward_us is not None
        assert row.backward_us is not None
        assert 4 * chunks * (row.forward_us + row.backward_us) < row.busy_us
    # The first stage waits for nobody before its first micro-batch.
    assert known.stages[0].bubble_start_us == 0.0
