"""Hooks into training frameworks, on stand-ins for them. Trainings with the frameworks themselves: tests/frameworks."""

from __future__ import annotations

import dataclasses
import enum
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from perfscope.collectors.discovery import JobObjects
from perfscope.collectors.frameworks import horovod, megatron, nvtx
from perfscope.collectors.frameworks import torch as torch_itself
from perfscope.collectors.frameworks.frameworks import FrameworkRanges, describe_frameworks, install_ranges
from perfscope.collectors.frameworks.hooks import Hooks, RangedFunction, range_functions
from perfscope.collectors.frameworks.values import DEPTH, clean, plain, settings_of
from perfscope.collectors.patches import Patches
from perfscope.collectors.problems import Problems
from perfscope.recording.vocabulary import COLLECTIVE_PREFIX, PIPELINE_PREFIX, REDUCE
from tests.collectors.harness import needs_torch


class Ranges:
    """Stands in for the annotator: what begins and ends, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def begin(self, name: str) -> str:
        self.events.append(f"begin {name}")
        return name

    def end(self, record: str) -> None:
        self.events.append(f"end {record}")

    open, close = begin, end


@pytest.fixture
def ranges() -> Ranges:
    return Ranges()


@pytest.fixture
def hooks(ranges: Ranges) -> Iterator[Hooks]:
    def around(call: Callable[..., Any], name: str, anywhere: bool) -> Callable[..., Any]:
        @functools.wraps(call)
        def ranged(*args: Any, **kwargs: Any) -> Any:
            record = ranges.begin(name)
            try:
                return call(*args, **kwargs)
            finally:
                ranges.end(record)

        return ranged

    patches = Patches()
    made: Any = Hooks(patches, ranges, Problems(), lambda: True, around)  # type: ignore[arg-type]
    yield made
    patches.restore()


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Make a module and have it imported."""

    def make(name: str, **content: Any) -> ModuleType:
        made = ModuleType(name)
        vars(made).update(content)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    return make


class Engine:
    def reduce(self, factor: int) -> int:
        if factor < 0:
            raise ValueError("negative")
        return 2 * factor


def test_a_phase_gets_its_range_and_the_original_comes_back(
    hooks: Hooks, ranges: Ranges, module: Callable[..., ModuleType]
) -> None:
    module("engines", Engine=Engine, size=lambda: 3)
    original = vars(Engine)["reduce"]
    absent = [
        RangedFunction("engines", "Engine", "no such method", "x"),
        RangedFunction("engines", "NoClass", "y", "x"),
    ]
    range_functions(
        hooks,
        [RangedFunction("engines", "Engine", "reduce", "reducing"), RangedFunction("nowhere", "", "f", "x"), *absent],
    )
    assert Engine().reduce(2) == 4
    with pytest.raises(ValueError, match="negative"):
        Engine().reduce(-1)
    assert ranges.events == ["begin reducing", "end reducing"] * 2
    hooks.patches.restore()
    assert vars(Engine)["reduce"] is original


def test_a_range_that_cannot_begin_leaves_the_call_alone_and_is_reported_once(
    hooks: Hooks, capsys: pytest.CaptureFixture[str]
) -> None:
    def begin(*_: Any) -> None:
        raise RuntimeError("injected")

    double = hooks.ranged(Engine.reduce, begin)
    assert [double(Engine(), number) for number in (1, 2, 3)] == [2, 4, 6]
    assert capsys.readouterr().err.count("injected") == 1


