"""An optimizer that loops over parameters: what a step takes with few kernels, by hand and by the job run again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.analyzers.rank.extra.extra_work import EMPTY_NS, FEW
from perfscope.analyzers.whatif.change import CannotReplay
from perfscope.analyzers.whatif.predict import predict
from perfscope.analyzers.whatif.whatif import context_of
from tests.emulator.emulate import emulate, step_ns
from tests.emulator.spec import MS, Cause, Job, Loader, Model, Recording
from tests.traces import TraceBuilder

NO_LOOPS = {"optimizer.loops": "0"}


def test_all_kernels_of_an_optimizer_step_but_for_a_few_are_spared() -> None:
    builder = TraceBuilder().step(1, 0, 2_000).launched("gemm", 10, 20, 100)
    builder.note("Optimizer.step#AdamW.step", 200, 1_000)
    for number in range(FEW + 2):
        # Launched every 20, from 300 on; each runs for 8, the last for 12.
        begin = 300 + 20 * number
        builder.launched("adam", begin, begin + 5, begin + (17 if number == FEW + 1 else 13))
    work = analyze_rank(builder.launched("gemm", 1_100, 1_110, 1_200).build()).optimizer_loops
    last = 300 + 20 * (FEW - 1)
    assert work.count.tolist() == [2]
    # From the end of one kernel to where the next has taken as long as the shortest.
    assert list(zip(work.device.start_ns.tolist(), work.device.end_ns.tolist(), strict=True)) == [
        (last + 13, last + 53)
    ]
    assert (work.host.start_ns.tolist(), work.host.end_ns.tolist()) == ([last + 1], [last + 41])


def test_of_long_kernels_only_what_an_empty_one_takes_is_spared() -> None:
    """Each follows on the one before after 1,000 and takes 30,000, as far as anyone can see all of it to compute."""
    builder = TraceBuilder().step(1, 0, 1_000_000).launched("gemm", 10, 20, 100)
    builder.note("Optimizer.step#AdamW.step", 200, 10_000)
    for number in range(FEW + 2):
        begin = 20_000 + 31_000 * number
        builder.launched("adam", 300 + 20 * number, begin, begin + 30_000)
    work = analyze_rank(builder.launched("gemm", 11_000, 800_000, 900_000).build()).optimizer_loops
    first = 20_000 + 31_000 * FEW
    assert list(zip(work.device.start_ns.tolist(), work.device.end_ns.tolist(), strict=True)) == [
        (begin - 1_000, begin + EMPTY_NS) for begin in (first, first + 31_000)
    ]


ADAM = ("aten::mul_", "aten::lerp_", "aten::mul_", "aten::addcmul_")


@pytest.mark.parametrize(
    ("operators", "left"),
    [
        pytest.param(ADAM * 6, len(ADAM), id="as many as for each parameter"),
        pytest.param(("aten::_foreach_mul_",) * 12 + ("aten::_foreach_add_",) * 12, 24, id="of foreach, all"),
        pytest.param(("aten::mul_",) * 24, FEW, id="no loop that shows"),
    ],
)
def test_foreach_runs_as_many_kernels_as_a_loop_does_for_each_parameter(operators: tuple[str, ...], left: int) -> None:
    builder = TraceBuilder().step(1, 0, 2_000).note("Optimizer.step#AdamW.step", 200, 1_000)
    for number, operator in enumerate(operators):
        begin = 300 + 20 * number
        builder.op(operator, begin - 4, begin + 2).launched("adam", begin, begin + 5, begin + 13)
    work = analyze_rank(builder.launched("gemm", 1_100, 1_110, 1_200).build()).optimizer_loops
    assert work.count.tolist() == [len(operators) - left]


LOOPS = Job(foreach=False, optimizer_kernels=10, noise=0.0, recording=Recording(steps=3), loader=Loader(load_ns=0))


@pytest.mark.scale
@pytest.mark.parametrize(
    "job",
    [
        replace(LOOPS, ranks=1, ranks_per_host=1, model=Model(blocks=2, tokens=4096)),
        replace(LOOPS, ranks=2, model=Model(blocks=2, tokens=1024, width=512)),
        replace(LOOPS, strategy="pipeline", stages=4, microbatches=8, model=Model(blocks=4, tokens=16384, width=512)),
        replace(
            LOOPS, strategy="fsdp", model=Model(blocks=2, tokens=4096, width=512),
            causes=(Cause("pause", 4 * MS, (2,), how="checkpoint"),),
        ),
    ],
    ids=["device", "launches", "pipeline", "behind a pause"],
)  # fmt: skip
def test_the_prediction_is_the_step_with_few_kernels(job: Job, tmp_path: Path) -> None:
    emulated = emulate(job)
    emulated.write(tmp_path)
    answer = predict(context_of(str(tmp_path)), NO_LOOPS)
    truth = step_ns(replace(job, foreach=True)) / emulated.step_ns
    assert answer.mid_ns / answer.measured_ns == pytest.approx(truth, abs=0.03)
    assert answer.low_ns <= truth * answer.measured_ns <= answer.high_ns


def test_an_optimizer_with_few_kernels_has_nothing_to_spare(tmp_path: Path) -> None:
    emulate(replace(LOOPS, ranks=1, ranks_per_host=1, foreach=True)).write(tmp_path)
    with pytest.raises(CannotReplay, match="no optimizer step that launches more than"):
        predict(context_of(str(tmp_path)), NO_LOOPS)
