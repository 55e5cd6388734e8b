"""Real trainings with everything that torch itself offers to train with: steps, settings, ranges, and the analysis.

The quick ones are part of the suite; the others run with ``-m frameworks``.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import perfscope
from perfscope.recording.vocabulary import (
    BACKWARD,
    COLLECTIVE_PREFIX,
    DATALOADER,
    EVALUATION,
    FORWARD,
    OPTIMIZER,
    PIPELINE_PREFIX,
)
from tests.collectors.harness import SCRIPTS, Recording, needs_torch, record, record_ranks

pytestmark = [pytest.mark.training, needs_torch]

WAIT, WARMUP, ACTIVE, STEPS = 2, 1, 5, 12
OPTIONS = ("--wait", str(WAIT), "--warmup", str(WARMUP), "--active", str(ACTIVE))
FIRST = WAIT + WARMUP
"""First recorded step."""


@dataclass(frozen=True)
class Case:
    """A mode of a script and what its recording holds."""

    mode: str
    ranks: int = 0
    """0: a plain process that runs loops.py."""
    strategies: tuple[str, ...] = ("single",)
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Of each of these subjects, at least these."""
    ranges: Mapping[str, int] = field(default_factory=dict)
    """Ranges of ours in one recorded step."""
    collectives: Mapping[str, int] = field(default_factory=dict)
    """``KIND of SIZE`` -> collectives that rank 0 issues in one recorded step; not checked where empty."""
    groups: tuple[str, ...] = ()
    """What the process groups are for."""
    steps: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the step record beside ``seen``."""
    used: tuple[int, ...] = tuple(range(FIRST, FIRST + ACTIVE))
    """Steps that the analysis uses."""


PLAIN = {FORWARD: 1, BACKWARD: 1, OPTIMIZER: 1}
MICRO_BATCHES = {FORWARD: 8, BACKWARD: 8, OPTIMIZER: 1}

QUICK = (
    Case("validation", ranges={**PLAIN, DATALOADER: 1}, used=(3, 5, 6, 7)),
    Case(
        "in_backward",
        settings={"optimizer": {"classes": ["SGD"], "count": 4}},
        ranges={FORWARD: 1, BACKWARD: 1, OPTIMIZER: 4},
    ),
    Case(
        "fsdp2",
        2,
        ("fsdp",),
        {
            "fsdp": {
                "version": 2,
                "units": 3,
                "mesh": {"names": ["shards"], "shape": [2]},
                "reshard_after_forward": True,
                "explicit_forward_prefetch": 1,
                "mixed_precision": {"param_dtype": "torch.bfloat16", "reduce_dtype": "torch.float32"},
            },
            "gradient_accumulation": {"backwards_per_step": 2, "no_sync": True},
            "optimizer": {"classes": ["AdamW"], "foreach": True},
        },
        {FORWARD: 2, BACKWARD: 2, OPTIMIZER: 1},
        {"all_gather of 2": 10, "reduce_scatter of 2": 3},
    ),
    Case(
        "interleaved",
        2,
        ("pipeline",),
        {
            "pipeline": {
                "schedule": "ScheduleInterleaved1F1B",
                "microbatches": 4,
                "stages": 4,
                "stage": [0, 2],
                "virtual_stages": 2,
                "degree": 2,
            }
        },
        MICRO_BATCHES,
        {"send of 2": 12, "recv of 2": 12},
    ),
    # The backward passes from which it is seen that they are all there is, two steps, are not recorded.
    Case(
        "without_optimizer", ranges={FORWARD: 1, BACKWARD: 1}, steps={"detected_by": "backward"}, used=(4, 5, 6, 7, 8)
    ),
)

SLOW = (
    Case("stream", ranges={**PLAIN, DATALOADER: 1}),
    Case("closure", settings={"optimizer": {"classes": ["LBFGS"]}}),
    Case("functional", ranges={FORWARD: 1}, steps={"detected_by": "gradients"}, used=(6, 7, 8, 9, 10)),
    Case("by_hand", ranges={FORWARD: 1, BACKWARD: 1}, steps={"detected_by": "explicit"}),
    Case("scaled", settings={"amp": {"dtype": "bfloat16", "scaler": "GradScaler"}}, ranges=PLAIN, steps={"skipped": 2}),
    Case("compiled", settings={"compile": {"backend": "eager", "regions": 1}}, ranges={BACKWARD: 1, OPTIMIZER: 1}),
    Case(
        "two_optimizers",
        settings={"optimizer": {"count": 2}, "gradient_accumulation": {"backwards_per_step": 2}},
        ranges={FORWARD: 2, BACKWARD: 2, OPTIMIZER: 2},
    ),
    Case("adversaries", ranges={FORWARD: 5, BACKWARD: 2, OPTIMIZER: 2}),
    Case(
        "ddp",
        2,
        ("ddp",),
        {"ddp": {"group": "0"}, "gradient_accumulation": {"backwards_per_step": 4, "no_sync": True}},
        {FORWARD: 4, BACKWARD: 4, OPTIMIZER: 1},
        {"all_reduce of 2": 1},
    ),
    Case(
        "ddp_synchronous",
        2,
        ("ddp",),
        {"gradient_accumulation": {"backwards_per_step": 2, "no_sync": False}},
        {FORWARD: 2, BACKWARD: 2, OPTIMIZER: 1},
        {"all_reduce of 2": 2},
    ),
    Case("replicate", 2, ("ddp",), {"ddp": {"replicate_degree": 2}}, PLAIN, {"all_reduce of 2": 1}),
    Case("zero1", 2, ("ddp", "zero1"), {"zero1": {"shards": "AdamW"}}, PLAIN),
    Case(
        "fsdp1",
        2,
        ("fsdp",),
        {
            "fsdp": {
                "version": 1,
                "sharding_strategy": "SHARD_GRAD_OP",
                "backward_prefetch": "BACKWARD_POST",
                "mixed_precision": {"param_dtype": "torch.bfloat16"},
            }
        },
        PLAIN,
        {"all_gather of 2": 3, "reduce_scatter of 2": 3},
    ),
    Case(
        "fsdp1_hybrid",
        4,
        ("fsdp",),
        {"fsdp": {"sharding_strategy": "HYBRID_SHARD", "shard_degree": 2, "replicate_degree": 2}},
        PLAIN,
        {"all_gather of 2": 1, "reduce_scatter of 2": 1, "all_reduce of 2": 1},
        ("default_pg", "mesh_replicas", "mesh_shards"),
    ),
    Case(
        "hsdp",
        4,
        ("fsdp",),
        {
            "fsdp": {"version": 2, "shard_degree": 2, "replicate_degree": 2, "reshard_after_forward": False},
            "device_mesh": {},
        },
        PLAIN,
        {"all_gather of 2": 3, "reduce_scatter of 2": 3, "all_reduce of 2": 3},
        ("default_pg", "mesh_replicas", "mesh_shards"),
    ),
    Case("tensor", 2, ("tensor",), {"tensor": {"degree": 2, "mesh_dimension": "tp"}}, PLAIN, {"all_reduce of 2": 1}),
    Case(
        "fsdp2_tensor",
        4,
        ("fsdp", "tensor"),
        {"tensor": {"degree": 2, "mesh_dimension": "tp"}, "fsdp": {"shard_degree": 2}},
        PLAIN,
        groups=("default_pg", "mesh_dp", "mesh_tp"),
    ),
    Case(
        "gpipe",
        2,
        ("pipeline",),
        {"pipeline": {"schedule": "ScheduleGPipe", "microbatches": 4, "stage": [0], "group": "0"}},
        {FORWARD: 4, BACKWARD: 4, OPTIMIZER: 1},
        {"send of 2": 4, "recv of 2": 4},
    ),
    Case(
        "one_forward_one_backward",
        2,
        ("pipeline",),
        {"pipeline": {"schedule": "Schedule1F1B", "microbatches": 4, "virtual_stages": 1}},
        {FORWARD: 4, BACKWARD: 4, OPTIMIZER: 1},
        {"send of 2": 4, "recv of 2": 4},
    ),
    Case(
        "zero_bubble",
        2,
        ("pipeline",),
        {"pipeline": {"schedule": "ScheduleInterleavedZeroBubble", "virtual_stages": 2}},
        {FORWARD: 8, OPTIMIZER: 1},
        {"send of 2": 12, "recv of 2": 12},
    ),
    Case("compiled", 2, ("ddp",), {"compile": {"backend": "aot_eager", "regions": 1}}, PLAIN, {"all_reduce of 2": 1}),
    Case(
        "gan",
        2,
        ("ddp",),
        {"ddp": {"instances": 2}, "optimizer": {"count": 2}},
        {FORWARD: 7, BACKWARD: 6, OPTIMIZER: 6},
    ),
    Case("evaluation", 2, ("ddp",), {}, PLAIN, used=(3, 5, 6, 7)),
)


def cases(given: tuple[Case, ...], *marks: Any) -> list[Any]:
    return [pytest.param(case, id=f"{case.mode} on {case.ranks or 1}", marks=marks) for case in given]


@pytest.mark.parametrize("case", [*cases(QUICK), *cases(SLOW, pytest.mark.frameworks)])
def test_a_training_is_recorded_and_analyzed(case: Case, tmp_path: Path) -> None:
    recording = run(case, tmp_path / "r")
    assert recording.exit_code == 0, recording.err
    for rank in range(case.ranks or 1):
        check_metadata(case, recording, rank)
    check_ranges(case, recording)
    if case.ranks:
        lines = recording.out.splitlines()
        assert len(lines) == case.ranks
        assert all(
            f"steps {STEPS} " in line and "'dispatcher'" in line and line.endswith("after: []") for line in lines
        )
    check_analysis(case, recording)


def run(case: Case, folder: Path) -> Recording:
    arguments = (case.mode, "--steps", str(STEPS))
    if case.ranks:
        return record_ranks(folder, case.ranks, str(SCRIPTS / "parallel.py"), *arguments, options=OPTIONS)
    return record(folder, sys.executable, str(SCRIPTS / "loops.py"), *arguments, options=OPTIONS)


def check_metadata(case: Case, recording: Recording, rank: int) -> None:
    run = recording.run(rank)
    assert (run.steps.seen, run.problems, run.outcome) == (STEPS, (), "finished")
    assert {name: getattr(run.steps, name) for name in case.steps} == dict(case.steps)
    assert run.strategies == case.strategies
    assert len(run.captures) == 1
    assert run.captures[0].complete
    expected = dict(case.settings)
    if "pipeline" in expected and rank:
        expected["pipeline"] = {**expected["pipeline"]}
        expected["pipeline"].pop("stage", None)  # each rank's are its own
    for subject, values in expected.items():
        assert {name: run.settings[subject].get(name) for name in values} == dict(values)
    if "gradient_accumulation" not in expected:
        assert "gradient_accumulation" not in run.settings
    assert run.settings["threads"]["intraop"] == 1
    assert run.settings["precision"]["default_dtype"] == "float32"
    described = [group.description for group in run.process_groups]
    assert [group.ranks for group in run.process_groups][:1] == ([tuple(range(case.ranks))] if case.ranks else [])
    assert not case.groups or tuple(described) == case.groups
    assert all(rank in group.ranks for group in run.process_groups)


def check_ranges(case: Case, recording: Recording) -> None:
    trace = recording.trace()
    recorded = trace.recorded_steps()
    assert len(recorded) == ACTIVE
    found = trace.ranges()
    extra = Counter(name.partition("#")[0] for name in found if name.partition("#")[0] not in case.ranges)
    wanted = dict(case.ranges)
    if EVALUATION in extra:
        assert len(case.used) < ACTIVE
        wanted.pop(DATALOADER, None)  # evaluations draw batches too
    assert {name: found[name] for name in wanted} == {name: count * ACTIVE for name, count in wanted.items()}
    kinds: Counter[str] = Counter()
    for name, count in found.items():
        if name.startswith(COLLECTIVE_PREFIX):
            kind, group, size, *_ = name.removeprefix(COLLECTIVE_PREFIX).split("|")
            assert any(each.name == group for each in recording.run().process_groups)
            kinds[f"{kind} of {size}"] += count
    if case.collectives:
        assert kinds == {kind: count * ACTIVE for kind, count in case.collectives.items()}
    if "pipeline" in case.strategies:
        check_micro_batches(recording.run().settings["pipeline"], found)


def check_micro_batches(pipeline: Mapping[str, Any], found: Counter[str]) -> None:
    halves = ("backward_input", "backward_weight") if "ZeroBubble" in pipeline["schedule"] else ("backward",)
    expected = {
        f"{PIPELINE_PREFIX}{phase}|{stage}|{micro_batch}": ACTIVE
        for phase in ("forward", *halves)
        for stage in pipeline["stage"]
        for micro_batch in range(pipeline["microbatches"])
    }
    assert {name: count for name, count in found.items() if name.startswith(PIPELINE_PREFIX)} == expected


def check_analysis(case: Case, recording: Recording) -> None:
    summary = perfscope.analyze(recording.folder)
    strategies = summary.job.strategy if isinstance(summary.job.strategy, (list, tuple)) else (summary.job.strategy,)
    assert tuple(strategies) == case.strategies
    assert tuple(summary.job.steps) == case.used
    assert summary.job.failures == ()
    assert len(summary.time_breakdown) == (case.ranks or 1)
    for row in summary.time_breakdown:
        assert 0 < row.compute_us < row.step_time_us
        assert row.idle_unknown_us == 0
        assert row.hidden_comm_us <= row.comm_us <= row.step_time_us
    if case.ranks:
        assert all(row.aligned for row in summary.clock)
        assert not {"group_unknown", "participants_missing"} & {note.kind for note in summary.notes}


def test_every_kind_of_collective_works_and_is_described(tmp_path: Path) -> None:
    """The script checks what each of them delivers; what gloo carries out is what the ranges announce."""
    recording = run(Case("every_collective", 2), tmp_path / "r")
    assert recording.exit_code == 0, recording.err
    assert all(line.endswith("after: []") for line in recording.out.splitlines())
    issued: list[Counter[str]] = []
    for rank in (0, 1):
        trace = recording.trace(rank)
        carried_out = Counter(event["name"] for event in trace.events if event["name"].startswith("gloo:"))
        names = [event["name"] for event in trace.events if event["name"].startswith(COLLECTIVE_PREFIX)]
        kinds = Counter(name.removeprefix(COLLECTIVE_PREFIX).split("|")[0] for name in names)
        assert sum(kinds.values()) == sum(carried_out.values())
        # gloo has no reduce-scatter: it reduces everywhere, and each rank keeps its part.
        kinds["all_reduce"] += kinds.pop("reduce_scatter")
        assert kinds == {name.removeprefix("gloo:"): count for name, count in carried_out.items()}
        issued.append(Counter(name for name in names if "#send" not in name and "#recv" not in name))
    assert issued[0] == issued[1]
    assert max(issued[0].values()) == 1  # numbers within the group distinguish them