def test_a_framework_that_fails_costs_itself_alone(
    ranges: Ranges, module: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    timers = fake_timers(module)

    def broken(_: Hooks) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr("perfscope.collectors.frameworks.deepspeed.install", broken)
    problems = Problems()
    frameworks = FrameworkRanges(ranges, problems)  # type: ignore[arg-type]
    frameworks.install(lambda: True, lambda call, name, anywhere: call)
    timers("forward").start()
    timers("forward").stop()
    frameworks.remove()
    assert ranges.events == ["begin megatron::forward", "end megatron::forward"]
    assert [problem.partition(" failed")[0] for problem in problems.as_tuple()] == ["the ranges of deepspeed"]


class FakeTimer:
    def __init__(self, name: str = "") -> None:
        self.name = name

    def start(self, barrier: bool = False) -> None:
        pass

    def stop(self, barrier: bool = False) -> None:
        pass


def fake_timers(module: Callable[..., ModuleType]) -> Any:
    """``megatron.core.timers`` as it is; the timer "on" is one, the others share one that measures nothing."""

    class Timer(FakeTimer):
        def start(self, barrier: bool = False) -> None:
            pass

        def stop(self, barrier: bool = False) -> None:
            pass

    class DummyTimer(FakeTimer):
        def start(self, barrier: bool = False) -> None:
            pass

        def stop(self, barrier: bool = False) -> None:
            pass

    class Timers:
        on, off = Timer("on"), DummyTimer("dummy timer")

        def __call__(self, name: str, log_level: int | None = None) -> FakeTimer:
            return self.on if name == "on" else self.off

    module("megatron.core.timers", Timers=Timers, Timer=Timer, DummyTimer=DummyTimer)
    return Timers()


def test_megatrons_timers_are_ranges_by_their_names(
    hooks: Hooks, ranges: Ranges, module: Callable[..., ModuleType]
) -> None:
    timers = fake_timers(module)
    before = dict(vars(type(timers)))
    megatron.range_timers(hooks)
    timers("on", log_level=0).start(barrier=True)
    timers("forward", log_level=2).start()
    timers("forward").stop()
    timers("backward").stop()  # began before the capture
    timers("on").stop()
    timers("left open").start()
    for close in hooks.at_end:
        close()
    hooks.patches.restore()
    assert ranges.events == [
        "begin megatron::on", "begin megatron::forward", "end megatron::forward", "end megatron::on",
        "begin megatron::left open", "end megatron::left open",
    ]  # fmt: skip
    assert dict(vars(type(timers))) == before


def test_a_backward_in_megatrons_pipeline_has_the_number_of_its_forward(
    hooks: Hooks, ranges: Ranges, module: Callable[..., ModuleType]
) -> None:
    """Two chunks on rank 1 of 2: stages 1 and 3; backwards come in another order than forwards."""

    def forward_step(*args: Any, current_microbatch: int, vp_stage: int) -> Any:
        return [args[4]], 0

    def backward_step(_input: Any, output: Any) -> None:
        pass

    module(
        "megatron.core.parallel_state",
        get_pipeline_model_parallel_world_size=lambda: 2,
        get_pipeline_model_parallel_rank=lambda: 1,
    )
    schedules: Any = module(
        "megatron.core.pipeline_parallel.schedules", forward_step=forward_step, backward_step=backward_step
    )
    megatron.install(hooks)
    training, outputs = SimpleNamespace(training=True), [object() for _ in range(3)]
    for output, micro_batch, chunk in ((outputs[0], 0, 0), (outputs[1], 1, 0), (outputs[2], 0, 1)):
        schedules.forward_step(None, None, training, 4, output, current_microbatch=micro_batch, vp_stage=chunk)
    schedules.forward_step(None, None, SimpleNamespace(training=False), 4, 5, current_microbatch=0, vp_stage=0)
    for output in (outputs[2], outputs[0]):
        schedules.backward_step(None, output)
    schedules.backward_step(None, object())  # its forward was before the capture
    begun = [event.removeprefix(f"begin {PIPELINE_PREFIX}") for event in ranges.events if event.startswith("begin")]
    assert begun == ["forward|1|0", "forward|1|1", "forward|3|0", "backward|3|0", "backward|1|0"]
    assert hooks.observed == {"num_microbatches": 4}
    hooks.patches.restore()
    assert schedules.forward_step is forward_step


def test_what_horovod_issues_and_waits_for(hooks: Hooks, ranges: Ranges, module: Callable[..., ModuleType]) -> None:
    """A gradient on a device is left to the device's own kernels."""

    def tensor(device: str, elements: int) -> Any:
        held = {"device": SimpleNamespace(type=device), "dtype": "torch.float32"}
        return SimpleNamespace(**held, numel=lambda: elements, element_size=lambda: 4)

    def synchronize(handle: int) -> int:
        return handle

    handles = iter(range(9))
    operations: Any = module(
        "horovod.torch.mpi_ops",
        _allreduce_async=lambda *_: next(handles),
        _allgather_async=lambda *_: next(handles),
        synchronize=synchronize,
    )
    optimizer: Any = module("horovod.torch.optimizer", synchronize=synchronize)
    module("horovod.torch", size=lambda: 4)
    install_ranges(horovod, hooks)
    one = operations._allreduce_async(tensor("cpu", 10), None, "grad", SimpleNamespace(process_set_id=0))
    two = operations._allgather_async(tensor("cpu", 3), SimpleNamespace(process_set_id=2, size=lambda: 2))
    three = operations._allreduce_async(tensor("cuda", 10))
    assert [optimizer.synchronize(one), operations.synchronize(two), operations.synchronize(three)] == [0, 1, 2]
    begun = [event.removeprefix("begin ") for event in ranges.events if event.startswith("begin")]
    assert begun == [
        f"{COLLECTIVE_PREFIX}all_reduce|horovod|4|0||float32|40",
        f"{COLLECTIVE_PREFIX}all_gather|horovod-2|2|0||float32|24",
        REDUCE, "ALLREDUCE", "ALLGATHER",
    ]  # fmt: skip
    hooks.patches.restore()
    assert operations.synchronize is optimizer.synchronize is synchronize


@needs_torch
def test_the_scripts_nvtx_ranges_are_in_the_trace(hooks: Hooks, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.cuda.nvtx
    from torch.profiler import ProfilerActivity, profile

    pushed: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", pushed.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: pushed.append("pop"))
    nvtx.install(hooks)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        torch.cuda.nvtx.range_pop()  # of a range from before the capture
        torch.cuda.nvtx.range_push("fetch_sub_module")
        torch.cuda.nvtx.range_pop()
    hooks.patches.restore()
    torch.cuda.nvtx.range_push("later")
    assert pushed == ["pop", "fetch_sub_module", "pop", "later"]
    assert [event.name for event in profiler.events()] == ["fetch_sub_module"]


class Level(enum.IntEnum):
    TWO = 2


class Kind(enum.Enum):
    FULL_SHARD = enum.auto()
    STEPS = "steps"


@dataclasses.dataclass
class Options:
    kind: Kind
    path: Path


@pytest.mark.parametrize(
    ("value", "as_json"),
    [
        (Level.TWO, 2),
        (Kind.FULL_SHARD, "FULL_SHARD"),
        (Kind.STEPS, "steps"),
        (Options(Kind.STEPS, Path("/a")), {"kind": "steps", "path": "/a"}),
        ({1: (1.5, float("inf")), "x": {2}}, {"1": [1.5, "inf"], "x": [2]}),
        (functools.partial(max, 1), "max"),
        (object(), "<object>"),
    ],
)
def test_values_become_plain(value: Any, as_json: Any) -> None:
    assert plain(value) == as_json


def test_nesting_without_end_is_cut() -> None:
    nest: dict[str, Any] = {}
    nest["x"] = nest
    found = plain(nest)
    for _ in range(DEPTH):
        found = found["x"]
    assert found == "<dict>"


def test_settings_keep_no_secrets_but_harmless_names() -> None:
    held = SimpleNamespace(
        moe_token_dispatcher_type="alltoall", unset=None, reporter={"api_key": "hunter2", "on": True}, model="gpt"
    )
    assert settings_of(held, ("moe_token_dispatcher_type", "unset", "reporter", "absent")) == {
        "moe_token_dispatcher_type": "alltoall",
        "reporter": {"api_key": "[redacted]", "on": True},
    }
    assert clean({"auth": {"user": {"name": "hunter2"}, "on": False}, "url": "s3://me:hunter2@host/x"}) == {
        "auth": {"user": {"name": "[redacted]"}, "on": False},
        "url": "s3://[redacted]@host/x",
    }


def test_without_frameworks_there_is_nothing_to_describe() -> None:
    problems = Problems()
    assert describe_frameworks(JobObjects(), [], {}, problems) == ([], {})
    assert problems.as_tuple() == ()


def test_torchs_pipelines_have_ranges_where_its_collectives_cannot(
    hooks: Hooks, module: Callable[..., ModuleType], ranges: Ranges, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stage:
        stage_index = 1

        def forward_one_chunk(self, fwd_chunk_id: int) -> int:
            return fwd_chunk_id

    def fail(*_: Any) -> None:
        raise RuntimeError("changed")

    module("torch.distributed")
    module("torch.distributed.pipelining.stage", _PipelineStageBase=Stage)
    monkeypatch.setattr(torch_itself, "range_collectives", fail)
    install_ranges(torch_itself, hooks)
    assert Stage().forward_one_chunk(5) == 5
    assert any("forward|1|5" in event for event in ranges.events)
    assert len(hooks.problems.as_tuple()) == 1
