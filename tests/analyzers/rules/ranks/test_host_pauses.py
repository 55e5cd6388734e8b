"""Hosts that pause on all ranks, or on all of a pipeline stage: what that costs, by the job simulated without it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from perfscope.analyzers.rank.host_activity import BETWEEN
from perfscope.analyzers.rules import evaluate
from perfscope.analyzers.rules.ranks import host_pauses
from perfscope.analyzers.whatif.predict import predict
from perfscope.analyzers.whatif.whatif import context_of
from perfscope.recording.metadata import CpuMetadata, RunMetadata
from perfscope.recording.vocabulary import GARBAGE_COLLECTION
from perfscope.results.findings import Obtained, Prediction
from perfscope.results.rows import StragglerRow
from perfscope.results.tables import ModuleRow
from tests.analyzers.measured import advised
from tests.analyzers.rules.jobs import QUICK, analyze, changed
from tests.emulator.emulate import emulate, step_ns
from tests.emulator.spec import MS, Cause, Job, Model, Recording
from tests.generator import Pause, RotatingPause, SlowLoader, cpu_job, step_time_ns

EMULATED = Job(ranks=2, ranks_per_host=2, noise=0.01, item_every=1, model=Model(blocks=4, tokens=4096))
PIPELINE = replace(
    EMULATED, strategy="pipeline", ranks=4, ranks_per_host=4, stages=2, microbatches=8, item_every=0,
    model=Model(blocks=4, tokens=4096), recording=Recording(steps=4),
)  # fmt: skip


@pytest.mark.parametrize("pause_ns", [MS, 2 * MS])
def test_pauses_of_all_ranks_are_the_finding_with_what_the_job_loses_by_them(tmp_path, pause_ns):
    pause = Pause(pause_ns=pause_ns)
    (finding,) = analyze(replace(QUICK, causes=(pause,)), tmp_path).summary.findings
    assert finding.rule == host_pauses.RULE
    assert finding.evidence[0].ranks == (0, 1, 2, 3)
    assert finding.predicted_step_us.mid == pytest.approx(step_time_ns(QUICK) / 1e3, rel=0.03)
    assert finding.whatif == {"host.pauses": "0"}


def test_what_an_optimizer_computes_on_the_cpu_is_no_pause_that_can_go(tmp_path):
    context = analyze(replace(QUICK, causes=(Pause(pause_ns=2 * MS),)), tmp_path).context
    without = host_pauses.evaluate(context)
    step = ModuleRow(
        name="Optimizer.step#DeepSpeedCPUAdam.step", depth=0, count_per_step=1.0, host_us_per_step=1_000.0,
        device_us_per_step=0.0, kernels_per_step=0.0,
    )  # fmt: skip
    beside = host_pauses.evaluate(changed(context, modules=(step,)))
    assert beside.predicted_step_us.mid == pytest.approx(without.predicted_step_us.mid + 1_000.0)
    assert (beside.whatif, without.whatif) == ({}, {"host.pauses": "0"})
    # A straggler costs most of the other pause, and less than half of both.
    late = StragglerRow(rank=1, cause="host", lost_us=900.0, confidence="high", ranks=(1,))
    assert host_pauses.evaluate(changed(context, modules=(step,), stragglers=(late,))) is None
    assert host_pauses.evaluate(changed(context, stragglers=(late,))) is not None


def test_pauses_too_short_to_cost_much_are_silent(tmp_path):
    assert not analyze(replace(QUICK, causes=(Pause(pause_ns=MS // 10),)), tmp_path).rules


def test_recorded_collections_and_a_straggler_have_their_own_findings(tmp_path):
    named = analyze(replace(QUICK, causes=(Pause(pause_ns=MS, name=GARBAGE_COLLECTION),)), tmp_path / "named")
    alone = analyze(replace(QUICK, causes=(Pause(pause_ns=MS, ranks=(1,)),)), tmp_path / "alone")
    assert named.rules == {"garbage-collection"}
    assert alone.rules == {"straggling-rank"}


CPU_JOB = cpu_job(ranks=2, steps=6)


@pytest.mark.parametrize(("part", "found"), [(0.45, True), (0.55, False)])
def test_pauses_that_are_mostly_a_straggler_s_are_its_finding(tmp_path, part, found):
    """All ranks pause for 20 ms; of what that costs, one that pauses for longer has a part."""
    context = analyze(replace(CPU_JOB, causes=(Pause(pause_ns=20 * MS),)), tmp_path).context
    saved_us = context.step_time_us - host_pauses.evaluate(context).predicted_step_us.mid
    row = StragglerRow(rank=1, cause="host", lost_us=part * saved_us, confidence="high", ranks=(1,))
    summary = replace(context.summary, stragglers=(row,))
    assert (host_pauses.evaluate(replace(context, summary=summary)) is not None) is found


def test_pauses_in_turn_are_found_where_no_straggler_has_a_finding(tmp_path):
    """Each rank pauses seldom, and all wait for it: 17% of the step. Those that take turns cost less than the 15% of
    the step that is no noise, and not three times as much as the next straggler.
    """
    spec = replace(QUICK, ranks=6, ranks_per_host=6, steps=6)
    pause = RotatingPause(pause_ns=7 * MS // 10)
    context = analyze(replace(spec, causes=(pause,)), tmp_path).context
    assert max(sum(each.pausing_us) / 6 for each in context.per_step.values()) < 0.05 * context.step_time_us
    turns, other = (
        StragglerRow(rank=ranks[0], cause="host", lost_us=share * context.step_time_us, confidence="high", ranks=ranks)
        for ranks, share in (((0, 1, 3, 4, 5), 0.14), ((2,), 0.05))
    )
    turns = replace(turns, scope="job", pattern="rotating", steps=(11, 12, 13, 15), share_of_steps=0.6)
    summary = replace(context.summary, stragglers=(turns, other))
    finding = host_pauses.evaluate(replace(context, summary=summary))
    assert finding.title.startswith("Ranks 0-5 pause in turn (host time between operators")
    assert "at the same step on all ranks" in finding.action.how
    assert finding.predicted_step_us.mid == pytest.approx(step_time_ns(spec) / 1e3, rel=0.03)
    clear = replace(context.summary, stragglers=(turns,))
    assert host_pauses.evaluate(replace(context, summary=clear)) is None


@pytest.mark.parametrize("every", [1, 2])
def test_ranks_that_all_pause_in_the_same_steps_take_no_turns(tmp_path, every):
    """In each step, or in every other one, all pause for 2 ms, and one of them for 1 ms longer, each time another one:
    what the devices are idle for on the mean is less than what the step loses by that.
    """
    pauses = [Pause(pause_ns=2 * MS, steps=tuple(range(0, 64, every)))]
    pauses += [
        Pause(pause_ns=MS, ranks=(rank,), steps=tuple(range(every * rank, 64, every * QUICK.ranks)))
        for rank in range(QUICK.ranks)
    ]
    context = analyze(replace(QUICK, steps=8, causes=tuple(pauses)), tmp_path).context
    finding = host_pauses.evaluate(context)
    assert finding.predicted_step_us.mid == pytest.approx(step_time_ns(QUICK) / 1e3, rel=0.03)
    idle = sum(row.idle_host_us for row in context.summary.time_breakdown) / 4 / context.step_time_us
    saved = 1 - finding.predicted_step_us.mid / context.step_time_us
    assert saved - idle >= 0.02
    assert finding.title.startswith(f"{idle:.0%} of the step is host time between operators")
    assert finding.title.endswith(f"; without its pauses the step takes {saved:.0%} less")
    assert "at the same step on all ranks" not in finding.action.how


def test_pauses_of_all_ranks_come_first_where_those_that_take_turns_are_fewer(tmp_path):
    """Each rank collects garbage in its own steps, in some with another one: of these the peers' pace keeps a part."""
    spec = replace(QUICK, ranks=4, ranks_per_host=4, steps=8)
    first = analyze(spec, tmp_path / "healthy").context.info.steps[0]
    turns = {0: (5, 6, 7), 1: (2, 6, 7), 2: (1, 3, 4), 3: (2, 5)}
    pauses = [
        Pause(pause_ns=6 * MS, ranks=(rank,), steps=tuple(first + step for step in steps))
        for rank, steps in turns.items()
    ]
    planted = replace(spec, causes=tuple(pauses))
    analyzed = analyze(planted, tmp_path / "planted")
    (turning,) = analyzed.summary.stragglers
    assert turning.pattern == "rotating"
    best = analyzed.summary.findings[0]
    assert (best.rule, best.whatif) == (host_pauses.RULE, {"host.pauses": "0"})
    assert best.evidence[0].ranks == (0, 1, 2, 3)
    assert best.predicted_step_us.mid == pytest.approx(step_time_ns(spec) / 1e3, rel=0.03)


