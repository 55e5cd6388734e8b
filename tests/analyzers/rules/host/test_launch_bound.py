"""Launch-bound: devices of most ranks wait for their host, and the replay without launches gives what that costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perfscope.analyzers.rules.host import launch_bound
from perfscope.results.findings import Prediction
from perfscope.results.rows import StragglerRow
from perfscope.results.tables import LaunchRow, ModuleRow
from tests.analyzers.rules.jobs import QUICK, STEP_US, Analyzed, analyze, breakdown, context, kernel, runs
from tests.generator import MS, ModelSpec, Pause, SlowHost, step_time_ns

SLOW = SlowHost(factor=16.0)


@pytest.fixture(scope="module")
def bound(tmp_path_factory: pytest.TempPathFactory) -> Analyzed:
    return analyze(replace(QUICK, causes=(SLOW,)), tmp_path_factory.mktemp("bound"))


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Analyzed:
    return analyze(replace(QUICK, causes=(replace(SLOW, ranks=(3,)),)), tmp_path_factory.mktemp("one"))


def by_hand(
    launches: float | None = 900.0, optimizer_kernels: float = 0.0, kernels_per_step: float = 900.0, **others: object
):
    rows = () if launches is None else (
        LaunchRow(
            rank=0, launches_per_step=launches, call_us_mean=5.0, delay_us_median=4.0, delay_us_p95=9.0,
            queue_depth_median=0.0, starved_share=0.6, short_kernels_share=0.7,
        ),
    )  # fmt: skip
    module = ModuleRow(
        name="Optimizer.step#AdamW.step", depth=0, count_per_step=1.0, host_us_per_step=1.0, device_us_per_step=1.0,
        kernels_per_step=optimizer_kernels,
    )  # fmt: skip
    return context(
        breakdown(0, idle_launch=20_000.0), launches=rows, modules=(module,),
        kernels=(kernel("small", 9_000.0, count_per_step=kernels_per_step),), **others,
    )  # fmt: skip


def test_it_fires_with_the_replay_without_launches(bound):
    (finding,) = [found for found in bound.summary.findings if found.rule == launch_bound.RULE]
    assert finding.whatif == {"host.launch": "0"}
    assert finding.obtained == "replayed"
    at_once = replace(QUICK.host, operator_ns=0, launch_ns=0, event_ns=0)
    free_us = step_time_ns(replace(QUICK, host=at_once, causes=(SLOW,))) / 1e3
    assert finding.predicted_step_us.mid == pytest.approx(free_us, abs=0.05 * bound.summary.job.step_time_us)
    assert finding.action.new == '"reduce-overhead"'
    assert 'torch.compile(model, mode="reduce-overhead")' in finding.action.how


def test_launches_need_not_be_recorded():
    """Without runtime calls, or their correlation ids, kernels show that more is launched than single slow calls."""
    finding = launch_bound.evaluate(by_hand(launches=None))
    assert finding is not None
    assert finding.title.startswith("Launch-bound: devices wait 20% of the step")
    assert "launches per step" not in {evidence.what for evidence in finding.evidence}
    assert launch_bound.evaluate(by_hand(launches=None, kernels_per_step=19.0)) is None


def test_one_rank_that_launches_slowly_is_a_straggler(one_rank):
    assert launch_bound.evaluate(one_rank.context) is None
    assert "straggling-rank" in one_rank.rules


def test_an_optimizer_that_launches_much_is_fused_first():
    recorded = runs(1, optimizer={"classes": ["AdamW"], "fused": None, "foreach": None})
    finding = launch_bound.evaluate(by_hand(optimizer_kernels=300.0, runs=recorded))
    assert finding is not None
    assert (finding.action.setting, finding.action.new) == ("torch.optim.AdamW(fused=…)", "True")
    assert "torch.optim.AdamW(model.parameters(), fused=True)" in finding.action.how
    assert "torch.compile" in finding.action.how


def test_a_fused_optimizer_is_left_alone():
    recorded = runs(1, optimizer={"classes": ["AdamW"], "fused": True})
    finding = launch_bound.evaluate(by_hand(optimizer_kernels=300.0, runs=recorded))
    assert finding is not None
    assert finding.action.setting == "torch.compile(mode=…)"


def test_a_model_that_is_compiled_gets_graphs_and_one_with_graphs_gets_neither():
    compiled = by_hand(runs=runs(1, compile={"mode": "default"}))
    assert (found := launch_bound.evaluate(compiled)) is not None
    assert (found.action.old, found.action.new) == ("default", '"reduce-overhead"')
    graphs = by_hand(runs=runs(1, compile={"mode": "reduce-overhead"}))
    assert (found := launch_bound.evaluate(graphs)) is not None
    assert found.action.new is None
    assert "TORCH_LOGS" in found.action.how


@pytest.mark.parametrize(
    ("devices", "backend", "graphs"),
    [
        (("Tesla V100-DGXS-32GB",), None, "CUDA graphs"),
        (("AMD Instinct MI300X",), "nccl", "HIP graphs"),
        ((), "nccl", "CUDA graphs"),
        (("CPU",), "gloo", None),
        (("NVIDIA H100 80GB HBM3", "CPU"), None, None),
        (("Intel(R) Data Center GPU Max 1550",), "xccl", None),
        (("GAUDI2",), "hccl", None),
        ((), None, None),
    ],
)
def test_graphs_are_advised_only_on_devices_that_have_them(devices, backend, graphs):
    finding = launch_bound.evaluate(by_hand(devices=devices, backend=backend))
    assert finding is not None
    said = f"{finding.action.setting} {finding.action.new} {finding.action.how} {finding.action.costs}"
    assert "torch.compile(model" in said
    assert graphs in said if graphs else "graphs" not in said and "reduce-overhead" not in said


def test_a_compiled_model_on_a_device_without_graphs_has_no_further_mode():
    recorded = runs(1, compile={"mode": "default"})
    finding = launch_bound.evaluate(by_hand(devices=("Intel(R) Data Center GPU Max 1550",), runs=recorded))
    assert finding is not None
    assert finding.action.new is None
    assert "cudagraphs" not in finding.action.how


def test_the_framework_s_own_words():
    found = launch_bound.evaluate(by_hand(runs=runs(1, transformers={"optim": "adamw_torch"})))
    assert found is not None
    assert "--torch_compile True" in found.action.how


def test_one_slow_call_among_few_is_no_launch_bound_step():
    assert launch_bound.evaluate(by_hand(launches=19.0)) is None


def test_silent_where_the_replay_saves_nothing():
    def unchanged(settings):
        return Prediction(low=STEP_US, mid=STEP_US, high=STEP_US)

    assert launch_bound.evaluate(by_hand(predict=unchanged)) is None


def test_with_ranks_missing_it_is_a_ceiling():
    finding = launch_bound.evaluate(by_hand(missing_ranks=(1,)))
    assert finding is not None
    assert finding.whatif == {}
    assert finding.ceiling == pytest.approx(100 / 80 - 1)


@pytest.mark.parametrize(("lost_us", "fires"), [(10_000.0, True), (17_000.0, False)])
def test_a_host_that_launches_slowly_is_named_as_what_it_is(lost_us, fires):
    """Where half of the ranks are on a slow host, the median device waits for launches, too."""
    slow = StragglerRow(
        rank=0, cause="launch", lost_us=lost_us, confidence="high", scope="host", ranks=(0, 1), host="node1"
    )
    without = Prediction(low=STEP_US - 20_000.0, mid=STEP_US - 20_000.0, high=STEP_US - 20_000.0)
    case = by_hand(stragglers=(slow,), predict=lambda settings: without)
    assert (launch_bound.evaluate(case) is not None) == fires


def test_launches_of_all_hosts_are_found_where_most_devices_wait_for_one_of_them(tmp_path):
    """All hosts launch slowly, and one of a pipeline's pauses: the others launch while their devices wait for it."""
    spec = replace(
        QUICK, ranks=8, ranks_per_host=8, strategy="pipeline", tensor=2, pipeline=4, microbatches=4, steps=5,
        model=ModelSpec(layers=4, tokens=2048), end_sync=False, causes=(SLOW, Pause(ranks=(3,), pause_ns=2 * MS)),
    )  # fmt: skip
    analyzed = analyze(spec, tmp_path)
    summary = analyzed.summary
    assert analyzed.context.typical_us("idle_launch") < launch_bound.SHARE * summary.job.step_time_us
    finding = summary.findings[0]
    assert finding.rule == launch_bound.RULE
    quick = replace(spec, host=replace(spec.host, operator_ns=0, launch_ns=0, event_ns=0))
    quick_us = step_time_ns(quick) / 1e3
    assert finding.predicted_step_us.mid == pytest.approx(quick_us, abs=0.05 * summary.job.step_time_us)
    assert f"that of rank {finding.evidence[0].ranks[0]} for" in finding.title


def test_a_rank_that_pauses_is_not_launch_bound(tmp_path):
    spec = replace(QUICK, causes=(Pause(ranks=(3,), pause_ns=2 * MS),))
    assert analyze(spec, tmp_path).rules == {"straggling-rank"}
