"""What is put off until a backward has returned."""

from __future__ import annotations

from collections.abc import Callable

from perfscope.collectors.backward import AfterBackward
from tests.collectors.harness import needs_torch

pytestmark = needs_torch


def backward(hook: Callable[[], None]) -> None:
    """A backward that calls ``hook`` inside."""
    import torch

    x = torch.ones(2, requires_grad=True)
    x.register_post_accumulate_grad_hook(lambda tensor: hook())
    with torch.enable_grad():
        x.sum().backward()


def test_outside_a_backward_nothing_is_put_off() -> None:
    import torch

    original = torch.autograd.backward
    after = AfterBackward()
    assert not after.put_off(lambda: None)
    assert torch.autograd.backward is original


def test_what_is_put_off_happens_once_the_backward_has_returned_and_in_order() -> None:
    import torch

    original = torch.autograd.backward
    after = AfterBackward()
    done: list[str] = []

    def step(name: str) -> Callable[[], None]:
        def inside() -> None:
            assert after.put_off(lambda: done.append(name))
            assert after.put_off(lambda: done.append(f"{name} too"))
            done.append(f"inside {name}")

        return inside

    backward(step("first"))
    assert done == ["inside first"]  # its end was not watched yet
    backward(step("second"))
    assert done == ["inside first", "first", "first too", "inside second", "second", "second too"]
    assert torch._C._current_graph_task_id() == -1
    after.remove()
    assert torch.autograd.backward is original


def test_who_writes_ranges_runs_it_after_closing_them() -> None:
    after = AfterBackward()
    done: list[str] = []
    backward(lambda: after.put_off(lambda: done.append("first")) and None)
    after.ranging = lambda: True
    backward(lambda: after.put_off(lambda: done.append("second")) and None)
    assert done == ["first"]
    after.run()
    assert done == ["first", "second"]
    after.remove()


def test_a_backward_inside_another_waits_for_the_outer_one() -> None:
    after = AfterBackward()
    backward(lambda: after.put_off(lambda: None) and None)
    done: list[str] = []

    def inside() -> None:
        backward(lambda: after.put_off(lambda: done.append("inner")) and None)
        done.append("outer goes on")

    backward(inside)
    assert done == ["outer goes on", "inner"]
    after.remove()
