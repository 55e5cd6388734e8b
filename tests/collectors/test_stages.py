"""The stages of a step: each its own time, whatever runs inside what, and nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from perfscope.collectors import stages
from perfscope.collectors.problems import Problems
from perfscope.collectors.stages import BACKWARD, DATALOADER, FORWARD, OPTIMIZER, Stages
from perfscope.history import STAGES
from tests.collectors.harness import needs_torch

pytestmark = needs_torch


class Clock:
    """A clock that stands still until it is told."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(stages, "perf_counter_ns", clock)
    return clock


@pytest.fixture
def timed() -> Iterator[Stages]:
    timed = Stages(Problems())
    yield timed
    timed.remove()


def taken(timed: Stages) -> dict[str, int]:
    return {name: time for name, time in zip(STAGES, timed.take(), strict=True) if time}


def test_a_stage_does_not_count_what_runs_inside_it(timed: Stages, clock: Clock) -> None:
    """The optimizer calls a closure: 5 of its own, 3 forward, of which 1 is loading, 4 backward, 2 of its own."""
    timed.begin(OPTIMIZER)
    clock.now += 5
    timed.begin(FORWARD)
    clock.now += 1
    timed.begin(DATALOADER)
    clock.now += 1
    timed.end(DATALOADER)
    clock.now += 1
    timed.end(FORWARD)
    timed.begin(BACKWARD)
    clock.now += 4
    timed.end(BACKWARD)
    clock.now += 2
    timed.end(OPTIMIZER)
    assert taken(timed) == {"dataloader": 1, "forward": 2, "backward": 4, "optimizer": 7}
    assert taken(timed) == {}


def test_a_stage_within_itself_counts_once(timed: Stages, clock: Clock) -> None:
    for _ in range(3):
        timed.begin(FORWARD)
        clock.now += 1
    for _ in range(3):
        timed.end(FORWARD)
        clock.now += 1
    assert taken(timed) == {"forward": 5}


def test_what_an_exception_went_through_ends_with_what_it_was_in(timed: Stages, clock: Clock) -> None:
    timed.begin(OPTIMIZER)
    timed.begin(FORWARD)
    clock.now += 3
    timed.end(OPTIMIZER)  # the forward raised, and the optimizer's step with it
    timed.end(FORWARD)  # nothing is open
    clock.now += 9
    timed.begin(BACKWARD)
    clock.now += 1
    timed.end(BACKWARD)
    assert taken(timed) == {"forward": 3, "backward": 1}


def test_a_step_that_ends_within_a_stage_leaves_nothing_of_it_to_the_next(timed: Stages, clock: Clock) -> None:
    timed.begin(BACKWARD)
    clock.now += 3
    assert taken(timed) == {}
    clock.now += 2
    timed.end(BACKWARD)
    assert taken(timed) == {}


def test_a_real_step(timed: Stages) -> None:
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, dataloader

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    before: list[Any] = [torch.autograd.backward, dataloader._BaseDataLoaderIter.__next__]
    timed.install([model, model[0]])
    for x in DataLoader(torch.ones(3, 4), batch_size=1):  # type: ignore[arg-type]
        model(x).sum().backward()
        assert set(taken(timed)) == {"dataloader", "forward", "backward"}
    assert set(taken(timed)) == {"dataloader"}  # there was none left
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 5))
    assert set(taken(timed)) == {"forward"}
    assert (timed.batch_shape, timed.loaders.records()[0].batches) == ((1, 4), 3)
    timed.remove()
    assert [torch.autograd.backward, dataloader._BaseDataLoaderIter.__next__] == before
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())


def test_a_model_compiled_in_place_keeps_its_code(timed: Stages) -> None:
    import torch
    from torch import nn

    model = nn.Linear(4, 4)
    model.compile(backend="eager")
    compiled = vars(model)["_compiled_call_impl"]
    timed.install([model])
    assert not model._forward_hooks
    model(torch.ones(1, 4))
    assert set(taken(timed)) == {"forward"}
    timed.remove()
    assert vars(model)["_compiled_call_impl"] is compiled