def test_on_cpus_pauses_of_the_training_threads_are_found(tmp_path):
    analyzed = analyze(replace(CPU_JOB, causes=(Pause(pause_ns=20 * MS),)), tmp_path)
    (finding,) = analyzed.summary.findings
    assert finding.title == f"42% of the step is host time between operators, mostly in {BETWEEN}"
    assert finding.predicted_step_us.mid == pytest.approx(step_time_ns(CPU_JOB) / 1e3, rel=0.03)


def test_the_title_has_the_share_of_the_breakdown_and_what_the_replay_saves_of_it(tmp_path):
    context = analyze(replace(CPU_JOB, causes=(Pause(pause_ns=20 * MS),)), tmp_path).context
    rows = context.summary.time_breakdown
    idle = sum(row.idle_host_us for row in rows) / len(rows) / context.step_time_us
    assert host_pauses.evaluate(context).title.startswith(f"{idle:.0%} of the step is host time between operators")
    longer = tuple(replace(row, idle_host_us=row.idle_host_us + 0.1 * context.step_time_us) for row in rows)
    title = host_pauses.evaluate(replace(context, summary=replace(context.summary, time_breakdown=longer))).title
    assert title.startswith(f"{idle + 0.1:.0%} of the step is host time")
    assert title.endswith("; without its pauses the step takes 42% less")


