"""Which gathers belong to which pass, whatever their type, with accumulation, and with hosts that run ahead."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest

from perfscope.analyzers.whatif.change import CannotReplay, Context
from perfscope.analyzers.whatif.gathers import GatherPass, Gathers, find_gathers
from perfscope.analyzers.whatif.predict import predict
from perfscope.analyzers.whatif.schedules.recorded import editable_schedules
from perfscope.analyzers.whatif.sharding_recorded import reductions_by_step
from perfscope.analyzers.whatif.whatif import context_of
from perfscope.recording.metadata import ModelMetadata, RunMetadata
from tests.analyzers.whatif.fsdp_variants import gathers_late, keeps_parameters
from tests.collectors.harness import SCRIPTS, needs_torch, record_ranks
from tests.emulator.changes import apply
from tests.emulator.emulate import emulate, step_ns
from tests.emulator.spec import MS, Cause, Cpu, Job, Loader, Model, Network, Recording
from tests.generator import JobSpec, ModelSpec, NetworkSpec, simulate, step_time_ns

pytestmark = pytest.mark.scale

SPEC = JobSpec(
    ranks=4, steps=4, strategy="fsdp", model=ModelSpec(layers=6, tokens=2048),
    network=NetworkSpec(busbw_gbps=20.0, alpha_ns=50_000),
)  # fmt: skip
RESHARD = {"fsdp.reshard_after_forward": "false"}
TRAINING = str(SCRIPTS / "sharded_gathers.py")


def recorded(folder: Path, spec: JobSpec, *, late: bool = False) -> Context:
    with pytest.MonkeyPatch.context() as patch:
        if late:
            gathers_late(patch)
        simulate(spec).write(folder)
    return as_version(2, context_of(folder))


def as_version(version: int, context: Context) -> Context:
    """The generator's FSDP frees parameters after every backward, as version 2 does."""
    known = {"fsdp": {"version": version}}
    return replace(context, runs={rank: RunMetadata(rank=rank, settings=known) for rank in context.result.partials})


def found(context: Context) -> Gathers:
    schedules = editable_schedules(context.result, context.recorded)
    return find_gathers(schedules, context, reductions_by_step(schedules))


def kept_ns(spec: JobSpec) -> float:
    """The step when parameters stay for the backward."""
    with pytest.MonkeyPatch.context() as patch:
        keeps_parameters(patch)
        return step_time_ns(spec)


def without_autograd(context: Context) -> Context:
    """The recording as it would be of a tool that does not record autograd's functions."""
    partials = {
        rank: replace(
            partial,
            collectives=replace(partial.collectives, backward=np.zeros(len(partial.collectives), dtype=np.bool_)),
        )
        for rank, partial in context.result.partials.items()
    }
    return replace(context, result=replace(context.result, partials=partials))


def in_words(passes: tuple[GatherPass, ...]) -> list[tuple[str, int, int]]:
    return [("B" if each.backward else "F", each.microbatch, len(each.gathers)) for each in passes]


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("late", [False, True], ids=["ahead", "late"])
def test_every_micro_batch_has_a_forward_and_a_backward(tmp_path: Path, microbatches: int, *, late: bool) -> None:
    # The host runs ahead: it issues a step's first gather long before the device begins the step.
    context = recorded(tmp_path, replace(SPEC, microbatches=microbatches), late=late)
    expected = [(phase, micro, 6) for micro in range(microbatches) for phase in "FB"]
    assert {key[1] for key in found(context).passes} == set(context.recorded.steps.tolist())
    for job in (context, without_autograd(context)):
        assert all(in_words(passes) == expected for passes in found(job).passes.values())


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_with_accumulation_the_gathers_of_every_backward_go(tmp_path: Path, microbatches: int) -> None:
    spec = replace(SPEC, microbatches=microbatches)
    answer = predict(recorded(tmp_path, spec), RESHARD)
    took = kept_ns(spec)
    assert answer.mid_ns == pytest.approx(took, rel=0.02)
    assert took < 0.95 * answer.measured_ns


