"""The headline and the first action."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from perfscope.analyzers.job.pipelines.table import ideal_bubble_share
from perfscope.analyzers.losses import launches_few
from perfscope.analyzers.rank.steps import CUT, UNMARKED
from perfscope.analyzers.rules import evaluate
from perfscope.analyzers.rules.context import RuleContext
from perfscope.analyzers.verdict import verdict
from perfscope.results.categories import CATEGORIES
from perfscope.results.findings import Action, Finding, Obtained, Prediction, code
from perfscope.results.notes import note
from perfscope.results.rows import CollectiveRow, PathRow, StragglerRow, Verdict
from perfscope.results.tables import LaunchRow, OperatorRow
from tests.analyzers.job.pipelines.pipeline_jobs import FOUR, made, pipeline, waiting
from tests.analyzers.measured import advised
from tests.analyzers.rules.jobs import STEP_US, breakdown, changed, context, kernel, starved
from tests.generator import ExtraLayers, ModelSpec, simulate
from tests.reports import examples

_MORE = "of the step, more than this change saves, is"
"""What the verdict says of a larger loss without a fix."""


def judged(case: RuleContext, *findings: Finding) -> Verdict:
    return verdict(dataclasses.replace(case.summary, findings=findings))


def test_healthy_says_so_and_how_much_is_compute():
    verdict = judged(context(breakdown(0, exposed_comm_transfer=8_000), breakdown(1, exposed_comm_transfer=8_000)))
    assert verdict.healthy
    assert "92%" in verdict.headline
    assert verdict.first_action is None


def test_evaluations_that_take_most_of_the_time_come_first_though_their_steps_are_left_out() -> None:
    found = note("steps", "evaluation_left_out", steps=[3, 7], share=0.9)
    verdict = judged(context(breakdown(0, idle_sync=30_000), notes=(found,)))
    assert verdict.headline.startswith(
        "Steps with an evaluation, which are left out, take 90% of the recorded time. Of"
    )
    assert "30% of the step is host synchronization" in verdict.headline
    assert verdict.first_action == "Evaluate in fewer steps, or fewer batches."


@pytest.mark.parametrize(
    ("alone", "begins"), [((0,), "Divide the evaluation among all ranks: only rank 0 does, and the others wait. "),
                          ((0, 2), "Divide the evaluation among all ranks: only ranks 0, 2 do, and the others wait. ")],
)  # fmt: skip
def test_an_evaluation_that_the_others_wait_for_is_divided(alone: tuple[int, ...], begins: str) -> None:
    found = note("steps", "evaluation_left_out", steps=[3, 7], share=0.9, alone=list(alone))
    verdict = judged(context(breakdown(0), breakdown(1), notes=(found,)))
    assert verdict.first_action == f"{begins}Evaluate in fewer steps, or fewer batches."


@pytest.mark.parametrize(("saved", "first"), [(0.1, True), (0.7, False)])
def test_evaluations_come_first_where_they_add_more_than_any_change_saves(saved: float, first: bool) -> None:
    """Two of ten steps evaluate and take 44 % of the time: their training takes 14 % of it, their evaluations 30 %."""
    found = note("steps", "evaluation_left_out", steps=[3, 7], share=0.44, alone=[0])
    case = context(breakdown(0), notes=(found,))
    step = Prediction(low=20_000, mid=(1 - saved) * 100_000, high=100_000)
    (finding, *_) = evaluate(changed(starved(60_000), predict=lambda _: step))
    assert (judged(case, finding).first_action or "").startswith("Divide the evaluation") is first
    assert (judged(case).first_action or "").startswith("Divide the evaluation")


@pytest.mark.parametrize(
    ("steps", "share", "said"), [([3], 0.9, True), ([3, 7], 0.3, True), ([3, 7], 0.1, False)],
    ids=["may be the only one", "takes less than the rest", "takes little"],
)  # fmt: skip
def test_other_evaluations_come_last_or_are_a_note(steps: list[int], share: float, said: bool) -> None:
    case = context(breakdown(0, idle_sync=30_000))
    usual = judged(case)
    found = note("steps", "evaluation_left_out", steps=steps, share=share)
    verdict = judged(dataclasses.replace(case, summary=dataclasses.replace(case.summary, notes=(found,))))
    assert verdict.headline.startswith(usual.headline)
    assert (f"take {share:.0%} of the recorded time." in verdict.headline) is said
    assert verdict.first_action == usual.first_action


def test_waiting_for_a_rank_that_is_slow_by_profiling_alone_is_no_loss_of_the_job() -> None:
    """Half of the other rank's step is a wait for it."""
    found = note("steps", "profiling_effect", [0], share=0.5, what="slower compute", own_ms=95.0, unprofiled_ms=50.0)
    rows = (breakdown(0), breakdown(1, exposed_comm_wait=50_000))
    assert "waiting for late ranks" in judged(context(*rows)).headline
    verdict = judged(context(*rows, notes=(found,)))
    assert "waiting" not in verdict.headline
    assert "works" not in verdict.headline
    assert verdict.headline.endswith(
        " That rank 0 is slow in the recorded steps is an effect of profiling: other steps are too short for it."
    )
    assert not verdict.healthy
    alone = note(
        "steps", "recorded_steps_alone", [0], share=0.5, what="slower compute", recorded_ms=90.0, others_ms=45.0,
        unprofiled_ms=40.0, unprofiled_others_ms=40.0,
    )  # fmt: skip
    headline = judged(context(*rows, notes=(alone,))).headline
    assert "waiting" not in headline
    assert headline.endswith(" Rank 0 is slow in the recorded steps alone: in others it takes no more CPU time.")
    (finding, *_) = evaluate(starved(80_000))  # five times as fast without
    assert "profiling" not in judged(context(*rows, notes=(found,)), finding).headline