def test_without_steps_what_pauses_cost_is_a_bound(tmp_path):
    context = analyze(replace(CPU_JOB, causes=(Pause(pause_ns=20 * MS),)), tmp_path).context
    job = replace(context.summary.job, steps=())
    (finding,) = evaluate(replace(context, summary=replace(context.summary, job=job)))
    assert finding.rule == host_pauses.RULE
    assert (finding.predicted_step_us, finding.obtained) == (None, Obtained.BOUNDED)
    assert finding.ceiling == pytest.approx(1 / (1 - 0.42) - 1, abs=0.02)


def test_a_loop_that_makes_its_batches_itself_is_told_of_the_loader(tmp_path):
    made = analyze(replace(CPU_JOB, causes=(Pause(pause_ns=20 * MS),)), tmp_path).context
    without = replace(made, summary=replace(made.summary, dataloader=()))
    told = "No data loader was recorded: if batches are read or made there"
    assert [told in host_pauses.evaluate(context).action.how for context in (made, without)] == [False, True]


def test_on_cpus_a_job_without_pauses_and_one_with_a_loader_are_not_accused(tmp_path):
    slow = analyze(replace(CPU_JOB, causes=(SlowLoader(load_ns=400 * MS),)), tmp_path / "slow")
    assert not analyze(CPU_JOB, tmp_path / "healthy").rules
    assert slow.rules == {"dataloader-workers"}