@pytest.mark.parametrize("microbatches", [1, 2])
def test_replicas_reduce_after_their_shards_do(tmp_path: Path, microbatches: int) -> None:
    # Hybrid sharding: the all-reduce across replicas waits for the reduce-scatter, which comes earlier now.
    spec = replace(SPEC, ranks=8, replicas=2, microbatches=microbatches)
    answer = predict(recorded(tmp_path, spec), RESHARD)
    took = kept_ns(spec)
    assert answer.mid_ns == pytest.approx(took, rel=0.02)
    assert took < 0.8 * answer.measured_ns


@pytest.mark.parametrize("parameter_bytes", [2, 4], ids=["bf16", "fp32"])
def test_elements_are_compared_not_bytes(tmp_path: Path, parameter_bytes: int) -> None:
    # Gathered in bf16, whatever the parameters are.
    context = recorded(tmp_path, SPEC)
    shard = SPEC.model.layers * SPEC.model.layer_parameters // SPEC.ranks
    model = ModelMetadata(parameters=shard, parameter_bytes=parameter_bytes * shard)
    known = replace(context, runs={rank: RunMetadata(rank=rank, model=model) for rank in context.result.partials})
    for job in (known, without_autograd(known)):
        assert predict(job, RESHARD).mid_ns == pytest.approx(kept_ns(SPEC), rel=0.02)


def test_sizes_need_not_be_recorded(tmp_path: Path) -> None:
    answer = predict(recorded(tmp_path, replace(SPEC, metadata="none")), RESHARD)
    assert answer.mid_ns == pytest.approx(kept_ns(SPEC), rel=0.02)


def test_fsdp1_keeps_parameters_until_gradients_are_reduced(tmp_path: Path) -> None:
    # Counted in a training with torch 2.13: SHARD_GRAD_OP under no_sync gathers in the first micro-batch only.
    spec = replace(SPEC, microbatches=3)
    context = recorded(tmp_path, spec)
    one, two = (predict(as_version(version, context), RESHARD).mid_ns for version in (1, 2))
    gathers = 2 * SPEC.model.layers * SPEC.network.alpha_ns
    assert one < two - gathers


def test_gathers_become_ready_in_the_order_of_their_stream(tmp_path: Path) -> None:
    # The host runs ahead: what is issued late on the stream may have been launched before the compute that holds up
    # what is in front of it. All ranks must issue in one order, or changed schedules wait for each other.
    job = Job(strategy="fsdp", ranks=4, noise=0.03, recording=Recording(steps=4), network=Network(gbps=20))
    emulate(job).write(tmp_path)
    context = context_of(str(tmp_path))
    for partial in context.result.partials.values():
        own = partial.collectives
        for stream in np.unique(own.stream):
            assert (np.diff(partial.progress.ready_ns[own.stream == stream]) >= 0).all()
    assert predict(context, RESHARD).mid_ns < context.result.step_ns


@pytest.mark.parametrize("metadata", ["kernel", "none"])
def test_gradients_reduced_in_every_micro_batch_free_the_parameters(tmp_path: Path, metadata: str) -> None:
    job = Job(
        strategy="fsdp", version=1, microbatches=3, noise=0.0, network=Network(gbps=10),
        recording=Recording(steps=3, metadata=metadata, shapes=False),
    )  # fmt: skip
    emulated = emulate(job)
    emulated.write(tmp_path)
    answer = predict(context_of(str(tmp_path)), RESHARD)
    truth = step_ns(replace(job, reshard=False)) / emulated.step_ns
    assert truth < 0.9
    assert answer.mid_ns / answer.measured_ns == pytest.approx(truth, rel=0.01)


@pytest.mark.parametrize("metadata", ["kernel", "none"])
def test_parameters_that_stay_are_not_gathered_twice(tmp_path: Path, metadata: str) -> None:
    """Without sizes, autograd that issues the reductions and no gather shows it."""
    recording = Recording(steps=2, metadata=metadata, shapes=False)
    emulate(Job(strategy="fsdp", ranks=2, ranks_per_host=2, reshard=False, recording=recording)).write(tmp_path)
    with pytest.raises(CannotReplay):
        predict(context_of(str(tmp_path)), RESHARD)