@pytest.mark.parametrize(
    ("share", "idle_us", "said"), [(0.6, 30_000, True), (0.25, 30_000, False), (0.1, 30_000, False)]
)
def test_steps_that_take_most_of_the_time_are_named_beside_a_smaller_loss(
    share: float, idle_us: float, said: bool
) -> None:
    long = note("steps", "long_steps", steps=[8, 12], times=8.2, share=share, category="host time")
    case = context(breakdown(0, idle_sync=idle_us))
    verdict = judged(dataclasses.replace(case, summary=dataclasses.replace(case.summary, notes=(long,))))
    assert verdict.headline == judged(case).headline + f" {long.text}" * said


def test_a_large_loss_without_a_rule_is_not_called_healthy():
    verdict = judged(context(breakdown(0, idle_sync=30_000)))
    assert not verdict.healthy
    assert "host synchronization" in verdict.headline


@pytest.mark.parametrize("category", [name for name in CATEGORIES if name != "compute"])
def test_a_large_loss_without_a_rule_says_so_and_where_to_look(category: str) -> None:
    verdict = judged(context(breakdown(0, **{category: 97_000})))
    assert not verdict.healthy
    assert verdict.headline.startswith("97% of the step is ")
    assert verdict.first_action is not None
    assert verdict.first_action.startswith("No fix is known: look at ")


def test_waits_that_cannot_be_told_ask_for_traces_that_name_the_ranks() -> None:
    """Nsight Systems records neither the ranks of a collective nor both ends of a message, of whatever torch."""
    rows = tuple(
        dataclasses.replace(breakdown(rank, exposed_comm_transfer=37_000), wait_is_bound=True) for rank in (0, 1)
    )
    verdict = judged(context(*rows))
    assert verdict.headline.startswith("37% of the step is communication, which may be waiting for other ranks")
    assert verdict.first_action is not None
    assert "Record with torch.profiler (perfscope run does): since PyTorch 2.5 its traces name" in verdict.first_action


