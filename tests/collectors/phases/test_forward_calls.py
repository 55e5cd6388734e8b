"""Forwards are timed by the call of a model's class where that is nobody else's, and models are saved as ever."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest

from perfscope.collectors.phases.clock import PhaseClock
from perfscope.collectors.phases.forward_calls import classes
from perfscope.collectors.phases.phases import FORWARD, StepPhases
from perfscope.collectors.problems import Problems
from tests.collectors.harness import needs_torch

pytestmark = needs_torch


def classes_of_models() -> tuple[Any, Any]:
    """A model's class, and that of its two blocks."""
    from torch import nn

    class Block(nn.Module):
        def forward(self, x: Any) -> Any:
            if x is None:
                raise ValueError("no input")
            return x

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Block(), Block()

        def forward(self, x: Any) -> Any:
            return self.second(self.first(x))

    return Net, Block


def test_a_class_of_other_modules_or_of_torchs_layers_is_left_alone() -> None:
    from torch import nn

    net_class, block_class = classes_of_models()
    net, layer = net_class(), nn.Sequential(nn.ReLU())
    assert classes([net, layer, net.first]) == {net_class: [net]}
    assert classes([net.first, net.second]) == {block_class: [net.first, net.second]}
    net_class.__call__ = lambda _, x: x
    assert classes([net]) == {}


def test_only_the_jobs_own_models_are_timed_and_the_class_is_put_back() -> None:
    net_class, _ = classes_of_models()
    net, other = net_class(), net_class()
    phases, clock = StepPhases(Problems()), PhaseClock()
    phases.attach(clock)
    phases.patch([net])
    try:
        assert not net._forward_hooks
        assert "__call__" in vars(net_class)
        assert (net(1), bool(clock.take()[0][FORWARD])) == (1, True)
        assert (other(1), bool(clock.take()[0][FORWARD])) == (1, False)
        assert (copy.deepcopy(net)(1), bool(clock.take()[0][FORWARD])) == (1, False)
        with pytest.raises(ValueError, match="no input"):
            net(None)
        assert clock.take()[0][FORWARD] > 0
    finally:
        phases.remove()
    assert "__call__" not in vars(net_class)


def test_the_class_that_follows_a_models_own_may_have_no_call() -> None:
    """As FSDP's, which it puts before the model's: calling that class would make an object."""

    class Sharded:
        pass

    net_class, _ = classes_of_models()
    kind = type("ShardedNet", (Sharded, net_class), {})
    net, phases, clock = kind(), StepPhases(Problems()), PhaseClock()
    phases.attach(clock)
    phases.patch([net])
    try:
        assert "__call__" in vars(kind)
        assert (net(1), bool(clock.take()[0][FORWARD])) == (1, True)
    finally:
        phases.remove()


def test_a_hooked_model_is_saved_loaded_and_copied() -> None:
    import torch
    from torch import nn

    net = nn.Sequential(nn.Linear(2, 2))
    phases, clock, file = StepPhases(Problems()), PhaseClock(), io.BytesIO()
    phases.attach(clock)
    phases.patch([net])
    x = torch.ones(1, 2)
    torch.save(net, file)
    file.seek(0)
    loaded, copied = torch.load(file, weights_only=False), copy.deepcopy(net)
    clock.take()
    assert torch.equal(loaded(x), net(x))
    clock.take()
    loaded(x)
    assert not clock.take()[0][FORWARD]
    assert torch.equal(copied(x), net(x))
    phases.remove()
    assert torch.equal(loaded(x), net(x))