@pytest.mark.parametrize(("waited", "found"), [(0.0, True), (0.3, True), (0.45, False)])
def test_on_cpus_threads_that_wait_for_a_core_are_not_said_to_pause(tmp_path, waited, found):
    """In every second step all pause for 40 ms, which are 42 % of the time."""
    pause = Pause(pause_ns=40 * MS, steps=tuple(range(0, 40, 2)))
    context = analyze(replace(CPU_JOB, causes=(pause,)), tmp_path).context
    cpu = CpuMetadata(steps=6, wall_ns=1000, process_ns=500, thread_ns=500, waited_ns=round(1000 * waited))
    runs = {rank: RunMetadata(rank=rank, cpu=cpu) for rank in context.ranks}
    assert (host_pauses.evaluate(replace(context, runs=runs)) is not None) == found


@pytest.mark.parametrize(("where", "found"), [("elsewhere", True), ("pauses", False)])
def test_on_cpus_waits_for_a_core_count_in_the_steps_that_pause(tmp_path, where, found):
    """The threads wait for as long in all: in steps without a pause, or for as long as each pause takes."""
    pause = Pause(pause_ns=20 * MS, steps=tuple(range(0, 40, 2)))
    context = analyze(replace(CPU_JOB, causes=(pause,)), tmp_path).context
    pausing = {rank: each.pausing_us for rank, each in context.per_step.items()}
    if where == "elsewhere":
        core_us = {rank: tuple(0.0 if us > 10_000 else 20_000.0 for us in steps) for rank, steps in pausing.items()}
    else:
        core_us = pausing
    cpu = CpuMetadata(steps=6, wall_ns=1000, process_ns=500, thread_ns=500, waited_ns=500)
    runs = {rank: RunMetadata(rank=rank, cpu=cpu) for rank in context.ranks}
    assert (host_pauses.evaluate(replace(context, runs=runs, core_us=core_us)) is not None) == found


@pytest.mark.parametrize("each_step", [True, False])
@pytest.mark.parametrize(("slept_ms", "found"), [(0, False), (1, False), (8, True), (20, True)])
def test_on_cpus_a_pause_that_is_slept_is_no_wait_for_a_core(tmp_path, slept_ms, found, each_step):
    """In every second step all pause for 40 ms, and wait for a core for as long: in the pauses no longer than these are
    without what is slept in them. 2.4 ms are 5 % of the mean step of 48.
    """
    pause = Pause(pause_ns=40 * MS, steps=tuple(range(0, 40, 2)))
    context = analyze(replace(CPU_JOB, causes=(pause,)), tmp_path).context
    pausing = {rank: each.pausing_us for rank, each in context.per_step.items()}
    cpu = CpuMetadata(steps=6, wall_ns=1000, process_ns=550, thread_ns=550, waited_ns=450)
    runs = {rank: RunMetadata(rank=rank, cpu=cpu) for rank in context.ranks}
    core_us = {rank: tuple(1.1 * us for us in steps) for rank, steps in pausing.items()} if each_step else {}
    slept_us = dict.fromkeys(context.ranks, 1e3 * slept_ms)
    waiting = replace(context, runs=runs, core_us=core_us, slept_us=slept_us)
    assert (host_pauses.evaluate(waiting) is not None) == found


@pytest.mark.parametrize(("thread_ns", "found"), [(550, True), (50, False)])
def test_on_cpus_pauses_of_each_step_are_the_programs_as_far_as_the_thread_runs(tmp_path, thread_ns, found):
    """Of each step of 48 ms all pause for 20. Threads that run for 55 % of the time in which they want a core ran 11 ms
    of that, and those that run for 10 % 2 ms; 2.4 are 5 % of the step.
    """
    context = analyze(replace(CPU_JOB, causes=(Pause(pause_ns=20 * MS),)), tmp_path).context
    cpu = CpuMetadata(steps=6, wall_ns=1000, process_ns=550, thread_ns=thread_ns, waited_ns=450)
    runs = {rank: RunMetadata(rank=rank, cpu=cpu) for rank in context.ranks}
    core_us = {rank: each.pausing_us for rank, each in context.per_step.items()}
    assert (host_pauses.evaluate(replace(context, runs=runs, core_us=core_us)) is not None) == found