def test_steps_that_nothing_marks_are_to_be_marked() -> None:
    """As in a report of Nsight Systems over 16 equal steps: more of them would not help."""
    rows = breakdown(0), breakdown(1)
    found = judged(context(*rows, steps=(), steps_from=UNMARKED))
    assert found.headline.startswith("No bottleneck in what was recorded (nothing marks the steps): ")
    assert found.first_action is not None
    assert found.first_action.startswith("Mark the steps, 5 or more of all ranks")
    assert "torch.cuda.nvtx.range" in found.first_action
    assert "prof.step()" in found.first_action
    cut = judged(context(*rows, steps=(), steps_from=CUT))
    assert "(no whole step)" in cut.headline
    assert cut.first_action == "Record 5 steps or more of all ranks to see the rest."
    text = note("steps", "no_steps", steps_from=UNMARKED).text
    assert "prof.step()" in text
    assert "NVTX" in text


def test_host_time_that_has_a_name_is_named() -> None:
    """As in a recording whose video decoding leaves the device idle for 58 % of the step."""
    function = "pipelines/video.py(129): preprocess"
    row = dataclasses.replace(breakdown(0, idle_host=58_000), named_host_us={function: 55_000.0, "checkpoint": 900.0})
    verdict = judged(context(row))
    assert verdict.headline.startswith("58% of the step is host time, mostly in preprocess (pipelines/video.py:129);")
    assert verdict.first_action is not None
    assert verdict.first_action.startswith("What a change saves is not known: look at what preprocess")
    assert "look at what preprocess (pipelines/video.py:129) does" in verdict.first_action
    collecting = dataclasses.replace(row, named_host_us={"garbage collection": 30_000.0})
    assert "mostly in garbage collection" in judged(context(collecting)).headline
    names = {function: 28_000.0, "log.py(7): write": 9_000.0, "saving": 9_000.0}
    spread = dataclasses.replace(row, named_host_us=names)
    assert "mostly" not in judged(context(spread)).headline
    operator = OperatorRow(
        name="aten::mm", operator_class="matrix", count_per_step=1.0, device_us_per_step=0.0, host_us_per_step=9.0,
        kernels_per_step=0.0, flops_per_step=None, tflops=None, share_of_peak=None, dtype=None,
    )  # fmt: skip
    assert str(judged(context(spread, operators=(operator,))).first_action).endswith(
        "most of it in these Python functions: preprocess (pipelines/video.py:129), write (log.py:7)."
    )
    ranges = {"[Callback]Hist.on_train_batch_end": 28_000.0, "the forward": 20_000.0, "tick": 900.0}
    in_ranges = dataclasses.replace(row, named_host_us=ranges)
    assert str(judged(context(in_ranges, operators=(operator,))).first_action).endswith(
        "most of it in these ranges: [Callback]Hist.on_train_batch_end."
    )
    unnamed = judged(context(breakdown(0, idle_host=58_000), operators=(operator,)))
    assert "perfscope run --stacks names its Python functions" in str(unnamed.first_action)


def test_idle_time_of_few_launches_is_that_of_slow_calls() -> None:
    """As in a recording of one small step whose kernels are compiled at their first use: 16 launches in 9 ms."""
    few = LaunchRow(
        rank=0, launches_per_step=16, call_us_mean=500.0, delay_us_median=4.0, delay_us_p95=9.0,
        queue_depth_median=0.0, starved_share=0.9, short_kernels_share=0.7,
    )  # fmt: skip
    case = context(breakdown(0, idle_launch=90_000))
    summary = dataclasses.replace(case.summary, launches=(few,))
    assert "compiled or loaded at its first use" in str(verdict(summary).first_action)
    summary = dataclasses.replace(case.summary, launches=(dataclasses.replace(few, launches_per_step=200),))
    assert "first use" not in str(verdict(summary).first_action)
    # A loop that repeats few operators launches them as slowly as others do: 16 in 0.9 ms.
    usual = dataclasses.replace(breakdown(0), idle_launch_us=900.0)
    summary = dataclasses.replace(case.summary, launches=(few,), time_breakdown=(usual,))
    assert not launches_few(summary)


def test_how_efficient_busy_devices_are_is_said_to_be_unknown() -> None:
    busy = context(breakdown(0)).summary
    assert "how near the devices come to their peak is not known" in verdict(busy).headline
    on_cpus = dataclasses.replace(busy, job=dataclasses.replace(busy.job, devices=("CPU",)))
    assert "not known" not in verdict(on_cpus).headline