@pytest.mark.parametrize("early", [False, True])
def test_gathers_that_are_issued_one_unit_ahead_are_early_enough(tmp_path: Path, early: bool) -> None:
    # In the forward a host that runs ahead issues the next unit's gather while one computes: FSDP's limit of two units
    # lets it come no earlier. In the backward it does so only with backward_prefetch.
    job = Job(
        strategy="fsdp", backward_prefetch=early, noise=0.0, network=Network(gbps=20), model=Model(tokens=16384),
        recording=Recording(steps=4),
    )  # fmt: skip
    emulated = emulate(job)
    emulated.write(tmp_path)
    answer = predict(context_of(str(tmp_path)), {"fsdp.prefetch": "1"})
    truth = step_ns(replace(job, backward_prefetch=True, forward_prefetch=True)) / emulated.step_ns
    assert truth == pytest.approx(1.0) if early else truth < 0.95
    assert answer.mid_ns / answer.measured_ns == pytest.approx(truth, rel=0.01)


def test_gathers_pass_the_same_reductions_on_every_rank(tmp_path: Path) -> None:
    """Ranks that are unlike early would issue them in unlike order, and wait for each other without end."""
    job = Job(
        seed=409, strategy="fsdp", version=1, ranks=2, ranks_per_host=1, microbatches=4, backward_prefetch=True,
        item_every=1, noise=0.01, model=Model(width=512),
    )  # fmt: skip
    emulate(job).write(tmp_path)
    answer = predict(context_of(str(tmp_path)), {"fsdp.prefetch": "1"})
    # They are prefetched already.
    assert answer.mid_ns / answer.measured_ns == pytest.approx(1.0, abs=0.01)


def test_a_lower_stage_needs_the_sizes_of_what_is_reduced(tmp_path: Path) -> None:
    recording = Recording(steps=2, metadata="none", shapes=False)
    emulate(Job(strategy="fsdp", ranks=2, recording=recording)).write(tmp_path)
    with pytest.raises(CannotReplay, match="record with shapes"):
        predict(context_of(str(tmp_path)), {"zero.stage": "0"})


LIMITED = Job(strategy="fsdp", version=1, noise=0.0, model=Model(width=512), recording=Recording(steps=5))
"""Its hosts wait for FSDP's limit on gathered units."""
PAUSE = (Cause("pause", 4 * MS, (1,), how="checkpoint"),)
SLOW_HOST = (Cause("slow host", 5.0, (1,)),)
LATE = replace(LIMITED, backward_prefetch=False)
KEPT = {"reshard": False}
LATE_BATCHES = replace(
    LATE, loader=Loader(workers=0, load_ns=MS), causes=(Cause("slow loader", 5.0, (3,)),), recording=Recording(steps=3),
    model=Model(blocks=3, tokens=8192, width=512, flops_per_ns=100_000.0),
)  # fmt: skip
"""One host comes late to each step, and how far the others are ahead of it is up to the limit."""
READS = replace(
    LIMITED, ranks=2, microbatches=2, model=Model(blocks=6, tokens=1024), causes=(Cause("sync"),),
    recording=Recording(steps=3), loader=Loader(load_ns=0),
)  # fmt: skip
"""The loss is read right before the first gather of each backward."""
TWO_SLOW = replace(
    READS, ranks=4, ranks_per_host=2, model=Model(blocks=2, tokens=2048), recording=Recording(steps=6),
    causes=(Cause("slow host", 2.6, (3,)), Cause("pause", 10 * MS, (1,), 2, "checkpoint")),
)  # fmt: skip
SHORT = Job(
    strategy="fsdp", version=1, noise=0.0, ranks=2, backward_prefetch=False, optimizer_kernels=4, item_every=5,
    model=Model(blocks=4, tokens=1024, width=512, small_kernels=1, flops_per_ns=100_000.0), bucket_mb=10,
    cpu=Cpu(python_ns=2_209, operator_ns=10_461, launch_ns=5_981, collective_ns=73_441),
    network=Network(latency_ns=24_582, gbps=230.0), recording=Recording(steps=3, metadata="operator"),
    loader=Loader(workers=0, load_ns=173_487, batch_bytes=6_677_370),
)  # fmt: skip
"""Before a host comes back from the limit, short kernels behind the freed unit have ended, too."""
AHEAD = {"backward_prefetch": True, "forward_prefetch": True}