@pytest.mark.parametrize(
    ("low_us", "loading_us", "found"),
    [(20_000.0, 2_000.0, True), (38_000.0, 2_000.0, True), (20_000.0, 15_000.0, False), (20_000.0, 0.0, False)],
)
def test_where_workers_may_set_the_pace_pauses_are_a_bound(tmp_path, low_us, loading_us, found):
    """Of each step of 48 ms all pause for 20. It is not known how fast the loader's workers are: without the pauses the
    step may take as long, or as little as ``low_us``; and all wait for batches.
    """
    context = analyze(replace(CPU_JOB, causes=(Pause(pause_ns=20 * MS),)), tmp_path).context
    rows = tuple(replace(row, idle_dataloader_us=loading_us) for row in context.summary.time_breakdown)
    mid = context.step_time_us
    open_ = replace(
        changed(context, time_breakdown=rows),
        may_save=None,
        predict=lambda _: Prediction(low=low_us, mid=mid, high=mid),
    )
    finding = host_pauses.evaluate(open_)
    assert (finding is not None) == found
    if finding is not None:
        saved_us = min(mid - low_us, 20_000.0)
        assert finding.obtained is Obtained.BOUNDED
        assert finding.confidence == "low"
        assert finding.ceiling == pytest.approx(mid / (mid - saved_us) - 1, rel=0.02)
        assert "without its pauses" not in finding.title
        assert not finding.whatif


@pytest.mark.parametrize(("part", "found"), [(0.9, False), (0.7, True)])
def test_what_the_replay_saves_of_a_pause_is_as_much_a_wait_for_a_core_as_the_pause_is(tmp_path, part, found):
    """Of 20 ms of pauses in a step of 48, this part is waited for a core. Without them the step takes 10 less: of these
    1 or 3 were not waited, and 2.4 are 5 % of the step.
    """
    context = analyze(replace(CPU_JOB, causes=(Pause(pause_ns=20 * MS),)), tmp_path).context
    core_us = {rank: tuple(part * us for us in each.pausing_us) for rank, each in context.per_step.items()}
    mid = context.step_time_us - 10_000
    saves_half = replace(context, core_us=core_us, predict=lambda _: Prediction(low=mid, mid=mid, high=mid))
    assert (host_pauses.evaluate(replace(saves_half, may_save=None)) is not None) == found


@pytest.mark.scale
def test_pauses_of_a_whole_stage_have_no_peers_and_are_found(tmp_path):
    pause = Cause("pause", 2.5 * step_ns(PIPELINE), (2, 3), 2, how="checkpoint")
    emulate(replace(PIPELINE, causes=(pause,))).write(tmp_path)
    summary = advised(tmp_path)
    finding = next(one for one in summary.findings if one.rule == host_pauses.RULE)
    assert finding.evidence[0].ranks == (2, 3)
    truth_us = step_ns(PIPELINE) / 1e3
    assert finding.predicted_step_us.mid == pytest.approx(truth_us, rel=0.05)
    assert summary.verdict.headline.startswith(finding.title)