def test_a_lone_step_of_a_compiled_model_is_told_to_compile() -> None:
    case = context(breakdown(0, idle_host=99_000))
    compiled = OperatorRow(
        name="TorchDynamo Cache Lookup", operator_class="other", count_per_step=1.0, device_us_per_step=0.0,
        host_us_per_step=1.0, kernels_per_step=0.0, flops_per_step=None, tflops=None, share_of_peak=None, dtype=None,
    )  # fmt: skip
    lone = dataclasses.replace(case.summary.job, steps=case.summary.job.steps[:1])
    summary = dataclasses.replace(case.summary, operators=(compiled,), job=lone)
    assert "the model is compiled" in str(verdict(summary).first_action)
    assert "the model is compiled" not in str(verdict(dataclasses.replace(summary, job=case.summary.job)).first_action)


@pytest.mark.parametrize(("on_path_us", "same"), [(50_000, True), (30_000, False)])
def test_waiting_for_ranks_that_load_late_is_for_the_same_reason(on_path_us: float, same: bool) -> None:
    """Each of two ranks loads for 20 ms of a step of 100 and waits for the other for 30; the path has 50 or 30 of
    loading: of the others' waits all 30 are for loading, or 10.
    """
    case = context(*(breakdown(rank, idle_dataloader=20_000, exposed_comm_wait=30_000) for rank in (0, 1)))
    path = (
        PathRow(rank=0, category="idle_dataloader", us=on_path_us),
        PathRow(rank=1, category="compute", us=STEP_US - on_path_us),
    )
    case = dataclasses.replace(case, summary=dataclasses.replace(case.summary, critical_path=path))
    (finding, *_) = evaluate(starved(80_000))
    loading = dataclasses.replace(finding, rule="dataloader-workers", title="Data loading", ceiling=100 / 80 - 1)
    headline = judged(case, loading).headline
    assert ("Ranks wait for late ones for 30% of the step on average, mostly for the same reason" in headline) is same
    assert ("no fix is known" in headline) is not same


@pytest.mark.parametrize("cause", ["communication", "compute"])
def test_what_is_transferred_over_a_slow_link_is_no_other_loss(cause: str) -> None:
    """The straggler costs 20 % of the step; transfers take 40 %."""
    case = context(*(breakdown(rank, exposed_comm_transfer=40_000) for rank in (0, 1)))
    slow = StragglerRow(
        rank=0, cause=cause, lost_us=20_000.0, confidence="high", share_of_steps=1.0, host="", scope="host", ranks=(0,),
        pattern="steady", steps=(1,),
    )  # fmt: skip
    case = dataclasses.replace(case, summary=dataclasses.replace(case.summary, stragglers=(slow,)))
    (finding, *_) = evaluate(starved(80_000))
    straggler = dataclasses.replace(finding, rule="straggling-rank", title="Slow", ceiling=100 / 80 - 1)
    assert (_MORE in judged(case, straggler).headline) is (cause == "compute")


@pytest.mark.parametrize(
    ("setting", "old", "new", "said"),
    [
        ("torch.utils.checkpoint.checkpoint", "on", "off", "Turn off torch.utils.checkpoint.checkpoint."),
        ("micro-batches per step", "8", "16", "Set micro-batches per step to 16 (now 8)."),
    ],
)  # fmt: skip
def test_what_is_no_setting_is_not_set(setting: str, old: str, new: str, said: str) -> None:
    (finding, *_) = evaluate(starved(80_000))
    action = dataclasses.replace(finding.action, setting=setting, old=old, new=new)
    found = judged(context(breakdown(0, idle_host=30_000)), dataclasses.replace(finding, action=action))
    assert found.first_action is not None
    assert found.first_action.startswith(said)
    assert found.lead == "Do first"


def test_cores_are_not_set() -> None:
    (finding, *_) = evaluate(starved(80_000))
    action = dataclasses.replace(
        finding.action,
        setting="cores per host",
        old="2",
        new="3",
        how="Use a host with 3 cores or more. Or fewer ranks.",
    )
    found = judged(context(breakdown(0, idle_host=30_000)), dataclasses.replace(finding, action=action))
    assert str(found.first_action).startswith("Use a host with 3 cores or more.")


