"""Phases are patched once for all sinks, put back when nobody listens, and no sink's fault reaches the training."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from perfscope.collectors.phases.clock import PhaseClock
from perfscope.collectors.phases.phases import BACKWARD, DATALOADER, FORWARD, OPTIMIZER, StepPhases
from perfscope.collectors.problems import Problems
from perfscope.recording.history import STAGES
from tests.collectors.harness import needs_torch
from tests.collectors.worlds import Written

pytestmark = needs_torch


class Heard:
    """A sink that writes down what it hears."""

    def __init__(self, what: str, log: list[str], fails: bool = False) -> None:
        self.what = what
        self._log = log
        self._fails = fails

    def begin(self, phase: int, subject: Any) -> None:
        if self._fails:
            raise RuntimeError("injected")
        self._log.append(f"{self.what} begin {STAGES[phase]}")

    def end(self, phase: int) -> None:
        self._log.append(f"{self.what} end {STAGES[phase]}")


@pytest.fixture
def problems() -> Problems:
    return Problems()


@pytest.fixture
def phases(problems: Problems) -> Iterator[StepPhases]:
    phases = StepPhases(problems)
    yield phases
    phases.remove()


def names() -> list[Any]:
    """What is patched."""
    import torch
    from torch.utils.data import dataloader

    return [torch.autograd.backward, dataloader._BaseDataLoaderIter.__next__]


def net() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def batches(count: int) -> Any:
    import torch
    from torch.utils.data import DataLoader

    return DataLoader(torch.ones(count, 4), batch_size=1)  # type: ignore[arg-type]


def hooks(model: Any) -> int:
    return sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules())


def train(model: Any) -> None:
    (x,) = batches(1)
    model(x).sum().backward()


def layers(function: Any) -> int:
    """Replacements around a function."""
    count = 0
    while hasattr(function, "__wrapped__"):
        count, function = count + 1, function.__wrapped__
    return count


def test_a_real_step_is_timed(phases: StepPhases) -> None:
    import torch

    clock = PhaseClock()

    def taken() -> set[str]:
        return {name for name, ns in zip(STAGES, clock.take()[0], strict=True) if ns}

    model, before = net(), names()
    phases.attach(clock)
    phases.describe_loaders()
    phases.patch([model, model[0]])
    for x in batches(3):
        model(x).sum().backward()
        assert taken() == {"dataloader", "forward", "backward"}
    assert taken() == {"dataloader"}  # there was none left
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 5))
    assert taken() == {"forward"}
    assert (phases.loaders.batch_shape, phases.loaders.records()[0].batches) == ((1, 4), 3)
    phases.detach(clock)
    assert names() == before
    assert hooks(model) == 0


def test_two_sinks_share_one_patch_and_one_leaves_the_other_in_place(phases: StepPhases) -> None:
    log: list[str] = []
    inner, outer = Heard("inner", log), Heard("outer", log)
    model, before = net(), names()
    depth = [layers(each) for each in before]
    phases.attach(outer)
    phases.patch([model])
    once, hooked = [layers(each) for each in names()], hooks(model)
    phases.attach(inner, innermost=True)
    phases.patch([model])
    phases.attach(inner, innermost=True)  # twice is once
    assert [layers(each) for each in names()] == once > depth
    assert hooks(model) == hooked == 2
    train(model)
    assert log == [
        f"{who} {edge} {phase}"
        # The loader shows with a second draw that it is exhausted.
        for phase in ("dataloader", "dataloader", "forward", "backward")
        for who, edge in (("outer", "begin"), ("inner", "begin"), ("inner", "end"), ("outer", "end"))
    ]
    phases.detach(outer)
    log.clear()
    train(model)
    assert len(log) == 8
    assert not any("outer" in line for line in log)
    phases.detach(inner)
    assert names() == before
    assert hooks(model) == 0


def test_a_sink_of_the_optimizer_alone_has_nothing_patched(phases: StepPhases) -> None:
    log: list[str] = []
    before = names()
    sink = Heard("sink", log)
    phases.attach(sink, (OPTIMIZER,))
    other = Heard("other", [])
    phases.attach(other)
    phases.patch([])
    phases.detach(other)
    assert names() == before
    assert phases.begin(OPTIMIZER)
    phases.end(OPTIMIZER)
    train(net())
    assert log == ["sink begin optimizer", "sink end optimizer"]


def test_a_sink_that_fails_is_switched_off_and_the_rest_goes_on(phases: StepPhases, problems: Problems) -> None:
    log: list[str] = []
    phases.attach(Heard("sound", log))
    phases.attach(Heard("broken", log, fails=True))
    model = net()
    phases.patch([model])
    train(model)
    train(model)
    assert [line for line in log if "broken" in line] == []
    assert len(log) == 16
    assert problems.as_tuple() == ("broken failed and was switched off (RuntimeError: injected)",)


def test_a_part_that_cannot_be_patched_leaves_the_others(
    phases: StepPhases, problems: Problems, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: StepPhases) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(StepPhases, "_patch_loader", broken)
    log: list[str] = []
    phases.attach(Heard("sink", log))
    model = net()
    phases.patch([model])
    train(model)
    assert [line.split()[-1] for line in log] == ["forward"] * 2 + ["backward"] * 2
    assert problems.as_tuple() == ("patching data loading failed and was switched off (RuntimeError: injected)",)


def test_what_others_put_around_a_patch_stays_theirs(phases: StepPhases, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    log: list[str] = []
    sink = Heard("sink", log)
    phases.attach(sink)
    phases.patch([])
    ours = torch.autograd.backward

    def theirs(*args: Any, **kwargs: Any) -> Any:
        log.append("theirs")
        return ours(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "backward", theirs)
    phases.detach(sink)
    assert torch.autograd.backward is theirs
    torch.ones(1, requires_grad=True).sum().backward()
    assert log == ["theirs"]


def test_other_threads_are_none_of_the_training(phases: StepPhases) -> None:
    log: list[str] = []
    phases.attach(Heard("sink", log))
    model = net()
    phases.patch([model])
    thread = threading.Thread(target=train, args=(model,))
    thread.start()
    thread.join()
    assert log == []


def test_a_model_compiled_in_place_keeps_its_code(phases: StepPhases) -> None:
    import torch
    from torch import nn

    model = nn.Linear(4, 4)
    model.compile(backend="eager")
    compiled = vars(model)["_compiled_call_impl"]
    log: list[str] = []
    sink = Heard("sink", log)
    phases.attach(sink)
    phases.patch([model])
    assert not model._forward_hooks
    model(torch.ones(1, 4))
    assert log == ["sink begin forward", "sink end forward"]
    phases.detach(sink)
    assert vars(model)["_compiled_call_impl"] is compiled


class TestPostponed:
    """What waits until a backward has returned."""

    @staticmethod
    def backward(hook: Callable[[], object]) -> None:
        """A backward that calls ``hook`` inside."""
        import torch

        x = torch.ones(2, requires_grad=True)
        x.register_post_accumulate_grad_hook(lambda tensor: hook() and None)
        with torch.enable_grad():
            x.sum().backward()

    def test_outside_a_backward_nothing_is_postponed(self, phases: StepPhases) -> None:
        before = names()
        assert not phases.postpone(lambda: None)
        assert names() == before

    def test_it_happens_once_the_backward_has_returned_and_in_order(self, phases: StepPhases) -> None:
        import torch

        before = names()
        done: list[str] = []

        def step(name: str) -> Callable[[], None]:
            def inside() -> None:
                assert phases.postpone(lambda: done.append(name))
                assert phases.postpone(lambda: done.append(f"{name} too"))
                done.append(f"inside {name}")

            return inside

        self.backward(step("first"))
        assert done == ["inside first"]  # its end was not watched yet
        self.backward(step("second"))
        assert done == ["inside first", "first", "first too", "inside second", "second", "second too"]
        assert torch._C._current_graph_task_id() == -1
        phases.remove()
        assert names() == before

    def test_it_happens_after_the_sinks_have_heard_of_the_end(self, phases: StepPhases) -> None:
        log: list[str] = []
        sink = Heard("sink", log)
        phases.attach(sink)
        phases.patch([])
        self.backward(lambda: phases.postpone(lambda: log.append("postponed")))
        assert log == ["sink begin backward", "sink end backward", "postponed"]

    def test_the_backward_stays_patched_while_a_sink_postpones(self, phases: StepPhases) -> None:
        self.backward(lambda: phases.postpone(lambda: None))
        sink = Heard("sink", [])
        phases.attach(sink)
        phases.patch([])
        phases.detach(sink)
        done: list[str] = []
        self.backward(lambda: phases.postpone(lambda: done.append("done")))
        assert done == ["done"]

    def test_a_backward_inside_another_waits_for_the_outer_one(self, phases: StepPhases) -> None:
        self.backward(lambda: phases.postpone(lambda: None))
        done: list[str] = []

        def inside() -> None:
            self.backward(lambda: phases.postpone(lambda: done.append("inner")))
            done.append("outer goes on")

        self.backward(inside)
        assert done == ["outer goes on", "inner"]


def test_parts_of_a_model_are_timed_for_as_long_as_somebody_else_asks(phases: StepPhases) -> None:
    """A capture asks for all of them; before and after it the whole model is enough."""
    log: list[str] = []
    clock, other, model = PhaseClock(), Heard("capture", log), net()
    phases.attach(clock)
    phases.patch([model, *model])
    assert hooks(model) == 2 * 3
    phases.settle([model])
    assert hooks(model) == 2
    phases.attach(other)
    phases.patch([model, *model])
    train(model)
    assert hooks(model) == 2 * 3
    assert log.count("capture begin forward") == 3
    clock.take()
    phases.detach(other)
    assert hooks(model) == 2
    train(model)
    assert clock.take()[0][FORWARD] > 0
    phases.detach(clock)
    assert hooks(model) == 0


def test_a_model_made_later_is_timed_after_a_capture_too(phases: StepPhases) -> None:
    """While it is not known which of its parts are called, those of the model before are not timed in their place."""
    clock, other, before, later = PhaseClock(), Heard("capture", []), net(), net()
    phases.attach(clock)
    phases.settle([before])
    phases.settle([])
    phases.patch([later, *later])
    phases.attach(other)
    phases.detach(other)
    assert (hooks(before), hooks(later)) == (0, 2 * 3)


@pytest.mark.filterwarnings("ignore:torch.is_autocast:DeprecationWarning")
def test_batches_of_an_evaluation_are_not_the_trainings(phases: StepPhases, problems: Problems) -> None:
    import torch
    from torch.utils.data import DataLoader

    from perfscope.collectors.ranges.ranges import Ranges

    ranges = Ranges(phases, Written(), problems)  # type: ignore[arg-type]
    model, data = net(), torch.ones(8, 4)
    ranges.install([model])
    with torch.no_grad():
        model.eval()
        for x in DataLoader(data, batch_size=1):
            model(x)
    model.train()
    for x in DataLoader(data, batch_size=4):
        model(x).sum().backward()
    ranges.remove()
    assert [(each.batch_size, each.batches) for each in ranges.loaders.records()] == [(4, 2), (1, 8)]
    assert problems.as_tuple() == ()


@pytest.mark.filterwarnings("ignore:torch.is_autocast:DeprecationWarning")
def test_the_clock_and_the_ranges_together(phases: StepPhases, problems: Problems) -> None:
    """As in a capture of a run whose phases are timed."""
    from perfscope.collectors.ranges.ranges import Ranges

    written, clock, before = Written(), PhaseClock(), names()
    model = net()
    phases.attach(clock)
    phases.patch([model])
    depth = [layers(each) for each in names()]
    ranges = Ranges(phases, written, problems)  # type: ignore[arg-type]
    ranges.install([model])
    assert [layers(each) for each in names()] == depth
    train(model)
    assert [name for name in written.names if "#" not in name] == [
        f"perfscope::{name}"
        for name in ("dataloader_start", *("dataloader", "dataloader_sampler") * 2, "forward", "backward")
    ]
    ranges.remove()
    assert written.open == 0
    assert [layers(each) for each in names()] == depth
    assert hooks(model) == 2
    times, _ = clock.take()
    assert min(times[DATALOADER], times[FORWARD], times[BACKWARD]) > 0
    record = ranges.loaders.records()[0]
    assert (record.batches, record.timed_batches, len(record.fingerprints)) == (1, 1, 1)
    phases.detach(clock)
    assert names() == before
    assert (hooks(model), problems.as_tuple()) == (0, ())