@pytest.mark.parametrize("ranks", [None, (0,)])
def test_the_what_if_is_the_job_without_pauses(tmp_path, ranks):
    pause = Cause("pause", 0.4 * step_ns(EMULATED), ranks, 2, how="log")
    emulate(replace(EMULATED, causes=(pause,))).write(tmp_path)
    found = predict(context_of(tmp_path), {"host.pauses": "0"})
    assert found.mid_ns == pytest.approx(step_ns(EMULATED), rel=0.03)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_pause_before_the_first_launch_of_a_recording_counts(tmp_path, steps):
    """In each step of 15 ms a lone rank prepares its batch for 5, then its device computes for 10."""
    calls, kernels = [], []
    for step in range(steps):
        at = 15_000 * step
        calls.append(("user_annotation", f"ProfilerStep#{step}", at, 15_000, 0))
        calls += [("cuda_runtime", "cudaLaunchKernel", at + 5_000 + 10 * n, 6, 100 * step + n + 1) for n in range(10)]
        calls.append(("cuda_runtime", "cudaDeviceSynchronize", at + 5_100, 9_900, 0))
        kernels += [("kernel", "gemm", at + 5_000 + 1_000 * n, 1_000, 100 * step + n + 1) for n in range(10)]
    events = [
        {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": 7, "ts": ts, "dur": dur,
         "args": {"correlation": number, "stream": 7, "device": 0} if number else {}}
        for pid, rows in ((1, calls), (0, kernels)) for cat, name, ts, dur, number in rows
    ]  # fmt: skip
    device = {"id": 0, "name": "NVIDIA A100-SXM4-80GB"}
    (tmp_path / "trace.json").write_text(json.dumps({"deviceProperties": [device], "traceEvents": events}))
    summary = advised(tmp_path)
    assert summary.findings[0].rule == host_pauses.RULE
    assert summary.findings[0].predicted_step_us.mid == pytest.approx(10_000, rel=0.05)


def test_a_pause_before_the_first_collective_of_a_recording_counts(tmp_path):
    """The same of two ranks that exchange 1 MiB before they compute: each first collective comes as late as the host,
    and waits for nothing else.
    """
    sent = {
        "Collective name": "allreduce", "dtype": "Float", "In msg nelems": 1 << 18, "Out msg nelems": 1 << 18,
        "Group size": 2, "Process Group Name": "0", "Process Group Ranks": "[0, 1]",
    }  # fmt: skip
    for rank in range(2):
        events = []
        for step in range(3):
            at = 15_000 * step
            events.append(("user_annotation", f"ProfilerStep#{step}", at, 15_000, {}))
            for number, (name, launched, start, takes, args) in enumerate(
                [("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 5_000, 5_010, 100, {**sent, "stream": 20})]
                + [("gemm", 5_020 + 10 * n, 5_110 + 980 * n, 980, {"stream": 7}) for n in range(10)],
                100 * step,
            ):
                args = {"device": 0, "correlation": number + 1, **args}
                events.append(("cuda_runtime", "cudaLaunchKernel", at + launched, 6, {"correlation": number + 1}))
                events.append(("kernel", name, at + start, takes, args))
            events.append(("cuda_runtime", "cudaDeviceSynchronize", at + 5_130, 9_870, {}))
        trace = {
            "deviceProperties": [{"id": 0, "name": "NVIDIA A100-SXM4-80GB"}],
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 2},
            "traceEvents": [
                {"ph": "X", "cat": cat, "name": name, "pid": int(cat != "kernel"), "tid": 7, "ts": 1e6 + ts, "dur": dur,
                 "args": args}
                for cat, name, ts, dur, args in events
            ],
        }  # fmt: skip
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(trace))
    found = predict(context_of(tmp_path), {"host.pauses": "0"})
    assert found.mid_ns == pytest.approx(10.1e6, rel=0.03)


def test_pauses_of_few_steps_say_so(tmp_path):
    """A checkpoint in 1 of 8 steps is no work of each."""
    first = analyze(replace(QUICK, steps=8), tmp_path / "healthy").context.info.steps[0]
    planted = replace(QUICK, steps=8, causes=(Pause(pause_ns=40 * MS, steps=(first + 3,)),))
    finding = host_pauses.evaluate(analyze(planted, tmp_path / "planted").context)
    assert " of the time is host time between operators" in finding.title
    assert finding.title.endswith(", in 1 of 8 steps")