def test_where_to_look_is_nothing_to_do_first() -> None:
    found = judged(context(breakdown(0, exposed_comm_transfer=33_000)))
    assert found.first_action is not None
    assert found.first_action.startswith("No fix is known: look at which collectives")
    assert found.lead == ""


@pytest.mark.parametrize(("costs", "named"), [(0.13, True), (0.06, False)])
def test_a_straggler_is_named_beside_a_change_that_is_worth_more(costs: float, named: bool) -> None:
    (finding, *_) = evaluate(starved(80_000))
    first = dataclasses.replace(finding, rule="offload", title="The optimizer computes on the CPU")
    late = dataclasses.replace(
        finding, rule="straggling-rank", title="Rank 3 is a straggler", predicted_step_us=None,
        ceiling=1 / (1 - costs) - 1,
    )  # fmt: skip
    case = context(breakdown(0, idle_host=30_000, exposed_comm_wait=13_000))
    headline = judged(case, first, late).headline
    assert headline.startswith("The optimizer computes on the CPU.")
    assert ("Also: rank 3 is a straggler." in headline) is named
    assert "no fix is known" not in headline  # of the host's time: the optimizer's


def test_a_larger_loss_than_that_of_the_first_finding_is_named_beside_it() -> None:
    """As in a recording of 2 ranks of 128: launches 11 %, transfer 26 %."""
    loss = {"idle_launch": 11_000, "exposed_comm_transfer": 26_000, "idle_dependency": 25_000}
    case = context(breakdown(0, **loss))
    (finding, *_) = evaluate(starved(80_000))
    launches = dataclasses.replace(finding, rule="launch-bound", title="Launch-bound", ceiling=100 / 89 - 1)
    assert f"Another 26% {_MORE} exposed transfer: no fix is known" in judged(case, launches).headline
    # A finding about transfers leaves the next one, which is larger than what both save.
    transfers = dataclasses.replace(launches, rule="nccl-environment", title="NCCL", ceiling=100 / 95 - 1)
    assert f"Another 25% {_MORE} waiting for a dep" in judged(case, launches, transfers).headline
    alone = context(breakdown(0, idle_launch=11_000, idle_host=10_500))
    assert judged(alone, launches).headline == "Launch-bound."


@pytest.mark.parametrize(
    ("lacks", "words"),
    [
        ({"steps": (10,), "step_time_us_per_step": (100e3,)}, "1 step"),
        ({"world_size": 64, "missing_ranks": tuple(range(2, 64))}, "ranks 0, 1 of 64"),
    ],
)
def test_a_recording_that_is_too_small_does_not_show_a_healthy_job(lacks: dict[str, object], words: str) -> None:
    found = judged(context(breakdown(0), breakdown(1), **lacks))
    assert not found.healthy
    assert found.unsure
    assert words in found.headline
    assert found.first_action is not None


@pytest.mark.parametrize(("mfu", "coverage", "healthy"), [(0.06, 1.0, False), (0.06, 0.5, True), (0.4, 1.0, True)])
def test_a_busy_device_far_below_its_peak_is_not_healthy(mfu: float, coverage: float, healthy: bool) -> None:
    used = dataclasses.replace(examples.NO_MFU, mfu=mfu, flops_coverage=coverage)
    found = judged(context(breakdown(0), utilisation=used))
    assert found.healthy is healthy
    assert ("at 6.0% of their peak" in found.headline) is not healthy


@pytest.mark.parametrize(
    ("name", "kind", "told"),
    [
        ("void elementwise_kernel", "elementwise", True),
        ("sm90_xmma_gemm", "matrix", False),
        ("triton_poi_fused_add", "elementwise", False),
    ],
)
def test_kernels_that_memory_limits_are_to_be_fused(name: str, kind: str, told: bool) -> None:
    """As in a recording of a transformer: 38 % elementwise kernels, 22 % copies; not where it is compiled already."""
    used = dataclasses.replace(examples.NO_MFU, mfu=0.17, flops_coverage=1.0)
    kernels = (kernel(name, 40_000.0, operator_class=kind, share=0.4),)
    found = judged(context(breakdown(0), utilisation=used, kernels=kernels))
    assert ("40% of their time in kernels that memory limits" in found.headline) is told
    assert str(found.first_action).startswith("Try torch.compile") is told


