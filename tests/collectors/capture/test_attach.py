"""How the collector learns of steps, around stand-ins for optimizers and engines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perfscope.collectors.capture import attach
from perfscope.collectors.capture.session import Collector
from perfscope.collectors.config import CollectorConfig


class Listener:
    """Stands in for a session that has begun, and for a sink of its phases: what they hear, in order."""

    what = "listening"

    def __init__(self) -> None:
        self.events: list[str] = []

    def begin(self, _phase: int, _subject: Any) -> None:
        self.events.append("begin")

    def end(self, _phase: int) -> None:
        self.events.append("end")

    def _counts(self) -> bool:
        self.events.append("stepped")
        return False  # the session itself has no part in this


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def edges(listener: Listener, tmp_path: Path) -> Any:
    collector: Any = Collector(CollectorConfig(output=str(tmp_path), package_root=""))
    collector._session = listener
    collector._phases.attach(listener)
    return attach.Edges(collector, SimpleNamespace(_disable_dynamo=lambda call: call))


def optimizer_step(listener: Listener, calls: int = 1) -> Callable[..., Any]:
    def step(_self: Any, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        for _ in range(calls if closure is not None else 0):
            assert closure is not None
            loss = closure()
            listener.events.append("update")
        return loss

    return step


def test_a_step_without_closure_is_one_range(edges: Any, listener: Listener) -> None:
    attach.counted_step(edges, optimizer_step(listener))(object())
    assert listener.events == ["begin", "end", "stepped"]


@pytest.mark.parametrize("named", [False, True])
def test_a_closure_is_none_of_the_optimizers_time(edges: Any, listener: Listener, named: bool) -> None:
    def closure() -> float:
        listener.events.append("train")
        return 0.5

    counted = attach.counted_step(edges, optimizer_step(listener, calls=2))
    assert (counted(object(), closure=closure) if named else counted(object(), closure)) == 0.5
    once = ["train", "begin", "update", "end"]
    assert listener.events == [*once, *once, "stepped"]


def test_a_closure_through_an_optimizer_that_derives_from_another(edges: Any, listener: Listener) -> None:
    inner = attach.counted_step(edges, optimizer_step(listener))
    outer = attach.counted_step(edges, lambda self, closure=None: inner(self, closure))
    outer(object(), lambda: listener.events.append("train"))
    assert listener.events == ["train", "begin", "update", "end", "stepped"]


def test_a_closure_that_is_never_called_still_ends_one_step(edges: Any, listener: Listener) -> None:
    inner = attach.counted_step(edges, optimizer_step(listener, calls=0))
    outer = attach.counted_step(edges, lambda self, closure=None: inner(self, closure))
    outer(object(), lambda: None)
    assert listener.events == ["stepped"]


def test_an_error_in_a_closure_ends_the_range_and_no_step(edges: Any, listener: Listener) -> None:
    def closure() -> None:
        raise ValueError("overflow")

    with pytest.raises(ValueError, match="overflow"):
        attach.counted_step(edges, optimizer_step(listener))(object(), closure)
    assert listener.events == ["begin", "end"]
    attach.counted_step(edges, optimizer_step(listener))(object())
    assert listener.events[2:] == ["begin", "end", "stepped"]


def test_a_step_that_a_framework_takes_for_its_own_ends_is_none(edges: Any, listener: Listener) -> None:
    step = attach.counted_step(edges, optimizer_step(listener))
    attach._uncounted(edges, step)(object())
    assert listener.events == []
    step(object())
    assert listener.events == ["begin", "end", "stepped"]


class Engine:
    """As DeepSpeed's: ``step`` updates the model where accumulation ends."""

    def __init__(self, accumulation: int = 2) -> None:
        self.global_steps = 0
        self._micro_steps = 0
        self._accumulation = accumulation

    def is_gradient_accumulation_boundary(self) -> bool:
        return (self._micro_steps + 1) % self._accumulation == 0

    def step(self) -> None:
        if self.is_gradient_accumulation_boundary():
            self._take_model_step()
        self._micro_steps += 1

    def _take_model_step(self) -> None:
        self.global_steps += 1


def test_an_engine_steps_where_accumulation_ends(
    edges: Any, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "step", attach._counted_engine_step(edges, Engine.step, attach._ends_accumulation))
    monkeypatch.setattr(Engine, "_take_model_step", attach._counted_engine_step(edges, Engine._take_model_step))
    engine = Engine()
    for _ in range(4):
        engine.step()
    assert listener.events == ["begin", "end", "stepped"] * 2


def test_an_engine_that_counts_no_steps_is_left_to_its_optimizers(edges: Any, listener: Listener) -> None:
    optimizer = attach.counted_step(edges, optimizer_step(listener))
    attach._counted_engine_step(edges, optimizer)(object())
    assert listener.events == ["begin", "end", "stepped"]


def test_a_child_that_was_forked_within_a_step_ends_it_and_counts_the_next(edges: Any) -> None:
    collector = edges.collector
    assert collector.enter_without_phase()
    collector._session = None
    collector._forked()
    collector.leave(False, None)
    assert collector.enter_without_phase()
    assert not collector.enter_without_phase()
