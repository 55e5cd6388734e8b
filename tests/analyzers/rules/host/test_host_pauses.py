"""Hosts that pause on all ranks, or on all of a pipeline stage: what that costs, by the job simulated without it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import perfscope
from perfscope.analyzers.rules.host import host_pauses
from perfscope.analyzers.whatif.predict import predict
from perfscope.analyzers.whatif.whatif import context_of
from perfscope.recording.vocabulary import GARBAGE_COLLECTION
from tests.analyzers.rules.jobs import QUICK, analyze
from tests.emulator.emulate import emulate
from tests.emulator.spec import MS, Cause, Job, Model, Recording
from tests.generator import Pause, cpu_job, simulate

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
    assert finding.predicted_step_us.mid == pytest.approx(simulate(QUICK).truth.step_time_ns / 1e3, rel=0.03)
    assert finding.whatif == {"host.pauses": "0"}


def test_pauses_too_short_to_cost_much_are_silent(tmp_path):
    assert not analyze(replace(QUICK, causes=(Pause(pause_ns=MS // 10),)), tmp_path).rules


def test_recorded_collections_and_a_straggler_have_their_own_findings(tmp_path):
    named = analyze(replace(QUICK, causes=(Pause(pause_ns=MS, name=GARBAGE_COLLECTION),)), tmp_path / "named")
    alone = analyze(replace(QUICK, causes=(Pause(pause_ns=MS, ranks=(1,)),)), tmp_path / "alone")
    assert named.rules == {"garbage-collection"}
    assert alone.rules == {"straggling-rank"}


def test_on_cpus_what_happens_between_operators_is_no_pause(tmp_path):
    job = cpu_job(ranks=2, steps=6)
    assert host_pauses.RULE not in analyze(replace(job, causes=(Pause(pause_ns=20 * MS),)), tmp_path).rules


@pytest.mark.scale
def test_pauses_of_a_whole_stage_have_no_peers_and_are_found(tmp_path):
    pause = Cause("pause", 2.5 * emulate(PIPELINE).step_ns, (2, 3), 2, how="checkpoint")
    emulate(replace(PIPELINE, causes=(pause,))).write(tmp_path)
    summary = perfscope.analyze(tmp_path)
    finding = next(one for one in summary.findings if one.rule == host_pauses.RULE)
    assert finding.evidence[0].ranks == (2, 3)
    truth_us = emulate(PIPELINE).step_ns / 1e3
    assert finding.predicted_step_us.mid == pytest.approx(truth_us, rel=0.05)
    assert summary.verdict.headline.startswith(finding.title)


@pytest.mark.parametrize("ranks", [None, (0,)])
def test_the_what_if_is_the_job_without_pauses(tmp_path, ranks):
    pause = Cause("pause", 0.4 * emulate(EMULATED).step_ns, ranks, 2, how="log")
    emulate(replace(EMULATED, causes=(pause,))).write(tmp_path)
    found = predict(context_of(tmp_path), {"host.pauses": "0"})
    assert found.mid_ns == pytest.approx(emulate(EMULATED).step_ns, rel=0.03)


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
    summary = perfscope.analyze(tmp_path)
    assert summary.findings[0].rule == host_pauses.RULE
    assert summary.findings[0].predicted_step_us.mid == pytest.approx(10_000, rel=0.05)