def test_a_recording_without_device_events_says_nothing_about_devices() -> None:
    case = context(breakdown(0, idle_host=65_000), breakdown(1, idle_host=65_000))

    def of_blind(*ranks: int) -> Verdict:
        notes = (note("time_breakdown", "no_device_events", ranks),)
        return verdict(dataclasses.replace(case.summary, notes=notes))

    assert "is not known" in of_blind(0, 1).headline
    assert "Record device activities" in (of_blind(0, 1).first_action or "")
    assert "65% of the step is host time" in of_blind(1).headline


def test_a_file_that_ends_before_the_devices_events_is_to_be_copied_again() -> None:
    case = context(breakdown(0, idle_host=65_000))
    notes = (note("time_breakdown", "device_events_cut", (0,)),)
    found = verdict(dataclasses.replace(case.summary, notes=notes))
    assert "is not known: the file ends early" in found.headline
    assert str(found.first_action).startswith("Copy the file again")
    assert found.unsure


def test_what_hosts_without_their_devices_wait_for_may_not_matter() -> None:
    case = starved(80_000)
    notes = (note("time_breakdown", "no_device_events", case.ranks),)
    summary = dataclasses.replace(case.summary, notes=notes, findings=evaluate(case))
    found = verdict(summary)
    assert found.headline.startswith("What the devices do, and what limits them, is not known")
    assert f"What it shows of the hosts: {summary.findings[0].title}." in found.headline
    assert found.unsure


def test_uneven_ranks_are_not_healthy() -> None:
    """In every step another rank works 30, the others 20: 1.2 times the mean of 25."""
    ranks = [dataclasses.replace(breakdown(rank), own_us_per_step=own) for rank, own in enumerate(((30, 20), (20, 30)))]
    found = judged(context(*ranks))
    assert not found.healthy
    assert "the slowest works 1.20 times as long as the mean of all" in found.headline


def test_many_small_losses_are_not_healthy() -> None:
    found = judged(context(breakdown(0, idle_launch=15_000, exposed_copy=14_000, idle_host=12_000)))
    assert not found.healthy
    assert found.headline.startswith("No single cause: compute takes 59%")


def test_a_gain_is_of_the_step_that_is_predicted_without_the_profiler() -> None:
    """Recorded steps take 100 ms, those without the profiler 150, and 120 with the change: it saves a fifth of them."""
    case = context(breakdown(0, exposed_comm_transfer=22_000), unprofiled_step_us=150_000.0)
    (finding, *_) = evaluate(starved(80_000))
    saves = dataclasses.replace(
        finding, rule="fsdp-no-sync", title="Reduced too often", ceiling=0.9,
        predicted_step_us=Prediction(low=110_000.0, mid=120_000.0, high=130_000.0),
    )  # fmt: skip
    found = judged(case, saves)
    assert found.headline == "Reduced too often."
    assert "Predicted speedup: 1.25x." in (found.first_action or "")
    wide = dataclasses.replace(saves, predicted_step_us=Prediction(low=3_000.0, mid=10_000.0, high=120_000.0))
    assert "Predicted speedup: 1.25x to 50x." in (judged(case, wide).first_action or "")


def test_the_first_action_is_a_sentence_where_code_follows() -> None:
    case = context(breakdown(0))
    (finding, *_) = evaluate(starved(80_000))
    action = Action(setting="no_sync", old="not used", new="used", how="Run it so:\n" + code("python", "run()"))
    told = judged(case, dataclasses.replace(finding, action=action)).first_action
    assert (told or "").startswith("Run it so. ")