@pytest.mark.scale
@pytest.mark.parametrize(
    ("job", "setting", "value", "change"),
    [
        (LIMITED, "fsdp.reshard_after_forward", "false", KEPT),
        (replace(LIMITED, causes=PAUSE), "fsdp.reshard_after_forward", "false", KEPT),
        (replace(LIMITED, causes=PAUSE), "zero.stage", "2", KEPT),
        (replace(LATE, network=Network(gbps=20)), "fsdp.reshard_after_forward", "false", KEPT),
        (replace(LATE, network=Network(gbps=20)), "fsdp.prefetch", "1", AHEAD),
        (replace(LATE, model=Model(width=512, tokens=8192)), "fsdp.prefetch", "1", AHEAD),
        (replace(LATE, causes=SLOW_HOST), "fsdp.prefetch", "1", AHEAD),
        (replace(LIMITED, causes=SLOW_HOST), "fsdp.prefetch", "1", AHEAD),
        (LATE_BATCHES, "fsdp.prefetch", "1", AHEAD),
        (READS, "fsdp.reshard_after_forward", "false", KEPT),
        (READS, "host.sync", "0", {"causes": ()}),
        (TWO_SLOW, "fsdp.reshard_after_forward", "false", KEPT),
        (SHORT, "fsdp.reshard_after_forward", "false", KEPT),
        (SHORT, "fsdp.backward_prefetch", "BACKWARD_PRE", {"backward_prefetch": True}),
        (replace(LATE, causes=SLOW_HOST), "fsdp.backward_prefetch", "BACKWARD_PRE", {"backward_prefetch": True}),
    ],
)
def test_hosts_wait_for_fewer_gathers_or_issue_them_earlier(
    tmp_path: Path, job: Job, setting: str, value: str, change: dict[str, bool]
) -> None:
    emulated = emulate(job)
    emulated.write(tmp_path)
    answer = predict(context_of(str(tmp_path)), {setting: value})
    truth = step_ns(replace(job, **change)) / emulated.step_ns
    assert answer.mid_ns / answer.measured_ns == pytest.approx(truth, abs=0.02)


@needs_torch
@pytest.mark.training
@pytest.mark.parametrize("arguments", [(), ("--accumulate", "3"), ("--keep", "--accumulate", "2")])
def test_a_real_training_s_gathers(arguments: tuple[str, ...], tmp_path: Path) -> None:
    options = ("--wait", "2", "--warmup", "1", "--active", "3")
    recording = record_ranks(tmp_path / "recording", 2, TRAINING, *arguments, options=options)
    assert recording.exit_code == 0, recording.err
    counted = json.loads(next(line for line in recording.out.splitlines() if line.startswith("[[")))
    context = context_of(str(recording.folder))
    passes = found(context).passes
    assert passes
    for (_, step), of_step in passes.items():
        runs = [(phase, len(list(run))) for phase, run in groupby(counted[step])]
        micro = 2 if "2" in arguments else 1
        if "--keep" in arguments:  # nothing between its forwards
            runs = [("F", size // micro) for _, size in runs for _ in range(micro)]
        assert [(phase, size) for phase, _, size in in_words(of_step)] == runs
    if "--keep" in arguments:
        with pytest.raises(CannotReplay, match="not gathered twice"):
            predict(context, RESHARD)
    else:
        answer = predict(context, RESHARD)
        assert answer.mid_ns < answer.measured_ns


@pytest.mark.parametrize("settings", [{"network.bandwidth": "0.25x"}, {"compute": "4x"}], ids=str)
@pytest.mark.parametrize("reshard", [True, False])
def test_work_waits_for_what_a_forward_gathers_ahead(tmp_path: Path, settings: dict[str, str], reshard: bool) -> None:
    """No wait for such a gather is recorded: the network is quick enough."""
    job = Job(
        strategy="fsdp", version=2, ranks=2, ranks_per_host=1, forward_prefetch=True, reshard=reshard,
        network=Network(between_gbps=20.0), model=Model(blocks=4, tokens=4096), recording=Recording(steps=5),
    )  # fmt: skip
    changed = apply(job, settings)
    assert changed is not None
    emulate(job).write(tmp_path)
    found, truth = predict(context_of(tmp_path, workers=1), settings), step_ns(changed.job)
    assert found.mid_ns == pytest.approx(truth, rel=0.01)
    assert found.low_ns <= truth <= found.high_ns
