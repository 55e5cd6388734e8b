"""The models that a job holds are found among all objects, whatever other threads are making at that moment."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from perfscope.collectors.discovery import discover  # noqa: E402 - only where torch is


def test_objects_that_another_thread_has_only_begun_to_make_are_none() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler, made = torch.amp.GradScaler.__new__(torch.amp.GradScaler), torch.amp.GradScaler("cpu", enabled=False)
    begun = torch.nn.Linear.__new__(torch.nn.Linear)
    with_children_alone = torch.nn.Linear(2, 2)
    del with_children_alone._parameters
    found = discover([optimizer])
    assert [id(root) for root in found.roots] == [id(model)]
    assert list(map(id, found.modules)) == list(map(id, model.modules()))
    assert id(made) in map(id, found.scalers)
    assert id(scaler) not in map(id, found.scalers)
    assert not vars(begun)


def test_a_model_that_grows_while_it_is_looked_at_hides_no_other() -> None:
    class Growing(dict[str, Any]):
        """Parameters of a child; whoever looks at them meets a model that has one child more."""

        def items(self) -> Any:
            growing.add_module(f"more{len(growing._modules)}", torch.nn.Identity())
            return super().items()

    growing = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    vars(growing[0])["_parameters"] = Growing(growing[0]._parameters)
    with pytest.raises(RuntimeError, match="changed"):
        list(growing.parameters())
    model = torch.nn.Linear(2, 2)
    found = discover([torch.optim.SGD(model.parameters(), lr=0.1)])
    assert [id(root) for root in found.roots] == [id(model)]


def test_parts_of_a_model_are_hooked_unless_it_is_called_as_a_whole() -> None:
    class Parts(torch.nn.Module):
        """Holds an encoder and a head, which the script calls itself."""

        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)

    held, whole = Parts(), torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    optimizer = torch.optim.SGD([*held.parameters(), *whole.parameters()], lr=0.1)
    found = discover([optimizer])
    assert {id(root) for root in found.roots} == {id(held), id(whole)}
    assert set(map(id, found.to_hook())) == set(map(id, (held, held.encoder, held.head, whole, *whole)))
    called = {id(whole), id(held.head)}
    assert set(map(id, found.to_hook(called))) == set(map(id, (held, held.encoder, held.head, whole)))