def test_the_first_finding_is_the_headline_and_its_setting_the_first_action():
    case = starved(80_000)
    verdict = judged(case, *evaluate(case))
    assert "Data loading" in verdict.headline
    assert verdict.first_action is not None
    assert verdict.first_action.startswith("Set DataLoader(num_workers=4) (now 0).")
    assert "Speedup: at most 5x." in verdict.first_action


@pytest.mark.parametrize(
    ("setting", "old", "new", "instruction"),
    [
        ("OMP_NUM_THREADS", "8", "1", "Set OMP_NUM_THREADS to 1 (now 8)."),
        ("batch size per rank", None, "16", "Set batch size per rank to 16."),
        ("TrainingArguments(bf16=True)", "float32", "bfloat16", "Set TrainingArguments(bf16=True) (now float32)."),
        ("--overlap-grad-reduce", "not set", "set", "Set --overlap-grad-reduce (now not set)."),
        ("DistributedDataParallel.no_sync()", "not used", "used", "As it is written."),
        ("FSDP units", "48 gathers per step", "larger units", "As it is written."),
        ("gradient all-reduce", "one for each parameter", "DistributedDataParallel", "As it is written."),
        ("cores per rank", "1", "6 or more", "As it is written."),
    ],
)
def test_the_first_action_names_the_value_or_how_to_set_it(setting, old, new, instruction):
    case = starved(80_000)
    (finding, *_) = evaluate(case)
    action = Action(setting=setting, old=old, new=new, how="As it is written.")
    first = judged(case, dataclasses.replace(finding, action=action)).first_action
    assert first is not None
    assert first.startswith(f"{instruction} Speedup: at most")


def test_the_first_action_brings_what_was_predicted():
    case = starved(80_000)
    (finding, *_) = evaluate(case)
    step = case.info.step_us
    prediction = Prediction(low=0.7 * step, mid=0.8 * step, high=0.9 * step)
    replayed = dataclasses.replace(finding, predicted_step_us=prediction, obtained=Obtained.REPLAYED)
    first = judged(case, replayed).first_action
    assert first is not None
    assert "Predicted speedup: 1.25x." in first


