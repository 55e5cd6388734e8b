"""Forward ranges in one process: training and evaluation distinguished, whichever way the model is called."""

from __future__ import annotations

from typing import Any

import pytest

from perfscope.collectors.problems import Problems
from perfscope.recording.vocabulary import BACKWARD, EVALUATION, FORWARD, NO_GRADIENTS
from tests.collectors.harness import needs_torch
from tests.collectors.worlds import Written, world

pytestmark = [needs_torch, pytest.mark.filterwarnings("ignore")]


def ranges_of(model: Any, calls: Any, optimizers: list[Any] | None = None) -> list[str]:
    """Ranges that ``calls()`` leaves while ``model`` is recorded; hooks and patched names are gone afterwards."""
    import torch

    from perfscope.collectors.discovery import JobObjects
    from perfscope.collectors.phases.phases import StepPhases
    from perfscope.collectors.ranges.ranges import Ranges

    written, problems = Written(), Problems()
    ranges = Ranges(StepPhases(problems), written, problems)  # type: ignore[arg-type]
    before = vars(torch.autograd).copy(), vars(torch.distributed).copy()
    ranges.install(JobObjects(roots=[model]).to_hook())
    calls()
    ranges.remove()
    assert (vars(torch.autograd), vars(torch.distributed)) == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert (written.open, problems.as_tuple()) == (0, ())
    return [name for name in written.names if "#" not in name]


def net() -> Any:
    import torch

    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))


def test_only_a_forward_in_evaluation_mode_and_without_gradients_is_an_evaluation() -> None:
    import torch

    model, x = net(), torch.zeros(2, 4)

    def calls() -> None:
        model(x)
        with torch.no_grad():
            model(x)  # of training: a target, say
        model.eval()
        model(x)  # frozen statistics
        with torch.no_grad():
            model(x)
        with torch.inference_mode():
            model(x)

    assert ranges_of(model, calls) == [FORWARD, NO_GRADIENTS, FORWARD, EVALUATION, EVALUATION]


def test_the_forward_of_a_model_that_is_checkpointed_as_a_whole_is_one() -> None:
    """It has no gradients; what runs again in the backward has."""
    import torch
    from torch.utils.checkpoint import checkpoint

    model, x = net(), torch.zeros(2, 4, requires_grad=True)

    def calls() -> None:
        for _ in range(2):
            checkpoint(model, x, use_reentrant=True).sum().backward()

    calls()  # torch imports parts of itself at the first
    assert ranges_of(model, calls) == [FORWARD, BACKWARD, FORWARD] * 2


def test_evaluation_past_a_wrapper_is_seen_and_counts_once() -> None:
    import torch

    x = torch.zeros(2, 4)
    with world(2):
        model = torch.nn.parallel.DistributedDataParallel(net())

        def calls() -> None:
            model(x)
            model.eval()
            with torch.no_grad():
                model.module(x)
                model(x)

        assert ranges_of(model, calls) == [FORWARD, EVALUATION, EVALUATION]


def test_a_model_compiled_in_place_is_ranged_from_outside() -> None:
    import torch

    model, x = net(), torch.zeros(2, 4)
    model.compile(backend="eager")
    model(x)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert ranges_of(model, lambda: model(x)) == [FORWARD]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


@pytest.mark.parametrize("wrapped", ["compiled", "empty"])
def test_a_wrapped_module_is_not_asked_for_its_length(wrapped: str) -> None:
    """A compiled module hands the question on to one that may have no length; an empty one's truth value is False."""
    import torch

    class Empty(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return self.layer(x)

        def __len__(self) -> int:
            if wrapped == "compiled":
                raise TypeError("has no length")
            return 0

    x = torch.zeros(2, 4)
    with world(2):
        inner = Empty()
        model = torch.nn.parallel.DistributedDataParallel(
            torch.compile(inner, backend="eager") if wrapped == "compiled" else inner
        )
        model(x)

        def calls() -> None:
            model(x)
            inner.eval()
            with torch.no_grad():
                model(x)

        assert ranges_of(model, calls) == [FORWARD, EVALUATION]