class TestPipelines:
    @pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
    def test_a_bubble_that_more_micro_batches_reduce_limits_the_job(self, schedule: str) -> None:
        """A bubble of 30% at 55% compute, where 2 stages and 4 micro-batches have one of 20% at best."""
        known = made(FOUR[:2], schedule=schedule, microbatches=4, ideal_bubble_share=ideal_bubble_share(2, 4, 1))
        case = waiting(known, more={"exposed_comm_transfer": 0.15 * STEP_US})
        found = judged(case, *evaluate(case))
        assert not found.healthy
        assert found.headline == (
            "The pipeline bubble takes 30% of the step; 20% is inherent in 2 stages and 4 micro-batches."
        )
        assert found.first_action is not None
        assert found.first_action.startswith("Set micro-batches per step to 16 (now 4).")

    @pytest.mark.parametrize(("transfer", "named"), [(0.15, False), (0.5, True)])
    def test_transfers_far_beyond_the_bubble_are_another_loss(self, transfer: float, named: bool) -> None:
        """Beside a bubble of 30 %, which a stage without its neighbours may show as transfer."""
        case = waiting(made(FOUR), more={"exposed_comm_transfer": transfer * STEP_US})
        headline = judged(case, *evaluate(case)).headline
        assert headline.startswith("The pipeline bubble takes 30%")
        assert (f"Another 50% {_MORE} exposed transfer: no fix is known" in headline) is named

    def test_a_smaller_bubble_is_named_where_it_is_the_largest_loss(self) -> None:
        """Four times as many would bring 8%, of which half counts."""
        known = made(FOUR, microbatches=24, bubble_share=1 / 9, ideal_bubble_share=ideal_bubble_share(4, 24, 1))
        case = waiting(known, share=1 / 9)
        (finding,) = evaluate(case)
        assert finding.severity == "low"
        found = judged(case, finding)
        assert not found.healthy
        assert found.headline == f"{finding.title}."
        other = waiting(known, share=1 / 9, more={"idle_host": 0.12 * STEP_US})
        assert judged(other, finding).headline.startswith("No bottleneck found: ")

    def test_a_bubble_that_nothing_reduces_is_named_in_a_healthy_job(self) -> None:
        found = verdict(waiting(made(FOUR)).summary)
        assert found.healthy
        assert "the pipeline bubble takes 30% (4 stages, 8 micro-batches)" in found.headline
        assert "the largest other category is " in found.headline

    def test_a_bubble_far_beyond_its_price_is_not(self) -> None:
        known = made(FOUR, bubble_share=0.3, microbatches=64, ideal_bubble_share=ideal_bubble_share(4, 64, 1))
        found = verdict(waiting(known).summary)
        assert not found.healthy
        assert found.headline.startswith("26% of the step is waiting for other stages of the pipeline")
        assert "4% is inherent in" in found.headline

    def test_a_bubble_without_a_known_price_counts_as_waiting(self) -> None:
        found = verdict(waiting(made(FOUR, microbatches=None, ideal_bubble_share=None)).summary)
        assert not found.healthy
        assert found.headline.startswith("30% of the step is waiting for other stages of the pipeline;")

    def test_uneven_stages_are_not_healthy(self) -> None:
        uneven = [dataclasses.replace(row, busy_us=row.busy_us * (1.5 if row.stage == 2 else 1.0)) for row in FOUR]
        found = verdict(waiting(made(uneven, imbalance=1.36)).summary)
        assert not found.healthy
        assert found.headline.startswith("Uneven stages: stage 2 works 1.36 times as long as the mean of all")

    def test_a_whole_job(self, tmp_path: Path) -> None:
        spec = pipeline(steps=4, model=ModelSpec(layers=4, tokens=2048), end_sync=True, noise=0.003)
        simulate(spec).write(tmp_path)
        summary = advised(tmp_path)
        assert not summary.verdict.healthy
        assert "inherent in 4 stages and 8 micro-batches" in summary.verdict.headline
        assert [finding.rule for finding in summary.findings] == ["pipeline-bubble"]
        assert summary.pipeline is not None
        assert summary.frames.stages["stage"].to_list() == [0, 1, 2, 3]

    def test_a_whole_job_with_uneven_stages(self, tmp_path: Path) -> None:
        spec = pipeline(steps=4, causes=(ExtraLayers(stages=(2,), layers=1),))
        simulate(spec).write(tmp_path)
        summary = advised(tmp_path)
        assert not summary.verdict.healthy
        first, *others = summary.findings
        assert (first.rule, first.severity) == ("pipeline-imbalance", "medium")
        assert first.predicted_step_us is not None
        assert first.predicted_step_us.mid < summary.job.step_time_us
        assert {finding.rule for finding in others} == {"pipeline-bubble"}
        assert not summary.stragglers


def test_a_job_in_graphs_without_their_kernels_is_not_called_healthy():
    """Of all that runs on the device, 70% is in two graphs of which nothing else is known."""
    rows = (kernel("CUDA graph 3", 50_000, share=0.5), kernel("CUDA graph 7", 20_000, share=0.2))
    found = judged(context(breakdown(0), kernels=(*rows, kernel("gemm", 30_000, share=0.3))))
    assert not found.healthy
    assert "outside CUDA graphs, which take 70%" in found.headline
    assert judged(context(breakdown(0), kernels=(kernel("gemm", 30_000, share=1.0),))).healthy


@pytest.mark.parametrize(("size", "asks"), [(None, True), (25 << 20, False)])
def test_transfers_of_unknown_size_have_a_transport_to_look_at(size: int | None, asks: bool) -> None:
    row = CollectiveRow(
        group="0", ranks=(0,), kind="all_reduce", dtype=None, bytes=size, count=8, transfer_us=8_000.0, wait_us=0.0,
        algbw_gbps=None, busbw_gbps=None, last_arriver={},
    )  # fmt: skip
    verdict = judged(context(breakdown(0, exposed_comm_transfer=60_000), collectives=(row,)))
    assert verdict.first_action is not None
    assert ("NCCL_DEBUG=INFO" in verdict.first_action) is asks
